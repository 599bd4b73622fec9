"""Operations, one folder each: reference, Triton kernel, CPU kernel, cases and README."""

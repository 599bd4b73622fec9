"""Decoded integer weights compared with the float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.weight_values import reference
from kernels.ops.weight_values.cases import CASES, Case, make
from kernels.ops.weight_values.triton import compilations, values_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_out}x{case.num_in}-int{case.bits}-g{case.group}")
def test_values_equal_the_reference(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = make(case, device)
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        made = plain(self, *args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    unit = torch.finfo(case.dtype).eps
    for first, last in ((0, case.num_out), (5, case.num_out - 2), (case.num_out - 1, case.num_out)):
        values = values_of(weight, first, last, case.dtype)
        assert values.shape == (last - first, case.num_in) and values.dtype == case.dtype
        # A value halfway between two others may round either way after float32.
        torch.testing.assert_close(values, reference.values_of(weight, first, last, case.dtype), rtol=unit, atol=1e-7)


def test_each_configuration_is_compiled_once() -> None:
    made = compilations("sm_90")
    assert len({one.configuration for one in made}) == len(made)
    for one in made:
        assert list(one.signature) == one.function.arg_names

"""Description of a decoder-only transformer as data. Families are rows of worker/model/families.py, not code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.kv.geometry import KVGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) and the scaling of its frequencies for long contexts.

    Attributes:
        theta: Base of the frequencies.
        rotary_dim: Number of dimensions of a head that rotate.
        kind: none; linear (positions divided by factor); dynamic (NTK-aware, base grows with the length); llama3
            (frequencies scaled by wavelength band); yarn (Peng et al. 2023).
        interleaved: Pairs are (2i, 2i + 1) as in GGUF's llama files; otherwise (i, i + rotary_dim / 2).
        factor: Factor of the scaling.
        original_max_position: Context length before the scaling.
        low_freq_factor: Parameter of llama3.
        high_freq_factor: Parameter of llama3.
        beta_fast: Parameter of yarn.
        beta_slow: Parameter of yarn.
        attention_factor: Parameter of yarn.
        mscale: Parameter of yarn.
        mscale_all_dim: Parameter of yarn.
        truncate: Parameter of yarn.
        frequency_factors: Divisors of the frequencies.
    """

    theta: float
    rotary_dim: int
    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Complete description of a decoder, read once from config.json or GGUF metadata.

    Attributes:
        kv_groups: Partition of the layers into KV groups; empty for one group of all layers without a window.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    kv_groups: tuple[KVGroupSpec, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.kv_groups:
            everything = KVGroupSpec(layers=tuple(range(self.num_layers)))
            object.__setattr__(self, "kv_groups", (everything,))

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.attention_scale if self.attention_scale is not None else self.head_dim**-0.5

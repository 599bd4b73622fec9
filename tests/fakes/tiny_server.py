"""Tiny random model served by the real scheduler and runner, without sockets, on a simulated asynchronous device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import worker.executor.request_rows
import worker.model.decoder
import worker.model.linear
from kernels.backends.reference import DecoderOps, SamplingOps, SpeculativeOps
from kernels.ops.attention.kv_pages import KVFormat
from kernels.ops.step_inputs.reference import ReferenceStepOps
from shared.messages import Submit
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.late_device import LateDevice
from tests.fakes.weights import MemoryWeights
from worker.executor.device import Device, open_device
from worker.executor.draft_model import DraftModel, PlanRunner
from worker.executor.executor import LocalExecutor
from worker.executor.model_runner import ModelRunner
from worker.executor.request_rows import RequestRows
from worker.executor.staged_drafts import DraftDistributions
from worker.kv.geometry import KVGroupSpec
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.spec import DecoderSpec, RopeSpec
from worker.quant.dense import DenseScheme
from worker.sampling.sampler import Sampler
from worker.scheduler.speculator import SpeculationConfig

CPU = torch.device("cpu")
VOCAB = 96
"""Vocabulary of FakeExecutor, whose harness is used here."""
MAX_MODEL_LEN = 96


def tiny_spec(head_dim: int = 16, windows: bool = False) -> DecoderSpec:
    groups = [KVGroupSpec(layers=(0, 1))]
    if windows:
        groups = [KVGroupSpec(layers=(0,)), KVGroupSpec(layers=(1,), window=24)]
    return DecoderSpec(
        family="llama",
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=VOCAB,
        max_position=MAX_MODEL_LEN,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, rotary_dim=head_dim),
        kv_groups=tuple(groups),
        tie_word_embeddings=True,
    )


def tiny_weights(spec: DecoderSpec, seed: int = 0) -> MemoryWeights:
    generator = torch.Generator().manual_seed(seed)

    def random_matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = {"embed.weight": random_matrix(VOCAB, hidden), "norm.weight": torch.ones(hidden)}
    for layer in range(spec.num_layers):
        shapes = {
            "attn_norm": (hidden,),
            "mlp_norm": (hidden,),
            "q": (heads, hidden),
            "k": (kv_heads, hidden),
            "v": (kv_heads, hidden),
            "o": (hidden, heads),
            "gate": (spec.intermediate_size, hidden),
            "up": (spec.intermediate_size, hidden),
            "down": (hidden, spec.intermediate_size),
        }
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = random_matrix(*shape) + (len(shape) == 1)
    return MemoryWeights(tensors)


class TinyServer(Harness):
    """Scheduler harness with a real runner.

    Args:
        ops, sampling_ops, step_ops: Kernels; None for the reference ops, which accept padding rows like a GPU's.
        late: True for a late device with two steps in flight and captured decode steps.
        speculation: Speculation of the scheduler; a `draft_len` adds a draft model.
        draft_seed: Seed of the draft model's weights. The target's seed is 0.
    """

    def __init__(
        self,
        monkeypatch,
        *,
        late: bool = True,
        spec: DecoderSpec | None = None,
        ops=None,
        sampling_ops=None,
        step_ops=ReferenceStepOps,
        device: torch.device = CPU,
        kv_format: KVFormat = "dense",
        speculation: SpeculationConfig | None = None,
        draft_seed: int = 0,
        **options,
    ) -> None:
        spec = spec or tiny_spec()
        rejection = speculation is not None and speculation.rejection
        options = {"max_model_len": MAX_MODEL_LEN, "num_groups": len(spec.kv_groups)} | options
        super().__init__(depth=2 if late else 1, speculation=speculation, **options)
        monkeypatch.setattr(worker.model.decoder, "select_ops", lambda *_, **__: ops or DecoderOps())
        monkeypatch.setattr(
            worker.model.linear, "linear_scheme", lambda dtype, device, *_, **__: DenseScheme(dtype, device)
        )
        monkeypatch.setattr(worker.executor.request_rows, "step_ops", step_ops)
        config, page_size = self.scheduler.config, self.kv.page_size
        self.device = LateDevice() if late else Device() if device.type == "cpu" else open_device(device)

        storage = KVStorage(spec, self.kv.num_pages, page_size, torch.float32, device, kv_format=kv_format)
        rows = RequestRows(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            page_size=page_size,
            num_groups=len(spec.kv_groups),
            vocab_size=VOCAB,
            device=self.device,
            max_drafts=0 if speculation is None else speculation.max_drafts,
            distributions=DraftDistributions() if rejection else None,
        )
        rows.sampling._host_words = None  # the sampling op then receives the tables, as on a GPU
        sampler = Sampler(rows.sampling, sampling_ops or SamplingOps(), SpeculativeOps(), rejection=rejection)
        self.runner = ModelRunner(self._decoder(spec, 0, device), storage, rows, sampler, self.device)
        draft = None
        if speculation is not None and speculation.draft_len:
            small = tiny_spec(spec.head_dim)
            draft_kv = KVStorage(small, self.kv.num_pages, page_size, torch.float32, device)
            storage.copy_along(draft_kv)
            draft = DraftModel(
                self._decoder(small, draft_seed, device),
                draft_kv,
                rows,
                sampler,
                self.device,
                vocab_size=VOCAB,
                draft_vocab_size=VOCAB,
                max_len=MAX_MODEL_LEN,
            )
        launch = PlanRunner(self.runner, draft).launch
        self.executor: LocalExecutor = LocalExecutor(launch, self.executor.depth)  # type: ignore[assignment]

    def _decoder(self, spec: DecoderSpec, seed: int, device: torch.device) -> Decoder:
        return Decoder(
            spec,
            tiny_weights(spec, seed),
            dtype=torch.float32,
            device=device,
            max_model_len=MAX_MODEL_LEN,
        )

    @property
    def num_captured(self) -> int:
        return self.runner._graphs.num_captured


COMMON_SAMPLING_PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {5: 3.0, 9: -100.0}},
    {"temperature": 0.7, "min_p": 0.05, "min_tokens": 5, "ignore_eos": True},
)
RARE_SAMPLING_PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5, "ignore_eos": True},
    {"temperature": 1.1, "typical_p": 0.8, "top_k": 30, "xtc_probability": 0.5, "xtc_threshold": 0.03},
    {"temperature": 0.0, "dry_multiplier": 3.0, "dry_breakers": (7, 8), "ignore_eos": True},
    {"temperature": 0.8, "mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.3, "logprobs": 2},
    {
        "temperature": 1.5,
        "allowed_token_ids": tuple(range(3, 40)),
        "bad_words": ((9,), (4, 5), (5, 6, 7)),
        "min_p": 0.01,
    },
    {"temperature": 0.9, "top_n_sigma": 1.5, "dynatemp_range": 0.4, "dry_multiplier": 0.8, "frequency_penalty": 0.3},
)


def submits(
    count: int,
    seed: int = 0,
    max_tokens: int = 14,
    sampling_params: Sequence[dict[str, object]] = COMMON_SAMPLING_PARAMS,
) -> list[Submit]:
    """Return requests with shared prefixes and different sampling parameters, some with several choices."""
    rng = random.Random(seed)
    prefixes = [[3 + (7 * index + step) % 90 for step in range(length)] for index, length in enumerate((5, 16, 30))]
    return [
        make_submit(
            f"r{number}",
            rng.choice(prefixes) + [rng.randrange(3, 96) for _ in range(rng.randrange(1, 12))],
            sampling={"seed": number, "max_tokens": max_tokens - number % 5}
            | sampling_params[number % len(sampling_params)],
            num_choices=3 if number % 7 == 3 else 1,
        )
        for number in range(count)
    ]

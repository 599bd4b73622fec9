"""Steps for the test and the benchmark of step inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.step_inputs.inputs import StepBuffers, StepLayout, StepShape


@dataclass(frozen=True, slots=True)
class Case:
    """Step of requests (row, position of the first token, number of tokens), followed by padding requests.

    Attributes:
        name: Name of the case.
        requests: The requests.
        padding: Number of tokens of each padding request.
        num_groups: Number of KV groups.
        page_size: Tokens per page.
        max_num_seqs: Number of rows.
        max_model_len: Longest context.
    """

    name: str
    requests: tuple[tuple[int, int, int], ...]
    padding: tuple[int, ...] = ()
    num_groups: int = 1
    page_size: int = 16
    max_num_seqs: int = 8
    max_model_len: int = 700

    @property
    def layout(self) -> StepLayout:
        """Layout of a server that can run this step."""
        tokens = sum(count for _, _, count in self.requests) + sum(self.padding)
        return StepLayout(
            max_num_seqs=self.max_num_seqs,
            max_num_tokens=max(tokens, 1),
            token_stride=self.max_model_len + 1,
            num_groups=self.num_groups,
            max_pages=-(-self.max_model_len // self.page_size),
            page_size=self.page_size,
            max_adjustments=3,
            max_tail=4096,
        )


CASES = (
    Case("one token of one request", ((3, 0, 1),)),
    Case("decode", ((7, 699, 1), (0, 15, 1), (2, 16, 1), (5, 31, 1))),
    Case("decode, padded", ((7, 130, 1), (1, 5, 1)), padding=(1, 1, 1)),
    Case("drafts, padded", ((4, 62, 4), (6, 3, 4)), padding=(4, 4)),
    Case("chunks beside decode", ((1, 17, 1), (0, 33, 333), (6, 0, 129), (2, 127, 1), (3, 256, 128))),
    Case("two groups, odd pages", ((2, 40, 50), (0, 96, 1), (1, 0, 7)), num_groups=2, page_size=7),
    Case("pages of one token", ((2, 300, 3), (1, 128, 1)), page_size=1),
    Case("nothing but padding", (), padding=(1, 1)),
    Case("one row", ((0, 698, 1),), max_num_seqs=1),
)


def fill(buffers: StepBuffers, case: Case) -> StepShape:
    """Fill the buffers with random state and the packed words of the case's step, and return its shape."""
    layout = buffers.layout
    generator = torch.Generator().manual_seed(len(case.name))
    random = torch.randint(0, 50_000, (layout.state_words,), generator=generator, dtype=torch.int32)
    buffers.state.copy_(random)
    requests = [*case.requests, *((-1, 0, count) for count in case.padding)]
    counts = [count for _, _, count in requests]
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    words = torch.full((layout.packed_words,), -7, dtype=torch.int32)
    num_requests = len(requests)
    for place, values in (
        (layout.rows, [row for row, _, _ in requests]),
        (layout.starts, [start for _, start, _ in requests]),
        (layout.cu_seqlens, bounds),
        (layout.seq_lens, [start + count if row >= 0 else 0 for row, start, count in requests]),
    ):
        place.of(words)[: len(values)] = torch.tensor(values, dtype=torch.int32)
    buffers.packed.copy_(words)
    longest = max([start + count for _, start, count in case.requests], default=0)
    return StepShape(
        num_requests=num_requests,
        num_tokens=bounds[-1],
        longest=max(counts),
        num_columns=-(-longest // layout.page_size),
    )


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks of decode steps of many requests and of a long chunk, for rows of 8192 tokens.

    Args:
        device: Device of the buffers.
        scale: Divisor of rows, contexts and chunks.
    """
    length = 8192 // scale
    shapes = {
        f"step_inputs decode {n}": Case("", tuple((i, length - 9, 1) for i in range(n)), max_num_seqs=n)
        for n in (1, max(2, 64 // scale), max(3, 256 // scale))
    }
    shapes["step_inputs prefill"] = Case("", ((0, 0, length),))
    return [_benchmark(name, case, length, device) for name, case in shapes.items()]


def _benchmark(name: str, case: Case, length: int, device: torch.device) -> Benchmark:
    from kernels.ops.step_inputs.triton import TritonStepOps

    sized = Case(name, case.requests, max_num_seqs=case.max_num_seqs, max_model_len=length)

    def run() -> Callable[[], object]:
        buffers = StepBuffers(sized.layout, device)
        shape = fill(buffers, sized)
        ops = TritonStepOps(buffers)
        return lambda: ops.step_inputs(shape)

    tokens = sum(count for _, _, count in case.requests)
    columns = -(-length // sized.page_size)
    # Per token, its id is read, and id, position and slot are written; per table entry, one word is read and written.
    num_bytes = tokens * (4 + 4 + 4 + 8 + 4) + len(case.requests) * columns * 8
    return Benchmark(f"{name} x {length}", (run(), run(), run()), num_bytes)

"""What follows the model in a decode step, as captured graphs: the head, the sampler, and the append to the rows.

These are few kernels, but the host takes longer to launch them than the GPU to run them. They are captured apart from
the model, because what a batch asks of the sampler changes while its size stays, and only for what batches ask most:
noise and filters. A tail is captured once it has been asked for twice, never more than one between two steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from shared.log import get_logger
from worker.executor.decode_graphs import Size
from worker.executor.device import CaptureError, Device, Graph, OutOfMemory
from worker.sampling.sampled_rows import Needs, SampledRows

_log = get_logger("worker.executor")

_ASKED_BEFORE_CAPTURE = 2
_MOST_TAILS = 128
_CAPTURED_NEEDS = Needs.NOISE | Needs.FILTER


class Tail(NamedTuple):
    """Size of the decode step whose hidden states it takes, and what its rows ask of the sampler together."""

    size: Size
    needs: Needs


class TailGraphs:
    """The tails of one rank. All ranks ask for the same ones in the same order.

    Args:
        compute: enqueues a tail, which reads static buffers and its decode graph's outputs; returns the sampled ids.
        clear: makes these buffers such that capturing, which runs the tail, writes to no row that is read.
    """

    def __init__(self, device: Device, compute: Callable[[Tail], torch.Tensor], clear: Callable[[], None]) -> None:
        self._device = device
        self._compute = compute
        self._clear = clear
        self._graphs: dict[Tail, Graph[torch.Tensor]] = {}
        self._asked: Counter[Tail] = Counter()
        self._given_up: set[Tail] = set()
        self._full = False

    @property
    def num_captured(self) -> int:
        """Tails that can be replayed."""
        return len(self._graphs)

    def choose(self, size: Size, sampled: SampledRows) -> Graph[torch.Tensor] | None:
        """The tail of a step whose decode graph has been replayed; None: run it eagerly."""
        if size.tokens_each != 1 or sampled.needs & ~_CAPTURED_NEEDS or sampled.mask is not None:
            return None
        tail = Tail(size, Needs(sampled.needs))
        found = self._graphs.get(tail)
        if found is None:
            self._asked[tail] += 1
        return found

    def capture_next(self) -> bool:
        """Captures one that has been asked for twice; False where there is none. Comes between two steps."""
        asked = [
            tail
            for tail, times in self._asked.items()
            if times >= _ASKED_BEFORE_CAPTURE and tail not in self._graphs and tail not in self._given_up
        ]
        if self._full or not asked or len(self._graphs) >= _MOST_TAILS:
            return False
        tail = max(asked, key=lambda one: self._asked[one])
        self._clear()
        try:
            self._graphs[tail] = self._device.capture(lambda: self._compute(tail))
        except OutOfMemory:
            self._full = True  # those that are there go on to be used
        except CaptureError as error:
            self._given_up.add(tail)
            _log.warning("sampler_graph_failed", num_requests=tail.size.num_requests, error=str(error))
        return True

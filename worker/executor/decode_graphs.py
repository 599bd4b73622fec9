"""Decode steps as captured graphs: which sizes there are, when each is captured, and which one a step gets.

A step of a few tokens is some hundred kernels, each shorter than its launch; replayed as one graph they follow one
another without the host. A graph has one size, so a step is padded to the next larger one. Capturing takes as long as
several steps, so serving does not wait for it: steps run eagerly until their size has been asked for twice, and then
it is captured before the next step, never more than one between two steps. An idle loop captures the rest.

Every rank of a group sees the same steps and so captures the same graphs at the same time, which the collectives
inside them need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from shared.log import get_logger
from worker.executor.device import CaptureError, Device, Graph, OutOfMemory

_log = get_logger("worker.executor")

T = TypeVar("T")

_ASKED_BEFORE_CAPTURE = 2
_MOST_PADDING = 4
"""A graph of up to this many times the requests stands in for one that is not captured yet."""


class Size(NamedTuple):
    """Shape of a captured step: so many requests of so many tokens each."""

    num_requests: int
    tokens_each: int


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests for which there is a graph, ascending: dense where steps are short, the last one the most."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, 4097, 128), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs(Generic[T]):
    """The graphs of one rank.

    Args:
        compute: enqueues the model for a step of this size, whose inputs are in static buffers, and returns tensors.
        clear: makes every request of these buffers padding. Capturing runs the model, which must then write no page.
        max_num_seqs: requests of the largest step.
        max_tokens_each: tokens per request for which graphs are worth their memory: one, and the drafts with it.
    """

    def __init__(
        self,
        device: Device,
        compute: Callable[[Size], T],
        clear: Callable[[], None],
        *,
        max_num_seqs: int,
        max_tokens_each: int = 1,
    ) -> None:
        self._device = device
        self._compute = compute
        self._clear = clear
        self._sizes = graph_sizes(max_num_seqs)
        self._max_tokens_each = max_tokens_each
        self._graphs: dict[Size, Graph[T]] = {}
        self._asked: Counter[Size] = Counter()
        self._given_up: set[Size] = set()
        self._full = not device.captures

    @property
    def num_captured(self) -> int:
        """Graphs that can be replayed."""
        return len(self._graphs)

    def choose(self, num_requests: int, tokens_each: int) -> Size | None:
        """The graph for a step, or None: run it eagerly. May capture one first, so the static buffers change.

        Comes before the step's inputs are written.
        """
        wanted = self._wanted(num_requests, tokens_each)
        if wanted is None:
            return None
        if wanted not in self._graphs:
            self._capture_asked_for()
            self._asked[wanted] += 1
        found = [
            size
            for size in self._graphs
            if size.tokens_each == tokens_each
            and num_requests <= size.num_requests <= wanted.num_requests * _MOST_PADDING
        ]
        return min(found, default=None)

    def replay(self, size: Size) -> T:
        """Enqueues a graph that `choose` gave, on what the static buffers hold now."""
        return self._graphs[size].replay()

    def outputs(self, size: Size) -> T:
        """Where the replays of a graph that `choose` gave leave their results."""
        return self._graphs[size].outputs

    def capture_next(self) -> bool:
        """While nothing else is to do: captures one more. False where all are there that ever will be."""
        seen = {1, *(size.tokens_each for size in self._asked)}
        sizes = [Size(num_requests, each) for each in sorted(seen) for num_requests in self._sizes]
        left = [size for size in sizes if self._can_capture(size)]
        if not left:
            return False
        self._capture(max(left, key=lambda size: self._asked[size]))
        return True

    def _wanted(self, num_requests: int, tokens_each: int) -> Size | None:
        if self._full and not self._graphs:
            return None
        if not 0 < tokens_each <= self._max_tokens_each or not 0 < num_requests <= self._sizes[-1]:
            return None
        return Size(next(size for size in self._sizes if size >= num_requests), tokens_each)

    def _capture_asked_for(self) -> None:
        asked = [
            size for size, times in self._asked.items() if times >= _ASKED_BEFORE_CAPTURE and self._can_capture(size)
        ]
        if asked:
            self._capture(max(asked, key=lambda size: self._asked[size]))

    def _can_capture(self, size: Size) -> bool:
        return not self._full and size not in self._graphs and size not in self._given_up

    def _capture(self, size: Size) -> None:
        self._clear()
        try:
            self._graphs[size] = self._device.capture(lambda: self._compute(size))
        except OutOfMemory:
            # Those that are there go on to be used; the next one would fail as well.
            self._full = True
            _log.warning(
                "no_memory_for_decode_graphs",
                num_captured=len(self._graphs),
                num_requests=size.num_requests,
                hint="lower gpu-memory-utilization or max-num-seqs",
            )
        except CaptureError as error:
            self._given_up.add(size)
            _log.warning("decode_graph_failed", num_requests=size.num_requests, error=str(error))

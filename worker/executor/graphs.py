"""Captured graphs of decode steps: the model's part and the sampler's part.

A small step consists of hundreds of kernels, each shorter than its launch. Replayed as one graph, they run without the
host. A graph has a fixed size, so a step is padded to the next size. Capturing takes as long as several steps and must
not delay serving: a step runs eagerly until its size has been requested twice, and then one graph is captured between
two steps. The idle loop captures the remaining sizes.

The head, the sampler and the append to the rows form a second graph, because the sampling features of a batch change
while its size stays the same. Only the most frequent features, noise and filters, are captured.

All ranks of a group execute the same steps, so they capture the same graphs at the same time. The collectives inside
the graphs require this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch

from shared.log import get_logger
from worker.executor.device import CaptureError, Device, Graph, OutOfMemory
from worker.sampling.sampled_rows import SampledRows, SamplingFeature

_log = get_logger("worker.executor")

T = TypeVar("T")

_REQUESTS_BEFORE_CAPTURE = 2
_MAX_PADDING = 4
"""Ratio up to which a larger graph is used for a size that is not captured yet."""
_MAX_SAMPLER_GRAPHS = 128
_CAPTURED_FEATURES = SamplingFeature.NOISE | SamplingFeature.FILTER


class SamplerKey(NamedTuple):
    """Key of a sampler graph: number of requests, and the sampling features of all rows combined."""

    size: int
    features: SamplingFeature


K = TypeVar("K", bound=int | SamplerKey)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the captured numbers of requests, ascending. Sizes are dense where steps are short."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, 4097, 128), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class _CapturedGraphs(Generic[K, T]):
    """Graphs by key, and the number of requests for each key.

    Args:
        device: Device that captures.
        compute: Enqueues the work of a key, which reads static buffers, and returns tensors.
        clear: Makes all requests in the static buffers padding. Capturing executes the work, which must then write
            neither to pages nor to rows in use.
    """

    def __init__(self, device: Device, compute: Callable[[K], T], clear: Callable[[], None]) -> None:
        self._device = device
        self._compute = compute
        self._clear = clear
        self._graphs: dict[K, Graph[T]] = {}
        self._requested: Counter[K] = Counter()
        self._failed: set[K] = set()
        self._full = not device.captures

    @property
    def num_captured(self) -> int:
        """Number of graphs that can be replayed."""
        return len(self._graphs)

    def _capture_most_requested(self, keys: Iterable[K], min_requests: int = 0) -> bool:
        """Capture the most requested of the keys. Return False if none of them can be captured."""
        if self._full:
            return False
        wanted = [
            key
            for key in keys
            if self._requested[key] >= min_requests and key not in self._graphs and key not in self._failed
        ]
        if not wanted:
            return False
        key = max(wanted, key=lambda key: self._requested[key])
        num_requests = key if isinstance(key, int) else key.size
        self._clear()
        try:
            self._graphs[key] = self._device.capture(lambda: self._compute(key))
        except OutOfMemory:
            # Existing graphs stay in use; capturing another one would fail as well.
            self._full = True
            _log.warning(
                "no_memory_for_decode_graphs",
                kind=type(self).__name__,
                num_captured=len(self._graphs),
                num_requests=num_requests,
                hint="lower --gpu-memory-utilization or --max-num-seqs",
            )
        except CaptureError as error:
            self._failed.add(key)
            _log.warning("graph_capture_failed", kind=type(self).__name__, num_requests=num_requests, error=str(error))
        return True


class DecodeGraphs(_CapturedGraphs[int, T]):
    """Decode graphs of one rank, by number of requests. Each request computes one token.

    Args:
        device: Device that captures.
        compute: Enqueues the model for a step of this size.
        clear: Makes all requests in the static buffers padding.
        max_num_seqs: Number of requests of the largest step.
    """

    def __init__(
        self, device: Device, compute: Callable[[int], T], clear: Callable[[], None], *, max_num_seqs: int
    ) -> None:
        super().__init__(device, compute, clear)
        self._sizes = graph_sizes(max_num_seqs)

    def choose(self, num_requests: int) -> int | None:
        """Return the graph size for a step, or None to run it eagerly.

        Call this before the inputs of the step are written: it may capture a graph, which changes the static buffers.
        """
        if self._full and not self._graphs:
            return None
        if not 0 < num_requests <= self._sizes[-1]:
            return None
        wanted = next(size for size in self._sizes if size >= num_requests)
        if wanted not in self._graphs:
            self._capture_most_requested(list(self._requested), _REQUESTS_BEFORE_CAPTURE)
            self._requested[wanted] += 1
        return min((size for size in self._graphs if num_requests <= size <= wanted * _MAX_PADDING), default=None)

    def replay(self, size: int) -> T:
        """Enqueue a graph returned by `choose` on the current contents of the static buffers."""
        return self._graphs[size].replay()

    def outputs(self, size: int) -> T:
        """Return the output tensors of a graph returned by `choose`."""
        return self._graphs[size].outputs

    def capture_next(self) -> bool:
        """Capture one more graph while the worker is idle. Return False if no further graph can be captured."""
        return self._capture_most_requested(self._sizes)


class SamplerGraphs(_CapturedGraphs[SamplerKey, torch.Tensor]):
    """Graphs of head, sampler and append of one rank. All ranks request the same graphs in the same order."""

    def choose(self, size: int, sampled: SampledRows) -> Graph[torch.Tensor] | None:
        """Return the graph that follows a replayed decode graph, or None to run the sampler eagerly."""
        if sampled.features & ~_CAPTURED_FEATURES or sampled.mask is not None:
            return None
        key = SamplerKey(size, SamplingFeature(sampled.features))
        graph = self._graphs.get(key)
        if graph is None:
            self._requested[key] += 1
        return graph

    def capture_next(self) -> bool:
        """Capture one graph that has been requested twice, between two steps. Return False if there is none."""
        if len(self._graphs) >= _MAX_SAMPLER_GRAPHS:
            return False
        return self._capture_most_requested(list(self._requested), _REQUESTS_BEFORE_CAPTURE)

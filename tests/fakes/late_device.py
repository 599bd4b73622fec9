"""A CPU device that is as asynchronous as a GPU can be.

A GPU reads the host buffer of an upload at any time before a later download completes. It reads the tensors of a
download at any time before that download completes. A graph works on the memory addresses it was captured with, even
if Python names now refer to other tensors. The classes below perform each of these operations at the latest permitted
time, so that code with a race fails in every run instead of rarely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.executor.device import Device

T = TypeVar("T")

_READ_ON_HOST = torch.ops.aten._local_scalar_dense.default
"""Operator that copies one value of a tensor to the host, as `Tensor.item` does."""

TensorMemory = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Misuse(RuntimeError):
    """Use of the device that would be a race, or would read the wrong memory, on a GPU."""


class Uploads:
    """Host buffers that the device may still read, with copies of their contents at the time of the upload."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, host: torch.Tensor) -> None:
        """Record a buffer whose upload has been enqueued."""
        self._pending.append((host, host.clone()))

    def take(self) -> Uploads:
        """Remove and return all pending uploads, for the download that is enqueued after them."""
        taken = Uploads()
        taken._pending, self._pending = self._pending, []
        return taken

    def check(self) -> None:
        """Raise Misuse if a buffer has been modified since its upload."""
        for host, before in self._pending:
            if not torch.equal(_bytes(host), _bytes(before)):
                raise Misuse("a host buffer was modified before its upload was known to be complete")
        self._pending.clear()


class LateDevice(Device):
    """The slowest permitted GPU. Misuse raises, or yields wrong results as it does on a GPU."""

    depth = 2
    captures = True

    def __init__(self) -> None:
        self._uploads = Uploads()

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy immediately; the next download checks that the host buffer has not changed by then."""
        target.copy_(host)
        self._uploads.add(host)

    def download(self, tensors: Sequence[torch.Tensor]) -> LateDownload:
        """Copy in `wait`."""
        return LateDownload(tensors, self._uploads.take())

    def capture(self, run: Callable[[], T]) -> LateGraph[T]:
        """Return a graph that calls the function on each replay."""
        return LateGraph(run)

    def synchronize(self) -> None:
        """Check the pending uploads."""
        self._uploads.take().check()


class LateDownload:
    """Download that reads its tensors in `wait`. The first call of `done` returns False."""

    def __init__(self, tensors: Sequence[torch.Tensor], uploads: Uploads) -> None:
        self._tensors = tuple(tensors)
        self._uploads = uploads
        self._polled = False

    def done(self) -> bool:
        """Return False on the first call, then True."""
        polled, self._polled = self._polled, True
        return polled

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the tensors as they are now. Raise Misuse if an upload buffer was modified."""
        self._uploads.check()
        return tuple(tensor.clone() for tensor in self._tensors)


class LateGraph(Generic[T]):
    """Graph that calls the function again on each replay and copies the results to the captured outputs.

    Capturing fills the outputs with NaN or the lowest integer, because a graph computes nothing until it is replayed.
    A replay raises Misuse if the function uses other tensors than during the capture. Reading a value on the host
    raises Misuse immediately.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        run()  # as on a GPU, where the first call compiles
        with _TensorRecorder() as recorder:
            self._outputs = run()
        self._inputs = recorder.inputs
        for tensor in _tensors(self._outputs):
            _poison(tensor)

    @property
    def outputs(self) -> T:
        """Outputs of the captured call."""
        return self._outputs

    def replay(self) -> T:
        """Call the function and return the captured outputs with the new values. Raise Misuse."""
        with _TensorRecorder() as recorder:
            outputs = self._run()
        if recorder.inputs != self._inputs:
            raise Misuse("a graph is replayed with other tensors than it was captured with")
        for captured, new in zip(_tensors(self._outputs), _tensors(outputs), strict=True):
            captured.copy_(new)
        return self._outputs


class _TensorRecorder(TorchDispatchMode):
    """Recorder of the tensors that operators read and that existed before the recorder was entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs: Counter[TensorMemory] = Counter()
        self._created: list[torch.Tensor] = []  # references prevent the reuse of their addresses
        self._addresses: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _READ_ON_HOST:
            raise Misuse("a value of the device is read on the host while a graph is captured")
        arguments = list(_tensors((args, kwargs)))
        for tensor in arguments:
            if tensor.untyped_storage().data_ptr() not in self._addresses:
                self.inputs[tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype] += 1
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in arguments}
        for tensor in _tensors(result):
            # Views and in-place operations return the storage of an argument; `to` and `reshape` sometimes do.
            if tensor.untyped_storage().data_ptr() not in known:
                self._created.append(tensor)
                self._addresses.add(tensor.untyped_storage().data_ptr())
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(child)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)

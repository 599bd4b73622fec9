"""A device that is as late as a GPU can be, for tests without one: what `CpuDevice(late=True)` is made of.

On a GPU an upload reads its host buffer at some time before a later download arrives, a download reads its tensors at
some time before it arrives, and a graph works on the memory that it was captured with, whatever Python names it now.
Here each happens as late as it may, so code that relies on luck fails every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Misuse(RuntimeError):
    """What the caller does would be a race, or read the wrong memory, on a GPU."""


class Uploads:
    """Host buffers that the device may still read, with what they held when they were handed over."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, host: torch.Tensor) -> None:
        """A buffer whose upload is enqueued."""
        self._pending.append((host, host.clone()))

    def take(self) -> Uploads:
        """All so far, for the download that is enqueued after them."""
        taken = Uploads()
        taken._pending, self._pending = self._pending, []
        return taken

    def check(self) -> None:
        """Raises Misuse where a buffer has been written to."""
        for host, before in self._pending:
            if not torch.equal(_bytes(host), _bytes(before)):
                raise Misuse("a host buffer was written to before its upload was known to be over")
        self._pending.clear()


class LateDownload:
    """Reads its tensors when it is waited for; asked before whether it is done, it says no once."""

    def __init__(self, tensors: Sequence[torch.Tensor], uploads: Uploads) -> None:
        self._tensors = tuple(tensors)
        self._uploads = uploads
        self._asked = False

    def done(self) -> bool:
        """False the first time."""
        asked, self._asked = self._asked, True
        return asked

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors as they are now. Raises Misuse."""
        self._uploads.check()
        return tuple(tensor.clone() for tensor in self._tensors)


class LateGraph(Generic[T]):
    """Runs the function again on each replay and copies what it returns to where the first run put it.

    Capturing leaves poison in the outputs, for a graph has computed nothing until it is replayed. A replay raises
    Misuse where the function takes other tensors than when it was captured; a read on the host raises it at once.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        run()  # as on a GPU, where the first run compiles
        with _Watch() as watch:
            self._outputs = run()
        self._inputs = watch.inputs
        for tensor in _tensors(self._outputs):
            _poison(tensor)

    @property
    def outputs(self) -> T:
        """As the function returned them when it was captured."""
        return self._outputs

    def replay(self) -> T:
        """Runs the function. Raises Misuse."""
        with _Watch() as watch:
            outputs = self._run()
        if watch.inputs != self._inputs:
            raise Misuse("a graph was captured with other tensors than it is replayed with")
        for kept, new in zip(_tensors(self._outputs), _tensors(outputs), strict=True):
            kept.copy_(new)
        return self._outputs


class _Watch(TorchDispatchMode):
    """Collects the tensors that come from outside of what runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs: Counter[Place] = Counter()
        self._made: list[torch.Tensor] = []  # kept, so that no address is used twice
        self._addresses: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise Misuse("a value of the device is read on the host while a graph is captured")
        for tensor in _tensors((args, kwargs)):
            if tensor.untyped_storage().data_ptr() not in self._addresses:
                place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                self.inputs[place] += 1
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            # A view, or an operation in place, returns what it was given; `to` and `reshape` may do so or not.
            if tensor.untyped_storage().data_ptr() not in known:
                self._made.append(tensor)
                self._addresses.add(tensor.untyped_storage().data_ptr())
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)

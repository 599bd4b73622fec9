"""What the runner asks of the machine under torch: copies, a second stream, graphs, memory figures.

Work is enqueued and runs in order; the host goes on meanwhile. This is the only place in the worker that names
torch.cuda, so that the code that runs on a GPU is the code that tests run without one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from worker.executor.host_memory import free_host_memory, total_host_memory
from worker.executor.late import LateDownload, LateGraph, Uploads

Out = TypeVar("Out", covariant=True)
T = TypeVar("T")

OutOfMemory: type[RuntimeError] = torch.OutOfMemoryError
"""What torch raises where the device's memory is full."""

_ALIGNMENT = 16
_LEAST_BUFFER = 4096


class CaptureError(RuntimeError):
    """What was to be captured does something that a graph cannot hold. The work itself can still be run."""


class Download(Protocol):
    """Tensors on their way to the host."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host, the caller's own. Called once."""
        ...


class Graph(Protocol[Out]):
    """Captured work. `outputs` is what the captured function returned; its tensors are filled by `replay`."""

    @property
    def outputs(self) -> Out:
        """Valid after a `replay`, until the next replay of any graph of the device."""
        ...

    def replay(self) -> Out:
        """Enqueues the work once more, on the same memory."""
        ...


class Device(Protocol):
    """A machine that runs what torch and Triton enqueue.

    Attributes:
        torch_device: where tensors are.
        depth: steps worth having in flight.
        captures: whether `capture` saves time.
    """

    torch_device: torch.device
    depth: int
    captures: bool

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A host buffer that `upload` reads without waiting; its values are undefined. Allocate once and keep."""
        ...

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueues target <- host. `host` must not change until a `download` enqueued later has been waited for."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copies to the host what the work enqueued so far leaves in the tensors, beside the work enqueued later.

        Nothing enqueued later may write to them: hand over results, not buffers that the next step fills again.
        """
        ...

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Runs the function once, and keeps what it enqueues for replays.

        The function must read and write the same memory each time, read nothing on the host, and may overwrite the
        outputs of other graphs. Raises CaptureError, and OutOfMemory.
        """
        ...

    def synchronize(self) -> None:
        """Waits for all that is enqueued."""
        ...

    def free_bytes(self) -> int:
        """Memory that nobody has taken; what torch keeps for later use is taken."""
        ...

    def total_bytes(self) -> int:
        """Memory of the device."""
        ...

    def allocated_bytes(self) -> int:
        """What tensors take now; 0 where it is not counted."""
        ...

    def peak_bytes(self) -> int:
        """Most that tensors took at a time since `reset_peak`; 0 where it is not counted."""
        ...

    def reset_peak(self) -> None:
        """Starts counting anew."""
        ...

    def release_cached(self) -> None:
        """Gives back what torch keeps for later use."""
        ...


class CpuDevice:
    """Everything happens at once.

    Args:
        late: for tests, behaves as a GPU may at its worst: downloads read their tensors when they are waited for,
            uploads insist that their host buffer has not changed by then, and graphs insist on the memory that they
            were captured with (worker/executor/late.py). Misuse raises or gives wrong results, here as there.
    """

    def __init__(self, *, late: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.depth = 2 if late else 1
        self.captures = late
        self._uploads = Uploads() if late else None

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copies."""
        target.copy_(host)
        if self._uploads is not None:
            self._uploads.add(host)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copies, or does so when waited for."""
        if self._uploads is not None:
            return LateDownload(tensors, self._uploads.take())
        return _Arrived(tuple(tensor.clone() for tensor in tensors))

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """The function itself, which a replay runs again."""
        return LateGraph(run)

    def synchronize(self) -> None:
        """Nothing is enqueued."""
        if self._uploads is not None:
            self._uploads.take().check()

    def free_bytes(self) -> int:
        """The host's, or what its control group leaves."""
        return free_host_memory()

    def total_bytes(self) -> int:
        """The host's."""
        return total_host_memory()

    def allocated_bytes(self) -> int:
        """Not counted."""
        return 0

    def peak_bytes(self) -> int:
        """Not counted."""
        return 0

    def reset_peak(self) -> None:
        """Nothing to reset."""

    def release_cached(self) -> None:
        """torch keeps nothing here."""


class _Arrived:
    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self._tensors


class CudaDevice:
    """One GPU (CUDA or ROCm). Work goes to the current stream of the thread that enqueues it, downloads to another."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.depth = 2
        self.captures = True
        torch.cuda.set_device(torch_device)
        self._downloads = torch.cuda.Stream(torch_device)
        self._captures = torch.cuda.Stream(torch_device)
        self._pool = torch.cuda.graph_pool_handle()
        # Buffers that are free, each with the event of its last download: making an event takes the host's time too.
        self._buffers: dict[int, list[tuple[torch.Tensor, torch.cuda.Event]]] = {}
        self._computed = torch.cuda.Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """By the copy engine, in order with the work."""
        target.copy_(host, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """On the second stream, which waits for the work enqueued so far; one page-locked buffer takes them all."""
        places, size = [], 0
        for tensor in tensors:
            places.append(size)
            size += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        capacity = max(_LEAST_BUFFER, 1 << (size - 1).bit_length()) if size else _LEAST_BUFFER
        kept = self._buffers.setdefault(capacity, [])
        buffer, event = kept.pop() if kept else (self.pinned((capacity,), torch.uint8), torch.cuda.Event())
        self._computed.record(torch.cuda.current_stream(self.torch_device))
        self._downloads.wait_event(self._computed)
        host = []
        with torch.cuda.stream(self._downloads):
            for tensor, place in zip(tensors, places):
                part = buffer[place : place + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
                part.copy_(tensor, non_blocking=True)
                # Otherwise the memory could be given to work that does not wait for this copy.
                tensor.record_stream(self._downloads)
                host.append(part)
            event.record(self._downloads)
        return _CudaDownload(event, host, lambda: kept.append((buffer, event)))

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """A CUDA graph; all graphs share one pool of memory, because no two run at a time."""
        current = torch.cuda.current_stream(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        self._captures.wait_stream(current)
        collecting = gc.isenabled()
        try:
            with torch.cuda.stream(self._captures):
                run()  # kernels are compiled and libraries take their workspace now: a capture could not hold that
                gc.disable()  # an object of the device that dies meanwhile would break the capture
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except OutOfMemory:
            raise
        except RuntimeError as error:
            raise CaptureError(f"a graph could not be captured: {error}") from error
        finally:
            if collecting:
                gc.enable()
            current.wait_stream(self._captures)
        return _CudaGraph(graph, outputs)

    def synchronize(self) -> None:
        """Waits for all streams."""
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """As the driver says it, so other processes count."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_bytes(self) -> int:
        """As the driver says it."""
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def allocated_bytes(self) -> int:
        """By torch's allocator."""
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        """By torch's allocator."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """Of torch's allocator."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        """Of torch's allocator."""
        torch.cuda.empty_cache()


class _CudaDownload:
    def __init__(self, event: torch.cuda.Event, host: Sequence[torch.Tensor], give_back: Callable[[], None]) -> None:
        self._event = event
        self._host = host
        self._give_back = give_back

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._event.synchronize()
        # Few bytes, and the buffer is free again for the next step.
        tensors = tuple(part.clone() for part in self._host)
        self._give_back()
        return tensors


class _CudaGraph(Generic[T]):
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T) -> None:
        self._graph = graph
        self._outputs = outputs

    @property
    def outputs(self) -> T:
        return self._outputs

    def replay(self) -> T:
        self._graph.replay()
        return self._outputs


def num_gpus() -> int:
    """GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_multiplies_bfloat16() -> bool:
    """Whether the current GPU does so itself."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def open_device(torch_device: torch.device) -> Device:
    """The Device of a torch device."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()

"""The device interface of the runners: copies, a second stream, graphs and memory statistics.

Work is enqueued and executed in order while the host continues. This is the only module of the worker that names
torch.cuda. Tests without a GPU use a device that is as asynchronous as a GPU (tests/fakes/late_device.py).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

Out = TypeVar("Out", covariant=True)
T = TypeVar("T")

OutOfMemory: type[RuntimeError] = torch.OutOfMemoryError
"""Error that torch raises if the memory of the device is exhausted."""

_ALIGNMENT = 16
_MIN_BUFFER_BYTES = 4096


class CaptureError(RuntimeError):
    """Failure to capture a graph. The work itself can still be executed eagerly."""


class Download(Protocol):
    """A copy of tensors to the host, in progress."""

    def done(self) -> bool:
        """Return True if `wait` would return immediately."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors on the host. They belong to the caller. May be called once."""


class Graph(Protocol[Out]):
    """Captured work. `outputs` holds what the captured function returned; `replay` fills its tensors."""

    @property
    def outputs(self) -> Out:
        """Outputs, valid after `replay` until the next replay of any graph of the device."""

    def replay(self) -> Out:
        """Enqueue the work again, on the same memory, and return `outputs`."""


class Device:
    """Device that executes the work of torch and Triton. This base class is the CPU, where all calls are synchronous.

    Attributes:
        torch_device: Device of the tensors.
        depth: Number of steps in flight at which the device is fully used.
        captures: True if replaying graphs is faster than enqueuing kernels.
    """

    torch_device = torch.device("cpu")
    depth = 1
    captures = False

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized host buffer from which `upload` copies asynchronously. Allocate once and reuse."""
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue target <- host. Do not modify `host` until a `download` enqueued later has been waited for."""
        target.copy_(host)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copy to the host what the work enqueued so far leaves in the tensors, concurrently with later work.

        Later work must not write to the tensors: pass results, not buffers that the next step reuses.
        """
        return _CompletedDownload(tuple(tensor.clone() for tensor in tensors))

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Run the function once and record the work it enqueues.

        The function must read and write the same memory in each call and read no values on the host. It may overwrite
        the outputs of other graphs.

        Raises:
            CaptureError: The work cannot be captured.
            OutOfMemory: The memory of the device is exhausted.
        """
        raise CaptureError("the CPU has no graphs")

    def synchronize(self) -> None:
        """Wait for all enqueued work."""

    def free_bytes(self) -> int:
        """Return the unallocated memory. Memory cached by torch counts as allocated."""
        return free_host_memory()

    def total_bytes(self) -> int:
        """Return the memory size of the device."""
        return _read_meminfo(Path("/proc/meminfo"), "MemTotal:")

    def allocated_bytes(self) -> int:
        """Return the memory used by tensors, or 0 if it is not counted."""
        return 0

    def peak_bytes(self) -> int:
        """Return the maximum memory used by tensors since `reset_peak`, or 0 if it is not counted."""
        return 0

    def reset_peak(self) -> None:
        """Reset the maximum returned by `peak_bytes`."""

    def release_cached(self) -> None:
        """Return the memory cached by torch to the driver."""


class _CompletedDownload:
    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self._tensors


class CudaDevice(Device):
    """One GPU (CUDA or ROCm). Work uses the current stream of the calling thread; downloads use a second stream."""

    depth = 2
    captures = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        torch.cuda.set_device(torch_device)
        self._download_stream = torch.cuda.Stream(torch_device)
        self._capture_stream = torch.cuda.Stream(torch_device)
        self._pool = torch.cuda.graph_pool_handle()
        # Free buffers, each with the event of its last download: creating an event costs host time too.
        self._buffers: dict[int, list[tuple[torch.Tensor, torch.cuda.Event]]] = {}
        self._computed = torch.cuda.Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate page-locked memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy in stream order."""
        target.copy_(host, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copy to one page-locked buffer on the second stream, which waits for the work enqueued so far."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        capacity = max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length()) if size else _MIN_BUFFER_BYTES
        free = self._buffers.setdefault(capacity, [])
        buffer, event = free.pop() if free else (self.pinned((capacity,), torch.uint8), torch.cuda.Event())
        self._computed.record(torch.cuda.current_stream(self.torch_device))
        self._download_stream.wait_event(self._computed)
        host = []
        with torch.cuda.stream(self._download_stream):
            for tensor, offset in zip(tensors, offsets):
                part = buffer[offset : offset + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
                part.copy_(tensor, non_blocking=True)
                # Otherwise the allocator could reuse the memory for work that does not wait for this copy.
                tensor.record_stream(self._download_stream)
                host.append(part)
            event.record(self._download_stream)
        return _CudaDownload(event, host, lambda: free.append((buffer, event)))

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Capture a CUDA graph. All graphs share one memory pool because they never run concurrently."""
        current = torch.cuda.current_stream(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        self._capture_stream.wait_stream(current)
        collecting = gc.isenabled()
        try:
            with torch.cuda.stream(self._capture_stream):
                run()  # compiles kernels and allocates library workspaces, which a capture does not permit
                gc.disable()  # collecting a device object would invalidate the capture
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
            current.wait_stream(self._capture_stream)
        return _CudaGraph(graph, outputs)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """Return the free memory according to the driver, which includes the use by other processes."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_bytes(self) -> int:
        """Return the memory size according to the driver."""
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def allocated_bytes(self) -> int:
        """Return the memory allocated through torch."""
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        """Return the maximum memory allocated through torch."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """Reset the maximum of torch's allocator."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        """Empty the cache of torch's allocator."""
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
        # The copies are small, and the next step can reuse the buffer.
        tensors = tuple(part.clone() for part in self._host)
        self._give_back()
        return tensors


class _CudaGraph(Generic[T]):
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> T:
        self._graph.replay()
        return self.outputs


def num_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_multiplies_bfloat16() -> bool:
    """Return True if the current GPU has bfloat16 arithmetic."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def open_device(torch_device: torch.device) -> Device:
    """Return the Device of a torch device."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else Device()


def free_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate.

    This is the kernel's estimate, or the remainder of the control group's limit (cgroup v2) if that is less.
    """
    free = _read_meminfo(meminfo, "MemAvailable:")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, int(limit) - used)) if limit.isdecimal() else free


def _read_meminfo(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0

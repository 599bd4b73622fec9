"""The worker's CUDA device; tests without a GPU use its stand-in (tests/fakes/late_device.py)."""

from __future__ import annotations

import pytest
import torch

from worker.executor.device import CaptureError, CudaDevice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_downloads_are_not_affected_by_later_work(device: torch.device) -> None:
    """Test downloads in order, with reused buffers and events, waiting for the first one last."""
    cuda = CudaDevice(device)
    for _ in range(3):
        downloads = []
        for number in range(4):
            values = torch.full((1 << 16,), number, dtype=torch.int64, device=device)
            downloads.append(cuda.download([values, values[:3].float(), values[:0]]))
            torch.full((1 << 22,), -1, device=device)  # may reuse the memory of what is freed
            del values
        for number in reversed(range(4)):
            whole, part, nothing = downloads[number].wait()
            assert downloads[number].done()
            assert whole.device.type == "cpu" and bool((whole == number).all())
            assert part.tolist() == [number] * 3 and not nothing.numel()


def test_uploads_are_ordered_with_device_work(device: torch.device) -> None:
    cuda = CudaDevice(device)
    host = [cuda.pinned((1 << 20,), torch.int32) for _ in range(3)]
    target = torch.empty(1 << 20, dtype=torch.int32, device=device)
    sums = []
    for number, buffer in enumerate(host):
        buffer.fill_(number)
        cuda.upload(buffer, target)
        sums.append(target.sum())
    (found,) = cuda.download([torch.stack(sums)]).wait()
    assert found.tolist() == [number << 20 for number in range(3)]


def test_graphs_share_memory_and_read_inputs_at_replay(device: torch.device) -> None:
    cuda = CudaDevice(device)
    static = torch.zeros(1000, device=device)
    double = cuda.capture(lambda: (static @ static, static * 2))
    triple = cuda.capture(lambda: double.outputs[1] + static)
    for value in (1.0, 5.0):
        static.fill_(value)
        square, twice = double.replay()
        assert twice is double.outputs[1]
        results = cuda.download([square.clone(), twice[:1].clone(), triple.replay()[:1].clone()]).wait()
        assert [result.item() for result in results] == [1000 * value * value, 2 * value, 3 * value]


def test_host_read_prevents_capture_but_not_of_the_next_graph(device: torch.device) -> None:
    cuda = CudaDevice(device)
    static = torch.ones(8, device=device)
    with pytest.raises(CaptureError, match="could not be captured"):
        cuda.capture(lambda: static * static.sum().item())
    graph = cuda.capture(lambda: static + 1)
    assert cuda.download([graph.replay()]).wait()[0].tolist() == [2.0] * 8


def test_memory_use_is_reported(device: torch.device) -> None:
    cuda = CudaDevice(device)
    before = cuda.allocated_bytes()
    cuda.reset_peak()
    held = torch.empty(1 << 20, device=device)
    assert cuda.allocated_bytes() - before == cuda.peak_bytes() - before == held.nbytes
    assert 0 < cuda.free_bytes() < cuda.total_bytes()
    del held
    cuda.release_cached()
    assert cuda.allocated_bytes() == before

"""The CPU device, and the detection of misuse by the late device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.late_device import LateDevice, Misuse
from worker.executor.device import Device, open_device

WORKER = Path(__file__).parents[4] / "worker"


def test_a_download_is_a_copy():
    device = open_device(torch.device("cpu"))
    source = torch.arange(4)
    download = device.download([source, source + 1])
    source.zero_()
    assert download.done()
    assert [tensor.tolist() for tensor in download.wait()] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert not device.captures and device.depth == 1


def test_a_host_buffer_is_busy_until_a_later_download_arrived():
    device = LateDevice()
    host, target = device.pinned((3,), torch.int32), torch.zeros(3, dtype=torch.int32)
    host.fill_(1)
    device.upload(host, target)
    download = device.download([target])
    assert download.wait()[0].tolist() == [1, 1, 1]
    host.fill_(2)  # the upload is known to be complete
    device.upload(host, target)
    first = device.download([target])
    host.fill_(3)
    with pytest.raises(Misuse, match="host buffer"):
        first.wait()
    device.upload(host, target)
    host.fill_(4)
    with pytest.raises(Misuse, match="host buffer"):
        device.synchronize()


def test_a_graph_refuses_other_memory_and_reads_on_the_host():
    device = LateDevice()
    inputs = {"x": torch.ones(3)}
    graph = device.capture(lambda: inputs["x"] * 2)
    kept, inputs["x"] = inputs["x"], torch.ones(3)
    with pytest.raises(Misuse, match="other tensors"):
        graph.replay()
    inputs["x"] = kept[:2]
    with pytest.raises(Misuse, match="other tensors"):
        graph.replay()
    with pytest.raises(Misuse, match="on the host"):
        device.capture(lambda: torch.full((2,), inputs["x"].sum().item()))


def test_no_other_module_of_the_worker_names_torch_cuda():
    sources = {path: path.read_text("utf-8") for path in WORKER.rglob("*.py")}
    assert [path.name for path, source in sources.items() if "torch.cuda" in source] == ["device.py"]


def test_memory_figures_of_the_host():
    device = Device()
    assert 0 < device.free_bytes() <= device.total_bytes()
    device.reset_peak()
    assert device.peak_bytes() == 0

"""The private attributes of torch that worker/executor/torch_internals.py isolates."""

import importlib

import pytest
import torch

from worker.executor import torch_internals


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("torch.utils._python_dispatch", "TorchDispatchMode.__torch_dispatch__"),
        ("torch", "ops.aten._local_scalar_dense.default"),
    ],
)
def test_the_private_attributes_of_torch_exist(module, path):
    found = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"torch {torch.__version__} has no {module}.{path}: {name} is missing"
        found = getattr(found, name)


def test_a_dispatch_mode_observes_operators_and_reads_on_the_host():
    observed = []

    class Recorder(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            observed.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        torch.ones(2).sum().item()
    assert torch.ops.aten.sum.default in observed
    assert observed[-1] is torch_internals.READ_ON_HOST

"""What is compiled while weights are read: what the model will use, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels.ops.activation.cpu
import kernels.ops.attention.cpu
import kernels.ops.decoder_layers.cpu
import kernels.ops.linear_panels.cpu
import kernels.ops.norm.cpu
from kernels.common.cpu import bf16
from tests.fakes.tiny_model import write_tiny_model
from worker.executor.precompile import Precompilation
from worker.model.loading.open_model import open_model
from worker.parallel import ParallelContext

NEEDS_INSTRUCTIONS = pytest.mark.skipif(not bf16.supported(), reason="panels need AVX512-BF16")


class Beside:
    """Records what a CompileProcess is asked."""

    def __init__(self, calls, succeeds):
        self.calls = calls
        self.succeeds = succeeds

    def compile_head(self, kinds):
        self.calls.append(("told", tuple(kinds)))

    def wait(self):
        self.calls.append(("waited",))
        return self.succeeds


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return open_model(str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")), Path("/nonexistent"))


@pytest.fixture
def calls(monkeypatch):
    """Names of what would have been compiled, in order."""
    found = []

    def record(module, name):
        monkeypatch.setattr(module, name, lambda *arguments, **_: found.append((name, *arguments)))

    record(kernels.ops.activation.cpu, "SiluAndMul")
    record(kernels.ops.attention.cpu, "PagedAttention")
    record(kernels.ops.decoder_layers.cpu, "compile_for")
    record(kernels.ops.linear_panels.cpu, "panel_linear")
    record(kernels.ops.norm.cpu, "AddRMSNorm")
    return found


@pytest.fixture
def spec(files):
    """Of heads as wide as the kernels take them."""
    return replace(files.spec, num_heads=2, num_kv_heads=2, head_dim=32, rope=replace(files.spec.rope, rotary_dim=32))


def compile_all(spec, weights, beside=None, dtype=torch.bfloat16):
    cpu, alone = torch.device("cpu"), ParallelContext()
    Precompilation(
        spec, weights, alone, page_size=16, dtype=dtype, kv_dtype=torch.float32, device=cpu, beside=beside
    ).wait()


def names(calls):
    return [call[0] for call in calls]


@NEEDS_INSTRUCTIONS
def test_layers_that_are_one_op_need_nothing_of_what_they_are_made_of(spec, files, calls):
    compile_all(spec, files.weights)
    assert names(calls) == ["AddRMSNorm", "compile_for", "panel_linear"]


@NEEDS_INSTRUCTIONS
def test_layers_that_are_several_ops_need_each(spec, files, calls):
    compile_all(replace(spec, activation="gelu_tanh"), files.weights)
    assert names(calls) == ["AddRMSNorm", "PagedAttention", "panel_linear", "panel_linear"]


def test_without_panels_there_are_no_products_to_compile(spec, files, calls):
    compile_all(spec, files.weights, dtype=torch.float32)
    assert names(calls) == ["AddRMSNorm", "PagedAttention", "SiluAndMul"]


@NEEDS_INSTRUCTIONS
@pytest.mark.parametrize("succeeds", [True, False])
def test_the_head_is_asked_for_after_the_process_that_compiles_it_has_ended(spec, files, calls, succeeds):
    # Where that failed the head is not in the cache, and asking for it compiles it.
    compile_all(spec, files.weights, Beside(calls, succeeds))
    assert names(calls) == ["told", "AddRMSNorm", "compile_for", "waited", "panel_linear"]
    assert calls[0][1] == (calls[-1][1:3],)

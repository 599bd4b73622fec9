"""Direct launches pass Triton's launcher the same arguments as Triton itself, for every timed kernel.

The test runs in its own process, without the interpreter and with a driver that compiles and runs nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.architecture.source import ROOT
from tests.kernels.test_benchmarks import FOLDERS, SCALE

_PROGRAM = """
import importlib, json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

calls = []

class Kernel:
    def __init__(self):
        self.function, self.packed_metadata = object(), object()

    def launch_metadata(self, *args):
        return None

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        assert function is self.function and packed is self.packed_metadata and stream == 7
        calls.append((self, (x, y, z), [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]))

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 7
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def compile_nothing(self, key, signature, device, constexprs, options, attrs, warmup):
    return self.device_caches[device][0].setdefault(key, Kernel())

driver.set_active(Driver())
JITFunction._do_compile = compile_nothing
from kernels.common.triton.launch import Variant
direct = Variant.__call__
kernels = set()

def both(self, grid, *args):
    # Triton's own way, then the direct way, once to find the kernel and once with it.
    taken = []
    for launch in (lambda: self._kernel[grid](*args, **self._constants), *[lambda: direct(self, grid, *args)] * 2):
        calls.clear()
        launch()
        taken += calls
    assert len(taken) == 3 and taken[0] == taken[1] == taken[2], (self._kernel, taken)
    kernels.add(self._kernel.__name__)

Variant.__call__ = both
for name in sys.argv[2:]:
    for benchmark in importlib.import_module(f"kernels.ops.{name}.cases").benchmarks(torch.device("cpu"),
    int(sys.argv[1])):
        benchmark.runs[0]()
x, ones = torch.empty(17, 64), torch.ones(64)
from kernels.ops.norm.triton import add_rms_norm
seen = []
Variant.__call__ = lambda self, grid, *args: seen.append((calls.clear(), direct(self, grid, *args), calls[-1])[2])
for rows in (x[:16], x[1:], x[:16], x[:16].bfloat16()):  # aligned, as well, not, and of another type
    add_rms_norm(None, rows, ones, 1e-5, torch.float32)
    add_rms_norm(None, torch.empty(1025)[1:].view(16, 64), ones, 1e-5, torch.float32)
found = [kernel for kernel, _, _ in seen]
assert len({id(kernel) for kernel in found[::2]}) == 2 and found[0] is found[2] is found[4] is not found[6]
assert found[1] is found[3] is not found[0]
print(json.dumps(sorted(kernels)))
"""


def test_direct_launches_equal_tritons() -> None:
    """Use sizes of several tiles, integers 1 and multiples of 16, empty parts, and pointers of any alignment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _PROGRAM, str(SCALE), *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads(done.stdout)) > 15

"""How many arenas malloc takes from in a gateway process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_COUNT = """
import ctypes, os, sys, threading
from gateway.__main__ import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fdopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
both = threading.Barrier(7)

def work():
    libc.malloc(1000)
    both.wait()
    both.wait()

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
both.wait()
out = libc.fdopen(os.dup(1), b"w")
libc.malloc_info(0, out)
libc.fflush(out)
both.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_arenas():
    counts = {}
    for how in ("limited", "as it is"):
        done = subprocess.run(
            [sys.executable, "-c", _COUNT, how], capture_output=True, text=True, timeout=60, check=True
        )
        counts[how] = done.stdout.count("<heap nr=")
    assert counts["limited"] <= 2 < counts["as it is"]

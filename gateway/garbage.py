"""What is no longer needed: what the garbage collector need not look at, and memory for the system to have back."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def settle() -> None:
    """Takes all objects that there are now out of the collector's sight, until the next time.

    Modules and a model's vocabulary and templates are hundreds of thousands of objects: looking through them took
    0.1 s, during which nothing else ran, whenever a long conversation had made some ten thousand others.
    """
    gc.unfreeze()  # a model that is gone may have left cycles
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Returns to the system what malloc has free. Call it in a thread: it takes 0.1 ms for each megabyte that there is
    to return, and next to nothing where it was done before. Who needs memory of the same arena meanwhile waits as long.

    glibc's threads have an arena of malloc each, which keeps what large prompts took there, up to 40 MB. With fewer
    arenas, or returning all at once, requests cost more.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)

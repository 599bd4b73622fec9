"""Garbage collection: what stays for as long as the process, or a model, is not looked at again and again."""

from __future__ import annotations

import gc


def settle() -> None:
    """Takes all objects that there are now out of the collector's sight, until the next time.

    Modules and a model's vocabulary and templates are hundreds of thousands of objects: looking through them took
    0.1 s, during which nothing else ran, whenever a long conversation had made some ten thousand others.
    """
    gc.unfreeze()  # a model that is gone may have left cycles
    gc.collect()
    gc.freeze()

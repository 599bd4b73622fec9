"""The model side: engine loop, scheduler, KV cache, executor, model, sampling."""

import os

# libgomp, which torch's CPU build carries, reads these when torch is loaded. Its threads spin at barriers for as long
# as a time slice by default: beside any other busy process (the gateway, for one) a step then takes ten times as long.
# A few microseconds of spinning keep most of its gain on cores that are free.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

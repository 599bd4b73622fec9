"""Model side of Pelton: engine loop, scheduler, KV cache, executor, model, sampling."""

import os

# libgomp, part of torch's CPU build, reads these variables when torch is loaded. By default its threads spin at
# barriers for as long as a time slice. Beside another busy process, such as the gateway, a step then takes ten times as
# long. A few microseconds of spinning keep most of the gain on free cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

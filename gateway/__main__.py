"""`python -m gateway`: the HTTP side.

Exit code 0 after an orderly end, else one of shared.exit_codes: 1 for a configuration that cannot be used, 78 where
`pelton serve` began it and the model cannot be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence

import uvloop
from prometheus_client import disable_created_metrics

from gateway.service import RefusedModelError, Service
from shared import log
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.exit_codes import EXIT_CONFIGURATION, EXIT_REFUSED
from shared.settings import GatewaySettings

_M_ARENA_MAX = -8
"""mallopt(3)."""
_NUM_ARENAS = 2


def main(argv: Sequence[str]) -> int:
    """Runs a gateway until it is stopped; returns the exit code."""
    try:
        settings = load_settings(GatewaySettings, argv, os.environ, prog="pelton gateway")
        writer = log.configure(settings.log_level, settings.log_format, process=f"gateway-{settings.gateway_index}")
        _raise_file_limit()
        limit_arenas()
        disable_created_metrics()  # a series beside each counter that says when it began
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, writer))
    except ConfigurationError as error:
        print(f"pelton gateway: {error}", file=sys.stderr)
        return EXIT_REFUSED if isinstance(error, RefusedModelError) else EXIT_CONFIGURATION
    return 0


async def _serve(settings: GatewaySettings, writer: log.LogWriter) -> None:
    await Service(settings, writer).run()


def limit_arenas() -> None:
    """Lets threads share what glibc's malloc has freed; before they start. Each has its own arena otherwise, up to
    eight for a core: prompts go through a dozen threads, and a gateway with long ones was a seventh larger.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def _raise_file_limit() -> None:
    """Each client and each worker is a file descriptor; the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

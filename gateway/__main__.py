"""`python -m gateway`: the HTTP side.

Exit code 0 after an orderly end, else one of shared.exit_codes: 1 for a configuration that cannot be used, 78 where
`pelton serve` began it and the model cannot be served.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Sequence

import uvloop
from prometheus_client import disable_created_metrics

from gateway.service import RefusedModelError, Service
from shared import log, supervisor_pipe
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.exit_codes import EXIT_CONFIGURATION, EXIT_REFUSED
from shared.settings import GatewaySettings


def main(argv: Sequence[str]) -> int:
    """Runs a gateway until it is stopped; returns the exit code."""
    try:
        settings = load_settings(GatewaySettings, argv, os.environ, prog="pelton gateway")
        writer = log.configure(settings.log_level, settings.log_format, process=f"gateway-{settings.gateway_index}")
        _raise_file_limit()
        disable_created_metrics()  # a series beside each counter that says when it began
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, writer))
    except ConfigurationError as error:
        supervisor_pipe.give_reason("pelton gateway", str(error))
        return EXIT_REFUSED if isinstance(error, RefusedModelError) else EXIT_CONFIGURATION
    return 0


async def _serve(settings: GatewaySettings, writer: log.LogWriter) -> None:
    await Service(settings, writer).run()


def _raise_file_limit() -> None:
    """Each client and each worker is a file descriptor; the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Entry point of the gateway process: `python -m gateway`.

The exit code is 0 after an orderly shutdown, or one of shared.errors: 1 for an unusable configuration, 78 if `pelton
serve` started the process and the model cannot be served.
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
from shared import log, notify
from shared.config import load_settings
from shared.errors import EXIT_CONFIGURATION, EXIT_REFUSED, ConfigurationError
from shared.settings import GatewaySettings


def main(argv: Sequence[str]) -> int:
    """Run a gateway until it is stopped and return the exit code."""
    try:
        settings = load_settings(GatewaySettings, argv, os.environ, prog="pelton gateway")
        writer = log.configure(settings.log_level, settings.log_format, process=f"gateway-{settings.gateway_index}")
        _raise_file_limit()
        disable_created_metrics()  # prometheus_client would add a series with the creation time of each counter
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, writer))
    except ConfigurationError as error:
        notify.give_reason("pelton gateway", str(error))
        return EXIT_REFUSED if isinstance(error, RefusedModelError) else EXIT_CONFIGURATION
    return 0


async def _serve(settings: GatewaySettings, writer: log.LogWriter) -> None:
    await Service(settings, writer).run()


def _raise_file_limit() -> None:
    """Raise the soft limit of file descriptors, which is often 1024. Each client and each worker needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

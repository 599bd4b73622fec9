"""A worker without a model for the gateway's benchmark: `python gateway_worker.py DIRECTORY SECONDS`.

Each request gets its prompt again and again, one token every SECONDS.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from shared.messages import GatewayMessage, Submit
from tests.fakes.fake_worker import FakeWorker


def repeat(submit: Submit) -> list[int]:
    """As many tokens as are asked for."""
    count, prompt = submit.sampling.max_tokens, submit.token_ids
    return (prompt * (count // len(prompt) + 1))[:count]


class Forgetful(list[GatewayMessage]):
    """What came in is looked at by nobody, and there may be hundreds of thousands."""

    def append(self, message: GatewayMessage) -> None:
        """Keeps nothing."""


def main() -> None:
    """Serves until the process is ended."""
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    worker = FakeWorker(
        directory, delay=seconds, script=repeat, max_num_seqs=8192, max_model_len=1 << 20, num_pages=1 << 20
    )
    worker.received = Forgetful()
    with worker:
        threading.Event().wait()


if __name__ == "__main__":
    main()

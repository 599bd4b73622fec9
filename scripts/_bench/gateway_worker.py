"""A worker without a model for the gateway's benchmark: `python gateway_worker.py DIRECTORY SECONDS`.

Each request gets its prompt again and again, one token every SECONDS.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from shared.messages import Submit
from tests.fakes.fake_worker import FakeWorker


def repeat(submit: Submit) -> list[int]:
    """As many tokens as are asked for."""
    count, prompt = submit.sampling.max_tokens, submit.token_ids
    return (prompt * (count // len(prompt) + 1))[:count]


def main() -> None:
    """Serves until the process is ended."""
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    with FakeWorker(
        directory, delay=seconds, script=repeat, max_num_seqs=8192, max_model_len=1 << 20, num_pages=1 << 20
    ):
        threading.Event().wait()


if __name__ == "__main__":
    main()

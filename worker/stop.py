"""When a choice ends by itself. Stop strings are the gateway's: this side knows only token ids."""

from __future__ import annotations

from shared.messages import Finish, FinishReason
from worker.request import Request

FINISH_LENGTH = Finish(FinishReason.LENGTH)


def finish_after(request: Request) -> Finish | None:
    """How the request ends with the last of its token_ids, or None where it goes on.

    A stop token wins over a length reached at the same time. The executor masks stop tokens until min_tokens are
    generated; the check here keeps that promise whatever was sampled.
    """
    length = len(request.token_ids)
    token_id = request.token_ids[-1]
    if token_id in request.stop_ids and length > request.min_num_tokens:
        return Finish(FinishReason.STOP, stop_token_id=token_id)
    if length >= request.max_num_tokens:
        return FINISH_LENGTH
    return None

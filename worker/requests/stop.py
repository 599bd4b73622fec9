"""End of a choice by its token ids. Stop strings are handled in the gateway."""

from __future__ import annotations

from shared.messages import Finish, FinishReason
from worker.requests.request import Request

FINISH_EMBEDDED = Finish(FinishReason.STOP)
FINISH_LENGTH = Finish(FinishReason.LENGTH)
FINISH_REPETITION = Finish(FinishReason.REPETITION)


def finish_after(request: Request) -> Finish | None:
    """Return how the request ends with the last of its token_ids, or None. Called once for each token.

    A stop token takes precedence, then the end of the grammar, the length, and a repetition. The executor masks stop
    tokens until min_tokens are generated; the check here ensures the same whatever was sampled. A repetition ends
    nothing before min_tokens either; the end of a grammar, after which nothing may follow, does.
    """
    length = len(request.token_ids)
    token_id = request.token_ids[-1]
    if token_id in request.stop_ids and length > request.min_num_tokens:
        return Finish(FinishReason.STOP, stop_token_id=token_id)
    finish = request.constraint.advance(token_id) if request.constraint is not None else None
    repeats = request.repetition is not None and request.repetition.append(token_id)
    if finish is not None:
        return finish
    if length >= request.max_num_tokens:
        return FINISH_LENGTH
    return FINISH_REPETITION if repeats and length > request.min_num_tokens else None

"""What is to be told to the gateways: one Output after the other, until the engine takes them."""

from __future__ import annotations

from shared.messages import Finish, Output, TokenLogprobs
from worker.requests.request import Request


class Outbox:
    """Outputs in order, each with the identity of the gateway that it is for."""

    def __init__(self) -> None:
        self._outputs: list[tuple[bytes, Output]] = []

    def put(
        self,
        request: Request,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprobs] | None,
        embedding: bytes | None = None,
    ) -> None:
        """News of a request. The first carries the number of cached tokens, and the report on the prompt goes with
        the first one after it is complete. Counts of drafts go with all: a stop string ends a choice in the gateway."""
        cached = prompt_logprobs = None
        if not request.reported_cached_tokens:
            request.reported_cached_tokens = True
            cached = request.num_cached_tokens
        if request.wants_prompt_logprobs and len(request.prompt_logprobs) >= request.num_prompt_tokens:
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
            request.wants_prompt_logprobs = False
        output = Output(
            request.request_id,
            request.choice,
            token_ids,
            finish,
            logprobs,
            cached,
            prompt_logprobs,
            request.draft_counts,
            embedding,
        )
        self._outputs.append((request.owner, output))

    @staticmethod
    def collect_prompt_logprobs(request: Request, entries: list[TokenLogprobs]) -> None:
        """The part of the report on the prompt that one chunk gave; nothing predicts the first token."""
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(TokenLogprobs(request.token_ids[0], None, 0, [], []))
        request.prompt_logprobs += entries

    def take(self) -> list[tuple[bytes, Output]]:
        """All that collected since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def drop_owner(self, owner: bytes) -> None:
        """Forgets what was to be told to one gateway."""
        self._outputs = [item for item in self._outputs if item[0] != owner]

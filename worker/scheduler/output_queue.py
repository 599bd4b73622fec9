"""Buffer of outputs until the engine sends them to the gateways."""

from __future__ import annotations

from shared.messages import Finish, Output, TokenLogprobs
from worker.requests.request import Request


class OutputQueue:
    """Outputs in order, each with the identity of its gateway."""

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
        """Add an output of a request.

        The first one carries the number of cached tokens, and the first one after its completion the report on the
        prompt. All carry counts of drafts, because a stop string ends a choice in the gateway.
        """
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
            None if request.speculation is None else request.speculation.draft_counts,
            embedding,
        )
        self._outputs.append((request.owner, output))

    @staticmethod
    def collect_prompt_logprobs(request: Request, entries: list[TokenLogprobs]) -> None:
        """Add the part of the report on the prompt that one chunk gave; nothing predicts the first token."""
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(TokenLogprobs(request.token_ids[0], None, 0, [], []))
        request.prompt_logprobs += entries

    def take(self) -> list[tuple[bytes, Output]]:
        """Return everything added since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def drop_owner(self, owner: bytes) -> None:
        """Remove the outputs for one gateway."""
        self._outputs = [item for item in self._outputs if item[0] != owner]

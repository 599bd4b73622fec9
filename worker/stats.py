"""Counters of the worker. Gauges are computed when a Pong needs them; both are sent in WorkerStats."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Counts since the worker started, under the names of /metrics (after the prefix `pelton:`).

    Attributes:
        prompt_tokens_total: Prompt tokens of started requests, including cached ones, each prompt once.
        generation_tokens_total: Emitted tokens.
        prefix_cache_queries_total: Prompt tokens looked up.
        prefix_cache_hits_total: Prompt tokens found.
        prefix_cache_evictions_total: Cached pages that were reused for other content.
        num_preemptions_total: Requests that released their pages to be recomputed later.
        malformed_messages_total: Messages from gateways that were dropped.
        rejected_requests_total: Submits refused as invalid.
        invalid_logits_total: Requests that failed because their logits were not finite.
        discarded_tokens_total: Tokens sampled for requests that had already ended.
        engine_steps_total: Steps.
        step_tokens_total: Tokens computed by the steps.
        gateways_dropped_total: Gateways that stopped sending or did not read their messages.
        grammar_compilations_total: Grammars compiled or abandoned.
        grammar_cache_hits_total: Choices whose grammar was already compiled.
        grammar_compile_seconds_total: Time of threads that compiled grammars.
        spec_decode_num_drafts_total: Verifications of drafts, one per choice and step.
        spec_decode_num_draft_tokens_total: Verified drafts.
        spec_decode_num_accepted_tokens_total: Accepted drafts.
        spec_decode_draft_seconds_total: Computation time of the draft model.
        accepted_per_position: Accepted drafts by position in the draft; their sum is the number of accepted
            drafts.
    """

    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    prefix_cache_evictions_total: int = 0
    num_preemptions_total: int = 0
    malformed_messages_total: int = 0
    rejected_requests_total: int = 0
    invalid_logits_total: int = 0
    discarded_tokens_total: int = 0
    engine_steps_total: int = 0
    step_tokens_total: int = 0
    gateways_dropped_total: int = 0
    grammar_compilations_total: int = 0
    grammar_cache_hits_total: int = 0
    grammar_compile_seconds_total: float = 0.0
    spec_decode_num_drafts_total: int = 0
    spec_decode_num_draft_tokens_total: int = 0
    spec_decode_num_accepted_tokens_total: int = 0
    spec_decode_draft_seconds_total: float = 0.0
    accepted_per_position: list[int] = field(default_factory=list)

    def count_verification(self, num_drafts: int, num_accepted: int) -> None:
        """Count the verification of one choice's drafts in one step.

        The first `num_accepted` of them are in its output.
        """
        self.spec_decode_num_drafts_total += 1
        self.spec_decode_num_draft_tokens_total += num_drafts
        self.spec_decode_num_accepted_tokens_total += num_accepted
        positions = self.accepted_per_position
        positions += [0] * (num_accepted - len(positions))
        for position in range(num_accepted):
            positions[position] += 1

    def as_dict(self) -> dict[str, float]:
        """Return the numbers for WorkerStats.counters."""
        return {one.name: float(getattr(self, one.name)) for one in fields(self) if one.name != "accepted_per_position"}

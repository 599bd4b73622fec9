"""The worker's counters. Gauges are computed when a Pong asks for them; both travel in WorkerStats."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Counts since the worker started, under the names that /metrics shows (after the prefix `pelton:`).

    Attributes:
        prompt_tokens_total: prompt tokens of requests that started, cached ones included, each prompt once.
        generation_tokens_total: tokens emitted.
        prefix_cache_queries_total, prefix_cache_hits_total: prompt tokens looked up and found.
        prefix_cache_evictions_total: cached pages that were given to other content.
        num_preemptions_total: requests that gave their pages back to be recomputed later.
        malformed_messages_total: messages from gateways that were not acted upon.
        rejected_requests_total: submits refused for what they ask.
        invalid_logits_total: requests failed because their logits were not finite.
        discarded_tokens_total: tokens sampled for requests that had ended meanwhile.
        engine_steps_total: steps that ran.
        step_tokens_total: tokens that the steps computed.
        gateways_dropped_total: gateways that fell silent or did not take their messages.
        grammar_compilations_total: grammars compiled, or given up.
        grammar_cache_hits_total: choices whose grammar was found compiled.
        grammar_compile_seconds_total: time that threads spent on compiling.
        spec_decode_num_drafts_total: verifications of drafted tokens, one for each choice and step.
        spec_decode_num_draft_tokens_total, spec_decode_num_accepted_tokens_total: drafted tokens that were verified,
            and those of them that are in the output.
        spec_decode_draft_seconds_total: time that the draft model computed.
        accepted_per_position: accepted tokens by their place in the draft; they add up to those accepted in all.
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
        """Counts what came of one choice's drafts in one step: the first `num_accepted` of them are in its output."""
        self.spec_decode_num_drafts_total += 1
        self.spec_decode_num_draft_tokens_total += num_drafts
        self.spec_decode_num_accepted_tokens_total += num_accepted
        positions = self.accepted_per_position
        positions += [0] * (num_accepted - len(positions))
        for position in range(num_accepted):
            positions[position] += 1

    def as_dict(self) -> dict[str, float]:
        """The numbers, for WorkerStats.counters."""
        return {one.name: float(getattr(self, one.name)) for one in fields(self) if one.name != "accepted_per_position"}

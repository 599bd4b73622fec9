"""Sampling parameters and their range checks.

The gateway calls `validate` on the client's parameters, and the worker on what arrived from the socket.
"""

from __future__ import annotations

import math

import msgspec

from shared.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 1024
"""Maximum number of sequences of bad_words, which have at most MAX_BAD_WORD_TOKENS tokens in total."""
MAX_BAD_WORD_TOKENS = 2048
MAX_DRY_BREAKERS = 16384
MAX_DRY_LENGTH = 1024
MAX_REPETITION = 1024
"""Maximum tokens of a pattern for repetition_detection, and maximum number of repetitions that it may require."""
MAX_MARK_TOKENS = 64
"""Maximum number of tokens that open or close a model's reasoning."""
MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, because logits / temperature would overflow float32."""
MIN_REPETITION_PENALTY = 1e-5
"""Smallest repetition penalty.

A smaller one would turn finite logits into infinities, also after division by a temperature.
"""


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End of a choice whose last tokens repeat one pattern (vLLM's `repetition_detection`).

    Attributes:
        max_pattern_size: Longest pattern in tokens, in [1, 1024].
        min_pattern_size: Shortest pattern, in [1, max_pattern_size].
        min_count: Number of consecutive occurrences that end the choice, in [2, 1024].
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 4


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bound on the tokens between the marks of a model's reasoning.

    Attributes:
        max_tokens: Number of tokens inside the reasoning after which end_ids are forced, one after the other; >=
            0.
        start_ids: Token ids that open the reasoning; empty if it is only opened by the prompt.
        end_ids: Token ids that close it, at least one.
        open: True if the prompt ends inside the reasoning.
    """

    max_tokens: int
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    open: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    Attributes:
        temperature: In [0, 2]; 0 takes the likeliest token.
        top_k: Keep the k likeliest tokens; 0 keeps all. (-1 from a client means 0.)
        top_p: In (0, 1]; keep the smallest set of tokens whose probability reaches it.
        min_p: In [0, 1]; keep tokens with at least this share of the likeliest token's probability.
        repetition_penalty: In [1e-5, 100]; divides positive and multiplies negative logits of tokens seen in
            prompt or output (Keskar et al. 2019, CTRL).
        presence_penalty: In [-2, 2]; subtracted once for tokens seen in the output.
        frequency_penalty: In [-2, 2]; subtracted per occurrence in the output.
        logit_bias: Bias in [-100, 100] by token id, added to the logits.
        seed: Signed 64-bit number; the gateway always sets it before it submits.
        max_tokens: Maximum number of generated tokens, >= 1.
        min_tokens: Number of generated tokens before which end-of-text and stop tokens are masked.
        ignore_eos: Mask end-of-text ids for the whole request; stop_token_ids still apply.
        stop_token_ids: Additional ids that end the request.
        logprobs: Number of alternatives to report per generated token (0: only the chosen one); None for no
            report.
        prompt_logprobs: The same for each prompt token.
        typical_p: In (0, 1]; locally typical sampling (Meister et al. 2023); 1 keeps all.
        top_n_sigma: In [0, 100]; keep logits within so many standard deviations of the largest (Tang et al. 2024);
            0 keeps all.
        xtc_probability: In [0, 1]; probability of dropping all tokens above the threshold except the least likely
            of them; 0 is off.
        xtc_threshold: In [0, 1].
        dynatemp_range: In [0, 2]; the temperature varies between temperature - range and temperature + range with
            the entropy of the distribution; 0 is off.
        dynatemp_exponent: In [0.01, 10]; shape of that curve.
        mirostat: 0 for off, else version 1 or 2 (Basu et al. 2021). Replaces top_k, top_p, min_p and typical_p.
        mirostat_tau: In (0, 20]; target surprise in bits.
        mirostat_eta: In (0, 1]; learning rate.
        dry_multiplier: In [0, 100]; a token that would continue a repetition of n >= dry_allowed_length tokens
            loses dry_multiplier * dry_base ** (n - dry_allowed_length); 0 is off.
        dry_base: In [1, 10].
        dry_allowed_length: In [1, 1024].
        dry_penalty_last_n: Number of last tokens that are searched; -1 for all, 0 for none.
        dry_breakers: Token ids that repetitions do not cross.
        bad_words: Sequences of token ids whose last id is never sampled after the others.
        allowed_token_ids: If not empty, only these ids, and ids that end the text, are ever sampled.
        repetition_detection: See RepetitionDetection; None is off.
        thinking: See ThinkingBudget; None is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    thinking: ThinkingBudget | None = None

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken without noise."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def extended(self) -> bool:
        """True if a rare filter, or a temperature that depends on the distribution, has an effect."""
        wanted = self.typical_p < 1.0 or self.top_n_sigma > 0.0 or self.xtc_probability > 0.0
        return not self.greedy and (wanted or self.dynatemp_range > 0.0 or self.mirostat > 0)

    @property
    def uses_dry(self) -> bool:
        """True if DRY searches for repetitions."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def uses_penalties(self) -> bool:
        """True if token counts of prompt and output are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Check the ranges of all parameters.

        Args:
            vocab_size: All token ids must be below it.

        Raises:
            InvalidRequestError: A parameter is out of its range; the error names the first one.
        """
        for name, low, high in _RANGES:
            _check_number(name, getattr(self, name), low, high)
        for name, high in _OPEN_RANGES:
            _check_number(name, getattr(self, name), 0.0, high, open_low=True)
        _check_number("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value, 0, MAX_LOGPROBS)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
        _check_ids("logit_bias", tuple(self.logit_bias), MAX_LOGIT_BIAS, vocab_size)
        for bias in self.logit_bias.values():
            _check_number("logit_bias", bias, -100.0, 100.0)
        _check_ids("dry_breakers", self.dry_breakers, MAX_DRY_BREAKERS, vocab_size)
        _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size, vocab_size)
        self._check_bad_words(vocab_size)
        self._check_repetition_detection()
        self._check_thinking(vocab_size)

    def _check_bad_words(self, vocab_size: int) -> None:
        words = self.bad_words
        if len(words) > MAX_BAD_WORDS:
            raise _invalid("bad_words", f"has {len(words)} entries; at most {MAX_BAD_WORDS} are allowed")
        if not all(words):
            raise _invalid("bad_words", "has an entry without tokens; each entry needs at least one token")
        tokens = tuple(token_id for word in words for token_id in word)
        if len(tokens) > MAX_BAD_WORD_TOKENS:
            raise _invalid("bad_words", f"has {len(tokens)} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed")
        _check_ids("bad_words", tokens, MAX_BAD_WORD_TOKENS, vocab_size)

    def _check_repetition_detection(self) -> None:
        wanted = self.repetition_detection
        if wanted is not None:
            name = "repetition_detection"
            _check_number(name, wanted.max_pattern_size, 1, MAX_REPETITION, field="max_pattern_size")
            _check_number(name, wanted.min_pattern_size, 1, wanted.max_pattern_size, field="min_pattern_size")
            _check_number(name, wanted.min_count, 2, MAX_REPETITION, field="min_count")

    def _check_thinking(self, vocab_size: int) -> None:
        budget, name = self.thinking, "thinking_token_budget"
        if budget is not None:
            _check_number(name, budget.max_tokens, 0, 2**31 - 1)
            _check_ids(name, budget.start_ids, MAX_MARK_TOKENS, vocab_size)
            _check_ids(name, budget.end_ids, MAX_MARK_TOKENS, vocab_size)
            if not budget.end_ids:
                raise _invalid(name, "needs tokens that end the reasoning")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("top_k", 0, 2**31 - 1),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("max_tokens", 1, 2**31 - 1),
    ("top_n_sigma", 0.0, 100.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dynatemp_range", 0.0, 2.0),
    ("dynatemp_exponent", 0.01, 10.0),
    ("mirostat", 0, 2),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 10.0),
    ("dry_allowed_length", 1, MAX_DRY_LENGTH),
    ("dry_penalty_last_n", -1, 2**31 - 1),
)
"""Name, smallest and largest value."""
_OPEN_RANGES = (("top_p", 1.0), ("typical_p", 1.0), ("mirostat_tau", 20.0), ("mirostat_eta", 1.0))
"""Name and largest value; all values must be above 0."""


def _invalid(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {problem}", param=name)


def _check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False, field: str = "") -> None:
    """Check a number. NaN and infinities, which pass every comparison, are refused too (CVE-2026-54235)."""
    above = value > low if open_low else value >= low
    if (isinstance(value, float) and not math.isfinite(value)) or not (above and value <= high):
        bracket = "(" if open_low else "["
        of = f".{field}" if field else ""
        raise InvalidRequestError(f"{name}{of} must be in {bracket}{low}, {high}], got {value}.", param=name)


def _check_ids(name: str, ids: tuple[int, ...], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise _invalid(name, f"has {len(ids)} entries; at most {most} are allowed")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise _invalid(name, f"has token id {token_id}; it must be below the vocabulary size {vocab_size}")

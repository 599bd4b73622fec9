"""The sampling parameters and their range checks, once: the gateway calls `validate` on what a client sent, the
worker on what arrived from the socket."""

from __future__ import annotations

import math

import msgspec

from shared.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 1024
"""Sequences of bad_words; of all together at most MAX_BAD_WORD_TOKENS tokens."""
MAX_BAD_WORD_TOKENS = 2048
MAX_DRY_BREAKERS = 16384
MAX_DRY_LENGTH = 1024
MAX_REPETITION = 1024
"""Tokens of a pattern that repetition_detection looks for, and how often it may have to come."""
MAX_MARK_TOKENS = 64
"""Tokens that open or close a model's reasoning."""
MIN_TEMPERATURE = 1e-5
"""A temperature below this is greedy: the quotient logits / temperature would overflow float32."""
MIN_REPETITION_PENALTY = 1e-5
"""Below this the penalty would make infinities of finite logits, also once they are divided by a temperature."""


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends a choice whose last tokens are one pattern over and over (vLLM's `repetition_detection`).

    Attributes:
        max_pattern_size: longest pattern that is looked for, in tokens, in [1, 1024].
        min_pattern_size: shortest one, in [1, max_pattern_size].
        min_count: so many times in a row end the choice, in [2, 1024].
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 4


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds the tokens between the marks of a model's reasoning.

    Attributes:
        max_tokens: once so many are generated inside, end_ids are forced, one after the other; >= 0.
        start_ids: what opens the reasoning, as token ids; empty where it only ever begins open.
        end_ids: what closes it, at least one id.
        open: whether the prompt ends inside the reasoning.
    """

    max_tokens: int
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    open: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen, for one request.

    Attributes:
        temperature: in [0, 2]; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all. (-1 from a client means 0.)
        top_p: in (0, 1]; keep the smallest set of tokens whose probability reaches it.
        min_p: in [0, 1]; keep tokens at least this share of the likeliest one's probability.
        repetition_penalty: in [1e-5, 100]; divides positive and multiplies negative logits of tokens seen in prompt
            or output (Keskar et al. 2019, CTRL).
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted once, and once per occurrence, for tokens seen in
            the output.
        logit_bias: token id -> bias in [-100, 100], added to the logits.
        seed: signed 64-bit; the gateway always fills it in before it submits.
        max_tokens: how many tokens may be generated, >= 1.
        min_tokens: end-of-text and stop tokens are masked until this many are generated.
        ignore_eos: end-of-text ids are masked for the whole request; stop_token_ids still hold.
        stop_token_ids: further ids that end the request.
        logprobs: how many alternatives to report per generated token (0: only the chosen one); None: no report.
        prompt_logprobs: the same for each prompt token.
        typical_p: in (0, 1]; locally typical sampling (Meister et al. 2023); 1 keeps all.
        top_n_sigma: in [0, 100]; keep logits within so many standard deviations of the largest (Tang et al. 2024);
            0 keeps all.
        xtc_probability, xtc_threshold: in [0, 1] both; with this probability all tokens above the threshold but the
            least likely of them are dropped; probability 0 is off.
        dynatemp_range: in [0, 2]; the temperature is between temperature - range and temperature + range by the
            entropy of the distribution; 0 is off. dynatemp_exponent: in [0.01, 10], the shape of that curve.
        mirostat: 0 off, 1 or 2 the version (Basu et al. 2021). mirostat_tau in (0, 20] the aimed surprise in bits,
            mirostat_eta in (0, 1] the learning rate. In place of top_k, top_p, min_p and typical_p.
        dry_multiplier: in [0, 100]; what would continue a repetition of n >= dry_allowed_length tokens loses
            dry_multiplier * dry_base ** (n - dry_allowed_length); 0 is off. dry_base in [1, 10],
            dry_allowed_length in [1, 1024].
        dry_penalty_last_n: so many last tokens are looked at; -1 all, 0 none.
        dry_breakers: token ids that no repetition goes across.
        bad_words: sequences of token ids whose last one is never sampled after the others.
        allowed_token_ids: where not empty, nothing but these, and the ids that end the text, is ever sampled.
        repetition_detection, thinking: see there; None is off.
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
        """Whether the likeliest token is taken without noise."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def extended(self) -> bool:
        """Whether one of the rarer filters, or a temperature that depends on the distribution, has an effect."""
        wanted = self.typical_p < 1.0 or self.top_n_sigma > 0.0 or self.xtc_probability > 0.0
        return not self.greedy and (wanted or self.dynatemp_range > 0.0 or self.mirostat > 0)

    @property
    def uses_dry(self) -> bool:
        """Whether repetitions are looked for."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def uses_penalties(self) -> bool:
        """Whether token counts of prompt and output are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequestError naming the first parameter that is out of its range.

        Args:
            vocab_size: all token ids must be below it.
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
            raise _invalid("bad_words", "has an entry without tokens")
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
"""Name and largest value; all must be above 0."""


def _invalid(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {problem}", param=name)


def _check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False, field: str = "") -> None:
    """Refuses NaN and infinities too, which every comparison lets through (CVE-2026-54235)."""
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
            raise _invalid(name, f"has token id {token_id}; the vocabulary has {vocab_size}")

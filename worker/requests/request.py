"""State of one choice of a Submit in this worker, and validation of Submits."""

from __future__ import annotations

import enum
import math
from dataclasses import KW_ONLY, InitVar, dataclass, field

from shared.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from shared.messages import MAX_CHOICES, Finish, FinishReason, Output, Submit, TokenLogprobs
from shared.sampling_params import SamplingParams
from worker.drafting.speculation import Speculation
from worker.kv.manager import SequencePages
from worker.requests.constraint import Constraint
from worker.requests.embedding import Embedding
from worker.requests.repetition import RepetitionWatch

_SAMPLES_NOTHING = SamplingParams(max_tokens=1)


class Status(enum.Enum):
    """Phase of a request.

    HELD requests wait for the first choice of their Submit to compute the shared prompt. COMPILING requests wait for
    their grammar and delay no others.
    """

    COMPILING = enum.auto()
    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The scheduler's state of one choice. Only the scheduler writes here.

    Attributes:
        owner: Identity of the gateway that submitted it.
        arrival: Order of submission; together with the priority it orders all queues.
        token_ids: Prompt and every generated token whose value has arrived.
        num_initial_tokens: Tokens of the Submit, the same for all its choices.
        max_num_tokens: Length at which the request ends with reason LENGTH.
        min_num_tokens: Length up to which no stop token ends it.
        stop_ids: Ids that end it.
        life: Increased when it leaves its row; results of steps of an earlier life are discarded.
        num_computed_tokens: Tokens whose keys and values are computed by the steps submitted so far.
        num_pending: Tokens sampled by steps in flight, whose values have not arrived.
        prompt_step: Step that completed the initial tokens in this life; others may fork from later steps on.
        leader: Choice whose prompt a HELD request waits for, and from which it can later fork if that still runs.
        followers: HELD choices that wait for this one.
        follows_started: The leader had started when it released this request.
        num_cached_tokens: Prompt tokens that were not computed when it first started; None before that.
        wants_prompt_logprobs: The report on its prompt has not been sent.
        mu: mirostat's mu after token_ids; None before the first token and without mirostat.
        constraint: Constraint on its tokens, in step with token_ids once it is ready; None for none.
        repetition: Detector of repetitions in its output; None for none.
        speculation: Possible continuations of its text; None if nothing is drafted. Steps without drafts do not
            touch it.
        is_drafting: The draft model was asked about it and has not answered.
        embedding: Pooling of its prompt, with which it ends without sampling; None if it generates.
    """

    submit: InitVar[Submit]
    choice: int
    _: KW_ONLY
    owner: bytes
    arrival: int
    eos_token_ids: InitVar[frozenset[int]]
    max_model_len: InitVar[int]
    pages: SequencePages
    constraint: Constraint | None = None

    embedding: Embedding | None = field(init=False)
    request_id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    priority: int = field(init=False)
    deadline: float | None = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_initial_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    min_num_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)
    repetition: RepetitionWatch | None = None
    status: Status = Status.WAITING
    life: int = 0
    row: int = -1
    num_computed_tokens: int = 0
    num_pending: int = 0
    mu: float | None = None
    prompt_step: int | None = None
    leader: Request | None = None
    followers: list[Request] = field(default_factory=list)
    follows_started: bool = False
    num_cached_tokens: int | None = None
    reported_cached_tokens: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    speculation: Speculation | None = None
    is_drafting: bool = False

    def __post_init__(self, submit: Submit, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self.embedding = Embedding(submit.pooling) if submit.pooling is not None else None
        self.sampling = sampling = submit.sampling if self.embedding is None else _SAMPLES_NOTHING
        self.request_id, self.priority, self.deadline = submit.request_id, submit.priority, submit.deadline
        self.token_ids = list(submit.token_ids)
        self.num_prompt_tokens, self.num_initial_tokens = submit.num_prompt_tokens, len(submit.token_ids)
        # An embedding may fill the context, because no token follows it.
        most = max_model_len if self.embedding is None else max_model_len + 1
        self.max_num_tokens = min(submit.num_prompt_tokens + sampling.max_tokens, most)
        self.min_num_tokens = submit.num_prompt_tokens + sampling.min_tokens
        own_stops = frozenset(sampling.stop_token_ids)
        self.stop_ids = own_stops if sampling.ignore_eos else own_stops | eos_token_ids
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and self.choice == submit.choice
        rule = sampling.repetition_detection
        if rule is not None:
            self.repetition = RepetitionWatch(rule, submit.token_ids[submit.num_prompt_tokens :])

    @property
    def key(self) -> tuple[int, int]:
        """Position in every queue: smaller keys run first and are preempted last."""
        return (self.priority, self.arrival)

    @property
    def has_started(self) -> bool:
        """True if it, or the choice that computed the prompt for it, has ever had a row."""
        if self.num_cached_tokens is not None or self.follows_started:
            return True
        return self.leader is not None and self.leader.has_started

    @property
    def needs_whole_prompt(self) -> bool:
        """True if all its tokens must be computed, including those with cached pages."""
        return self.wants_prompt_logprobs or (self.embedding is not None and self.embedding.needs_all)

    @property
    def num_tokens(self) -> int:
        """Number of its tokens, including those whose value is still on the device."""
        return len(self.token_ids) + self.num_pending

    @property
    def awaits_values(self) -> bool:
        """True if its next token can be chosen, or drafted, only after the tokens in flight have arrived."""
        if self.num_pending == 0:
            return self.is_drafting
        if self.constraint is not None and self.num_pending >= self.constraint.num_free:
            return True
        return self.speculation is not None and self.speculation.is_promising

    def add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Add the log-probabilities of one chunk of the prompt. The first token has none: nothing predicts it."""
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(TokenLogprobs(self.token_ids[0], None, 0, [], []))
        self.prompt_logprobs += entries

    def output(
        self,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprobs] | None,
        embedding: bytes | None = None,
    ) -> Output:
        """Return the next message to the client's gateway.

        The first message carries the number of cached tokens. The first message after the prompt was computed carries
        its log-probabilities. All messages carry the counts of drafts, because the gateway may end a choice at a stop
        string.
        """
        cached = prompt_logprobs = None
        if not self.reported_cached_tokens:
            self.reported_cached_tokens = True
            cached = self.num_cached_tokens
        if self.wants_prompt_logprobs and len(self.prompt_logprobs) >= self.num_prompt_tokens:
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
            self.wants_prompt_logprobs = False
        drafts = None if self.speculation is None else self.speculation.draft_counts
        return Output(
            self.request_id, self.choice, token_ids, finish, logprobs, cached, prompt_logprobs, drafts, embedding
        )


@dataclass(frozen=True, slots=True)
class SubmitLimits:
    """Limits for the validation of a Submit."""

    model_names: tuple[str, ...]
    vocab_size: int


def validate_submit(submit: Submit, limits: SubmitLimits) -> None:
    """Validate a Submit. Types were checked by the decoder, and the scheduler checks lengths.

    Raises:
        InvalidRequestError: The Submit is invalid.
        ModelNotFoundError: The model is not served here.
    """
    if submit.model not in limits.model_names:
        raise ModelNotFoundError(f"the model {submit.model!r} is not served here", param="model")
    num_tokens, vocab_size = len(submit.token_ids), limits.vocab_size
    _require(num_tokens > 0, "token_ids", "the prompt has no tokens")
    low, high = min(submit.token_ids), max(submit.token_ids)
    message = f"token id {high} must be below the vocabulary size {vocab_size}"
    _require(low >= 0 and high < vocab_size, "token_ids", message)
    predicted = max(submit.prediction, default=0)
    message = f"predicted token id {predicted} must be below the vocabulary size {vocab_size}"
    _require(predicted < vocab_size, "prediction", message)
    message = f"num_prompt_tokens is {submit.num_prompt_tokens}, but there are {num_tokens} tokens"
    _require(1 <= submit.num_prompt_tokens <= num_tokens, "num_prompt_tokens", message)
    last = submit.choice + submit.num_choices - 1
    message = f"choices up to {last} are requested; they must be below {MAX_CHOICES}"
    _require(last < MAX_CHOICES, "num_choices", message)
    finite = submit.deadline is None or math.isfinite(submit.deadline)
    _require(finite, "deadline", "deadline must be a finite number")
    submit.sampling.validate(limits.vocab_size)
    if submit.pooling is not None:
        _validate_embedding(submit)


def _validate_embedding(submit: Submit) -> None:
    """Refuse fields without meaning for an embedding."""
    refused = {
        "num_prompt_tokens": submit.num_prompt_tokens != len(submit.token_ids),
        "num_choices": submit.num_choices != 1,
        "grammar": bool(submit.grammar),
        "prompt_logprobs": submit.sampling.prompt_logprobs is not None,
        "prediction": bool(submit.prediction),
    }
    for name, is_there in refused.items():
        reason = "an embedding has one prompt, and nothing is generated"
        _require(not is_there, name, f"{name} cannot be combined with pooling: {reason}")


def _require(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise InvalidRequestError(message, param=param)


def check_length(submit: Submit, max_model_len: int, max_cached_tokens: int) -> None:
    """Check that a request can ever be computed.

    Args:
        submit: The request.
        max_model_len: Maximum tokens of prompt and completion together.
        max_cached_tokens: Capacity of the whole KV cache.

    Raises:
        ContextLengthError: The request can never be computed.
    """
    num_tokens = len(submit.token_ids)
    if submit.pooling is not None:
        if num_tokens > min(max_model_len, max_cached_tokens):
            raise ContextLengthError(
                f"the input has {num_tokens} tokens; this model's maximum context length is {max_model_len} tokens, "
                f"and the KV cache holds {max_cached_tokens}"
            )
        return
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens; this model's maximum context length is {max_model_len} tokens, "
            "one of which is needed for the completion"
        )
    # The last token of a completion is never computed, so it needs no room in the cache.
    longest = min(submit.num_prompt_tokens + submit.sampling.max_tokens, max_model_len) - 1
    if max(num_tokens, longest) > max_cached_tokens:
        raise ContextLengthError(
            f"the prompt's {submit.num_prompt_tokens} tokens and a completion of {submit.sampling.max_tokens} "
            f"do not fit the KV cache, which holds {max_cached_tokens} tokens"
        )


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

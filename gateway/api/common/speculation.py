"""What a request says of speculation: whether tokens may be drafted for it, and what it expects its output to be.

Neither changes what may come out, or how likely it is. What would have no effect at all is refused like anything else
that would be ignored.
"""

from __future__ import annotations

from gateway.api.common.cache_breakpoint import BREAKPOINT, check_breakpoint
from gateway.api.common.fields import ChatFields, SamplingFields
from gateway.api.common.prompts import check_token_ids, context_limit
from gateway.api.common.speculation_fields import PredictionField
from gateway.flow.requests import ModelEntryLike
from shared.errors import ContextLengthError, InvalidRequestError
from shared.messages import WorkerFacts

_OFF = "off"
"""WorkerFacts.speculative_method of a server that drafts nothing."""


def may_draft(fields: SamplingFields) -> bool:
    """Whether the client lets tokens be drafted."""
    return fields.speculative is None or fields.speculative.enabled


def check_speculation(fields: SamplingFields, facts: WorkerFacts) -> None:
    """Raises InvalidRequestError, naming it, for a field that asks for drafts where there are none."""
    if fields.speculative is not None and fields.speculative.enabled:
        _check_effect(fields, facts, "speculative", "cannot be enabled")
    prediction = fields.prediction if isinstance(fields, ChatFields) else None
    if prediction is None:
        return
    _check_shape(prediction)
    if not may_draft(fields):
        raise InvalidRequestError("prediction has no use where speculative.enabled is false.", param="prediction")
    _check_effect(fields, facts, "prediction", "cannot be used")


async def prediction_ids(fields: SamplingFields, entry: ModelEntryLike) -> list[int]:
    """Token ids of the predicted output, without a beginning-of-text token; of none, none.

    Raises InvalidRequestError naming `prediction` where there are more than the model's context has room for.
    """
    prediction = fields.prediction if isinstance(fields, ChatFields) else None
    if prediction is None:
        return []
    limit = context_limit(entry.facts)
    content = prediction.content
    text = content if isinstance(content, str) else "".join([part.text for part in content])
    too_long = InvalidRequestError(
        f"prediction has more than {limit} tokens, which is all that prompt and output may have.", param="prediction"
    )
    try:
        ids = await entry.pipeline.encode(text, False, max_tokens=limit, param="prediction")
    except ContextLengthError:
        # It speaks of the prompt, and clients that know the error would shorten that.
        raise too_long from None
    if len(ids) > limit:
        raise too_long
    check_token_ids(ids, entry.facts, "prediction")
    return ids


def _check_shape(prediction: PredictionField) -> None:
    if prediction.type != "content":
        raise InvalidRequestError('prediction.type must be "content".', param="prediction.type")
    if isinstance(prediction.content, str):
        return
    if not prediction.content:
        name = "prediction.content"
        raise InvalidRequestError(f"{name} must be a string or a non-empty list of text parts.", param=name)
    for index, part in enumerate(prediction.content):
        if part.type != "text":
            name = f"prediction.content[{index}].type"
            raise InvalidRequestError(f'{name} must be "text"; other parts are not supported.', param=name)
        check_breakpoint({BREAKPOINT: part.prompt_cache_breakpoint}, f"prediction.content[{index}]")


def _check_effect(fields: SamplingFields, facts: WorkerFacts, name: str, what: str) -> None:
    if facts.speculative_method == _OFF:
        why = "this server drafts no tokens (--speculative-method is off)"
        raise InvalidRequestError(f"{name} {what}: {why}.", param=name, code="unsupported_parameter")
    if fields.mirostat in (1, 2):
        raise InvalidRequestError(f"{name} {what} with mirostat, for which no tokens are drafted.", param=name)

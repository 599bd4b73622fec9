"""Fields on speculative decoding: `speculative`, which allows drafts, and `prediction`, the expected output.

Neither changes the output or its distribution. A field that would have no effect is refused.
"""

from __future__ import annotations

from gateway.api.common.fields import ChatFields, PredictionField, SamplingFields, invalid
from gateway.api.common.messages import BREAKPOINT, check_breakpoint
from gateway.api.common.prompts import check_token_ids, context_limit
from gateway.cluster.registry import ModelEntry
from shared.errors import ContextLengthError, InvalidRequestError
from shared.messages import WorkerFacts

_OFF = "off"
"""WorkerFacts.speculative_method of a server without speculation."""


def may_draft(fields: SamplingFields) -> bool:
    """Return True if the request allows drafts."""
    return fields.speculative is None or fields.speculative.enabled


async def prediction_ids(fields: SamplingFields, entry: ModelEntry) -> list[int]:
    """Check the fields and return the token ids of the predicted output, without a beginning-of-text token.

    Raises:
        InvalidRequestError: A field asks for drafts where there are none, or the prediction exceeds the context.
    """
    if fields.speculative is not None and fields.speculative.enabled:
        _check_effect(fields, entry.facts, "speculative", "cannot be enabled")
    prediction = fields.prediction if isinstance(fields, ChatFields) else None
    if prediction is None:
        return []
    _check_shape(prediction)
    if not may_draft(fields):
        raise invalid("prediction", "cannot be combined with speculative.enabled = false. Send one of them.")
    _check_effect(fields, entry.facts, "prediction", "cannot be used")
    limit = context_limit(entry.facts)
    content = prediction.content
    text = content if isinstance(content, str) else "".join([part.text for part in content])
    too_long = InvalidRequestError(
        f"prediction has more than {limit} tokens, the limit on prompt and output together. Shorten it.",
        param="prediction",
    )
    try:
        ids = await entry.pipeline.encode(text, False, max_tokens=limit, param="prediction")
    except ContextLengthError:
        # Its message is about the prompt, and clients that recognize the error would shorten that.
        raise too_long from None
    if len(ids) > limit:
        raise too_long
    check_token_ids(ids, entry.facts, "prediction")
    return ids


def _check_shape(prediction: PredictionField) -> None:
    if prediction.type != "content":
        raise invalid("prediction.type", 'must be "content".')
    if isinstance(prediction.content, str):
        return
    if not prediction.content:
        raise invalid("prediction.content", "must be a string or a non-empty list of text parts.")
    for index, part in enumerate(prediction.content):
        place = f"prediction.content[{index}]"
        if part.type != "text":
            raise invalid(f"{place}.type", 'must be "text"; other parts are not supported.')
        check_breakpoint({BREAKPOINT: part.prompt_cache_breakpoint}, place)


def _check_effect(fields: SamplingFields, facts: WorkerFacts, name: str, problem: str) -> None:
    if facts.speculative_method == _OFF:
        raise invalid(
            name,
            f"{problem}: this server does not use speculative decoding (--speculative-method is off).",
            "unsupported_parameter",
        )
    if fields.mirostat in (1, 2):
        raise invalid(name, f"{problem} with mirostat, which excludes speculative decoding.")

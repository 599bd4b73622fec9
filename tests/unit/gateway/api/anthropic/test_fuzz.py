"""Random conversations of Anthropic's API with one value replaced: they are converted or refused."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.anthropic.conversation import conversation
from gateway.api.anthropic.fields import MessagesFields, parse_body
from gateway.api.common.messages import check_messages
from shared.errors import InvalidRequestError

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CLEAR_AT = st.sampled_from([None, "never", "next_user_message"])
TEXT = st.sampled_from(["x", " ", "\ud7ff"])


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    """Draw rounds of a question, an answer with calls, and their results; some messages are split in two."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(TEXT)}]
    for turn in range(draw(st.integers(0, 3))):
        said: list[dict[str, Any]] = []
        if draw(st.booleans()):
            said.append({"type": "thinking", "thinking": draw(TEXT), "signature": "s"})
        if draw(st.booleans()):
            said.append({"type": "redacted_thinking", "data": "opaque"})
        if draw(st.booleans()):
            said.append({"type": "text", "text": draw(TEXT), "citations": None})
        calls = [f"call_{turn}_{number}" for number in range(draw(st.integers(0, 2)))]
        said += [{"type": "tool_use", "id": call, "name": "f", "input": {"a": draw(TEXT)}} for call in calls]
        cut = draw(st.integers(0, len(said)))
        messages += [{"role": "assistant", "content": said[:cut]}, {"role": "assistant", "content": said[cut:]}]
        told: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call, "content": draw(TEXT), "is_error": draw(st.booleans())}
            for call in calls
        ]
        if draw(st.booleans()):
            source = {"type": "text", "media_type": "text/plain", "data": draw(TEXT)}
            told.append({"type": "document", "source": source, "title": draw(st.none() | TEXT)})
        told.append({"type": "text", "text": draw(TEXT), "cache_control": {"type": "ephemeral"}})
        messages.append({"role": "user", "content": told})
        if draw(st.booleans()):
            messages.append({"role": "system", "content": "now", "clear_at": draw(CLEAR_AT)})
    if draw(st.booleans()):
        messages.append({"role": "assistant", "content": "x"})
    return messages


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@settings(max_examples=300, deadline=None)
@given(conversations(), st.data())
def test_invalid_values_are_refused(messages, data):
    system = [{"type": "text", "text": "x"}]
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "system": system, "messages": messages}
    container, key = data.draw(st.sampled_from(places(body)))
    if isinstance(container, dict) and data.draw(st.booleans()):
        key = data.draw(st.text(max_size=3))
    container[key] = data.draw(ODD)
    try:
        fields = parse_body(body, MessagesFields, [])
        check_messages(conversation(fields.system, fields.messages).messages)
    except InvalidRequestError as error:
        assert error.param is not None and error.param in error.message

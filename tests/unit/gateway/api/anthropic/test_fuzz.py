"""A conversation of Anthropic's API with one value replaced: it is converted or refused."""

from __future__ import annotations

from copy import deepcopy
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
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x", "signature": "s"},
            {"type": "redacted_thinking", "data": "opaque"},
            {"type": "text", "text": " ", "citations": None},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "x"}},
        ],
    },
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c2", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [
            *({"type": "tool_result", "tool_use_id": call, "content": "x", "is_error": True} for call in ("c1", "c2")),
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "title": None},
            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "system", "content": "now", "clear_at": "never"},
    {"role": "assistant", "content": "x"},
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_replaced_value_is_accepted_or_refused(data):
    system = [{"type": "text", "text": "x"}]
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "system": system, "messages": deepcopy(MESSAGES)}
    container, key = data.draw(st.sampled_from(places(body)))
    if isinstance(container, dict) and data.draw(st.booleans()):
        key = data.draw(st.text(max_size=3))
    container[key] = data.draw(ODD)
    try:
        fields = parse_body(body, MessagesFields, [])
        check_messages(conversation(fields.system, fields.messages).messages)
    except InvalidRequestError as error:
        assert error.param is not None and error.param in error.message

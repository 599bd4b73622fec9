"""Every field of Anthropic's package is either accepted or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic import types
from anthropic.types import beta, message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from gateway.api.anthropic import content as anthropic_content
from gateway.api.anthropic import fields as anthropic_params
from gateway.api.anthropic.chat import chat_of_messages
from gateway.api.anthropic.fields import NO_EFFECT, REFUSED, ConversationFields, MessagesFields, parse_body
from gateway.api.anthropic.models import ModelsQuery
from shared.errors import InvalidRequestError
from tests.fakes.fake_generator import MODEL, FakeEntry

PAIRS: list[tuple[Any, type[msgspec.Struct]]] = [
    (message_create_params.MessageCreateParamsNonStreaming, MessagesFields),
    (beta_create_params.MessageCreateParamsNonStreaming, MessagesFields),
    (message_count_tokens_params.MessageCountTokensParams, ConversationFields),
    (beta_count_params.MessageCountTokensParams, ConversationFields),
    (types.MetadataParam, anthropic_params.MetadataField),
    (types.OutputConfigParam, anthropic_params.OutputConfig),
    (beta.BetaOutputConfigParam, anthropic_params.OutputConfig),
    (types.JSONOutputFormatParam, anthropic_params.OutputFormat),
    (beta.BetaThinkingConfigEnabledParam, anthropic_params.ThinkingField),
    (beta.BetaThinkingConfigAdaptiveParam, anthropic_params.ThinkingField),
    (types.ThinkingConfigDisabledParam, anthropic_params.ThinkingField),
    (types.ToolChoiceToolParam, anthropic_params.ChoiceField),
    (types.ToolChoiceAnyParam, anthropic_params.ChoiceField),
    (types.ToolChoiceAutoParam, anthropic_params.ChoiceField),
    (types.ToolChoiceNoneParam, anthropic_params.ChoiceField),
    (types.ToolParam, anthropic_params.ToolDefinition),
    (beta.BetaToolParam, anthropic_params.ToolDefinition),
    (types.CacheControlEphemeralParam, anthropic_params.CacheControl),
    (beta.BetaContextManagementConfigParam, anthropic_params.ContextManagement),
    (types.TextBlockParam, anthropic_content.TextBlock),
    (types.DocumentBlockParam, anthropic_content.DocumentBlock),
    (types.PlainTextSourceParam, anthropic_content.TextSource),
    (types.ContentBlockSourceParam, anthropic_content.ContentSource),
    (types.SearchResultBlockParam, anthropic_content.SearchResultBlock),
    (types.ToolReferenceBlockParam, anthropic_content.ToolReferenceBlock),
    (types.ThinkingBlockParam, anthropic_content.ThinkingBlock),
    (types.ToolUseBlockParam, anthropic_content.ToolUseBlock),
    (types.ToolResultBlockParam, anthropic_content.ToolResultBlock),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_field_is_known(theirs, ours):
    known = set(ours.__struct_fields__)
    if issubclass(ours, ConversationFields):
        known |= set(REFUSED)
    assert set(theirs.__annotations__) <= known
    # Their annotations are strings, so __required_keys__ is empty.
    required = {name for name, kind in theirs.__annotations__.items() if "Required[" in str(kind)}
    assert required >= {field.name for field in msgspec.structs.fields(ours) if field.required}


def test_pages_of_models():
    known = {field.encode_name for field in msgspec.structs.fields(ModelsQuery)}
    # A header, and a filter that is not supported.
    assert set(types.ModelListParams.__annotations__) - known == {"workspace_id", "lifecycle"}


def test_refused_fields_are_named_and_values_without_effect_accepted():
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert set(NO_EFFECT) <= set(REFUSED)
    for name in REFUSED:
        with pytest.raises(InvalidRequestError, match=name):
            parse_body({**body, name: "certainly not"}, MessagesFields, [])
        for value in (None, *NO_EFFECT.get(name, ())):
            fields = parse_body({**body, name: value}, MessagesFields, [])
            assert chat_of_messages(fields, FakeEntry()).messages == [
                {"role": "user", "content": [{"type": "text", "text": "x"}]}
            ]

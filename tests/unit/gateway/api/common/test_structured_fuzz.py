"""Fuzz test of structured output: every schema, expression or grammar is accepted or refused as the client's fault."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.common.fields import ChatFields, parse_fields
from gateway.api.common.grammar import checked_grammar
from gateway.api.common.structured import structured_fragment
from gateway.text.grammars.checker import GrammarChecker, Vocabulary
from shared.errors import InvalidRequestError

KEYWORDS = [
    "type", "properties", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum", "const", "required", "minimum",
    "maximum", "multipleOf", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "prefixItems",
    "additionalProperties", "patternProperties", "exclusiveMinimum", "minProperties", "not", "$id", "$schema",
]  # fmt: skip
WORDS = ["string", "integer", "number", "object", "array", "date", "email", "#", "#/$defs/a", "^a+$", "[", ""]
SCALARS = st.none() | st.booleans() | st.integers(-5, 300) | st.floats(-2, 2) | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b"]), inner, max_size=4)
    ),
    max_leaves=14,
)
SCHEMAS = st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5)
EBNF = st.lists(
    st.sampled_from(["root ::= ", "a ::= ", "a ", "root ", '"x" ', "[a-z] ", "[^\\n", "] ", "( ", ") ", "| ", "* ",
                     "{2,3} ", "\n", "<[5]> ", "# "]),
    max_size=16,
).map("".join)  # fmt: skip
LARK = st.lists(
    st.sampled_from(["start: ", "a: ", "A: ", "a ", "A ", '"x" ', "/[a-z]+/ ", "( ", ") ", "| ", "* ", "{2} ", "\n",
                     "%json {} ", "<[5]> ", "} ", "%lark { ", "[lazy]", "& ", "~"]),
    max_size=16,
).map("".join)  # fmt: skip
REGEX = st.text("ab(|)[]^$*+?{}1,2\\.-/ \n#x<=!:", max_size=14)
FORMATS = st.recursive(
    st.sampled_from(
        [{"type": "any_text"}, {"type": "const_string", "value": "a<t>"}, {"type": "regex", "pattern": "a+"},
         {"type": "json_schema", "json_schema": {}}]
    )
    | VALUES,
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["sequence", "or", "tag", "triggered_tags", "tags_with_separator", "star", "plus"])},
        optional={
            "elements": st.lists(inner, max_size=3), "tags": st.lists(inner, max_size=2), "content": inner,
            "begin": st.sampled_from(["<t>", "", "<"]), "end": st.sampled_from(["</t>", "", ["a", "b"]]),
            "triggers": st.lists(st.sampled_from(["<", "<t", ""]), max_size=2), "separator": st.just(","),
            "at_least_one": st.booleans(),
        },
    ),
    max_leaves=6,
)  # fmt: skip

OUTPUTS = st.one_of(
    SCHEMAS.map(lambda schema: {"json": schema}),
    EBNF.map(lambda grammar: {"grammar": grammar}),
    LARK.map(lambda grammar: {"grammar": grammar}),
    REGEX.map(lambda pattern: {"regex": pattern}),
    st.lists(st.text(max_size=3), max_size=3).map(lambda choices: {"choice": choices}),
    FORMATS.map(lambda form: {"structural_tag": {"format": form}}),
    SCHEMAS.flatmap(lambda schema: REGEX.map(lambda white: {"json": schema, "whitespace_pattern": white})),
)


@settings(max_examples=25)
@given(st.lists(OUTPUTS, min_size=8, max_size=8))
def test_no_value_is_the_servers_fault(outputs):
    async def check_all() -> None:
        checker = GrammarChecker(num_processes=1)
        try:
            for one in outputs:
                await check(checker, one)
        finally:
            await checker.close()

    asyncio.run(check_all())


async def check(checker: GrammarChecker, outputs: dict[str, Any]) -> None:
    special_ids = {"<t>": 300}
    try:
        fields = parse_fields({"model": "m", "messages": [], "structured_outputs": outputs}, ChatFields)
        content = structured_fragment(fields, special_ids)
        assert content is not None
        await checked_grammar(checker, content, vocabulary=Vocabulary(400, special_ids))
    except InvalidRequestError as error:
        assert error.param is not None and error.param.startswith("structured_outputs"), error.message
        assert len(error.message) < 700 and "panic" not in error.message, error.message

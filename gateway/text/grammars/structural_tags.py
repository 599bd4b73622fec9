"""Structural tags as vLLM takes them from xgrammar: text with tags around structured parts.

A format is an object with a `type`. Free text (`any_text`, `triggered_tags`) is allowed only where its end is defined:
inside a tag, before a tag or a constant text, or at the end of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from gateway.text.grammars.client import grammar_fragment, regex_fragment
from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.grammars.json_schema import json_expression
from gateway.text.json_text import parsed_json
from shared.errors import InvalidRequestError

MAX_FORMATS = 2000
MAX_TRIGGERS = 256
"""Maximum number of triggers. Each tag is compared with each of them."""
MAX_DEPTH = 32
_TEXT = "ST_TEXT"

_Nothing = Annotated[list[Any], Meta(max_length=0)]
_Triggers = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_TRIGGERS)]
_Ends = str | Annotated[list[str], Meta(min_length=1)]


class _Format(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Base class of all formats."""


class ConstString(_Format, tag="const_string"):
    """Constant text."""

    value: str


class JsonSchema(_Format, tag="json_schema"):
    """JSON that satisfies a schema."""

    json_schema: str | bool | dict[str, Any]
    style: Literal["json"] | None = None


class Regex(_Format, tag="regex"):
    """Text that matches a regular expression."""

    pattern: str


class ClientGrammar(_Format, tag="grammar"):
    """Text that follows a grammar of the client."""

    grammar: str


class AnyText(_Format, tag="any_text"):
    """Free text."""

    excludes: _Nothing | None = None


class Elements(_Format, tag="sequence"):
    """Formats that follow one another."""

    elements: list[Format]


class Or(_Format, tag="or"):
    """Alternatives."""

    elements: Annotated[list[Format], Meta(min_length=1)]


class Tag(_Format, tag="tag"):
    """Format between two texts, of which the second may be any of several."""

    begin: str
    content: Format
    end: _Ends


class TriggeredTags(_Format, tag="triggered_tags"):
    """Free text in which a trigger begins a tag."""

    triggers: _Triggers
    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_FORMATS)]
    at_least_one: bool | None = None
    stop_after_first: bool | None = None
    excludes: _Nothing | None = None


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    """Formats with a text between them."""

    tags: Annotated[list[Format], Meta(min_length=1)]
    separator: str
    at_least_one: bool | None = None
    stop_after_first: bool | None = None


class Optional(_Format, tag="optional"):
    """Format that may be missing."""

    times: ClassVar = "?"
    content: Format


class Star(_Format, tag="star"):
    """Format that may be repeated or missing."""

    times: ClassVar = "*"
    content: Format


class Plus(_Format, tag="plus"):
    """Format that may be repeated."""

    times: ClassVar = "+"
    content: Format


Format = (
    ConstString
    | JsonSchema
    | Regex
    | ClientGrammar
    | AnyText
    | Elements
    | Or
    | Tag
    | TriggeredTags
    | TagsWithSeparator
    | Optional
    | Star
    | Plus
)


class Structure(Struct, forbid_unknown_fields=True, kw_only=True):
    """Tag in the older form."""

    begin: str
    end: _Ends
    schema: str | bool | dict[str, Any] | None = None


class StructuralTag(_Format, tag="structural_tag"):
    """vLLM's `{"type": "structural_tag", ...}`: a format, or structures and triggers, which is the older form."""

    format: Format | None = None
    structures: Annotated[list[Structure], Meta(min_length=1, max_length=MAX_FORMATS)] | None = None
    triggers: _Triggers | None = None


def structural_tag_fragment(
    value: StructuralTag, place: str, special_ids: Mapping[str, int], whitespace: str | None = None
) -> Fragment:
    """Return the fragment of a structural tag.

    Args:
        value: The structural tag.
        place: Request field that contains it.
        special_ids: Id by text of each special token; in tags these texts stand for the tokens.
        whitespace: See json_expression.

    Raises:
        InvalidRequestError: A format is invalid or not supported; the error names the place.
    """
    writer = _Writer(special_ids, whitespace)
    if (value.format is None) == (value.structures is None and value.triggers is None):
        raise _error(place, "needs either format, or structures and triggers")
    if value.format is not None:
        expression = writer.expression(value.format, f"{place}.format", last=True)
    else:
        if value.structures is None or value.triggers is None:
            missing = "structures" if value.structures is None else "triggers"
            raise _error(f"{place}.{missing}", "is missing")
        tags = [
            Tag(begin=one.begin, content=JsonSchema(json_schema=one.schema or {}), end=one.end)
            for one in value.structures
        ]
        expression = writer.expression(TriggeredTags(triggers=value.triggers, tags=tags), place, last=True)
    rules = (*writer.rules, f"{_TEXT}: /(?s:.*)/") if writer.uses_text else tuple(writer.rules)
    return Fragment(f"({expression})", rules, param=place)


class _Writer:
    def __init__(self, special_ids: Mapping[str, int], whitespace: str | None) -> None:
        self.rules: list[str] = []
        self.uses_text = False
        self._special_ids = special_ids
        self._whitespace = whitespace
        self._num_formats = 0

    def expression(self, value: Format, place: str, *, last: bool, depth: int = 0) -> str:
        """Return the expression of one format; `last` means that nothing follows it."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS or depth > MAX_DEPTH:
            raise _error(
                place, f"has more than {MAX_FORMATS} formats, or formats nested more than {MAX_DEPTH} levels deep"
            )
        depth += 1
        match value:
            case ConstString():
                return self._literal(value.value)
            case JsonSchema():
                return self._json_schema(value.json_schema, f"{place}.json_schema")
            case Regex():
                return self._part(regex_fragment(value.pattern, self._name("ST"), f"{place}.pattern"))
            case ClientGrammar():
                return self._part(grammar_fragment(value.grammar, self._name("st"), f"{place}.grammar"))
            case AnyText():
                _check_end(place, defined=last)
                return self._text()
            case Elements():
                return self._sequence(value.elements, f"{place}.elements", last, depth)
            case Or():
                return self._any_of(value.elements, f"{place}.elements", last, depth)
            case Tag():
                return f"{self._literal(value.begin)} {self._behind(value, place, value.begin, last, depth)}"
            case TriggeredTags():
                return self._triggered_tags(value, place, last, depth)
            case TagsWithSeparator():
                tag = self._rule(
                    self._any_of(value.tags, f"{place}.tags", last and bool(value.stop_after_first), depth)
                )
                body = tag if value.stop_after_first else f"{tag} ({self._literal(value.separator)} {tag})*"
                return body if value.at_least_one else f"({body})?"
            case Optional() | Star() | Plus():
                return f"({self.expression(value.content, f'{place}.content', last=False, depth=depth)}){value.times}"

    def _json_schema(self, schema: str | bool | dict[str, Any], place: str) -> str:
        found = parsed_json(schema, place) if isinstance(schema, str) else schema
        if found is True:
            found = {}
        if not isinstance(found, dict):
            raise _error(place, "must be a JSON schema, which is an object")
        return self._rule(json_expression(found, place, whitespace=self._whitespace))

    def _any_of(self, values: Sequence[Format], place: str, last: bool, depth: int) -> str:
        return any_of(self.expression(one, f"{place}[{i}]", last=last, depth=depth) for i, one in enumerate(values))

    def _sequence(self, elements: Sequence[Format], place: str, last: bool, depth: int) -> str:
        parts: list[str] = []
        written = ""
        for index, element in enumerate(elements):
            following = elements[index + 1] if index + 1 < len(elements) else None
            ends = last and following is None
            where = f"{place}[{index}]"
            if written and isinstance(element, Tag | ConstString):
                parts.append(self._behind(element, where, written, ends, depth))
                written = ""
            elif isinstance(element, AnyText) and (written := _beginning(following)):
                parts.append(self._text_until(written))
            else:
                parts.append(self.expression(element, where, last=ends, depth=depth))
        return " ".join(parts) or '""'

    def _behind(self, value: Tag | ConstString, place: str, written: str, last: bool, depth: int) -> str:
        """Return the rest of a tag or constant text of which `written` has been generated."""
        if isinstance(value, ConstString):
            return self._literal(value.value[len(written) :])
        rest = self._literal(value.begin[len(written) :])
        ends = [value.end] if isinstance(value.end, str) else value.end
        if isinstance(value.content, AnyText) and any(ends):
            if not all(ends):
                raise _error(f"{place}.end", "must not be empty after free text")
            return f"{rest} {any_of(map(self._text_until, ends))}"
        inner = self.expression(value.content, f"{place}.content", last=last and not any(ends), depth=depth)
        return f"{rest} {inner} {any_of(map(self._literal, ends))}"

    def _triggered_tags(self, value: TriggeredTags, place: str, last: bool, depth: int) -> str:
        once, must = bool(value.stop_after_first), bool(value.at_least_one)
        _check_end(place, defined=last or (once and must))
        bodies: dict[str, list[str]] = {trigger: [] for trigger in value.triggers}
        self._num_formats += len(value.tags)
        for index, tag in enumerate(value.tags):
            where = f"{place}.tags[{index}]"
            matching = [trigger for trigger in value.triggers if tag.begin.startswith(trigger)]
            if len(matching) != 1:
                raise _error(
                    f"{where}.begin", f"must begin with exactly one of the triggers; it begins with {len(matching)}"
                )
            bodies[matching[0]].append(self._behind(tag, where, matching[0], last and once, depth))
        parts = [f"{self._text_until(trigger)} {any_of(found)}" for trigger, found in bodies.items() if found]
        part = self._rule(" | ".join(parts))
        if once:
            return part if must else f"({part} | {self._text()})"
        return f"{part}{'+' if must else '*'} {self._text()}"

    def _text(self) -> str:
        self.uses_text = True
        return _TEXT

    def _text_until(self, end: str) -> str:
        """Return an expression for any text up to and including the first occurrence of this one."""
        expression = self._literal(end)
        if any(token in end for token in self._special_ids):
            # Special tokens are not text, so free text need not end before them.
            return f"{self._text()} {expression}"
        name = self._name("st")
        self.rules.append(f"{name}[lazy]: {self._text()} {expression}")
        return name

    def _literal(self, text: str) -> str:
        return literal(text, self._special_ids)

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{len(self.rules)}"

    def _rule(self, expression: str) -> str:
        name = self._name("st")
        self.rules.append(f"{name}: {expression}")
        return name

    def _part(self, part: Fragment) -> str:
        self.rules += part.rules
        return part.expression


def _beginning(value: Format | None) -> str:
    """Return the text that a format begins with, if it is a tag or a constant text."""
    if isinstance(value, Tag):
        return value.begin
    return value.value if isinstance(value, ConstString) else ""


def _check_end(place: str, *, defined: bool) -> None:
    if not defined:
        raise _error(
            place,
            "is free text whose end is not defined; put it inside a tag, before a tag or a constant text, or last",
        )


def _error(place: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {what}.", param=place)

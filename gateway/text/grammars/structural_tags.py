"""Structural tags as vLLM takes them from xgrammar: text with tags around structured parts.

A format is an object with a `type`. Free text (`any_text`, `triggered_tags`) is allowed only where its end is defined:
inside a tag, before a tag or a constant text, or at the end of the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

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


def structural_tag_fragment(
    value: Mapping[str, Any], place: str, special_ids: Mapping[str, int], whitespace: str | None = None
) -> Fragment:
    """Return the fragment of a structural tag.

    Args:
        value: `{"format": {...}}`, or the older form, `{"structures": [...], "triggers": [...]}`.
        place: Request field that contains it.
        special_ids: Id by text of each special token; in tags these texts stand for the tokens.
        whitespace: See json_expression.

    Raises:
        InvalidRequestError: A format is invalid or not supported; the error names the place.
    """
    has_format = value.get("format") is not None
    has_structures = value.get("structures") is not None or value.get("triggers") is not None
    if has_format == has_structures:
        raise _error(place, "needs either format, or structures and triggers")
    writer = _Writer(place, special_ids, whitespace)
    if has_format:
        expression = writer.expression(value["format"], f"{place}.format", last=True)
    else:
        expression = writer.expression(_from_structures(value, place), place, last=True)
    rules = (*writer.rules, f"{_TEXT}: /(?s:.*)/") if writer.uses_text else tuple(writer.rules)
    return Fragment(f"({expression})", rules, param=place)


def _from_structures(value: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Convert the older form to triggered_tags."""
    tags = []
    for index, structure in enumerate(_get(value, "structures", list, place)):
        where = f"{place}.structures[{index}]"
        if not isinstance(structure, dict):
            raise _error(where, "must be an object")
        _only(structure, {"begin", "schema", "end"}, where)
        schema = structure.get("schema", {})
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({"type": "tag", "content": content} | {name: structure.get(name) for name in ("begin", "end")})
    return {"type": "triggered_tags", "triggers": _get(value, "triggers", list, place), "tags": tags}


class _Writer:
    def __init__(self, place: str, special_ids: Mapping[str, int], whitespace: str | None) -> None:
        self.rules: list[str] = []
        self.uses_text = False
        self._place = place
        self._special_ids = special_ids
        self._whitespace = whitespace
        self._num_formats = 0
        self._depth = 0
        self._kinds: dict[str, Callable[[Mapping[str, Any], str, bool], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda value, place, last: self._repeated(value, place, "?"),
            "star": lambda value, place, last: self._repeated(value, place, "*"),
            "plus": lambda value, place, last: self._repeated(value, place, "+"),
        }

    def expression(self, value: object, place: str, *, last: bool) -> str:
        """Return the expression of one format; `last` means that nothing follows it."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS or self._depth > MAX_DEPTH:
            raise _error(
                place, f"has more than {MAX_FORMATS} formats, or formats nested more than {MAX_DEPTH} levels deep"
            )
        if not isinstance(value, dict):
            raise _error(place, "must be an object with a type")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            shown = json.dumps(kind)[:64]
            raise _error(f"{place}.type", f"is {shown}; supported are {', '.join(self._kinds)}")
        self._depth += 1
        try:
            return self._kinds[kind](value, place, last)
        finally:
            self._depth -= 1

    def _const_string(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"value"}, place)
        return self._literal(_get(value, "value", str, place))

    def _json_schema(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"json_schema", "style"}, place)
        if value.get("style") not in (None, "json"):
            raise _error(f"{place}.style", 'must be "json"; other styles are not supported')
        schema = value.get("json_schema")
        if isinstance(schema, str):
            schema = parsed_json(schema, f"{place}.json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _error(f"{place}.json_schema", "must be a JSON schema, which is an object")
        return self._rule(json_expression(schema, f"{place}.json_schema", whitespace=self._whitespace))

    def _regex(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"pattern"}, place)
        part = regex_fragment(_get(value, "pattern", str, place), self._name("ST"), f"{place}.pattern")
        return self._part(part)

    def _grammar(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"grammar"}, place)
        part = grammar_fragment(_get(value, "grammar", str, place), self._name("st"), f"{place}.grammar")
        return self._part(part)

    def _any_text(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        self._check_any_text(value, place)
        if not last:
            raise _error(
                place,
                "is free text whose end is not defined; put it inside a tag, before a tag or a constant text, or last",
            )
        return self._text()

    def _sequence(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"elements"}, place)
        elements = _get(value, "elements", list, place)
        parts: list[str] = []
        index = 0
        while index < len(elements):
            element, where = elements[index], f"{place}.elements[{index}]"
            ends = index + 1 == len(elements)
            following = None if ends else _beginning(elements[index + 1])
            if isinstance(element, dict) and element.get("type") == "any_text" and following:
                self._check_any_text(element, where)
                parts.append(self._text_until(following))
                index += 1
                where = f"{place}.elements[{index}]"
                parts.append(self._behind(elements[index], where, following, last and index + 1 == len(elements)))
            else:
                parts.append(self.expression(element, where, last=last and ends))
            index += 1
        return " ".join(parts) or '""'

    def _or(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"elements"}, place)
        elements = _get(value, "elements", list, place)
        if not elements:
            raise _error(f"{place}.elements", "must not be empty")
        return any_of(self.expression(one, f"{place}.elements[{i}]", last=last) for i, one in enumerate(elements))

    def _tag(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        return f"{self._literal(_get(value, 'begin', str, place))} {self._behind(value, place, value['begin'], last)}"

    def _behind(self, value: Mapping[str, Any], place: str, written: str, last: bool) -> str:
        """Return the rest of a tag or constant text of which `written` has been generated."""
        if value.get("type") == "const_string":
            return self._literal(_get(value, "value", str, place)[len(written) :])
        _only(value, {"begin", "content", "end"}, place)
        rest = self._literal(_get(value, "begin", str, place)[len(written) :])
        ends = value.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise _error(f"{place}.end", "must be a text or a list of texts")
        content, where = value.get("content"), f"{place}.content"
        if isinstance(content, dict) and content.get("type") == "any_text" and any(ends):
            self._check_any_text(content, where)
            if not all(ends):
                raise _error(f"{place}.end", "must not be empty after free text")
            return f"{rest} {any_of(self._text_until(end) for end in ends)}"
        inner = self.expression(content, where, last=last and not any(ends))
        return f"{rest} {inner} {any_of(map(self._literal, ends))}"

    def _triggered_tags(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}, place)
        if value.get("excludes"):
            raise _error(f"{place}.excludes", "is not supported")
        triggers = _get(value, "triggers", list, place)
        tags = _get(value, "tags", list, place)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _error(f"{place}.triggers", "must be a list of non-empty texts")
        if len(triggers) > MAX_TRIGGERS or len(tags) > MAX_FORMATS:
            raise _error(place, f"has more than {MAX_TRIGGERS} triggers, or more than {MAX_FORMATS} tags")
        once, must = _flag(value, "stop_after_first", place), _flag(value, "at_least_one", place)
        if not last and not (once and must):
            raise _error(
                place,
                "is free text whose end is not defined; put it inside a tag, before a tag or a constant text, or last",
            )
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(tags):
            where = f"{place}.tags[{index}]"
            self._num_formats += 1
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise _error(where, "must be a tag")
            begin = _get(tag, "begin", str, where)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise _error(
                    f"{where}.begin", f"must begin with exactly one of the triggers; it begins with {len(matching)}"
                )
            bodies[matching[0]].append(self._behind(tag, where, matching[0], last and once))
        parts = [f"{self._text_until(trigger)} {any_of(found)}" for trigger, found in bodies.items() if found]
        if not parts:
            raise _error(f"{place}.tags", "must not be empty")
        part = self._rule(" | ".join(parts))
        if once:
            return part if must else f"({part} | {self._text()})"
        return f"{part}{'+' if must else '*'} {self._text()}"

    def _tags_with_separator(self, value: Mapping[str, Any], place: str, last: bool) -> str:
        _only(value, {"tags", "separator", "at_least_one", "stop_after_first"}, place)
        tags = _get(value, "tags", list, place)
        if not tags:
            raise _error(f"{place}.tags", "must not be empty")
        once, must = _flag(value, "stop_after_first", place), _flag(value, "at_least_one", place)
        found = [self.expression(tag, f"{place}.tags[{i}]", last=last and once) for i, tag in enumerate(tags)]
        tag = self._rule(any_of(found))
        separator = self._literal(_get(value, "separator", str, place))
        body = tag if once else f"{tag} ({separator} {tag})*"
        return body if must else f"({body})?"

    def _repeated(self, value: Mapping[str, Any], place: str, times: str) -> str:
        _only(value, {"content"}, place)
        return f"({self.expression(value.get('content'), f'{place}.content', last=False)}){times}"

    def _check_any_text(self, value: Mapping[str, Any], place: str) -> None:
        _only(value, {"excludes"}, place)
        if value.get("excludes"):
            raise _error(f"{place}.excludes", "is not supported")

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


def _beginning(value: object) -> str | None:
    """Return the text that a format begins with, if it is a tag or a constant text."""
    if isinstance(value, dict):
        found = value.get({"tag": "begin", "const_string": "value"}.get(str(value.get("type")), ""))
        return found if isinstance(found, str) and found else None
    return None


def _get(value: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    found = value.get(name)
    if not isinstance(found, kind):
        raise _error(f"{place}.{name}", f"must be a {'text' if kind is str else 'list'}")
    return found


def _flag(value: Mapping[str, Any], name: str, place: str) -> bool:
    found = value.get(name, False)
    if not isinstance(found, bool):
        raise _error(f"{place}.{name}", "must be a boolean")
    return found


def _only(value: Mapping[str, Any], names: set[str], place: str) -> None:
    for name in value:
        if name not in names and name != "type":
            raise _error(f"{place}.{name[:64]}", "is not supported here")


def _error(place: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {what}.", param=place)

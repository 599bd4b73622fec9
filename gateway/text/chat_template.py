"""Chat templates: Jinja in a sandbox, with limits on source, loops, values, output and time.

A template comes with the model's files and is trusted no more than they are. Python threads cannot be stopped from
outside. Therefore the operations of the template check the limits themselves: loops are wrapped, and operators, calls
and filters are intercepted, so that no single operation takes long or produces a large value.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser

from shared.errors import InvalidRequestError

MAX_SOURCE = 1_048_576
"""Maximum number of characters of a template."""
MAX_RANGE = 100_000
MAX_OUTPUT = 33_554_432
"""Maximum number of characters of a rendered conversation, and of any string or list that a template creates."""
MAX_TOTAL = 1 << 30
"""Maximum number of characters that a template creates in total."""
MAX_ARGUMENT = 10_000_000
"""Largest number that may be passed to a function as a width or a count."""
MAX_SECONDS = 5.0

FILLED_IN = frozenset(["messages", "tools", "documents", "add_generation_prompt"])
"""Variables that `render` sets itself."""

_MAX_MESSAGE = 500
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class TemplateLimitError(jinja2.TemplateError):
    """A template exceeded its limit of time or size."""


class _RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


class ChatTemplate:
    """Compiled template.

    Args:
        source: Jinja text.
        special_tokens: Variables such as `bos_token`.
        max_seconds: Time limit of one rendering.

    Attributes:
        source: The source text.
        reads: Names that the template reads from its context.
        variables: Those of them that `render` does not fill in.

    Raises:
        InvalidRequestError: The source is not a usable template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, max_seconds: float = MAX_SECONDS) -> None:
        if len(source) > MAX_SOURCE:
            raise InvalidRequestError(
                f"the model's chat template has {len(source)} characters; at most {MAX_SOURCE} are supported"
            )
        self._environment = _Environment(max_seconds)
        self._special_tokens = dict(special_tokens)
        self.source = source
        # Compiling evaluates constant expressions, so the limits apply here too.
        self._environment.start_clock()
        try:
            self._template = self._environment.from_string(source)
            undeclared = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise _unusable(error) from error
        known = FILLED_IN | self._special_tokens.keys() | self._environment.globals.keys()
        self.reads = frozenset(undeclared)
        self.variables = frozenset(undeclared - known)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation, in at most about `max_seconds`. Several threads may call this method.

        Raises:
            InvalidRequestError: The template refuses the messages or fails; the message is the template's own.
        """
        variables: dict[str, Any] = {
            **template_kwargs,
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        self._environment.start_clock()
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                self._environment.check(len(piece))
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise _too_long()
                pieces.append(piece)
        except _RefusedError as error:
            raise InvalidRequestError(str(error.message)[:_MAX_MESSAGE], param="messages") from error
        except Exception as error:  # expressions of a template may raise any exception
            raise _unusable(error) from error
        return "".join(pieces)


class _BoundedCode(CodeGenerator):
    """Code in which loops and each `a ~ b` call methods of the environment that check the limits."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = _call_node("bounded_loop", node.iter)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(_call_node("bounded_concat", nodes.List(node.nodes)), frame)


def _call_node(method: str, argument: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox with limits. Its clock is per thread, because one rendering runs in one thread."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _BoundedCode

    def __init__(self, max_seconds: float) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
            autoescape=False,
        )
        self._max_seconds = max_seconds
        self._clock = threading.local()
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(name, function)
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum", None)
        self.globals["range"] = _bounded_range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def start_clock(self) -> None:
        self._clock.deadline = time.monotonic() + self._max_seconds
        self._clock.total = 0

    def check(self, size: int = 0) -> None:
        """Count a value of this size. Raise TemplateLimitError after the deadline or above a limit."""
        self._clock.total = total = getattr(self._clock, "total", 0) + size
        if size > MAX_OUTPUT or total > MAX_TOTAL:
            raise _too_long()
        if time.monotonic() > getattr(self._clock, "deadline", float("inf")):
            raise TemplateLimitError(f"it takes longer than {self._max_seconds:g} s")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check(_binop_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args, *kwargs.values()))
        # The sandbox wraps str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            __self.check(_text_operation_size(method.__name__, text, args))
        result = super().call(__context, __obj, *args, **kwargs)
        __self.check(_size(result))
        return result

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, rest = args[first], args[first + 1 :]
            _check_arguments((*rest, *kwargs.values()))
            if name == "join":
                separator = next(iter((*rest, *kwargs.values())), "")
                value = list(value)
                self.check(sum(map(_size, value)) + len(value) * _size(separator))
                args = (*args[:first], value, *rest)
            elif isinstance(value, str):
                self.check(_text_operation_size(name, value, rest))
            result = function(*args, **kwargs)
            self.check(_size(result))
            return result

        # Jinja reads from these attributes whether to pass the context or the environment.
        bounded.__dict__.update(getattr(function, "__dict__", {}))
        return bounded

    def bounded_loop(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.check()
            yield item

    def bounded_concat(self, parts: Iterable[Any]) -> str:
        texts = [str(part) for part in parts]
        self.check(sum(map(len, texts)))
        return "".join(texts)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's words for training. Its content is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _binop_size(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the size of the result; for numbers, of their bits."""
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                return len(sequence) * max(times, 0)
    if operator == "+":
        return _size(left) + _size(right)
    if operator == "%" and isinstance(left, str):
        return _format_size(left, right if isinstance(right, tuple) else (right,))
    if isinstance(left, int) and isinstance(right, int):
        # Powers take more time than their size suggests. The factor 64 keeps one below a second.
        return 64 * left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    return 0


def _text_operation_size(name: str, text: str, args: Sequence[Any]) -> int:
    """Return an upper bound of the size of the result of a method or filter that can make text much longer."""
    if name == "join":
        return len(text) * _size(args[0]) if args else 0
    if name == "replace" and len(args) > 1:
        return (len(text) // max(_size(args[0]), 1) + 1) * _size(args[1])
    if name in ("format", "format_map"):
        return _format_size(text, args)
    return 0


def _format_size(form: str, args: Sequence[Any]) -> int:
    widths = [int(digits) for digits in re.findall(r"\d{1,12}", form)]
    # Arguments may contain widths: `%*d`, `{:{}}`.
    widths += [abs(item) for item in args if isinstance(item, int) and ("*" in form or "{" in form)]
    return sum(widths) + len(form)


def _check_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > MAX_ARGUMENT:
            raise TemplateLimitError(f"it passes a number above {MAX_ARGUMENT} to a function")


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimitError(f"it asks for a range of {len(numbers)} numbers; {MAX_RANGE} are possible")
    return numbers


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without HTML escapes, which models were not trained on."""
    if isinstance(indent, int) and indent > 16:
        raise TemplateLimitError(f"it indents JSON by {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _too_long() -> TemplateLimitError:
    return TemplateLimitError(f"it creates more than {MAX_OUTPUT} characters")


def _unusable(error: BaseException) -> InvalidRequestError:
    reason = _ADDRESS.sub("...", str(error))[:_MAX_MESSAGE] or type(error).__name__
    return InvalidRequestError(f"the model's chat template cannot render these messages: {reason}", param="messages")

"""Generator of the tables in docs/configuration.md and docs/metrics.md and of the excerpts in docs/tour.md.

A document marks a generated table with `<!-- NAME -->` and `<!-- /NAME -->`; the lines between them are replaced. An
excerpt stands between `<!-- code: PATH SYMBOL -->` and `<!-- /code -->`.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client.registry import CollectorRegistry

from shared.config import describe
from shared.metrics import GatewayMetrics, WorkerCollector
from shared.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/configuration.md", "docs/metrics.md", "docs/tour.md")
_EXCERPT = re.compile(r"<!-- code: (\S+) (\S+) -->\n.*?<!-- /code -->\n", re.DOTALL)
_LABELS = {"counter": "_total"}


def settings_table(*, of: type, without: Iterable[type] = ()) -> str:
    """Return a Markdown table with one row per setting of a class, without the settings of other classes."""
    known = {name for other in without for name in describe(other)}
    rows = ["| flag | variable | default | |", "|---|---|---|---|"]
    for name, info in describe(of).items():
        if name in known:
            continue
        default = "" if info.default in ((), "") else f"`{str(info.default).lower()}`"
        rows.append(f"| `{info.flag}` | `PELTON_{name.upper()}` | {default} | {_cell(info.doc)} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """Return a Markdown table with one row per metric, named as in /metrics."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    registry.register(WorkerCollector(lambda: ()))
    rows = ["| metric | kind | |", "|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda family: family.name):
        name = family.name + _LABELS.get(family.type, "")
        rows.append(f"| `{name}` | {family.type} | {_cell(family.documentation)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "settings of both": lambda: settings_table(of=CommonSettings),
    "settings of the gateway": lambda: settings_table(of=GatewaySettings, without=[CommonSettings]),
    "settings of a worker": lambda: settings_table(of=WorkerSettings, without=[CommonSettings]),
    "settings of serve": lambda: settings_table(of=ServeSettings, without=[GatewaySettings, WorkerSettings]),
    "metrics": metrics_table,
}


def filled(text: str) -> str:
    """Return a document with every marked table and excerpt regenerated from the code.

    Raises:
        ValueError: The end mark of a table is missing.
    """
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        if begin in text:
            before, rest = text.split(begin, 1)
            if end not in rest:
                raise ValueError(f"the end of {begin.strip()} is missing")
            text = f"{before}{begin}\n{make()}\n\n{end}{rest.split(end, 1)[1]}"
    return _EXCERPT.sub(_filled_excerpt, text)


def excerpt(path: str, symbol: str) -> str:
    """Return the source of a function, class or constant without its docstring and indentation.

    Args:
        path: File, relative to the root of the project.
        symbol: Name; `Class.method` for a method.

    Raises:
        ValueError: The file does not define the symbol.
    """
    source = (ROOT / path).read_text("utf-8")
    node: ast.AST = ast.parse(source)
    for name in symbol.split("."):
        found = [child for child in ast.iter_child_nodes(node) if _name(child) == name]
        if not found:
            raise ValueError(f"{path} does not define {symbol}, of which a document shows the source")
        node = found[0]
    assert isinstance(node, ast.stmt) and node.end_lineno is not None
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    omitted: set[int] = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
        docstring, following = node.body[0], node.body[1] if len(node.body) > 1 else None
        end = following.lineno - 1 if following is not None else docstring.end_lineno or docstring.lineno
        comments = [i for i in range(docstring.lineno, end + 1) if _line(source, i).startswith("#")]
        omitted = set(range(docstring.lineno, end + 1)) - set(comments)
    lines = source.splitlines()
    return textwrap.dedent("\n".join(lines[i - 1] for i in range(first, node.end_lineno + 1) if i not in omitted))


def _line(source: str, number: int) -> str:
    return source.splitlines()[number - 1].strip()


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Assign):
        return node.targets[0].id if isinstance(node.targets[0], ast.Name) else None
    return getattr(node, "name", None)


def _filled_excerpt(match: re.Match[str]) -> str:
    path, symbol = match.groups()
    return f"<!-- code: {path} {symbol} -->\n\n```python\n{excerpt(path, symbol)}\n```\n\n<!-- /code -->\n"


def outdated() -> list[str]:
    """Return the documents whose tables differ from the code."""
    return [name for name in DOCUMENTS if (text := (ROOT / name).read_text("utf-8")) != filled(text)]


def main(argv: Sequence[str]) -> int:
    """Rewrite the documents; with --check only report outdated ones and return exit code 1."""
    names = outdated()
    if list(argv) == ["--check"]:
        print("".join(f"{name} is out of date: run scripts/document\n" for name in names), end="", file=sys.stderr)
        return 1 if names else 0
    for name in names:
        (ROOT / name).write_text(filled((ROOT / name).read_text("utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

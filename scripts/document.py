"""Writes what the documents take from the code: settings, metrics, and a line per source file.

A document marks such a part with `<!-- NAME -->` and `<!-- /NAME -->`; what stands between is replaced.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client.registry import CollectorRegistry

from shared.config import describe
from shared.metrics import GatewayMetrics, WorkerCollector
from shared.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/ARCHITECTURE.md")
PACKAGES = ("shared", "gateway", "worker", "kernels", "scripts")
_LABELS = {"counter": "_total"}


def settings_table(*, of: type, without: Iterable[type] = ()) -> str:
    """A row per setting of one class that none of the others has."""
    known = {name for other in without for name in describe(other)}
    rows = ["| flag | variable | default | |", "|---|---|---|---|"]
    for name, info in describe(of).items():
        if name in known:
            continue
        default = "" if info.default in ((), "") else f"`{str(info.default).lower()}`"
        rows.append(f"| `{info.flag}` | `PELTON_{name.upper()}` | {default} | {_cell(info.doc)} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """A row per metric, as /metrics names it."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    registry.register(WorkerCollector(lambda: ()))
    rows = ["| metric | kind | |", "|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda family: family.name):
        name = family.name + _LABELS.get(family.type, "")
        rows.append(f"| `{name}` | {family.type} | {_cell(family.documentation)} |")
    return "\n".join(rows)


def file_list(package: str) -> str:
    """A line per file of a package: its path and the first sentence of its docstring."""
    lines = []
    for path in sorted((ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if "__pycache__" not in relative.parts and path.name != "__init__.py":
            lines.append(f"- `{relative}`: {_first_sentence(path)}")
    return "\n".join(lines)


def _first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph if len(paragraph) <= 200 else paragraph.split(". ")[0].rstrip(".") + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "settings of both": lambda: settings_table(of=CommonSettings),
    "settings of the gateway": lambda: settings_table(of=GatewaySettings, without=[CommonSettings]),
    "settings of a worker": lambda: settings_table(of=WorkerSettings, without=[CommonSettings]),
    "settings of serve": lambda: settings_table(of=ServeSettings, without=[GatewaySettings, WorkerSettings]),
    "metrics": metrics_table,
    **{f"files of {package}": lambda package=package: file_list(package) for package in PACKAGES},  # type: ignore[misc]
}


def filled(text: str) -> str:
    """The document with every marked part as the code has it now.

    Raises:
        ValueError: a part's end is missing.
    """
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        if begin in text:
            before, rest = text.split(begin, 1)
            if end not in rest:
                raise ValueError(f"the end of {begin.strip()} is missing")
            text = f"{before}{begin}\n{make()}\n\n{end}{rest.split(end, 1)[1]}"
    return text


def outdated() -> list[str]:
    """Documents that differ from what the code says."""
    return [name for name in DOCUMENTS if (text := (ROOT / name).read_text("utf-8")) != filled(text)]


def main(argv: Sequence[str]) -> int:
    """Exit code 1 when --check finds a document out of date."""
    names = outdated()
    if list(argv) == ["--check"]:
        print("".join(f"{name} is out of date: run scripts/document\n" for name in names), end="", file=sys.stderr)
        return 1 if names else 0
    for name in names:
        (ROOT / name).write_text(filled((ROOT / name).read_text("utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

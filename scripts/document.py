"""Generator of the tables in docs/configuration.md and docs/metrics.md.

A document marks a generated table with `<!-- NAME -->` and `<!-- /NAME -->`; the lines between them are replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client.registry import CollectorRegistry

from shared.config import describe
from shared.metrics import GatewayMetrics, WorkerCollector
from shared.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/configuration.md", "docs/metrics.md")
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
    """Return a document with every marked table regenerated from the code.

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
    return text


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

"""The table of query parameters in docs/API.md against the routes.

`python -m tests.architecture.test_query_document` writes it.
"""

from __future__ import annotations

from gateway.app import ROUTES
from gateway.openapi import describe
from tests.architecture.source import ROOT

DOCUMENT = ROOT / "docs" / "API.md"
OPENING, CLOSING = "<!-- query -->\n", "<!-- /query -->"


def table() -> str:
    """What routes take, as openapi.json says it."""
    lines = ["", "| endpoint | parameter | type | default | |", "|---|---|---|---|---|"]
    for path, methods in describe(ROUTES)["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    cells = (f"{method.upper()} `{path}`", f"`{parameter['name']}`", *described(parameter["schema"]))
                    lines.append(f"| {' | '.join((*cells, parameter['description']))} |")
    return "\n".join(lines) + "\n\n"


def described(schema: dict[str, object]) -> tuple[str, str]:
    """Type and default, in words."""
    kind, default = str(schema.get("type", "")), schema.get("default")
    if isinstance(values := schema.get("enum"), list):
        kind = " or ".join(f"`{value}`" for value in values)
    elif "maximum" in schema:
        kind = f"{kind}, {schema['minimum']} to {schema['maximum']}"
    if default is None:
        return kind, ""
    return kind, str(default).lower() if isinstance(default, bool) else str(default)


def test_every_query_parameter_is_in_the_document():
    written = DOCUMENT.read_text("utf-8").partition(OPENING)[2].partition(CLOSING)[0]
    assert written == table(), "python -m tests.architecture.test_query_document writes it"


def main() -> None:
    head, opening, rest = DOCUMENT.read_text("utf-8").partition(OPENING)
    DOCUMENT.write_text(head + opening + table() + CLOSING + rest.partition(CLOSING)[2])


if __name__ == "__main__":
    main()

"""Generated tables of the documents against the code."""

import pytest

from scripts import document
from tests.architecture.source import ROOT


def test_documents_are_up_to_date():
    assert document.outdated() == [], "run scripts/document"


def test_every_table_is_in_a_document():
    texts = "".join((ROOT / name).read_text("utf-8") for name in document.DOCUMENTS)
    assert [name for name in document.PARTS if f"<!-- {name} -->" not in texts] == []


def test_a_changed_document_is_noticed():
    text = "<!-- metrics -->\nSTALE\n<!-- /metrics -->\nafter\n"
    new = document.filled(text)
    assert "STALE" not in new
    assert new.endswith("<!-- /metrics -->\nafter\n")
    assert "pelton:num_requests_running" in new
    assert document.filled(new) == new


def test_a_changed_excerpt_is_noticed():
    text = "<!-- code: shared/errors.py PeltonError -->\nSTALE\n<!-- /code -->\nafter\n"
    new = document.filled(text)
    assert "STALE" not in new
    assert new.endswith("<!-- /code -->\nafter\n")
    assert "class PeltonError(Exception)" in new
    assert document.filled(new) == new


def test_an_excerpt_of_a_missing_symbol_is_refused():
    with pytest.raises(ValueError, match=r"shared/errors.py does not define NoSuchError"):
        document.filled("<!-- code: shared/errors.py NoSuchError -->\n<!-- /code -->\n")


def test_the_tour_shows_twelve_stops():
    assert (ROOT / "docs/tour.md").read_text("utf-8").count("\n## ") - 4 == 12

"""Generated tables of the documents against the code."""

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

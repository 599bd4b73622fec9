"""Opened default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worker.model.loading import ModelFiles, open_model


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    opened = open_model("", tmp_path_factory.mktemp("cache"))
    yield opened
    opened.weights.close()

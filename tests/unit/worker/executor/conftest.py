"""Fixtures of the executor tests."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder of a tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def restore_threads():
    """Restore torch's number of threads, which building an executor changes."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

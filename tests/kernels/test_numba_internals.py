"""Availability of the private numba helpers that the CPU kernels use."""

import ast
import pathlib

import pytest

from tests.architecture.source import ROOT

numba_internals = pytest.importorskip("kernels.common.cpu.numba_internals")


def test_numba_still_has_the_helpers():
    """Import the helpers directly, so that an ImportError names the missing one."""
    assert all(callable(getattr(numba_internals, name)) for name in numba_internals.__all__)


@pytest.mark.parametrize("package", ["kernels", "worker", "scripts"])
def test_no_other_module_imports_the_internals(package):
    allowed = ROOT / "kernels/common/cpu/numba_internals.py"
    found = [path for path in (ROOT / package).rglob("*.py") if path != allowed and _imports_numba_core(path)]
    assert found == []


def _imports_numba_core(path: pathlib.Path) -> bool:
    tree = ast.parse(path.read_text("utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return any(name.startswith("numba.core") for name in names)

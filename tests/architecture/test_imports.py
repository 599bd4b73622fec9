"""Imports run one way: shared <- kernels <- worker, and shared <- gateway; heavy libraries stay on their side."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGES, ROOT, imported_modules, python_files, relative

ALLOWED = {
    "shared": {"shared"},
    "kernels": {"shared", "kernels"},
    "worker": {"shared", "kernels", "worker"},
    "gateway": {"shared", "gateway"},
}
FORBIDDEN_LIBRARIES = {
    "shared": {"torch", "transformers", "aiohttp", "triton", "numba"},
    "kernels": {"aiohttp", "transformers"},
    "worker": {"aiohttp"},
    "gateway": {"torch", "transformers", "triton", "numba"},
}
NO_PICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing"}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_is_below_them(package):
    wrong = [
        f"{relative(path)} imports {name}"
        for path in python_files(package)
        for name in imported_modules(path)
        if name.split(".")[0] in {*PACKAGES, "tests", "scripts"} - ALLOWED[package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_leave_the_other_sides_libraries_alone(package):
    wrong = [
        f"{relative(path)} imports {name}"
        for path in python_files(package)
        for name in imported_modules(path)
        if name.split(".")[0] in FORBIDDEN_LIBRARIES[package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_pickled(package):
    wrong = [
        f"{relative(path)} imports {name}"
        for path in python_files(package)
        for name in imported_modules(path)
        if name.split(".")[0] in NO_PICKLE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("gateway.__main__", {"torch", "transformers", "worker", "kernels", "multiprocessing.pool"}),
        ("worker.__main__", {"aiohttp", "gateway", "transformers"}),
        ("worker.scheduler.scheduler", {"torch", "numba", "llguidance", "tokenizers", "zmq"}),
        ("shared.supervisor", {"aiohttp", "torch", "transformers", "numpy", "gateway", "worker", "kernels"}),
        ("shared.cli", {"aiohttp", "torch", "zmq", "msgspec", "structlog"}),
    ],
)
def test_a_process_loads_only_its_own_side(module, forbidden):
    if importlib.util.find_spec(module) is None:
        pytest.fail(f"{module} does not exist")
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({sorted(forbidden)!r})))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_imported_modules_sees_every_form(tmp_path):
    path = ROOT / "shared" / "config.py"
    assert {"argparse", "shared.errors", "shared.errors.ConfigurationError"} <= imported_modules(path)

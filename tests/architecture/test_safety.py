"""What must not be called in Pelton's own code: anything that evaluates data, and checks that -O removes."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import PACKAGES, parse, python_files, relative

FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "numpy.load",
    "np.load",
    "os.system",
    "os.popen",
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_data_is_evaluated(package):
    wrong = [
        f"{relative(path)}:{line} {what}" for path in python_files(package) for line, what in unsafe_calls(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_assert_is_not_a_check(package):
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files(package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, "asserts vanish under -O; raise an error: " + ", ".join(wrong)


@pytest.mark.parametrize(
    "code", ["eval('1')", "torch.load(path)", "socket.recv_pyobj()", "subprocess.run('ls', shell=True)"]
)
def test_unsafe_calls_are_recognised(code):
    assert list(unsafe_calls(ast.parse(code)))


def unsafe_calls(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, source) of each call that evaluates or unpickles data or starts a shell."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        shell = any(keyword.arg == "shell" for keyword in node.keywords)
        if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_METHODS or shell:
            found.append((node.lineno, name))
    return found

"""Files stay under 500 lines, functions under 60 (compiled kernels 150): only a check holds."""

from __future__ import annotations

import ast

from tests.architecture.source import PACKAGES, parse, python_files, relative

MAX_FILE_LINES = 499
MAX_FUNCTION_LINES = 59
MAX_KERNEL_LINES = 149
KERNEL_COMPILERS = ("triton.jit", "njit", "cfunc", "inner")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
EVERYTHING = (*PACKAGES, "scripts", "tests")


def test_files_are_short():
    sizes = {relative(path): len(path.read_text("utf-8").splitlines()) for path in python_files(*EVERYTHING)}
    too_long = {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert not too_long


def test_functions_are_short():
    too_long = []
    for path in python_files(*EVERYTHING):
        for node in ast.walk(parse(path)):
            if isinstance(node, FUNCTION):
                lines = _own_lines(node)
                if lines > (MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES):
                    too_long.append(f"{relative(path)}:{node.lineno} {node.name} has {lines} lines")
    assert not too_long, "\n".join(too_long)


def _own_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without the kernels that it defines inside, which have a limit of their own."""
    kernels = [inner for inner in ast.walk(node) if inner is not node and isinstance(inner, FUNCTION)]
    return _lines(node) - sum(_lines(inner) for inner in kernels if _is_kernel(inner))


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return any(compiler in decorators for compiler in KERNEL_COMPILERS)


def test_kernels_are_recognised_and_counted_once():
    outer, plain = ast.parse("def outer():\n  @triton.jit\n  def k():\n    pass\n  return k\n@other\ndef f(): ...").body
    assert isinstance(outer, ast.FunctionDef)
    assert isinstance(plain, ast.FunctionDef)
    assert _own_lines(outer) == 3
    assert not _is_kernel(plain)

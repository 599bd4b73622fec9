"""Docstrings open with a verb or a noun phrase, not with a dangling clause."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import PACKAGES, ROOT, parse, python_files, relative

DANGLING = re.compile(
    r"(What|Who|Whom|Whose|Whether|That|Of|So|How|Where|When|As|By|Nothing|Nobody|None|Not)\b",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def dangling_docstrings(tree: ast.Module) -> list[str]:
    """Return the docstrings of a module, its classes and its functions that open with one of the banned words."""
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return [docstring for docstring in docstrings if DANGLING.match(docstring)]


@pytest.mark.parametrize("package", [*PACKAGES, "scripts"])
def test_no_docstring_opens_with_a_dangling_word(package):
    wrong = [
        f"{relative(path)}: {docstring.splitlines()[0]}"
        for path in python_files(package)
        for docstring in dangling_docstrings(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_has_a_docstring(package):
    folders = {path.parent for path in python_files(package) if path.suffix == ".py"}
    missing = [relative(folder) for folder in sorted(folders) if not ast.get_docstring(parse(folder / "__init__.py"))]
    assert not missing, f"a package docstring is missing in {missing} of {ROOT}"


def test_dangling_docstrings_are_recognized():
    source = 'class A:\n    """Whether it is."""\n    def f(self):\n        """Asset of the class."""\n'
    assert dangling_docstrings(ast.parse(source)) == ["Whether it is."]

"""The limits of size that CONTRIBUTING.md names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
FILES = [
    path
    for folder in ("runtime", "actors", "serve_app", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_files_are_short():
    long = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in long.items() if lines > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("folder", ["runtime", "actors", "serve_app", "tests", "benchmarks"])
def test_functions_fit_a_screen(folder: str):
    """Kernels of Triton excepted, which cannot call one another freely."""
    long = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if lines > MAX_FUNCTION_LINES and not is_kernel:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert long == {}


def test_no_code_stands_in_a_drawer():
    """A file is named after what it holds."""
    assert [str(path) for path in FILES if path.stem in ("utils", "helpers", "misc", "common")] == []

"""The direction of imports: serve_app -> actors -> runtime; torch and ray only where they belong."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {  # folder -> top-level packages that no file in it may import, at whatever depth of the file
    "runtime": {"ray", "actors", "serve_app", "starlette", "fastapi", "transformers"},
    "runtime/core": {"torch", "triton"},
    "runtime/text": {"torch", "triton", "transformers"},
    "runtime/structured": {"torch", "triton"},
    "runtime/output": {"torch", "triton", "transformers"},
    "actors": {"serve_app", "transformers"},
    "serve_app": {"torch", "triton", "transformers"},
}

PACKAGES_BELOW = {  # package or module of runtime -> the others of runtime that its files may import
    "core": set(),
    "child": {"core"},
    "loading": {"core", "models"},
    "kernels": {"core"},
    "text": {"core", "child", "loading"},
    "structured": {"core", "child", "text"},
    "output": {"core", "structured", "text"},
    "quant": {"core", "kernels"},
    "models": {"core", "kernels", "quant"},
    "worker": {"core", "loading", "kernels", "quant", "models", "text", "structured"},
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; write it out"
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_file_imports_what_its_folder_must_not(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imports_of(path)
        if module.split(".")[0] in FORBIDDEN[folder]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES_BELOW)
def test_the_packages_of_runtime_import_only_those_below_them(package: str):
    allowed = PACKAGES_BELOW[package] | {package}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted([*(ROOT / "runtime" / package).rglob("*.py"), *ROOT.glob(f"runtime/{package}.py")])
        for line, module in imports_of(path)
        if module.startswith("runtime.") and module.split(".")[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_all_functions_of_kernels_but_those_in_tritons_language_have_types():
    """mypy cannot tell them apart: its settings let functions without types pass in runtime/kernels."""
    untyped = []
    for path in sorted((ROOT / "runtime" / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(d) for d in node.decorator_list):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
            missing = [a.arg for a in arguments if a.annotation is None and a.arg != "self"]
            if missing or node.returns is None:
                untyped.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}({', '.join(missing)})")
    assert not untyped, "\n".join(untyped)


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (["serve_app.cli"], ["torch", "ray", "pydantic", "tokenizers"]),  # --help is immediate
        (["serve_app.application", "serve_app.protocol.sse"], ["torch", "ray", "actors.wire.transport"]),
        (
            ["actors.wire.engine_client"],
            ["ray", "actors.wire.transport", "actors.wire.messages"],
        ),  # an interface, whatever is behind
        pytest.param(["serve_app.app", "actors.engine.supervisor"], ["torch", "triton"], marks=pytest.mark.long),
        (["runtime.core.scheduler", "runtime.core.engine"], ["torch", "ray", "tokenizers"]),
        (["runtime.text.tokenizer", "runtime.text.chat", "runtime.text.stream"], ["torch", "ray"]),
        (["runtime.structured.engines", "runtime.structured.compiler"], ["torch", "ray", "tokenizers"]),
        (["runtime.llm"], ["torch", "ray"]),
        (["runtime.inspection"], ["torch", "ray"]),
        (["runtime.loading.resolve"], ["torch", "ray", "huggingface_hub"]),
    ],
)
def test_what_importing_really_loads(modules: list[str], unwanted: list[str]):
    code = f"import sys, {', '.join(modules)}\nprint(*(m for m in {unwanted!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.long
def test_runtime_loads_no_ray():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "runtime").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nassert 'ray' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr

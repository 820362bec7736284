"""The direction of imports: serve_app -> actors -> runtime; torch and ray only where they belong."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {  # folder -> top-level packages that no file in it may import, at whatever depth of the file
    "runtime": {"ray", "actors", "serve_app", "starlette", "fastapi", "transformers"},
    "runtime/core": {"torch", "triton"},
    "runtime/media": {"torch", "triton", "transformers"},
    "runtime/text": {"torch", "triton", "transformers"},
    "runtime/structured": {"torch", "triton"},
    "runtime/output": {"torch", "triton", "transformers"},
    "actors": {"serve_app", "transformers"},
    "serve_app": {"torch", "triton", "transformers"},
}

CORE_MAY_IMPORT = ("runtime.core", "runtime.base")  # of our own packages: extras import the core
TOPS = ("runtime", "actors", "serve_app")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; write it out"
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_import_only_what_they_may(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imports_of(path)
        if module.split(".")[0] in FORBIDDEN[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_is_closed():
    """The core and all that it imports, however far: extras import the core, and never the other way round.

    All of it is short enough to be read."""
    arrows = _module_arrows(*TOPS)
    open_modules = [module for module in arrows if module.startswith("runtime.core")]
    closure = {*open_modules}
    while open_modules:
        new = arrows[open_modules.pop()] - closure
        closure |= new
        open_modules += new
    assert "runtime.base.model_info" in closure
    assert "runtime.base.config" not in closure
    assert [module for module in sorted(closure) if not module.startswith(CORE_MAY_IMPORT)] == []
    assert sum(len(_modules(*TOPS)[module].read_text().splitlines()) for module in closure) <= 3_720


def test_imports_between_files_have_no_circle():
    """Also under TYPE_CHECKING, and in functions."""
    assert _circles(_module_arrows(*TOPS, "benchmarks")) == {}


@cache
def _modules(*tops: str) -> dict[str, Path]:
    found = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[module.removesuffix(".__init__")] = path
    return found


@cache
def _module_arrows(*tops: str) -> dict[str, set[str]]:
    """Module -> the modules that it imports, anywhere in its file."""
    modules = _modules(*tops)
    arrows: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                arrows[module] |= {name if name in modules else node.module for name in names} & modules.keys()
        arrows[module].discard(module)
    return arrows


def _folders() -> dict[str, str]:
    """Module -> its folder. A file beside folders counts as a folder of its own."""
    packages, folders = {}, {}
    for module, path in _modules(*TOPS).items():
        packages[module] = module if path.name == "__init__.py" else module.rpartition(".")[0]
    parents = {package.rpartition(".")[0] for package in packages.values()}
    for module, package in packages.items():
        folders[module] = module if package in parents else package
    return folders


def _arrows() -> dict[str, set[str]]:
    """Folder -> the folders that its files import, also under TYPE_CHECKING."""
    folders = _folders()
    arrows: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for module, targets in _module_arrows(*TOPS).items():
        arrows[folders[module]] |= {folders[target] for target in targets} - {folders[module]}
    return arrows


def _circles(arrows: dict[str, set[str]]) -> dict[str, list[str]]:
    """Return the nodes of circles and above them, with their arrows to each other."""
    order: dict[str, None] = {}
    while ready := [node for node in arrows if node not in order and arrows[node] <= order.keys()]:
        order |= dict.fromkeys(ready)
    return {node: sorted(targets - order.keys()) for node, targets in arrows.items() if node not in order}


def test_imports_between_folders_have_no_circle():
    """Also under TYPE_CHECKING: a folder can be read without the folders above it."""
    assert _circles(_arrows()) == {}


def test_imports_between_rooms_have_no_circle():
    """A room is a folder of `runtime`, `actors` or `serve_app`, with the folders in it."""
    rooms: dict[str, set[str]] = {}
    for module, targets in _module_arrows(*TOPS).items():
        room = ".".join(module.split(".")[:2])
        rooms.setdefault(room, set()).update({".".join(target.split(".")[:2]) for target in targets} - {room})
    assert _circles(rooms) == {}


def test_private_names_stay_in_their_file():
    """A name that another file imports is public."""
    private = [
        f"{path.relative_to(ROOT)}:{node.lineno} {alias.name} of {node.module}"
        for top in TOPS
        for path in sorted((ROOT / top).rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TOPS
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private, "\n".join(private)


def test_private_parts_of_ray_stay_in_their_folder():
    """Another version of Ray then changes one folder, and actors/ray/private.py states what a version lacks."""
    own = ROOT / "actors" / "ray"
    private = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for top in ("runtime", "actors", "serve_app")
        for path in sorted((ROOT / top).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if own not in path.parents and re.search(r"\bray(\.serve)?(\._private|\._raylet)|_get_global_client", line)
    ]
    assert not private, "\n".join(private)


def test_kernel_functions_outside_triton_have_types():
    """mypy cannot distinguish them: its settings accept functions without types in runtime/kernels."""
    untyped = []
    for path in sorted((ROOT / "runtime" / "kernels").rglob("*.py")):
        for node in nodes_of(path):
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
            ["ray", "actors.wire.transport", "actors.wire.link_messages"],
        ),  # an interface, whatever is behind
        pytest.param(["serve_app.app", "actors.engine.supervisor"], ["torch", "triton"], marks=pytest.mark.long),
        (["runtime.core.scheduler", "runtime.core.engine"], ["torch", "ray", "tokenizers"]),
        (["runtime.text.tokenizer", "runtime.text.chat", "runtime.text.stream"], ["torch", "ray"]),
        (["runtime.structured.matching.factory", "runtime.structured.compiler"], ["torch", "ray", "tokenizers"]),
        (["runtime.llm"], ["torch", "ray"]),
        (["runtime.inspection"], ["torch", "ray"]),
        (["runtime.loading.resolve"], ["torch", "ray", "huggingface_hub"]),
        (["runtime.media.processor"], ["torch", "ray", "PIL", "httpx"]),  # Pillow runs in a child
    ],
)
def test_imports_load_only_what_they_may(modules: list[str], unwanted: list[str]):
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

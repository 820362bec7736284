"""`from callboard import LLM`: the contents of an install, and its behaviour beside modules of the same names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import callboard
from runtime.child import Child
from runtime.start import PACKAGES

ROOT = Path(__file__).parents[2]
SHADOWS = {"runtime.py": "x = 1", "actors.py": "x = 1", "random.py": "x = 1", "serve_app.py": "x = 1"}


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """A user's folder with files of the same names as packages of Callboard, and as a module of Python."""
    folder = tmp_path / "user"
    folder.mkdir()
    for name, text in SHADOWS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The packages as a wheel has them: side by side."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "serve_app/public/callboard", site / "callboard")
    for name in PACKAGES:
        (site / name).symlink_to(ROOT / name)
    return site


def run(code: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """A script of the user's, in the user's folder."""
    script = folder / "script.py"
    script.write_text(code)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder, env=env, timeout=600)


def test_every_public_name_is_there_and_no_other():
    assert set(callboard.__all__) == {name for name in dir(callboard) if getattr(callboard, name) is not None}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = callboard.Nothing


def test_a_wheel_has_the_public_package_once():
    settings = read_configuration(ROOT / "pyproject.toml")
    packages = [p for p in settings["tool"]["setuptools"]["packages"] if "callboard" in p or "public" in p]
    assert packages == ["callboard"]
    assert settings["project"]["scripts"]["callboard"] == "callboard.__main__:main"


def test_importing_the_public_package_loads_nothing_heavy(installed: Path, tmp_path: Path):
    code = (
        "import sys, callboard; callboard.SamplingParams; print('numpy' in sys.modules, 'runtime.llm' in sys.modules)"
    )
    done = run(code, tmp_path, installed)
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize("place", ["checkout", "installed"])
def test_a_script_may_be_beside_modules_of_the_same_names(place: str, shadows: Path, installed: Path, request):
    (shadows / "random.py").unlink()  # it would take the place of Python's own in the script itself
    path = [installed] if place == "installed" else [ROOT, ROOT / "serve_app/public"]
    code = "from callboard import LLM; import runtime, actors, serve_app; print(runtime.__file__, actors.__file__)"
    done = run(code, shadows, *path)
    home = path[0]
    assert done.stdout.split() == [str(home / "runtime/__init__.py"), str(home / "actors/__init__.py")], done.stderr


def test_a_module_of_the_same_name_that_is_loaded_is_named(shadows: Path, installed: Path):
    done = run("import runtime, callboard", shadows, installed)
    *_, last = done.stderr.splitlines()
    assert last == (
        f"ImportError: The module 'runtime' ({shadows / 'runtime.py'}) is loaded, and Callboard has a package of this "
        "name; rename that module."
    )


def test_the_command_finds_its_own_packages_first(shadows: Path, installed: Path):
    (shadows / "random.py").unlink()
    env = os.environ | {"PYTHONPATH": f"{shadows}{os.pathsep}{installed}"}
    command = [sys.executable, "-P", "-m", "callboard", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=shadows, env=env, timeout=600)
    assert done.stdout == f"callboard {callboard.__version__}\n", done.stderr


def test_a_child_process_finds_its_modules_in_any_folder(shadows: Path, monkeypatch):
    monkeypatch.chdir(shadows)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in `python -c`
    child = Child(1 << 30)
    try:
        assert child.run(60, len, "abc") == 3
    finally:
        child.kill()


@pytest.mark.rotated
def test_generate_runs_in_any_folder(write_tiny_gguf, shadows: Path):
    model = str(write_tiny_gguf())
    flags = ["--model", model, "--max-tokens", "1", "--num-threads", "1", "--kv-cache-memory", "0.01"]
    command = [sys.executable, "-P", "-m", "serve_app.cli", "generate", "Once", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=shadows, env=env, timeout=600)
    assert done.returncode == 0, done.stderr


def test_doctors_probes_do_not_search_the_current_folder(monkeypatch):
    from serve_app.tools import doctor

    commands = []
    monkeypatch.setattr(doctor, "_run", lambda *command: commands.append(command))
    list(doctor.findings("127.0.0.1:1"))
    doctor._torch()
    programs = [command for command in commands if command[0] == sys.executable]
    assert programs
    assert all(command[1] == "-P" for command in programs)

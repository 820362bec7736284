"""The image's build needs only the files that its ignore file admits; its commands run without a daemon."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from actors.ray.environment import CLUSTER
from actors.ray.haproxy import COMMAND

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docs/deploy/Dockerfile"
_AS_ROOT = ("apt-get", "useradd")  # commands of the system, which a test leaves out


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with its text in one line."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def admitted() -> list[str]:
    first, *others = Path(f"{DOCKERFILE}.dockerignore").read_text().split()
    assert first == "*"
    return [line.removeprefix("!") for line in others if line.startswith("!")]


def test_the_image_has_the_environment_of_a_node():
    found: dict[str, str] = {}
    for name, rest in instructions():
        if name == "ENV":
            found |= dict(pair.split("=", 1) for pair in rest.split())
    assert found.items() >= CLUSTER.items()
    assert found[COMMAND] == "/opt/callboard/bin/haproxy"


def test_the_image_runs_as_a_user_without_rights():
    last = [rest for name, rest in instructions() if name in ("USER", "CMD")]
    assert last == ["1000", '["callboard", "serve", "--host", "0.0.0.0"]']  # Kubernetes checks a number only


@pytest.mark.thorough
@pytest.mark.processes
def test_the_commands_of_the_image_install_callboard(tmp_path: Path):
    """Packages come from this environment, so that pip finds its requirements met."""
    source = tmp_path / "src"
    source.mkdir()
    for name in admitted():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    bin_folder = tmp_path / "opt/callboard/bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    environment |= {"PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "DEVICE": "cpu"}
    for name, rest in instructions():
        if name != "RUN" or any(word in rest for word in _AS_ROOT):
            continue
        command = re.sub(r"(?<=[ '])/(?=opt/|wheel)", f"{tmp_path}/", re.sub(r"^--mount=\S+ ", "", rest))
        done = subprocess.run(["sh", "-ec", command], cwd=source, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if "-m venv" in command:
            (packages,) = (tmp_path / "opt").rglob("site-packages")
            (packages / "session.pth").write_text(sysconfig.get_path("purelib"))
    home = tmp_path / "home"
    home.mkdir()
    for arguments, words in ((["--version"], "callboard 0.1.0"), (["doctor"], "Ready to serve.")):
        done = subprocess.run(
            [bin_folder / "callboard", *arguments], cwd=home, env=environment, capture_output=True, text=True
        )
        assert words in done.stdout, done.stdout + done.stderr
    place = subprocess.run(
        [bin_folder / "python", "-c", "import runtime; print(runtime.__path__)"],
        cwd=home, env=environment, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert str(tmp_path / "opt") in place
    assert (bin_folder / "haproxy").read_text().startswith("#!/bin/sh\n")

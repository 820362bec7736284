"""Models and adapters in buckets: complete, of one version, or not at all. fsspec's memory is the bucket."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from runtime.base.types import CallboardError
from runtime.loading.resolve import resolve, resolve_adapter
from runtime.loading.sources import cloud
from runtime.loading.sources.names import CLOUD_PACKAGES, CloudName, HubName, absolute, parse
from runtime.loading.sources.stored import stored_models
from runtime.output.fields import FieldError
from serve_app.service.allowed_folder import path_within

MODEL = "memory://bucket/llama"
WEIGHTS = bytes(range(256)) * 40
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "original/model.bin": b"x"}
Read = Callable[..., bytes]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch) -> Any:
    """Write files with `put`, see requests for bytes in `reads`, and let `fail` answer them first."""
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CLOUD_PACKAGES, "memory", "fsspec")
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(cloud, "_PIECE_BYTES", 1000)
    monkeypatch.setattr("threading.Event.wait", lambda *_: None)  # the pause before another try
    system, made = MemoryFileSystem(), SimpleNamespace(reads=[], fail=lambda path, start: None)
    read = system.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> bytes:
        made.reads.append((path.rpartition("/")[2], start))
        failed = made.fail(path, start)
        return read(path, start, end) if failed is None else failed

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    made.system = system
    made.put = lambda name, data, folder=MODEL: system.pipe_file(f"{folder}/{name}", data)
    for name, data in FILES.items():
        made.put(name, data)
    return made


def fetched(name: str = MODEL) -> Path:
    return resolve(name, progress=False)


def cut(bucket: Any, at: int) -> None:
    """End each request of the weights from byte `at` on with an error."""

    def fail(path: str, start: int) -> None:
        if path.endswith(".safetensors") and start >= at:
            raise ConnectionResetError("reset by peer")

    bucket.fail = fail


def test_a_folder_of_a_bucket_is_a_model_folder(bucket):
    folder = fetched()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in FILES.items() if "/" not in name
    }
    num_reads = len(bucket.reads)
    assert fetched() == folder
    assert len(bucket.reads) == num_reads, "stored files were fetched again"


def test_a_front_fetches_no_weights(bucket):
    assert not [path for path in resolve(MODEL, weights=False).iterdir() if path.name.endswith(".safetensors")]
    assert (fetched() / "model.safetensors").exists()


def test_a_download_from_a_bucket_resumes(bucket, tmp_path):
    cut(bucket, 5000)
    with pytest.raises(CallboardError, match=r"reset by peer.*5\.0 KB of model\.safetensors are kept\.$"):
        fetched()
    assert not list(tmp_path.rglob("snapshots"))
    bucket.fail, bucket.reads[:] = lambda *_: None, []
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert min(start for name, start in bucket.reads if name == "model.safetensors") == 5000


def test_errors_of_single_requests_are_repeated(bucket):
    failed: set[int] = set()

    def fail(path: str, start: int) -> None:
        if start not in failed:
            failed.add(start)
            raise TimeoutError

    bucket.fail = fail
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_changed_object_is_not_resumed(bucket):
    cut(bucket, 5000)
    with pytest.raises(CallboardError):
        fetched()
    other = WEIGHTS[::-1]
    bucket.put("model.safetensors", other)
    bucket.fail, bucket.reads[:] = lambda *_: None, []
    assert (fetched() / "model.safetensors").read_bytes() == other
    assert ("model.safetensors", 0) in bucket.reads


def test_a_change_within_a_download_is_noticed(bucket, tmp_path):
    def fail(path: str, start: int) -> None:
        if path.endswith(".safetensors") and start == 3000:
            bucket.fail = lambda *_: None
            bucket.put("model.safetensors", WEIGHTS[::-1])

    bucket.fail = fail
    with pytest.raises(CallboardError, match="has changed while it was fetched"):
        fetched()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS[::-1]


def test_a_changed_model_is_another_snapshot(bucket):
    old = fetched()
    bucket.put("model.safetensors", WEIGHTS[::-1])
    bucket.reads.clear()
    new = fetched()
    assert (old / "model.safetensors").read_bytes() == WEIGHTS  # engines may still read it
    assert (new / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert {name for name, _ in bucket.reads} == {"model.safetensors"}, "unchanged files were fetched again"


def test_a_wrong_length_is_refused(bucket, tmp_path):
    bucket.fail = lambda path, start: b"x" * 11_000 if path.endswith(".safetensors") else None
    with pytest.raises(CallboardError, match=r"has 11000 bytes where 10240 are announced; it was deleted"):
        fetched()
    bucket.fail = lambda path, start: b"" if path.endswith(".safetensors") and start >= 9000 else None
    with pytest.raises(CallboardError, match=r"it ends after 9000 of 10240 bytes"):
        fetched()
    assert not list(tmp_path.rglob("snapshots"))


def test_a_wrong_hash_is_refused(bucket, monkeypatch, tmp_path):
    listed, md5 = MemoryFileSystem.ls, hashlib.md5(WEIGHTS[::-1]).digest()

    def ls(self: Any, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return [entry | {"content_settings": {"content_md5": md5}} for entry in listed(self, path, detail, **kwargs)]

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(CallboardError, match=f"has MD5 .* where {md5.hex()} is announced; it was deleted"):
        fetched()
    assert not list(tmp_path.rglob("snapshots"))


def test_an_unreachable_bucket_leaves_the_stored_model(bucket, monkeypatch):
    folder = fetched()

    def ls(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route; AWS_SECRET_ACCESS_KEY=hidden&sig=hidden")

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    assert fetched() == folder
    with pytest.raises(CallboardError) as refused:
        fetched("memory://bucket/other")
    assert "hidden" not in str(refused.value)
    assert "ConnectionError: no route" in str(refused.value)
    assert refused.value.__suppress_context__  # tracebacks in logs lack the cause, too


def test_gguf_files_of_a_bucket(bucket):
    for name in ("m-Q2_K.gguf", "m-Q4_K_M.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        bucket.put(name, b"GGUF" + name.encode(), "memory://bucket/gguf")
    assert fetched("memory://bucket/gguf").name == "m-Q4_K_M.gguf"
    assert fetched("memory://bucket/gguf/m-Q2_K.gguf").read_bytes() == b"GGUFm-Q2_K.gguf"
    first = fetched("memory://bucket/gguf/b-00001-of-00002.gguf")
    assert sorted(path.name for path in first.parent.iterdir()) == ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]
    with pytest.raises(CallboardError, match=r"has no GGUF file 'n\.gguf'; it has"):
        fetched("memory://bucket/gguf/n.gguf")


def test_an_empty_place_is_named(bucket):
    with pytest.raises(CallboardError, match=r"^memory://bucket/none has no files that you may read; check"):
        fetched("memory://bucket/none")


def test_an_adapter_of_a_bucket_is_fetched(bucket, tmp_path):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"12345678"}
    for name, data in files.items():
        bucket.put(name, data, "memory://bucket/sql")
    folder = Path(resolve_adapter("memory://bucket/sql"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert resolve_adapter(str(tmp_path)) == str(tmp_path)


def test_models_of_buckets_are_listed_and_removed(bucket, tmp_path):
    fetched()
    (model,) = (one for one in stored_models(tmp_path / "cache") if one.name.startswith("memory:"))
    assert (model.name, model.num_bytes, model.is_whole) == (MODEL, len(WEIGHTS) + 4, True)
    model.remove()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_missing_package_is_named():
    try:
        import gcsfs  # noqa: F401
    except ImportError:
        with pytest.raises(CallboardError, match=r"needs the package gcsfs.* pip install 'callboard\[cloud\]'$"):
            fetched("gs://bucket/llama")


@pytest.mark.parametrize(
    "name", ["s3://KEY:hidden@bucket/m", "s3://KEY@bucket/m", "az://box/m?sig=hidden", "abfss://box:hidden@x.y/m"]
)
def test_a_name_with_credentials_is_refused_unseen(name: str):
    with pytest.raises(CallboardError, match="credentials or options") as refused:
        fetched(name)
    assert "hidden" not in str(refused.value)
    assert "KEY" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("s3://bucket/a/llama/", CloudName("s3://bucket/a/llama")),
        ("abfss://box@account.dfs.core.windows.net/m", CloudName("abfss://box@account.dfs.core.windows.net/m")),
        ("hf://org/m", HubName("org/m")),
        ("hf://org/m@v2", HubName("org/m", "v2")),
        ("hf://org/m@v2/a/m.gguf", HubName("org/m", "v2", "a/m.gguf")),
        ("hf://org", None),
        ("ftp://bucket/m", None),
    ],
)
def test_meaning_of_a_bucket_name(name: str, meaning: HubName | CloudName | None):
    assert parse(name) == meaning


def test_clients_stay_in_the_folder_of_the_bucket():
    folder = "s3://bucket/adapters/"
    for path in ("sql", "s3://bucket/adapters/sql"):
        assert path_within(folder, path, "lora_path", "adapters") == "s3://bucket/adapters/sql"
    for path in ("../other", "s3://bucket/adapters-2/sql", "s3://other/sql", "/sql?sig=1", "gs://bucket/adapters/sql"):
        with pytest.raises(FieldError, match="which is not in this server's folder of adapters"):
            path_within(folder, path, "lora_path", "adapters")
    assert absolute("s3://bucket/adapters") == "s3://bucket/adapters"
    assert absolute("adapters").startswith("/")

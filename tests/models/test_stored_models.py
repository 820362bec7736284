"""`callboard pull`, `ls` and `rm`, with a hub, a web server and wheels of the tests' own."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from runtime.loading.sources.stored import stored_models
from serve_app import cli
from tests.models.test_loading_sources import FILES, SHA, gguf
from tests.support.models.fake_hub import FakeHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Iterator[FakeHub]:
    dense = {"config.json": b"{}", "model.safetensors": b"x" * 2000}
    with FakeHub({"org/m-GGUF": {SHA: FILES}, "org/dense": {SHA: dense}}, {"main": SHA}) as fake:
        fake.use(tmp_path, monkeypatch)
        yield fake


@pytest.fixture
def run(hub, capsys):
    """A command's exit code and its output."""

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        return code, *capsys.readouterr()

    return call


def rows(text: str) -> dict[str, list[str]]:
    """name -> size and the rest, as `ls` prints them."""
    return {line.split("  ")[0]: line.split("  ")[1:] for line in text.splitlines()[1:-1]}


def test_pull_names_the_size_and_the_place(run, tmp_path):
    code, out, _ = run("pull", "org/m-GGUF:Q2_K")
    assert code == 0
    assert out.startswith(f"org/m-GGUF:Q2_K: 3.0 KB in {tmp_path / 'hub'}")


def test_ls_has_models_of_both_caches(run, hub, tmp_path, monkeypatch):
    assert run("ls") == (0, "No model is stored; `callboard pull MODEL` fetches one.\n", "")
    for name in ("org/m-GGUF:Q2_K", "org/m-GGUF:BF16", "org/dense"):
        run("pull", name)
    wheel = tmp_path / "cache" / "llm-tiny-1.2"
    wheel.mkdir(parents=True)
    (wheel / "tiny.gguf").write_bytes(gguf(1, 2000))
    monkeypatch.delenv("HF_ENDPOINT")
    address = f"{hub.url}/org/m-GGUF/resolve/main/m-Q4_K_M.gguf"
    run("pull", address)
    code, out, _ = run("ls")
    assert code == 0
    found = {name: " ".join(rest).split()[:2] for name, rest in rows(out).items()}
    assert found == {
        address: ["60", "KB"],
        "org/dense": ["2.0", "KB"],
        "org/m-GGUF:BF16": ["6.0", "KB"],
        "org/m-GGUF:Q2_K": ["3.0", "KB"],
        "pypi:llm-tiny==1.2": ["2.0", "KB"],
    }
    assert str(wheel) in out
    assert out.splitlines()[-1].split() == ["73", "KB", "in", "all"]


def test_rm_of_a_quantization_leaves_the_others(run, tmp_path):
    for name in ("org/m-GGUF:Q2_K", "org/m-GGUF:BF16"):
        run("pull", name)
    assert run("rm", "--yes", "org/m-GGUF:BF16") == (0, "Removed org/m-GGUF:BF16: 6.0 KB are free again.\n", "")
    (left,) = stored_models(tmp_path / "cache")
    assert left.name == "org/m-GGUF:Q2_K"
    assert sum(path.stat().st_size for path in (tmp_path / "hub").rglob("blobs/*")) == len(FILES["m-Q2_K.gguf"])


@pytest.mark.parametrize("names", [["org/m-GGUF", "org/dense"], ["org/dense", "org/m-GGUF:Q2_K", "org/m-GGUF:BF16"]])
def test_rm_of_all_models_frees_all_bytes(run, tmp_path, names: list[str]):
    for name in ("org/m-GGUF:Q2_K", "org/m-GGUF:BF16", "org/dense"):
        run("pull", name)
    code, _, err = run("rm", "--yes", *names)
    assert code == 0, err
    assert stored_models(tmp_path / "cache") == []
    assert not list((tmp_path / "hub").rglob("blobs/*"))


def test_rm_of_a_wheel_and_of_an_address(run, hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT")
    address = f"{hub.url}/org/m-GGUF/resolve/main/m-BF16/m-BF16-00001-of-00002.gguf"
    run("pull", address)
    wheel = tmp_path / "cache" / "llm-tiny-1.2"
    wheel.mkdir(parents=True)
    (wheel / "tiny.gguf").write_bytes(gguf(1))
    code, _, err = run("rm", "--yes", "pypi:llm-tiny==1.2", address)
    assert code == 0, err
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_rm_confirms_on_a_terminal(run, tmp_path, monkeypatch):
    run("pull", "org/dense")
    answers = iter(["", "y"])
    monkeypatch.setattr("sys.stdin", Mock(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert run("rm", "org/dense") == (0, "", "")
    assert len(stored_models(tmp_path / "cache")) == 1
    assert run("rm", "org/dense")[1] == "Removed org/dense: 2.0 KB are free again.\n"
    assert stored_models(tmp_path / "cache") == []


def test_rm_without_a_terminal_needs_a_flag(run, monkeypatch):
    run("pull", "org/dense")
    monkeypatch.setattr("sys.stdin", Mock(isatty=lambda: False))
    assert run("rm", "org/dense") == (
        1, "", "callboard: org/dense (2.0 KB) is not removed without a question; pass --yes.\n",
    )  # fmt: skip


def test_rm_of_a_model_that_is_not_stored(run):
    run("pull", "org/dense")
    code, _, err = run("rm", "--yes", "org/dens")
    assert code == 1
    assert err == "callboard: The model 'org/dens' is not stored on this machine; meant org/dense?\n"


def test_interrupted_download_is_listed_and_removed(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.loading.sources.download._TRIES", 0)
    hub.cut_at = 1500
    assert run("pull", "org/dense")[0] == 1
    (row,) = rows(run("ls")[1])
    assert row == "org/dense (incomplete)"
    assert run("rm", "--yes", "org/dense")[0] == 0
    assert stored_models(tmp_path / "cache") == []

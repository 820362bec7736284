"""The meaning of names, and downloads from a hub and from web servers, which are fakes on loopback."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from runtime.base.types import CallboardError
from runtime.loading.resolve import cache_folder, resolve
from runtime.loading.sources import download
from runtime.loading.sources.gguf_choice import choose, encoder_beside, gguf_models, image_encoders
from runtime.loading.sources.names import HubName, WebFile, parse
from runtime.loading.sources.near_names import nearest
from runtime.loading.sources.short_names import SHORT_NAMES, near_name
from runtime.loading.sources.stored import stored_model
from tests.support.models.fake_hub import FakeHub

SHA = "c" * 40


def gguf(seed: int, size: int = 3000) -> bytes:
    return b"GGUF" + bytes([seed]) * size


FILES = {
    "README.md": b"about",
    "config.json": b"{}",
    "m-Q2_K.gguf": gguf(2),
    "m-Q4_K_M.gguf": gguf(4, 60_000),
    "m-BF16/m-BF16-00001-of-00002.gguf": gguf(16),
    "m-BF16/m-BF16-00002-of-00002.gguf": gguf(17),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Iterator[FakeHub]:
    """A hub with a repository of GGUF files, one without Q4_K_M, and one with both kinds of files."""
    both = {"config.json": b"{}", "model.safetensors": b"x" * 2000, "m-Q8_0.gguf": gguf(8)}
    few = {"m-Q8_0.gguf": gguf(8), "m-Q3_K_S.gguf": gguf(3)}
    seeing = {"m-Q8_0.gguf": gguf(8), "mmproj-F16.gguf": gguf(1)}
    found = {"org/m-GGUF": FILES, "org/few": few, "org/both": both, "org/seeing": seeing}
    with FakeHub({name: {SHA: files} for name, files in found.items()}, {"main": SHA}) as fake:
        fake.use(tmp_path, monkeypatch)
        yield fake


def had(model: str) -> tuple[str, bytes]:
    path = resolve(model, progress=False)
    return path.name, path.read_bytes()


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2", HubName("gpt2")),
        ("org/m", HubName("org/m")),
        ("org/m:Q4_K_M", HubName("org/m", gguf="Q4_K_M")),
        ("org/m:sub/m.gguf", HubName("org/m", gguf="sub/m.gguf")),
        ("https://huggingface.co/org/m", HubName("org/m")),
        ("hf.co/org/m:Q8_0", HubName("org/m", gguf="Q8_0")),
        ("https://huggingface.co/org/m/tree/main", HubName("org/m", "main")),
        ("https://huggingface.co/org/m/tree/main/BF16", HubName("org/m", "main", "BF16")),
        ("https://huggingface.co/org/m/tree/refs%2Fpr%2F1", HubName("org/m", "refs/pr/1")),
        ("https://huggingface.co/org/m/blob/v2/a/m.gguf", HubName("org/m", "v2", "a/m.gguf")),
        ("https://huggingface.co/org/m/resolve/main/m.gguf?download=true", HubName("org/m", "main", "m.gguf")),
        ("https://huggingface.co/org/m/blob/main/config.json", HubName("org/m", "main")),
        ("https://huggingface.co/org/m?show_file_info=m.gguf", HubName("org/m", gguf="m.gguf")),
        ("https://huggingface.co/datasets/org/m", None),
        ("https://example.org/a/m.gguf?x=1", WebFile("https://example.org/a/m.gguf?x=1")),
        ("https://example.org/page", None),
        ("https://[::1/m.gguf", None),
        ("folder/m.gguf", None),
        ("a/b/c", None),
        ("llama3.2:1b", HubName("bartowski/Llama-3.2-1B-Instruct-GGUF", gguf="Q4_K_M")),
        ("llama3.2:5b", None),
    ],
)
def test_meaning_of_a_name(text: str, name: HubName | WebFile | None):
    assert parse(text) == name


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("q2_k", "m-Q2_K.gguf"),
        ("BF16", "m-BF16/m-BF16-00001-of-00002.gguf"),
        ("m-BF16-00002-of-00002.gguf", "m-BF16/m-BF16-00001-of-00002.gguf"),
        ("Q4_K", "m-Q4_K_M.gguf"),
    ],
)
def test_choice_among_gguf_files(asked: str, file: str):
    assert choose(gguf_models(FILES), asked, "it").files[0] == file


def test_labels_of_gguf_files():
    names = ["a.Q4_0.gguf", "b-UD-Q4_K_XL.gguf", "c-fp16.gguf", "IQ3_M/d.gguf", "e.gguf", "f-imatrix.gguf"]
    assert [m.label for m in gguf_models(names)] == ["IQ3_M", "Q4_0", "UD-Q4_K_XL", "FP16", ""]


def test_a_missing_quantization_lists_the_existing_ones():
    with pytest.raises(CallboardError, match=r"^it has no GGUF file 'Q9'; it has BF16, Q2_K, Q4_K_M\.$"):
        choose(gguf_models(FILES), "Q9", "it")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen/Qwen3-0.6", "Qwen/Qwen3-0.6B"),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
        ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("llama3.1", "meta-llama/Llama-3.1-8B-Instruct"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("HugingFaceTB/SmolLM2-135M-Instrct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google/gemma-3-270m-it", None),
        ("org/quite-another", None),
    ],
)
def test_nearest_name(name: str, near: str | None):
    known = ["HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "google/gemma-3-270m-it"]
    assert nearest(name, [*known, "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"]) == near


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("qwen3", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("Qwen3:latest", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("qwen3:30b-a3b-q8_0", "Qwen/Qwen3-30B-A3B-GGUF:Q8_0"),
        ("llama3.1:8b-instruct-q5_K_M", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q5_K_M"),
        ("gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF:MXFP4"),
        ("gpt2", "gpt2"),
        ("org/qwen3", "org/qwen3"),
    ],
)
def test_short_names_are_files_of_the_hub(name: str, file: str):
    assert str(parse(name)) == file


def test_a_short_name_is_fetched_and_found_again(hub: FakeHub):
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = {SHA: {"Qwen3-0.6B-Q8_0.gguf": gguf(8), "Qwen3-0.6B-Q4_K_M.gguf": gguf(4)}}
    assert had("qwen3:0.6b") == ("Qwen3-0.6B-Q8_0.gguf", gguf(8))
    assert resolve("qwen3:0.6b", progress=False) == resolve("Qwen/Qwen3-0.6B-GGUF:Q8_0", progress=False)
    assert stored_model("qwen3:0.6b", cache_folder()).name == "Qwen/Qwen3-0.6B-GGUF:Q8_0"


def test_every_short_name_has_a_file():
    for name, tags in SHORT_NAMES.items():
        for tag, file in tags.items():
            assert re.fullmatch(r"[a-z0-9.-]+:[a-z0-9.-]+", f"{name}:{tag}")
            assert re.fullmatch(r"[\w-]+/[\w.-]+-GGUF(:\w+)?", file), file
            assert str(parse(f"{name}:{tag}")).startswith(file)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama3.2:2b", "llama3.2"),
        ("lama3.2:1b", "llama3.2:1b"),
        ("mistrall", "mistral"),
        ("gema3:99b", "gemma3"),
        ("something:else", None),
    ],
)
def test_a_wrong_short_name_has_a_near_one(name: str, near: str | None):
    assert near_name(name) == near


def test_an_unknown_short_name_names_a_near_one():
    with pytest.raises(CallboardError, match=r"'lama3\.2:1b' is not among the short names .*; meant llama3\.2:1b\?"):
        resolve("lama3.2:1b")


def test_an_unknown_tag_lists_the_known_ones():
    with pytest.raises(CallboardError, match=r"has a tag that is unknown here; llama3\.2 has 3b, 1b\.$"):
        resolve("llama3.2:5b")


def test_a_known_name_has_no_typing_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("Qwen/Qwen3-0.6B", "llama3.2:1b"):
        with pytest.raises(CallboardError, match=r"HF_HUB_OFFLINE is set; check the network\.$"):
            resolve(name)


def test_a_misspelled_file(tmp_path: Path):
    (tmp_path / "smollm.gguf").write_bytes(gguf(1))
    with pytest.raises(CallboardError, match=r"no model at .*smolm\.gguf'; meant .*/smollm\.gguf\?"):
        resolve(str(tmp_path / "smolm.gguf"))


# ---- folders --------------------------------------------------------------------------------------------------------


def test_the_only_gguf_file_of_a_folder(tmp_path: Path):
    for name in ("m-Q8_0.gguf", "mmproj-F16.gguf", "config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(gguf(1))
    assert resolve(str(tmp_path)) == resolve(str(tmp_path), weights=False) == tmp_path / "m-Q8_0.gguf"


def test_the_only_split_gguf_file_of_a_folder(tmp_path: Path):
    for i in (2, 1):
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(gguf(i))
    assert resolve(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"


def test_several_gguf_files_of_a_folder_are_listed(tmp_path: Path):
    for name in ("a-Q8_0.gguf", "a-Q4_0.gguf"):
        (tmp_path / name).write_bytes(gguf(1))
    with pytest.raises(CallboardError, match=r"several GGUF files; .* as .*/a-Q4_0\.gguf: a-Q4_0\.gguf, a-Q8_0\.gguf"):
        resolve(str(tmp_path))


# ---- a hub ----------------------------------------------------------------------------------------------------------


def test_gguf_repository_gives_q4_k_m(hub):
    assert had("org/m-GGUF") == ("m-Q4_K_M.gguf", FILES["m-Q4_K_M.gguf"])
    assert hub.ranges == [None]  # no other file was fetched


def test_gguf_repository_without_q4_k_m_gives_the_first(hub):
    assert had("org/few")[0] == "m-Q3_K_S.gguf"


@pytest.mark.parametrize("name", ["org/m-GGUF:bf16", "{hub}/org/m-GGUF/tree/main/m-BF16"])
def test_split_gguf_file_comes_with_all_parts(hub, name: str):
    path = resolve(name.format(hub=hub.url), progress=False)
    assert path.name == "m-BF16-00001-of-00002.gguf"
    assert path.with_name("m-BF16-00002-of-00002.gguf").read_bytes() == FILES["m-BF16/m-BF16-00002-of-00002.gguf"]


def test_address_of_one_gguf_file_of_the_hub(hub):
    assert had(f"{hub.url}/org/m-GGUF/resolve/main/m-Q2_K.gguf?download=true")[0] == "m-Q2_K.gguf"


def test_safetensors_are_preferred_to_gguf_files(hub):
    assert resolve("org/both", progress=False).is_dir()
    assert resolve("org/both:Q8_0", progress=False).name == "m-Q8_0.gguf"


def test_cached_gguf_file_is_found_without_the_hub(hub, monkeypatch):
    path = resolve("org/m-GGUF:Q2_K", progress=False)
    hub.ranges.clear()
    assert resolve("org/m-GGUF:Q2_K", progress=False) == path
    assert hub.ranges == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/m-GGUF:Q2_K", progress=False) == resolve("org/m-GGUF", progress=False) == path
    with pytest.raises(CallboardError, match=r"'org/m-GGUF:Q8_0' is not in the local cache and HF_HUB_OFFLINE is set"):
        resolve("org/m-GGUF:Q8_0", progress=False)


def test_a_wrong_hub_id_suggests_a_near_one(hub):
    resolve("org/few", progress=False)
    with pytest.raises(CallboardError, match=r"no model 'org/fews' that you may read; meant org/few\?"):
        resolve("org/fews", progress=False)


def test_without_a_hub_a_typing_error_is_mentioned(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CallboardError, match=r"and the name, where a typing error is as likely; meant Qwen/Qwen3-0\.6B\?"
    ):
        resolve("qwen/qwen3-06b", progress=False)


def test_an_interrupted_download_is_resumed(hub):
    hub.cut_at = 20_000
    assert had("org/m-GGUF")[1] == FILES["m-Q4_K_M.gguf"]
    assert hub.ranges[0] is None
    assert len(hub.ranges) > 2
    assert all(hub.ranges[1:])


@pytest.mark.parametrize("name", ["org/m-GGUF", "org/both"])
def test_a_gated_model_explains_access(hub, name: str):
    hub.is_gated = True
    with pytest.raises(
        CallboardError, match=f"^The hub model '{name}' is gated: accept its licence on the hub and set"
    ):
        resolve(name, progress=False)


def test_wrong_bytes_of_a_hub_are_deleted(hub, tmp_path):
    hub.wrong_bytes = True
    with pytest.raises(CallboardError, match=r"m-Q2_K\.gguf has SHA-256 \w+ where \w+ is announced; it was deleted"):
        resolve("org/m-GGUF:Q2_K", progress=False)
    assert not any(path.stat().st_size > 1000 for path in (tmp_path / "hub").rglob("*") if path.is_file())


@pytest.mark.long
def test_a_killed_download_is_resumed(hub, tmp_path):
    hub.cut_at, hub.goes_on = 40_000, threading.Event()
    code = "from runtime.loading.resolve import resolve; resolve('org/m-GGUF', progress=False)"
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        while sum(path.stat().st_size for path in tmp_path.rglob("*.incomplete")) < 20_000:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        hub.goes_on.set()
    (kept,) = [path.stat().st_size for path in tmp_path.rglob("*.incomplete")]
    hub.cut_at = None
    hub.ranges.clear()
    assert had("org/m-GGUF")[1] == FILES["m-Q4_K_M.gguf"]
    assert hub.ranges == [f"bytes={kept}-"]


def test_full_disk_is_named_before_anything_is_fetched(hub, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
    says = r"^The hub model 'org/m-GGUF:Q4_K_M' needs 60 KB of disk, but .* has 20 KB free; make room, or set HF_HOME "
    with pytest.raises(CallboardError, match=says):
        resolve("org/m-GGUF:Q4_K_M", progress=False)
    assert hub.ranges == []


# ---- web servers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def web(hub, monkeypatch) -> str:
    """The address of a folder of GGUF files on a web server."""
    monkeypatch.delenv("HF_ENDPOINT")
    return f"{hub.url}/org/m-GGUF/resolve/main"


def test_gguf_file_of_a_web_server_is_fetched_once(hub, web, tmp_path):
    path = resolve(f"{web}/m-Q2_K.gguf", progress=False)
    assert path.read_bytes() == FILES["m-Q2_K.gguf"]
    assert path.is_relative_to(tmp_path / "cache" / "web")
    assert resolve(f"{web}/m-Q2_K.gguf", progress=False) == path
    assert hub.ranges == [None]
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".gguf", ".lock"]


def test_split_gguf_file_of_a_web_server(web):
    path = resolve(f"{web}/m-BF16/m-BF16-00001-of-00002.gguf", progress=False)
    assert path.with_name("m-BF16-00002-of-00002.gguf").read_bytes() == FILES["m-BF16/m-BF16-00002-of-00002.gguf"]


def test_download_of_a_changed_file_begins_anew(hub, web, monkeypatch):
    hub.cut_at = 1500
    monkeypatch.setattr(download, "_TRIES", 0)  # the first failure is final
    with pytest.raises(
        CallboardError, match=r"cannot be fetched .*; check the network, and try again: 1\.5 KB are kept"
    ):
        resolve(f"{web}/m-Q2_K.gguf", progress=False)
    hub.cut_at = None
    hub.repos["org/m-GGUF"][SHA] = {**FILES, "m-Q2_K.gguf": gguf(9)}
    assert had(f"{web}/m-Q2_K.gguf")[1] == gguf(9)
    assert hub.ranges == [None, "bytes=1500-"]


def test_full_disk_for_a_file_of_a_web_server(web, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CallboardError, match=r"m-Q2_K\.gguf needs 3\.0 KB of disk, but .* set CALLBOARD_CACHE"):
        resolve(f"{web}/m-Q2_K.gguf", progress=False)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("{web}/m-Q9.gguf", "the server answers 404; check the address"),
        ("{web}/page.gguf", "starts with b'<htm', so it is no GGUF file"),
        ("{web}/mmproj-F16.gguf", "is no model by its name"),
        ("http://192.0.2.1/m.gguf", "cannot be fetched safely without encryption"),
        ("https://example.org/page", "There is no model at 'https://example.org/page'; a model is"),
    ],
)
def test_addresses_without_a_model(hub, web, address: str, says: str):
    hub.repos["org/m-GGUF"][SHA] = {**FILES, "page.gguf": b"<html>"}
    with pytest.raises(CallboardError, match=says):
        resolve(address.format(web=web), progress=False)


@pytest.mark.parametrize(
    "end",
    ["a/..%2F..%2F..%2Fhome%2Fm.gguf", "..%2f..%2f..%2fhome%2fm.gguf", "%2Fhome%2Fm.gguf", "%252e%252e%252fm.gguf"],
)
def test_an_address_is_stored_within_the_cache(web, tmp_path, end: str):
    (tmp_path / "home").mkdir()
    with pytest.raises(CallboardError, match="the server answers 404"):
        resolve(f"{web}/{end}", progress=False)
    assert list((tmp_path / "home").iterdir()) == []
    (home,) = (tmp_path / "cache" / "web").iterdir()
    assert all(path.parent == home for path in tmp_path.rglob("*.lock"))


@pytest.mark.parametrize(
    "address",
    [
        "{web}/m%00.gguf",
        "{web}/m%0A.gguf",
        "{web}/%2Em.gguf",
        "{web}/m%2F.gguf",
        "{web}/a%5C..%5Cm.gguf",
        "{web}/%ff.gguf",
        "{web}/m\ud800.gguf",
        "{web}/m.gguf?\x00",
        "http://a\0b/m.gguf",
        "https://a..b/m.gguf",
        "http://127.0.0.1:x/m.gguf",
        "{web}/" + 300 * "m" + ".gguf",
        "{web}/m-00000-of-00000.gguf",
    ],
)
def test_odd_addresses_are_one_sentence(web, tmp_path, monkeypatch, address: str):
    monkeypatch.setattr(download, "_TRIES", 0)
    with pytest.raises(CallboardError, match=r"check the address\.$|cannot be stored under .*File name too long\.$"):
        resolve(address.format(web=web), progress=False)


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "/etc", "a\0b"])
def test_a_revision_is_a_name(revision: str):
    with pytest.raises(CallboardError, match="names no branch, tag or commit"):
        resolve("org/m", revision)


def test_a_name_without_parts_is_a_whole_file():
    assert gguf_models(["m-00000-of-00000.gguf"])[0].files == ("m-00000-of-00000.gguf",)


def test_the_image_encoder_of_a_hub_model_is_fetched_with_it(hub: FakeHub):
    path = resolve("org/seeing", progress=False)
    assert sorted(file.name for file in path.parent.iterdir()) == ["m-Q8_0.gguf", "mmproj-F16.gguf"]


def test_the_most_exact_image_encoder_is_preferred():
    names = ["mmproj-m-Q8_0.gguf", "a/mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-m-f16.gguf", "m-F16.gguf"]
    assert image_encoders(names) == [names[i] for i in (1, 3, 2, 0)]
    (model,) = gguf_models(["a/m-Q8_0.gguf"])
    assert encoder_beside(model, names) + encoder_beside(model, [names[0], "b/mmproj.gguf"]) == [names[1], names[0]]

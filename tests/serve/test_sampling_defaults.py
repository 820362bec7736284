"""The sampling and chat settings of a model's files and of its operator, and the defaults that requests get from
them."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, SamplingParams
from runtime.inspection import model_report
from runtime.llm import LLM
from runtime.text.chat import ChatTemplate, load_tokenizer
from runtime.text.sampling_defaults import SamplingDefaults
from serve_app import cli
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.01}
GGUF = {
    "general__sampling__temp": 0.5,
    "general__sampling__top_k": 7,
    "general__sampling__penalty_repeat": 1.5,
}


def folder(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "do_sample": True, **values}))
    return path


def test_a_folder_has_sampling_defaults(tmp_path: Path):
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    assert SamplingDefaults.load(folder(tmp_path)).params() == SamplingParams()
    defaults = SamplingDefaults.load(folder(tmp_path, **QWEN))
    assert defaults.params() == SamplingParams(**QWEN)
    assert defaults.params(temperature=0, top_k=0, top_p=None, max_tokens=5) == SamplingParams(
        **QWEN | {"temperature": 0, "top_k": 0, "max_tokens": 5}
    )
    assert str(defaults).startswith("temperature 0.7, top_k 20, top_p 0.8")
    assert SamplingDefaults.load(tmp_path, "none") == SamplingDefaults()
    assert SamplingDefaults.load(folder(tmp_path, top_k=-1, temperature=None)) == SamplingDefaults()


def test_a_gguf_file_has_sampling_defaults(write_tiny_gguf: Callable[..., Path]):
    assert SamplingDefaults.load(write_tiny_gguf()) == SamplingDefaults()
    defaults = SamplingDefaults.load(write_tiny_gguf(**GGUF))
    assert defaults.params() == SamplingParams(temperature=0.5, top_k=7, repetition_penalty=1.5)
    assert defaults.source == "tiny.gguf"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_p": 2}, "top_p is 2; it must be between 0 and 1"),
        ({"top_k": 2.5}, "top_k is '2.5'; it must be a number"),
        ({"min_p": True}, "min_p is 'True'; it must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_impossible_defaults_are_reported_at_the_start(tmp_path: Path, values: dict, says: str):
    with pytest.raises(CallboardError, match="pass --generation-config none") as error:
        SamplingDefaults.load(folder(tmp_path, **values))
    assert says in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "generation_config.json"))


@pytest.fixture
def client():
    engine = FakeEngine()
    service = Service(engine, None, MODEL)
    service.start(byte_tokenizer(), SamplingDefaults(QWEN, "generation_config.json"))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(build_http_app(service)))
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)
    return engine, client


async def test_requests_get_the_defaults(client):
    engine, openai_client = client
    await openai_client.chat.completions.create(**chat())
    await openai_client.completions.create(model=MODEL, prompt="a")
    given = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
    await openai_client.chat.completions.create(**chat(), temperature=0, top_p=1, extra_body=given)
    sampled = [{name: getattr(request.params, name) for name in QWEN} for request in engine.requests]
    off = {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "min_p": 0}
    assert sampled == [QWEN, QWEN, off]


def test_offline_requests_get_the_defaults(write_tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    settings = {"device": "cpu", "num_threads": 1, "kv_cache_memory": 0.01}
    path = str(write_tiny_gguf(**GGUF))
    for use, want in (("auto", (0.5, 7, 1.5)), ("none", (1.0, 0, 1.0))):
        llm = LLM(path, generation_config=use, **settings)
        seen, add = [], llm.engine.add
        monkeypatch.setattr(llm.engine, "add", lambda r, o, add=add, to=seen: (to.append(r.params), add(r, o)))
        llm.generate("hello")
        "".join(llm.stream("hello"))
        llm.generate("hello", llm.defaults.params(max_tokens=3))
        assert [(p.temperature, p.top_k, p.repetition_penalty) for p in seen] == [want] * 3
        assert [p.max_tokens for p in seen] == [16, 16, 3]
        llm.generate("hello", SamplingParams())
        assert seen[-1] == SamplingParams()


def test_inspect_shows_the_defaults(write_tiny_gguf: Callable[..., Path], tmp_path: Path):
    path = str(write_tiny_gguf(**GGUF))
    (tmp_path / "t.jinja").write_text("MINE {{ messages[0].content }}")
    report = model_report(EngineConfig(model=path, device="cpu", chat_template=str(tmp_path / "t.jinja")))
    assert "sampling       temperature 0.5, top_k 7, repetition_penalty 1.5 (tiny.gguf)" in report
    assert report.endswith("MINE {{ messages[0].content }}")
    report = model_report(EngineConfig(model=path, device="cpu", generation_config="none"))
    assert "sampling       none: temperature 1" in report


def test_a_chat_template_of_the_operator(write_tiny_gguf: Callable[..., Path], tmp_path: Path):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(write_tiny_gguf(tokenizer__chat_template=None), EngineConfig(chat_template=str(file)))
    assert ChatTemplate.of(tokenizer).render([{"role": "user", "content": "hé"}]) == "[user] hé"
    assert tokenizer.tool_template is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: [Errno 2]"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
        (b"{% for %}", "cannot be used: The model's chat template has an error in line 1"),
    ],
)
def test_a_chat_template_with_an_error(
    content: bytes | None, says: str, write_tiny_gguf: Callable[..., Path], tmp_path: Path, capfd
):
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    assert cli.main(["serve", str(write_tiny_gguf()), "--port", port, "--chat-template", str(file)]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"callboard: The chat template '{file}' {says}")
    assert said.count("\n") == 1

"""The default model: its names for clients, and how it is sampled."""

from collections.abc import Callable
from pathlib import Path

import httpx

from runtime.base.config import DEFAULT_MODEL, DEFAULT_MODEL_NAMES, EngineConfig, names_of
from runtime.base.types import SamplingParams
from runtime.inspection import model_report
from runtime.llm import LLM
from runtime.text.sampling_defaults import RECOMMENDED, SamplingDefaults
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, chat

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def client_of_service(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_http_app(service)), base_url="http://test")


def test_clients_get_the_hub_id_of_the_default_model():
    assert names_of(DEFAULT_MODEL)[0] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert names_of("some/model") == ("some/model",)
    assert names_of("/a/folder/small.gguf") == ("/a/folder/small.gguf", "small")


async def test_every_name_of_the_default_model_is_accepted():
    service = Service(FakeEngine("ok"), byte_tokenizer(), DEFAULT_MODEL_NAMES[0], aliases=DEFAULT_MODEL_NAMES[1:])
    async with client_of_service(service) as client:
        for name in DEFAULT_MODEL_NAMES:
            answer = await client.post("/v1/chat/completions", json={**chat(), "model": name})
            assert answer.json()["model"] == DEFAULT_MODEL_NAMES[0]


def test_recommended_sampling_is_for_the_default_model_only(write_tiny_gguf: Callable[..., Path]):
    silent = write_tiny_gguf()
    defaults = SamplingDefaults.load(silent, "auto", DEFAULT_MODEL)
    assert defaults.params() == SamplingParams(temperature=0)
    assert defaults.params(temperature=0.9, top_p=None) == SamplingParams(temperature=0.9)
    assert SamplingDefaults.load(silent, "auto", "other/model") == SamplingDefaults()
    assert SamplingDefaults.load(silent, "none", DEFAULT_MODEL) == SamplingDefaults()
    outspoken = write_tiny_gguf(general__sampling__temp=0.5)
    assert SamplingDefaults.load(outspoken, "auto", DEFAULT_MODEL).params() == SamplingParams(temperature=0.5)


def test_inspect_shows_the_recommended_sampling(smollm2_path: Path):
    assert f"sampling       temperature 0 ({RECOMMENDED})" in model_report(EngineConfig(device="cpu"))


async def test_server_info_has_the_defaults_of_sampling():
    service = Service(FakeEngine("ok"), None, DEFAULT_MODEL)
    service.start(byte_tokenizer(), SamplingDefaults({"temperature": 0.0}, RECOMMENDED))
    async with client_of_service(service) as client:
        assert (await client.get("/server_info")).json()["sampling"] == {"temperature": 0.0}


def test_the_first_question_is_answered_correctly(smollm2_path: Path):
    llm = LLM(device="cpu", num_threads=1, kv_cache_memory=0.1)
    params = [llm.defaults.params(max_tokens=64, seed=seed) for seed in range(1, 41)]
    answers = llm.chat([QUESTION] * 40, params, progress=False)
    assert sum("Paris" in answer.text for answer in answers) >= 36

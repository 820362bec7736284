"""The announcement of `callboard serve` when it is ready."""

import json
import shlex
import threading

import pytest

from runtime.base.config import DEFAULT_MODEL, EngineConfig
from serve_app.server.announcement import NextStep, announcement
from serve_app.settings import ModelSettings, ScalingSettings

URL = "http://127.0.0.1:8000"


def models(*given):
    return ModelSettings.of_all([(config, names, ScalingSettings()) for config, names in given])


def test_the_announcement_names_page_api_and_stop():
    first, second, _ = announcement(models((EngineConfig(), ())), URL)
    assert first == f"Callboard serves HuggingFaceTB/SmolLM2-135M-Instruct at {URL}/v1"
    assert second == f"Chat: {URL}/   API: {URL}/v1   Ctrl-C stops"


def test_the_curl_command_is_greedy_and_names_the_model():
    *_, curl = announcement(models((EngineConfig("some/model"), ("a", "b"))), URL)
    command = shlex.split(curl)
    body = json.loads(command[command.index("-d") + 1])
    assert (body["model"], body["temperature"], body["stream"]) == ("a", 0, True)
    assert body["messages"] == [{"role": "user", "content": "What is the capital of France?"}]


def test_the_draft_and_the_adapters_are_named():
    first, *_ = announcement(models((EngineConfig("m", draft="ngram", lora=("x=/x", "y=/y")), ())), URL)
    assert first == f"Callboard serves m (draft: ngram) with the adapters x, y at {URL}/v1"


def test_tokens_of_pinned_acceptance_are_disowned():
    first, second, *_ = announcement(models((EngineConfig("m", draft="mtp", pinned_acceptance=2.0), ())), URL)
    assert first == "pinned_acceptance is set: the tokens of m are not the model's. It is for benchmarks."
    assert second.startswith("Callboard serves m ")


def test_several_models_are_named():
    first, *_ = announcement(models((EngineConfig("m"), ()), (EngineConfig("n"), ("x", "y"))), URL)
    assert first == f"Callboard serves m, x at {URL}/v1"


@pytest.mark.parametrize(
    ("model", "reason", "is_shown"),
    [(DEFAULT_MODEL, None, True), (DEFAULT_MODEL, "no route", False), ("m", None, False)],
)
def test_a_better_model_is_named_if_a_hub_answers(monkeypatch, model: str, reason: str | None, is_shown: bool):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("serve_app.server.announcement.unreachable", lambda url: reason)
    before = set(threading.enumerate())
    step = NextStep(model)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert ("callboard serve Qwen/Qwen3-0.6B" in step.line()) == is_shown

"""Requests beyond a model are refused at the front and fail no other request. They have token ids beyond its
vocabulary, outputs bound to a grammar that no token ends, or invalid end-of-sequence ids."""

import json
from dataclasses import replace

import pytest

from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.llm import LLM
from tests.support.engine.sessions import make
from tests.support.engine.whole import whole_scheduler
from tests.support.http.fake_engine import FakeEngine, chat, post
from tests.support.structured.cases import regex
from tests.support.structured.engine import answers, hot, runner_of

LETTERS = regex("[ab]{3,9}")
FREE = hot(None, max_tokens=5)


@pytest.mark.parametrize("bad", [29, -1, 10**12])
def test_the_scheduler_refuses_ids_that_the_model_does_not_have(bad):
    scheduler = whole_scheduler(*make())
    with pytest.raises(CallboardError, match=f"Token id {bad} is not in this model's vocabulary of 29"):
        scheduler.add(Request("a", [1, bad, 2], 3, SamplingParams()))
    assert not scheduler.requests
    scheduler.add(Request("a", [1, 28, 2], 3, SamplingParams()))


def test_the_scheduler_refuses_a_grammar_without_an_end():
    config, info = make()
    scheduler = whole_scheduler(config, replace(info, eos_token_ids=()))
    with pytest.raises(CallboardError, match="no end-of-sequence token"):
        scheduler.add(Request("a", [1], 1, SamplingParams(grammar=LETTERS)))
    scheduler.add(Request("a", [1], 1, SamplingParams()))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": [65, 200]}, "prompt"),
        ("/v1/completions", {"prompt": "é"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "é"]}, "prompt.1"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [200]}, "stop_token_ids"),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "é"}]), "messages"),
    ],
)
async def test_tokenizer_ids_beyond_the_model_are_a_400(path, body, field):
    engine = FakeEngine()
    engine.info = replace(engine.info, vocab_size=128)
    answer = await post(engine, body, path)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert "ids of this model end at 127" in answer.json()["error"]["message"]
    assert not engine.requests


async def test_a_schema_for_a_model_without_an_end_is_a_400():
    engine = FakeEngine(json.dumps({}))
    engine.info = replace(engine.info, eos_token_ids=())
    answer = await post(engine, chat(response_format={"type": "json_object"}), "/v1/chat/completions")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "end-of-sequence" in answer.json()["error"]["message"]


@pytest.mark.parametrize("eos", [262, 2**31])
def test_an_invalid_end_of_sequence_id_is_refused_at_load(write_tiny_gguf, eos):
    path = write_tiny_gguf(**{"tokenizer.ggml.eos_token_id": eos})
    with pytest.raises(CallboardError, match=f"{path} names the end-of-sequence id {eos}.*vocabulary of 262"):
        LLM(str(path))


def test_a_failed_grammar_engine_fails_only_its_outputs():
    runner = runner_of(vocabulary=None)

    def unreadable():
        raise IndexError("tuple index out of range")

    runner.masks.serve(unreadable)
    found = answers(runner, [hot(LETTERS), FREE, hot(LETTERS), FREE])
    assert [found[name][1] for name in "0123"] == [FinishReason.GRAMMAR, FinishReason.LENGTH] * 2

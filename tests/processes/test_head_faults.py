"""A served model with its head: 24 requests alone, in a burst, and while runners and engines are killed.

The model without its head, in another process, gives the same answers."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.base.types import GrammarSpec, SamplingParams
from runtime.llm import LLM, Completion
from runtime.structured.grammar import compiled
from tests.support.models.headed_files import write_headed
from tests.support.processes.fault_cells import deployed

NUM_REQUESTS = 24
LETTERS = "([a-e]{3,9}[ ,]){90}"
# fields of a request over HTTP, which SamplingParams has by the same names, but n and the grammar
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "ignore_eos": True},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 250},
    {"temperature": 0.6, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.9, "n": 3, "min_tokens": 200},
    {"temperature": 1.0, "stop": ["xy", "z"], "min_tokens": 60, "stop_token_ids": list(range(200, 210))},
    {"temperature": 0.8, "structured_outputs": {"regex": LETTERS}},
]


def prompt(number: int) -> list[int]:
    shared = [3 + 7 * k % 250 for k in range(40 * (number % 2))]
    return shared + [3 + (7 * number + 13 * k + number * k) % 250 for k in range(9 + number)]


def body_of(number: int) -> dict[str, Any]:
    own = {"prompt": prompt(number), "max_tokens": 300, "seed": number, "return_token_ids": True}
    return own | FIELDS[number % len(FIELDS)]


Answer = list[tuple[Any, ...]]  # each choice's token ids, text, reason, and log-probabilities of its tokens


def undisturbed(llm: LLM, number: int) -> Answer:
    """The answer without a head and without a server."""
    fields = body_of(number)
    n, grammar = fields.pop("n", 1), fields.pop("structured_outputs", None)
    params = SamplingParams(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
           if name not in ("prompt", "return_token_ids")},
        grammar=grammar and compiled(GrammarSpec("regex", grammar["regex"])),
    )  # fmt: skip
    return [_facts(answer) for answer in llm.generate(fields["prompt"], params, n=n)]


def _facts(answer: Completion) -> tuple[Any, ...]:
    logprobs = [entry.logprob for entry in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish_reason.name.lower(), logprobs


async def answered(client: httpx.AsyncClient, number: int) -> tuple[Answer, int]:
    """The answer over HTTP, and its accepted draft tokens."""
    answer = (await client.post("/v1/completions", json=body_of(number))).raise_for_status().json()
    found = []
    for choice in answer["choices"]:
        logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
        found.append((choice["token_ids"], choice["text"], choice["finish_reason"], logprobs))
    return found, answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


class Headed:
    """An application with a head, and the answers without it."""

    def __init__(self, here: Any, model: Path) -> None:
        self.application, self.url = here.application, here.url
        llm = LLM(str(model), deterministic=True, num_threads=1, kv_cache_memory=0.1)
        self.answers = [undisturbed(llm, number) for number in range(NUM_REQUESTS)]


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.thorough) for kind in ("glm4-moe", "qwen3.5")]
)
def headed(request: pytest.FixtureRequest, serve_url: str, tmp_path_factory) -> Iterator[Headed]:
    model = write_headed(tmp_path_factory.mktemp("headed") / "model.gguf", request.param)
    for here in deployed(model, serve_url, draft="mtp", num_draft_tokens=3):
        yield Headed(here, model)


async def test_a_head_changes_no_answer(headed: Headed):
    async with httpx.AsyncClient(base_url=headed.url, timeout=300) as client:
        alone = [await answered(client, number) for number in range(NUM_REQUESTS)]
        assert [answer for answer, _ in alone] == headed.answers
        assert all(accepted > 0 for _, accepted in alone), "also with a grammar"
        burst = await asyncio.gather(*(answered(client, number) for number in range(NUM_REQUESTS)))
        assert [answer for answer, _ in burst] == headed.answers
    assert not any(role == "draft" for role, *_ in headed.application.processes()), "a head has no process"


@pytest.mark.parametrize("role", ["engine", "runner"])
async def test_killed_processes_change_no_answer(headed: Headed, role: str):
    """Streams move to another engine, or to fresh runners. There the head lacks their entries."""
    async with httpx.AsyncClient(base_url=headed.url, timeout=300) as client:
        tasks = [asyncio.create_task(answered(client, number)) for number in range(NUM_REQUESTS)]
        while (await client.get("/load")).json()["server_load"] < NUM_REQUESTS // 2:
            await asyncio.sleep(0.01)
        pid = next(pid for name, _, pid in headed.application.processes() if name == role)
        os.kill(pid, signal.SIGKILL)
        found = await asyncio.gather(*tasks)
        assert [answer for answer, _ in found] == headed.answers
        assert sum(accepted for _, accepted in found) > 0
        async with asyncio.timeout(120):
            while headed.application.strength():
                await asyncio.sleep(0.1)

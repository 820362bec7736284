"""n > 1: the choices of a prompt share its blocks."""

from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from runtime.base.types import Request, SamplingParams
from runtime.core.requests import requests_of
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.completions.request import CompletionRequest
from serve_app.protocol.answers import ChoiceUsage
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.service.service import Service
from tests.support.engine.sessions import Session
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer


def prepare(n: int) -> PreparedRequest:
    request = CompletionRequest(prompt=[1 + i % 7 for i in range(22)], n=n, max_tokens=6, ignore_eos=True, seed=1)
    return Service(FakeEngine(), byte_tokenizer(), MODEL).prepare(COMPLETIONS, request)


def submit(session: Session, requests: list[Request]) -> list:
    """Adds the service's requests, plans one step, and returns their states."""
    for request in requests:
        session.core.add(request)
        session.added[request.request_id], session.outputs[request.request_id] = request, []
    session.step()
    return [session.core.scheduler.requests[request.request_id] for request in requests]


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_share_prompt_blocks_from_the_first_step(depth: int):
    session = Session(block_size=4, max_num_batched_tokens=64, pipeline_depth=depth)
    prepared = prepare(n=4)
    states = submit(session, prepared.requests)
    tables = [state.tables[0][:5] for state in states]  # the full blocks of 22 tokens
    assert tables == [tables[0]] * 4
    pool = session.core.scheduler.pool
    assert [pool.refs(block) for block in tables[0]] == [4] * 5
    held = Counter(block for state in states for block in state.tables[0])
    assert len(held) == 5 + 4  # alone, each would need 6
    assert [state.num_cached for state in states] == [0, 20, 20, 20]
    assert prepared.usage([ChoiceUsage(6, state.num_cached) for state in states]) == {
        "prompt_tokens": 22,
        "completion_tokens": 24,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 0},  # one of them computed it
    }
    session.finish()  # checks the tokens of each choice against a run alone, and that no block leaks
    again = prepare(n=4)
    states = submit(session, again.requests)
    usage = again.usage([ChoiceUsage(6, s.num_cached) for s in states])
    assert usage["prompt_tokens_details"] == {"cached_tokens": 20}
    session.finish()


def test_a_new_request_is_complete():
    names = iter("abcdef")
    first, second = requests_of(Request("", [1, 2], 2, SamplingParams(seed=7)), names, 2)
    assert (first.seed, first.prompt_len) == (7, 2)
    assert second.seed not in (0, 7)
    (one,), (other,) = (requests_of(Request("", [1], 1, SamplingParams()), names) for _ in range(2))
    assert one.seed != other.seed  # without a seed, each is given one
    with pytest.raises(FrozenInstanceError):
        one.seed = 3

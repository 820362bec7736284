"""What callers give a RolloutClient: values of any kind, lists of any length, iterators that block or fail."""

import itertools
import queue
import re
import subprocess
import sys
import threading
from array import array

import numpy as np
import pytest
import torch

from actors.client.engines import RolloutGroup
from actors.wire.engine_client import EngineRefusal, Refusal
from runtime.base.types import CallboardError, SamplingParams
from tests.actors.test_rollout_client import LONG, PARAMS, connected, expected, until
from tests.support.engine.links import Engine


@pytest.fixture(scope="module")
def shared():
    with connected(Engine(), Engine()) as client:
        yield client


@pytest.fixture
def client():
    with connected(Engine()) as found:
        yield found


I64 = np.int64


@pytest.mark.parametrize(
    "prompt",
    [
        [I64(3), I64(4)],
        np.array([3, 4]),
        np.array([3, 4], np.uint8),
        torch.tensor([3, 4]),
        [torch.tensor(3), np.int32(4)],
        (3, 4),
        array("i", [3, 4]),
        iter([3, 4]),
        range(3, 5),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_integers_of_any_library_are_tokens(shared, prompt):
    (found,) = shared.generate_list([prompt], PARAMS)
    assert (found.error, found.prompt_token_ids, found.token_ids) == ("", [3, 4], expected([3, 4])[0])
    assert {type(i) for i in found.prompt_token_ids} == {int}


def test_integers_of_any_library_are_options(shared):
    params = SamplingParams(
        max_tokens=I64(4), seed=torch.tensor(5), stop_token_ids=np.array([318]), logit_bias={I64(1): 0}, top_k=I64(3)
    )
    plain = SamplingParams(max_tokens=4, seed=5, stop_token_ids=(318,), logit_bias=((1, 0),), top_k=3)
    assert params == plain
    options = {"n": I64(2), "priority": torch.tensor(1), "max_in_flight": I64(2), "max_unread": I64(9)}
    found = shared.generate_list([[1], [2]], params, seeds=np.array([7, 8]), **options)
    assert found == shared.generate_list([[1], [2]], plain, seeds=[7, 8], n=2)
    assert shared.generate_list([[1]], plain, seeds=I64(3)) == shared.generate_list([[1]], plain, seeds=3)
    assert shared.score([[1, 2, 3]], np.array([2])) == shared.score([[1, 2, 3]], [2])


@pytest.mark.parametrize(
    "prompt",
    [
        [1.0, 2.0], [True], [None], None, 5, "12", b"12", [[1]], [2**70], [-(2**70)], {1: 2}, {1}, torch.tensor([1.0]),
        torch.tensor([True]), np.array(5), np.array([[1]]), [np.float32(1)], [np.bool_(1)], ["a"], [10**5000],
        (1 // 0 for _ in "a"),
    ],
    ids=lambda prompt: type(prompt).__name__,
)  # fmt: skip
def test_a_prompt_of_another_kind_fails_alone(shared, prompt):
    found = shared.generate_list([[1], prompt, [2]], PARAMS, n=3)
    assert [(r.index, r.choice) for r in found] == list(itertools.product(range(3), range(3)))
    assert {r.index for r in found if r.error} == {1}
    assert all(re.fullmatch(r"The prompt(\[0\])? (is|has|cannot be read:) .*", r.error) for r in found[3:6])
    assert found[0].token_ids == expected([1])[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        *(({"priority": value}, "priority") for value in (1.0, True, None, "1", 2**70)),
        *(({"n": value}, "n") for value in (0, 1.0, None, True)),
        *(({"cache_salt": value}, "cache_salt") for value in (None, 5, "\ud800")),
        *(({"adapter": value}, "adapter") for value in (None, "\ud800")),
        *(({"seeds": value}, "seeds") for value in (1.5, True, 2**70)),
        *(({"seeds": value}, r"seeds\[1\]") for value in ([1, 1.5], [1, None], [1, 2**70], (1, True))),
        ({"seeds": np.array([[1], [2]])}, r"seeds\[0\]"),
        *(({"max_in_flight": value}, "max_in_flight") for value in (0, -1, 2.0)),
        ({"max_unread": -1}, "max_unread"),
        *(({"min_weight_version": value}, "min_weight_version") for value in (1.5, None, "\ud800")),
        ({"params": {"max_tokens": 5}}, "params"),
    ],
    ids=str,
)
def test_options_of_another_kind_are_refused(shared, options, field):
    with pytest.raises(CallboardError, match=rf"^{field} is .*; it must be "):
        shared.generate_list([[1], [2]], **{"params": PARAMS, **options})


@pytest.mark.parametrize("prompt_lens", [[1.5], [0], [5], [None, 1], [True]])
def test_lengths_of_another_kind_are_refused(shared, prompt_lens):
    with pytest.raises(CallboardError, match=r"prompt_lens"):
        shared.score([[1, 2, 3]], prompt_lens)


@pytest.mark.parametrize("lists", [list, iter])
@pytest.mark.parametrize("num", [0, 1, 2, 4])
def test_lists_of_unequal_length_are_refused(shared, lists, num):
    with pytest.raises(CallboardError, match=rf"There are \d prompts and {num} seeds; send as many"):
        shared.generate_list(lists([[1], [2], [3]]), PARAMS, seeds=[1] * num)
    with pytest.raises(CallboardError, match=rf"There are \d prompts and {num} prompt_lens; send as many"):
        shared.score(lists([[1, 2], [2, 3], [3, 4]]), [1] * num)
    if num < 3:
        with pytest.raises(CallboardError, match=rf"There are {num + 1} prompts and {num} seeds"):
            shared.generate_list(lists([[1], [2], [3]]), PARAMS, seeds=iter([1] * num))


def test_seeds_may_be_endless(shared):
    assert [r.seed for r in shared.generate_list([[1], [2]], PARAMS, seeds=itertools.count(5))] == [5, 6]


def test_any_exception_is_the_error_of_its_rollout(shared, monkeypatch):
    complete = RolloutGroup.complete

    async def fails(self, request):
        if request.token_ids == [2]:
            raise ZeroDivisionError("no more paper")
        return await complete(self, request)

    monkeypatch.setattr(RolloutGroup, "complete", fails)
    found = shared.generate_list([[1], [2], [3]], PARAMS)
    assert [r.error for r in found] == ["", "The request failed: ZeroDivisionError: no more paper", ""]


def test_an_exception_of_a_result_is_raised(shared, monkeypatch):
    monkeypatch.setattr("actors.client.client._rollout_of", lambda job, output: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        shared.generate_list([[1], [2]], PARAMS)


# ---- prompts as they come -------------------------------------------------------------------------------------------


def test_a_prompt_may_need_the_result_before_it(client):
    results = queue.Queue()

    def prompts():
        yield [1]
        while (last := results.get(timeout=30)).index < 5:
            yield [last.token_ids[-1] % 9]

    found = client.generate(prompts(), PARAMS)
    for rollout in found:
        results.put(rollout)
    assert rollout.index == 5


def test_a_source_that_blocks_holds_no_other_up():
    engine = Engine(max_queued_requests=1, max_num_seqs=2)
    with connected(engine) as client:
        source = queue.Queue()
        found = client.generate(iter(source.get, None), PARAMS)
        for i in range(12):
            source.put([i % 9])
        others = client.generate_list([[i % 9] for i in range(12)], PARAMS)  # also refused ones are sent again
        assert [r.error for r in others] == [""] * 12
        assert {next(found).index for _ in range(12)} == set(range(12))
        source.put(None)
        assert list(found) == []


def prompt_threads():
    return {thread for thread in threading.enumerate() if thread.name == "prompts"}


def test_helper_threads_end(client):
    before = prompt_threads()
    endless = client.generate(([i % 9] for i in itertools.count()), PARAMS, max_in_flight=2)
    source = queue.Queue()
    blocked = client.generate(iter(source.get, None), PARAMS)
    assert client.generate_list([[1]], PARAMS)
    until(lambda: len(prompt_threads() - before) == 2)
    endless.close()
    blocked.close()
    until(lambda: source.put([1]) or not prompt_threads() - before)


def test_the_process_ends_with_a_source_that_blocks():
    code = (
        "import queue\n"
        "from tests.actors.test_rollout_input import *\n"
        "with connected(Engine()) as client:\n"
        "    found = client.generate(iter(queue.Queue().get, None), PARAMS)\n"
        "    until(prompt_threads)\n"
        "print('end of main')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "end of main\n")


def test_a_client_that_closes_at_once_ends_its_batches():
    for _ in range(5):
        with connected(Engine()) as client:
            found = client.generate([[1]], LONG)
        with pytest.raises(CallboardError, match="closed before its rollouts had ended"):
            list(found)


def test_closing_in_another_thread_ends_the_reader(client):
    found = client.generate(iter(queue.Queue().get, None), PARAMS)
    threading.Timer(0.05, found.close).start()
    assert list(found) == []


def test_refusals_without_an_end_fail(monkeypatch, client):
    async def refuse(self, request):
        raise EngineRefusal("The queue is full.", Refusal.BUSY)

    monkeypatch.setattr("actors.client.batch._GIVE_UP_S", 0.3)
    monkeypatch.setattr(RolloutGroup, "complete", refuse)
    assert [r.error for r in client.generate_list([[1], [2]], PARAMS)] == ["The queue is full."] * 2

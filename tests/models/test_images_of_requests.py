"""Requests with images have equal tokens in each setting: alone, in a burst, preempted, from caches, after a loss."""

import time
from functools import cache

import numpy as np
import pytest

from runtime.assembly.engine import build_engine
from runtime.base.types import Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Drafter, Speculation
from runtime.speculation.draft import LocalWire
from runtime.speculation.draft_client import DraftClient
from runtime.speculation.ngram import Ngram
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.whole import whole_draft
from tests.support.models.runner_driver import TINY, tiny_runner
from tests.support.models.tiny_images import TOKEN_ID, span_of, tiny_tower

TOWER = tiny_tower(TINY.hidden_size)
PARAMS = SamplingParams(max_tokens=40, temperature=0.8)
Answers = dict[str, list[int]]


def request_of(number: int) -> Request:
    """Two images among text. Every other request shares its prompt, but for its last tokens, with an earlier one."""
    seed = number // 2
    spans = span_of(20, seed, 4, 6), span_of(60, seed + 1, 3, 3)
    tokens = np.random.default_rng(seed).integers(2, TINY.vocab_size, 90).tolist()
    tokens.append(number + 2)
    for span in spans:
        tokens[span.begin : span.end] = [TOKEN_ID] * span.num_tokens
    return Request(str(number), tokens, len(tokens), PARAMS, seed=number, images=spans)


REQUESTS = [request_of(number) for number in range(8)]


def core_of(speculation: Speculation | None = None, **config) -> EngineCore:
    defaults = {"deterministic": True, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    runner = tiny_runner(tower=TOWER, **defaults | config)
    core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
    core.extras[Admission].lengths = FixedShare(0.1)  # too many requests for a small KV cache, which preempts some
    return core


def answers(core: EngineCore, requests: list[Request] = REQUESTS, lost_after: int = 0) -> Answers:
    """Each request's tokens. The runner is lost once after some steps, if given."""
    found, num_steps = {request.request_id: list[int]() for request in requests}, 0
    for request in requests:
        core.add(request, found[request.request_id])
    while core.has_work:
        num_steps += 1
        if num_steps == lost_after:
            core.scheduler.requeue_all()
            core.executor.reset()
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                state.owner.append(token)
    return found


def num_encoded(core: EngineCore) -> float:
    return core.current_stats().images_encoded


@cache
def alone() -> Answers:
    found: Answers = {}
    for request in REQUESTS:
        found |= answers(core_of(), [request])
    return found


def test_text_in_place_of_images_has_other_tokens():
    plain = [Request(r.request_id, r.token_ids, r.prompt_len, PARAMS, seed=r.seed) for r in REQUESTS]
    assert all(tokens != alone()[name] for name, tokens in answers(core_of(), plain).items())


def test_images_in_a_burst_are_encoded_once():
    core = core_of()
    assert answers(core) == alone()
    assert num_encoded(core) == 8, "four requests share their images with another"
    assert answers(core) == alone()
    assert num_encoded(core) == 8, "they were in the pool, and in the prefix cache"


@pytest.mark.parametrize(
    "config",
    [
        {"num_kv_blocks": 24, "prefix_cache": False, "image_pool_tokens": 33, "max_image_tokens": 24},
        {"max_num_batched_tokens": 9},
        {"chunked_prefill": False, "max_model_len": 160, "max_num_batched_tokens": 300},
        {"block_size": 5},
        {"kernel_backend": "torch"},
    ],
    ids=str,
)
def test_policies_do_not_show(config):
    core = core_of(**config)
    if config.get("kernel_backend") == "torch":
        want: Answers = {}
        for request in REQUESTS:
            want |= answers(core_of(**config), [request])
    else:
        want = alone()
    assert answers(core) == want
    if "num_kv_blocks" in config:
        assert core.scheduler.stats.preemptions > 0
        assert answers(core) == want
        assert num_encoded(core) > 8, "most images have left the pool"


@pytest.mark.parametrize("lost_after", [2, 3, 5])
def test_images_are_encoded_again_after_a_loss(lost_after):
    assert answers(core_of(), lost_after=lost_after) == alone()


@pytest.mark.parametrize("kind", ["n-gram", "model"])
def test_draft_tokens_do_not_show(kind):
    """A draft model reads the images' tokens as text."""
    drafter: Drafter = Ngram()
    if kind == "model":
        draft, client = tiny_runner(is_draft=True, images="off"), DraftClient(TINY.vocab_size, time.monotonic)
        core = whole_draft(draft.config, draft.info, InProcess(draft), 2)
        client.attach(LocalWire(core), ((1, 0.1), (64, 0.1)))
        drafter = client
    speculation = Speculation(drafter, 3, ((1, 1e3), (64, 2e3)), 0.0)
    engine = core_of(speculation)
    assert answers(engine) == alone()
    assert engine.scheduler.stats.draft_tokens > 0

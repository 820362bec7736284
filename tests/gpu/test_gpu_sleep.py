"""A runner releases its memory and takes it again at the same addresses. Its graphs still work, and its tokens equal
the tokens of a runner that never slept."""

import os

import numpy as np
import pytest
import torch

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.worker.sources import DummySource
from tests.support.models.specs import dense_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SPEC = dense_spec(
    num_layers=8, hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=64, ffn_size=4096, vocab_size=32003,
    max_positions=1024, norm_eps=1e-5,
)  # fmt: skip


def start(**config) -> EngineCore:
    settings = {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 4000, "max_num_seqs": 8, "max_model_len": 512}
    runner = build_runner(EngineConfig(**settings | {"deterministic": True} | config), DummySource(SPEC))
    return build_engine(runner.config, runner.info, InProcess(runner))


def generate(core: EngineCore, sleep=None) -> list[list[int]]:
    """Twelve requests; after 30 steps, with two of them in flight, `sleep` is called."""
    rng, tokens = np.random.default_rng(0), [[] for _ in range(12)]
    for i, answer in enumerate(tokens):
        prompt = rng.integers(0, SPEC.vocab_size, 5 + 37 * i % 300).tolist()
        core.add(Request(str(i), prompt, len(prompt), SamplingParams(max_tokens=48, ignore_eos=True), seed=i), answer)

    def take(output):
        for state, token in zip(output.states, output.token_ids, strict=True) if output is not None else ():
            state.owner.append(token)

    num_steps = 0
    while core.has_work:
        take(core.step())
        num_steps += 1
        if sleep is not None and num_steps == 30:
            while core.scheduler.num_in_flight:
                take(core.collect())
            core.lose()
            sleep()
            core.recover(core.executor)
    return tokens


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"cuda_graphs": False}])
def test_a_runner_gives_the_same_tokens_after_sleep(settings):
    want = generate(start(**settings))
    core = start(sleep_mode=True, **settings)
    runner = core.executor._runner
    assert generate(core) == want  # the addresses of its memory change nothing
    size, given_back = runner.memory.weights + runner.memory.kv, []

    def sleep():
        free = torch.cuda.mem_get_info()[0]
        runner.sleep()
        given_back.append(torch.cuda.mem_get_info()[0] - free)
        others = torch.full((size // 4,), torch.nan, device="cuda")  # its values differ after others have used it
        torch.cuda.synchronize()
        del others
        torch.cuda.empty_cache()
        runner.wake()

    for _ in range(2):
        assert generate(core, sleep) == want
    if "PYTEST_XDIST_WORKER" not in os.environ:  # others on this GPU use and release memory of their own
        assert min(given_back) > 0.95 * size
    runner.sleep()  # leave no memory in use for later tests


def test_a_runner_sleeps_on_while_its_memory_is_taken(monkeypatch):
    core = start(sleep_mode=True)
    runner, want = core.executor._runner, generate(core)
    core.lose()
    runner.sleep()
    cache = runner._sleep_memory.cache._segments
    with monkeypatch.context() as patch:

        def refuse(address, segment):
            raise OSError(2, "cuMemCreate says OUT_OF_MEMORY")

        patch.setattr(cache, "map", refuse)
        free = torch.cuda.mem_get_info()[0]
        with pytest.raises(CallboardError, match=r"too little to wake up \(cuMemCreate says OUT_OF_MEMORY\)"):
            runner.wake()
        if "PYTEST_XDIST_WORKER" not in os.environ:
            assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
    runner.wake()
    core.recover(core.executor)
    assert generate(core) == want
    runner.sleep()

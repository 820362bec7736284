"""Groups of 2, 3 and 4 runner processes, through all phases of their start, beside one runner of the whole model.
Requests get the same tokens, and with rank_invariant the same log-probabilities to the bit."""

import math
import time
from dataclasses import replace

import pytest
import torch

from runtime.assembly.engine import build_engine, speculation_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.quant.model_formats import weight_bytes
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.grammar.test_structured_walks import SMALL
from tests.support.models.specs import changed, dense_spec
from tests.support.models.tiny_images import TOKEN_ID, span_of, tiny_tower
from tests.support.ranks.rank_processes import RankedRunner, RankProcesses, rank_processes
from tests.support.structured.cases import regex

EIGHTS = dense_spec(
    num_layers=1, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=len(SMALL.tokens),
    max_positions=128, norm_eps=1e-5, qkv_bias=True, qk_norm="head",
)  # fmt: skip
THIRDS = changed(EIGHTS, num_heads=9, num_kv_heads=3, head_dim=8, ffn_size=96, tied_head=True)
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.9, top_p=0.9, repetition_penalty=1.2, logprobs=1),
    SamplingParams(max_tokens=4, temperature=1.2, prompt_logprobs=1),
    SamplingParams(max_tokens=5, temperature=0.0, logit_bias=((7, 2.0),)),
    SamplingParams(max_tokens=6, temperature=1.5, grammar=regex("(?:ab|c){40}")),
]
PHRASE = [3, 9, 27, 81, 40]
PROMPTS = [PHRASE * 5, [*PHRASE * 3, 11, 12], list(range(5, 40)), [8], [4, 6]]
BASE = {
    "device": "cpu", "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4,
    "num_kv_blocks": 80,
}  # fmt: skip
# Settings that change a request's path through a runner.
TOGGLES = {
    "draft": "ngram", "num_draft_tokens": 3, "prefix_cache": False, "pipeline_depth": 1, "kv_cache_dtype": "int8",
    "packed_weights": False,
}  # fmt: skip


class ScaledSource(DummySource):
    """With scales of keys and values, of each head its own."""

    def kv_scales(self) -> torch.Tensor:
        spec = self.spec
        shape = spec.num_layers, 2, spec.layers[0].mixer.num_kv_heads
        return torch.linspace(0.5, 2.0, math.prod(shape)).view(shape)


REQUESTS = [
    Request(str(i), prompt, len(prompt), params, seed=i)
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
]
Answers = dict[str, list[tuple[int, tuple[float, ...]]]]


def core_of(runner: ModelRunner | RankedRunner, config: EngineConfig) -> EngineCore:
    runner.reset()
    config = config.sized_for("cpu")
    return build_engine(config, runner.info, InProcess(runner), speculation_of(config, runner.info, time.monotonic))


def answers(core: EngineCore, requests: list[Request]) -> Answers:
    """Each request's tokens, with its log-probabilities."""
    for request in requests:
        core.add(request)
    found: Answers = {request.request_id: [] for request in requests}
    while core.has_work:
        if (output := core.step()) is None:
            continue
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            own = output.logprobs.get(i)
            values = (own.logprob, *(value for _, value in own.top)) if own else ()
            found[state.request.request_id].append((token, values))
    return found


def check_against_one_rank(processes: RankProcesses, spec: DecoderSpec, size: int, **settings) -> None:
    config = EngineConfig(**BASE | settings)
    source = ScaledSource(spec, eos_token_ids=SMALL.eos_ids, vocabulary=SMALL)
    alone, ranks = build_runner(config, source), processes.open(replace(config, tensor_parallel_size=size), source)
    want, got = (answers(core_of(runner, config), REQUESTS) for runner in (alone, ranks))
    assert all(len(own) == params.max_tokens for own, params in zip(want.values(), PARAMS, strict=True))
    if config.rank_invariant:
        assert got == want
        assert ranks.info.fingerprint == alone.info.fingerprint, "their blocks have one identity"
        return
    assert {k: [token for token, _ in own] for k, own in got.items()} == {
        k: [token for token, _ in own] for k, own in want.items()
    }
    torch.testing.assert_close(
        *(torch.tensor([v for own in each.values() for _, values in own for v in values]) for each in (got, want)),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert ranks.info.fingerprint != alone.info.fingerprint


@pytest.fixture(scope="module")
def processes():
    torch.set_num_threads(1)
    with rank_processes(4) as group:
        yield group


def test_groups_answer_as_one_rank_does(processes):
    check_against_one_rank(processes, THIRDS, 3)
    check_against_one_rank(processes, EIGHTS, 4, rank_invariant=True, kv_cache_dtype="fp8")
    check_against_one_rank(processes, EIGHTS, 2, rank_invariant=True, **TOGGLES)


def test_ranks_agree_on_a_size_that_fits(processes):
    """A rank has its heads' part of each block, so the same memory holds twice the blocks."""
    config = EngineConfig(**BASE | {"num_kv_blocks": None, "kv_cache_memory": 5e-5, "tensor_parallel_size": 2})
    with pytest.raises(CallboardError, match=r"tensor_parallel_size is 2, .* 9 heads, 3 of keys and values"):
        processes.open(config, DummySource(THIRDS))
    runner = processes.open(config, DummySource(EIGHTS))
    num_blocks = int(5e-5 * (1 << 30)) // (EIGHTS.kv_cache("float32").bytes_per_block(4) // 2)
    assert runner.info.num_kv_blocks == num_blocks
    assert runner.info.vocab_size == EIGHTS.vocab_size
    planned = runner.ask("attribute", "memory")
    allocated = runner.ask("attribute", "steps", "cache", "_blocks", "_values", "nbytes")
    assert [plan.kv for plan in planned] == allocated
    whole = weight_bytes(EIGHTS, runner.ask("attribute", "numerics")[0])
    assert whole < sum(plan.weights for plan in planned) < 1.05 * whole, "norms are on both"


def test_ranks_read_images_as_one_rank_does(processes):
    """The second request's prefix hit ends within the image. After a loss, the image is encoded again."""
    spans = (span_of(3, 5, 4, 6),)
    prompts = [[3, 4, 5, *[TOKEN_ID] * 24, end, 9, 10] for end in (6, 7)]
    first, second = (
        Request(str(i), prompt, len(prompt), PARAMS[0], seed=i, images=spans) for i, prompt in enumerate(prompts)
    )
    source = DummySource(EIGHTS, tower=tiny_tower(EIGHTS.hidden_size))
    found = []
    for ranks in (1, 2):
        config = EngineConfig(**BASE, rank_invariant=True, tensor_parallel_size=ranks)
        core = core_of(build_runner(config, source) if ranks == 1 else processes.open(config, source), config)
        each = [answers(core, [first]), answers(core, [second])]
        assert core.current_stats().prompt_tokens_cached == 24, "the image ends with token 26"
        core.scheduler.requeue_all()
        core.executor.reset()
        found.append([*each, answers(core, [second])])
        assert found[-1][2] == found[-1][1]
        assert core.current_stats().images_encoded == 2
    assert found[0] == found[1]

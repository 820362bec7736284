"""A request reports the experts that the router chose for each computed token, in any history."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.reports import Experts
from runtime.base.shard import Shard
from runtime.base.types import CallboardError, FinishReason, Request
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.core.plan import StepResult
from runtime.features.expert_recorder import ExpertRecorder
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.cpu_support import obstacle
from runtime.models.decoder_build import draw_decoder
from runtime.worker.extras import StepWork
from runtime.worker.runner import ModelRunner, choose_numerics
from tests.models.test_divided_decoder import SPECS
from tests.support.engine.fake_runner import Recorded
from tests.support.models.family_cases import spec_of
from tests.support.models.scored_engine import (
    REPORTED,
    SAMPLED,
    SCORED,
    Answer,
    answers,
    check_experts,
    engine_of,
    family_runner,
    prompts_of,
    sampled,
    scored,
)
from tests.support.ranks.rank_threads import on_ranks

COMPILED = pytest.mark.skipif(bool(obstacle()), reason=f"needs compiled kernels: {obstacle()}")
BACKENDS = ["torch", pytest.param("llvm", marks=COMPILED)]
MIXTURES = [
    "mixtral", "qwen3 moe", "qwen3.5 moe", "qwen3-next", "lfm2 moe", "glm4 moe", "qwen2 moe", "olmoe", "granite moe",
    "expert biases", "gpt-oss", "gemma4 moe",
]  # fmt: skip
PROMPTS = prompts_of(101)
MANY = prompts_of(101, (67, 70, 66, 68, 1))  # an engine with 41 blocks of 4 tokens preempts some


def runner_of(case: str, **config) -> ModelRunner:
    return family_runner(case, routed_experts=True, **config)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", MIXTURES)
def test_they_are_the_best_of_the_router(case: str, backend: str):
    runner = runner_of(case, kernel_backend=backend, max_num_batched_tokens=70)
    spec = spec_of(case)
    num_dense = sum(layer.ffn.experts is None for layer in spec.layers)
    assert runner.info.routed_experts == (spec.num_layers - num_dense, spec.experts.top_k)
    check_experts(runner, PROMPTS[3])
    assert all(layer.feed_forward.router.record is None for layer in runner.decoder.layers[num_dense:])


@pytest.mark.parametrize("case", ["qwen3 moe", "qwen3.5 moe", "glm4 moe", "granite moe"])
def test_scoring_the_same_tokens_reports_the_same_experts(case: str):
    core = engine_of(runner_of(case))
    outputs = answers(core, sampled(PROMPTS, REPORTED))
    scores = answers(core, scored(PROMPTS, [o.tokens for o in outputs], replace(SCORED, routed_experts=True)))
    for prompt, output, score in zip(PROMPTS, outputs, scores, strict=True):
        assert len(score.experts) == len(prompt) + len(output.tokens)
        assert np.array_equal(score.experts[:-1], output.experts)
        assert score.scores[len(prompt) - 1 :] == output.logprobs


def equal(found, want) -> bool:
    pairs = list(zip(found, want, strict=True))
    return all(a.tokens == b.tokens and np.array_equal(a.experts, b.experts) for a, b in pairs)


def alone(case: str) -> list[Answer]:
    """The answers of requests without mates."""
    core = engine_of(runner_of(case))
    return [answers(core, [request])[0] for request in sampled(MANY, REPORTED)]


@pytest.mark.parametrize("case", ["mixtral", "qwen3.5 moe", "glm4 moe", "expert biases"])
def test_mates_preemption_and_cache_change_no_experts(case: str):
    requests, want = sampled(MANY, REPORTED), alone(case)
    core = engine_of(runner_of(case, block_size=4, max_num_batched_tokens=70, num_kv_blocks=41))
    mates = [Request("mate", PROMPTS[0], len(PROMPTS[0]), SAMPLED)]
    for _ in range(2):  # the second time with cached prefixes
        mate, *found = answers(core, [*mates, *requests])
        assert equal(found, want)
        assert mate.experts is None
    assert core.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("case", ["mixtral", "qwen3.5 moe", "glm4 moe", "expert biases"])
def test_losses_and_guesses_change_no_experts(case: str):
    want = alone(case)
    drafter = Recorded({f"sampled {i}": answer.tokens for i, answer in enumerate(want)}, 0.7, 101)
    core = engine_of(runner_of(case), drafter)

    def between(core: EngineCore, step: int) -> None:
        if step in (3, 8):
            core.lose()
            core.recover(InProcess(runner_of(case)))

    assert equal(answers(core, sampled(MANY, REPORTED), between), want)
    stats = core.scheduler.stats
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0


class Other(ExpertRecorder):
    """A runner that finds other experts for all tokens."""

    def run(self, work: StepWork) -> None:
        super().run(work)

        def report(result: StepResult) -> None:
            result.reports = [(row, Experts(b"\xff" * len(experts.ids))) for row, experts in result.reports]

        work.reports.append(report)


def test_the_first_report_of_a_position_counts():
    """Rows that are computed again may choose others, if numerics are not deterministic."""
    config = {"max_num_batched_tokens": 20, "pipeline_depth": 1}
    (want,) = answers(engine_of(runner_of("mixtral", **config)), sampled([PROMPTS[1]], REPORTED))
    core = engine_of(runner_of("mixtral", **config))

    def between(core: EngineCore, step: int) -> None:
        if step == 9:  # two chunks of the prompt, and seven decoded tokens
            other = runner_of("mixtral", **config)
            next(extra for extra in other.extras if isinstance(extra, ExpertRecorder)).__class__ = Other
            core.lose()
            core.recover(InProcess(other))

    (found,) = answers(core, sampled([PROMPTS[1]], REPORTED), between)
    known = len(PROMPTS[1]) + 7
    assert np.array_equal(found.experts[:known], want.experts[:known])
    assert (found.experts[known:] == -1).all()
    assert len(found.experts) == len(want.experts)


def test_requests_are_refused_without_the_setting():
    core = engine_of(family_runner("mixtral"))
    with pytest.raises(CallboardError, match="does not serve routed_experts"):
        core.add(sampled([[1, 2]], REPORTED)[0])
    core = engine_of(runner_of("llama"))
    assert core.scheduler.info.routed_experts is None
    with pytest.raises(CallboardError, match="has no experts"):
        core.add(sampled([[1, 2]], REPORTED)[0])


def test_an_end_within_accepted_guesses_reports_one_less():
    core = engine_of(runner_of("mixtral"))
    (want,) = answers(core, sampled([PROMPTS[1]], REPORTED))
    stop = replace(REPORTED, stop_token_ids=(want.tokens[9],))
    length = want.tokens.index(want.tokens[9]) + 1
    core = engine_of(runner_of("mixtral"), Recorded({"sampled 0": want.tokens}, 1.0, 101))
    (found,) = answers(core, sampled([PROMPTS[1]], stop))
    assert (found.tokens, found.reason) == (want.tokens[:length], FinishReason.STOP)
    assert np.array_equal(found.experts, want.experts[: len(PROMPTS[1]) + length - 1])


@pytest.mark.parametrize("rank_invariant", [False, True])
@pytest.mark.parametrize("family", [family for family in SPECS if "mixture" in family])
def test_every_rank_records_the_choices_of_one(family: str, rank_invariant: bool):
    spec = SPECS[family]
    x = torch.randn(9, spec.hidden_size, generator=torch.Generator().manual_seed(1))

    def chosen(ranks: Communicator) -> torch.Tensor:
        config = EngineConfig(device="cpu", tensor_parallel_size=ranks.size, rank_invariant=rank_invariant)
        own = spec.of_rank(Shard(ranks.rank, ranks.size))
        decoder = draw_decoder(own, choose_numerics(config), 64, communicator=ranks)
        layer = decoder.layers[-1]
        layer.feed_forward.router.record = []
        layer.feed_forward.add_to(x.clone(), layer.ffn_norm, spec.norm_eps)
        (ids,) = layer.feed_forward.router.record
        return ids[:, : spec.experts.top_k]

    with torch.inference_mode():
        want = chosen(OneRank())
        for ids in on_ranks(2, chosen, tree=rank_invariant):
            assert torch.equal(ids, want)

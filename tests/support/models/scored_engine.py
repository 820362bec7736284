"""An engine of a small model that keeps everything that a trainer reads of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from runtime.assembly.engine import build_engine
from runtime.base.reports import Experts, PromptScores
from runtime.base.types import FinishReason, Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.kernels.experts.dense_beside import DenseBeside
from runtime.kernels.experts.moe_torch import route_torch
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Drafter, Speculation
from runtime.worker.runner import ModelRunner
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.family_cases import spec_of
from tests.support.models.runner_driver import tiny_runner

SAMPLED = SamplingParams(max_tokens=14, logprobs=0, sampling_logprobs=True)
REPORTED = replace(SAMPLED, routed_experts=True)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
LENGTHS = (1, 40, 67, 100)  # of prompts: shorter and longer than a chunk of states, and between chunks


@dataclass
class Answer:
    """The output of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)  # sampling_logprobs
    scores: list[float] = field(default_factory=list)  # of its given tokens, except the first
    experts: np.ndarray | None = None
    reason: FinishReason = FinishReason.NONE


Between = Callable[[EngineCore, int], None]  # called with the number of each step


def engine_of(runner: ModelRunner, drafter: Drafter | None = None) -> EngineCore:
    speculation = None if drafter is None else Speculation(drafter, 4, (), 0.0)
    core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
    core.extras[Admission].lengths = FixedShare(0.0)  # it admits too many, and so preempts some
    return core


def answers(core: EngineCore, requests: Sequence[Request], between: Between = lambda core, step: None) -> list[Answer]:
    """Run the requests as one batch."""
    found, step, shape = {request.request_id: Answer() for request in requests}, 0, core.scheduler.info.routed_experts
    for request in requests:
        core.add(request)
    while core.has_work:
        if (output := core.step()) is None:
            continue
        for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            answer = found[state.request.request_id]
            answer.tokens.append(token)
            if at in output.logprobs:
                answer.logprobs.append(output.logprobs[at].logprob)
                answer.drawn.append(output.logprobs[at].sampling_logprob)
        for state, report in output.reports:
            answer = found[state.request.request_id]
            if isinstance(report, PromptScores):
                answer.scores += np.frombuffer(report.logprobs, np.float32).tolist()
            elif isinstance(report, Experts):
                answer.experts = np.frombuffer(report.ids, np.int16).reshape(-1, *shape)
        for state, reason in output.finished:
            found[state.request.request_id].reason = reason
        step += 1
        between(core, step)
    assert core.scheduler.find_faults() == []
    return list(found.values())


def prompts_of(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]


def sampled(prompts: Sequence[list[int]], params: SamplingParams = SAMPLED) -> list[Request]:
    return [Request(f"sampled {i}", prompt, len(prompt), params, seed=5 + i) for i, prompt in enumerate(prompts)]


def scored(
    prompts: Sequence[list[int]], outputs: Sequence[list[int]], params: SamplingParams = SCORED
) -> list[Request]:
    """Requests that score outputs behind their prompts."""
    pairs = enumerate(zip(prompts, outputs, strict=True))
    return [Request(f"scored {i}", [*prompt, *output], len(prompt), params) for i, (prompt, output) in pairs]


def family_runner(case: str, changes: Mapping[str, Any] | None = None, **config) -> ModelRunner:
    """A random model of a family, in deterministic mode. `changes` are fields of its config.json."""
    limits = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_blocks": 64} | config
    return tiny_runner(spec_of(case, **changes or {}), deterministic=True, **limits)


def killed(first: EngineCore, second: EngineCore, requests: Sequence[Request], num_steps: int) -> list[Answer]:
    """Return the answers of requests when their engine dies after `num_steps`. A front submits them again."""
    before = {request.request_id: Answer() for request in requests}
    for request in requests:
        first.add(request)
    for _ in range(num_steps):
        output = first.step()
        for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            answer = before[state.request.request_id]
            answer.tokens.append(token)
            answer.logprobs.append(output.logprobs[at].logprob)
            answer.drawn.append(output.logprobs[at].sampling_logprob)
    known = list(before.values())
    pairs = zip(requests, known, strict=True)
    again = [replace(request, token_ids=[*request.token_ids, *answer.tokens]) for request, answer in pairs]
    after = answers(second, again)
    for answer, rest in zip(after, known, strict=True):
        answer.tokens[:0], answer.logprobs[:0], answer.drawn[:0] = rest.tokens, rest.logprobs, rest.drawn
    return after


def check_scores(
    core: EngineCore,
    prompts: Sequence[list[int]],
    between: Between = lambda core, step: None,
    params: SamplingParams = SAMPLED,
) -> None:
    """Sampled tokens and the same tokens as given ones have equal log-probabilities to the bit."""
    check_scores_of(core, prompts, answers(core, sampled(prompts, params), between), between, params)


def check_scores_of(
    core: EngineCore,
    prompts: Sequence[list[int]],
    outputs: Sequence[Answer],
    between: Between = lambda core, step: None,
    params: SamplingParams = SAMPLED,
) -> None:
    """The tokens of sampled outputs as given ones have equal log-probabilities to the bit."""
    scores = answers(core, scored(prompts, [output.tokens for output in outputs]), between)
    for prompt, output, score in zip(prompts, outputs, scores, strict=True):
        assert len(output.logprobs) == len(output.tokens) == params.max_tokens
        assert score.scores[len(prompt) - 1 :] == output.logprobs
        assert (len(score.scores), score.reason) == (len(prompt) + len(output.tokens) - 1, FinishReason.LENGTH)


def check_experts(runner: ModelRunner, prompt: list[int], params: SamplingParams = REPORTED) -> None:
    """The experts that a request reports are the best of its routers' logits, by `route_torch`."""
    core, calls, shape = engine_of(runner), _routed(runner), runner.info.routed_experts
    (answer,) = answers(core, sampled([prompt], params))
    assert answer.experts.shape == (len(prompt) + len(answer.tokens) - 1, *shape)
    by_layer = [torch.cat(calls[layer :: shape[0]]) for layer in range(shape[0])]
    assert np.array_equal(answer.experts, torch.stack(by_layer, 1).cpu().numpy()[: len(answer.experts)])


def _routed(runner: ModelRunner) -> list[torch.Tensor]:
    """Note the best experts by each router's logits, in the order of the calls."""
    found: list[torch.Tensor] = []

    def noted(product, layer):
        def compute(x: torch.Tensor, *norm: Any) -> torch.Tensor:
            logits = product(x, *norm)
            found.append(route_torch(logits, layer.spec, layer.router.bias)[0][:, : layer.spec.top_k])
            return logits

        return compute

    for layer in runner.decoder.layers:
        if hasattr(layer.feed_forward, "router"):
            own = layer.feed_forward
            own = own.experts if isinstance(own, DenseBeside) else own
            name = "normed" if own.spec.own_norm else "in_float32" if own.spec.float32_logits else "product"
            setattr(own.router.logits, name, noted(getattr(own.router.logits, name), own))
    return found

"""Steps of every family's tiny model, on a backend of choice; run as a program, under Triton's interpreter, it compares
the kernels with the torch path."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from runtime.core.config import EngineConfig
from runtime.core.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.kernels.experts import Experts, GroupedExperts
from runtime.kernels.gated_activation import gated_activation_torch
from runtime.worker.gpu_steps import DecodeGraph
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.support.family_cases import spec_of
from tests.support.runner_driver import Driver
from tests.support.triton_engine import Replay

KERNEL_CASES = {  # those whose kernels differ -> what makes them shorter
    "mixtral": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 1, "sliding_window": 7},
    "gemma3": {"num_hidden_layers": 2, "sliding_window": 7},
    "phi4-mini": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
}


def logits_of(driver: Driver, long: list[int], short: list[int]) -> torch.Tensor:
    """[steps, vocab]: a prompt in chunks beside another, then both decode; all tokens but the last are given."""
    steps = driver.runner.steps
    tokens = steps.tokens if hasattr(steps, "tokens") else steps.slots.tokens
    driver.open(0, long)
    driver.open(1, short)
    cut, kept = len(long) - 8, []
    plan = [[(0, 0, cut, 0), (1, 0, 3, 1)], [(0, cut, 6, 1), (1, 3, 1, 1)]]
    plan += [[(0, cut + 6 + i, 1, 1), (1, 4 + i, 1, 1)] for i in range(2)]
    for rows in plan:
        driver.step(*rows)
        kept.append(driver.logits.float())
        for slot, start, count, sampled in rows:
            if sampled:  # over what was sampled there
                known = (long, short)[slot][start + count : start + count + 1]
                tokens[slot, start + count : start + count + len(known)] = torch.tensor(known)
    return torch.cat(kept)


def interpreted(spec: DecoderSpec, backend: str, deterministic: bool, graphs: bool) -> torch.Tensor:
    config = EngineConfig(
        device="cpu", kernel_backend=backend, dtype="float32", num_kv_blocks=12, block_size=8, max_num_seqs=2,
        max_model_len=40, num_threads=1, deterministic=deterministic,
    )  # fmt: skip
    with mock.patch.object(ModelRunner, "_warm_up"):
        runner = ModelRunner(config, DummySource(spec))
    driver = Driver(runner)
    if graphs:
        replay = Replay(runner.steps, 2)
        runner.steps.graph_logits = torch.full((2, spec.vocab_size), torch.nan)
        runner.steps.graphs = {1: [DecodeGraph(1, 2, replay, replay.token_ids)]}
    tokens = torch.randint(0, spec.vocab_size, (34,), generator=torch.Generator().manual_seed(5)).tolist()
    return logits_of(driver, tokens[:24], tokens[24:])


def check_experts(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, favoured: int) -> None:
    """The kernels against the plain form; all tokens prefer the first `favoured` experts, so that the others idle."""
    hidden, ffn, spec = 24, 20, ExpertsSpec(num_experts, top_k, num_tokens % 2 == 0)
    weights = [(torch.randn(2 * ffn, hidden) / 5, torch.randn(hidden, ffn) / 5) for _ in range(num_experts)]
    weights = [(gate_up.to(dtype), down.to(dtype)) for gate_up, down in weights]
    x, base = torch.randn(num_tokens, hidden).to(dtype), torch.randn(num_tokens, hidden).to(dtype)
    router = torch.randn(num_experts, hidden).to(dtype)
    bias = torch.where(torch.arange(num_experts) < favoured, 50.0, 0.0).to(dtype)
    route = partial(F.linear, weight=router, bias=bias)
    activate = partial(gated_activation_torch, activation="gelu_tanh")
    plain = Experts(spec, route, weights, lambda weight: partial(F.linear, weight=weight), activate)
    want = base.clone()
    plain.add_to(want, x)
    for deterministic in (False, True):
        got = base.clone()
        GroupedExperts(spec, route, weights, "gelu_tanh", deterministic).add_to(got, x)
        error = ((got - want).abs().max() / (want - base).abs().max()).item()
        print(f"{num_tokens} tokens, {top_k} of {num_experts} experts, {dtype}: {error:.1e}", flush=True)
        assert error < {torch.float32: 1e-6, torch.float16: 5e-3}[dtype]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check_experts(1, 8, 2, torch.float32, 8)
    check_experts(90, 5, 2, torch.float32, 3)
    check_experts(150, 3, 2, torch.float16, 3)
    check_experts(7, 33, 5, torch.float16, 5)
    for number, (case, shorter) in enumerate(KERNEL_CASES.items()):
        spec = spec_of(case, **shorter)
        deterministic = bool(number % 2)
        want = interpreted(spec, "torch", False, graphs=False)
        got = interpreted(spec, "triton", deterministic, graphs=not deterministic)
        error = ((got - want).abs().max() / want.abs().max()).item()
        print(f"{case}: {error:.1e}", flush=True)
        assert error < 1e-5, case
    print("equal")

"""Steps of every family's tiny model, on a backend of choice; run as a program, under Triton's interpreter, it compares
the kernels with the torch path."""

from __future__ import annotations

from unittest import mock

import torch
from family_cases import spec_of
from runner_driver import Driver
from triton_engine import Replay

from runtime.core.config import EngineConfig
from runtime.models.spec import DecoderSpec
from runtime.worker.device_steps import DecodeGraph
from runtime.worker.runner import ModelRunner

KERNEL_CASES = {  # those whose kernels differ -> what makes them shorter
    "mixtral": {"num_hidden_layers": 1},
    "qwen3 moe": {"num_hidden_layers": 1},
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
        runner = ModelRunner.dummy(config, spec)
    driver = Driver(runner)
    if graphs:
        replay = Replay(runner.steps, 2)
        runner.steps.graph_logits = torch.full((2, spec.vocab_size), torch.nan)
        runner.steps.graphs = {1: [DecodeGraph(2, replay, replay.token_ids)]}
    tokens = torch.randint(0, spec.vocab_size, (34,), generator=torch.Generator().manual_seed(5)).tolist()
    return logits_of(driver, tokens[:24], tokens[24:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (case, shorter) in enumerate(KERNEL_CASES.items()):
        spec = spec_of(case, **shorter)
        deterministic = bool(number % 2)
        want = interpreted(spec, "torch", False, graphs=False)
        got = interpreted(spec, "triton", deterministic, graphs=not deterministic)
        error = ((got - want).abs().max() / want.abs().max()).item()
        print(f"{case}: {error:.1e}", flush=True)
        assert error < 1e-5, case
    print("equal")

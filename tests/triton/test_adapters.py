"""The kernels of adapters: against the torch twin, and in steps that are launched and steps in graphs."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.lora import RowAdapters, add_adapters_torch, add_adapters_triton, make_adapters
from runtime.kernels.linear.small_results import EMPTY_WORD
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.worker.runner import ModelRunner
from tests.support.kernels.triton_engine import SHALLOW, replayed_graphs
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import changed


@pytest.mark.parametrize("index", [0, 2])
def test_one_row_within_the_product(index):
    """The fused forms of a product with its adapter, against the plain ones in torch."""
    torch.manual_seed(0)
    sizes, size_in, rows = (24, 24), 40, torch.tensor([index], dtype=torch.int32)
    stacks = make_adapters(sizes, size_in, 2, 5, torch.float32, torch.device("cpu"))
    stacks.write(2, [(torch.randn(5, size_in), torch.randn(size, 5)) for size in sizes], None)
    weight, bias, norm_weight = torch.randn(48, size_in) * 0.2, torch.randn(48), torch.randn(size_in)
    x, residual = torch.randn(1, size_in), torch.randn(1, 48)
    fused = FusedLinear(weight, bias, "silu", deterministic=False).with_adapters(
        RowAdapters(rows, stacks, add_adapters_triton)
    )
    plain = Linear(
        partial(F.linear, weight=weight, bias=bias), rms_norm_torch, partial(gated_activation_torch, activation="silu")
    )
    plain = plain.with_adapters(RowAdapters(rows, stacks, add_adapters_torch))
    residuals = residual.clone(), residual.clone()
    for linear, own in zip((fused, plain), residuals, strict=True):
        stacks.results.fill_(EMPTY_WORD)
        linear.add_to(own, x)
    torch.testing.assert_close(*residuals, rtol=1e-5, atol=1e-5)
    for verb in ("normed", "gated"):
        stacks.results.fill_(EMPTY_WORD)
        got, want = (getattr(linear, verb)(x, norm_weight, 1e-5) for linear in (fused, plain))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_steps_and_graphs(tmp_path, monkeypatch):
    """Logits equal the torch path's, for launched steps and for graphs. A step without adapters has graphs of its
    own."""
    spec = changed(SHALLOW, hidden_size=64, num_heads=2, ffn_size=64)
    # Other tests cover products of few rows and the warm-up before the first step.
    monkeypatch.setattr("runtime.kernels.linear.fused_linear.MAX_ROWS", 0)
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda self: None)
    prompts = [np.random.default_rng(i).integers(0, 131, 5 + i).tolist() for i in range(3)]
    runners = {}
    for backend in ("torch", "triton"):
        config = {"kernel_backend": backend, "num_kv_blocks": 24, "max_num_seqs": 4, "max_model_len": 96}
        runners[backend] = tiny_runner(spec, dtype="float32", max_loras=2, max_lora_rank=4, **config)
        for index in (1, 2):
            save_adapter(tmp_path / str(index), modules_of(spec), index, size=0.5)
            runners[backend].load_adapter(index, str(tmp_path / str(index)))

    def logits_of(driver: Driver) -> list[torch.Tensor]:
        for slot, prompt in enumerate(prompts):
            driver.open(slot, prompt, adapter=slot)
        driver.step(*((slot, 0, len(prompt), 1) for slot, prompt in enumerate(prompts)))
        found = [driver.logits]
        for rows in ((0, 1, 2), (2, 0)):
            driver.step(*((slot, len(prompts[slot]) + len(found) - 1, 1, 1) for slot in rows))
            found.append(driver.logits)
        return found

    want = logits_of(Driver(runners["torch"]))
    assert float((want[0][0] - want[0][1]).abs().max()) > 0.1
    runner = runners["triton"]
    launched = logits_of(Driver(runner))
    replays = replayed_graphs(runner.steps, (1, 4), has_adapters=True) + replayed_graphs(runner.steps, (1, 4))
    driver = Driver(runner)
    for got in (launched, logits_of(driver)):
        for logits, expected in zip(got, want, strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert [replay.count for replay in replays] == [2, 0]
    driver.step((0, len(prompts[0]) + 2, 1, 1))
    assert [replay.count for replay in replays] == [2, 1]

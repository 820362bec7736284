"""Adapters on a GPU: kernels at published shapes, rows of many in graphs, and loads while steps go on."""

import threading

import pytest
import torch

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import AdaptedLinear
from runtime.kernels.linear.lora import RowAdapters, add_adapters_triton, make_adapters
from runtime.kernels.linear.small_results import EMPTY_WORD
from tests.gpu.test_gpu_determinism import SPECS, prompt
from tests.support.models.runner_driver import Driver, tiny_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(("sizes", "size_in"), [((2048, 512, 512), 2048), ((8192, 8192), 2048), ((2048,), 8192)])
def test_one_row_within_the_product(sizes, size_in):
    device, size_out = torch.device("cuda"), sum(sizes)
    torch.manual_seed(0)
    stacks = make_adapters(sizes, size_in, 8, 16, torch.bfloat16, device)
    stacks.a.normal_(std=size_in**-0.5)
    stacks.b.normal_(std=0.25)
    weight = torch.randn(size_out, size_in, device=device).mul_(size_in**-0.5).bfloat16()
    x, norm_weight = (torch.randn(n, size_in, device=device).bfloat16() for n in (1, 1))
    own = FusedLinear(weight, None, "silu", deterministic=False)
    for index in (0, 3, 8):
        of_row = RowAdapters(torch.tensor([index], dtype=torch.int32, device=device), stacks, add_adapters_triton)
        fused, plain = own.with_adapters(of_row), AdaptedLinear(own, of_row)
        for verb in ("normed", "gated") if len(sizes) == 2 else ("normed",):
            stacks.results.fill_(EMPTY_WORD)
            got, want = (getattr(linear, verb)(x, norm_weight[0], 1e-5) for linear in (fused, plain))
            torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("config", [{}, {"quantization": "int4"}, {"dtype": "float32"}], ids=str)
def test_rows_of_many_adapters_equal_each_alone(config, tmp_path):
    """Prompts and decode rows, as graphs and launched. A step without adapters equals a step of a runner without
    them."""
    settings = {
        "device": "cuda", "deterministic": True, "max_num_seqs": 64, "max_model_len": 700, "num_kv_blocks": 3000,
        "max_num_batched_tokens": 8192, "num_threads": None, **config,
    }  # fmt: skip
    runners = [
        tiny_runner(SPECS["128"], max_loras=8, max_lora_rank=16, cuda_graphs=g, **settings) for g in (True, False)
    ]
    runners.append(tiny_runner(SPECS["128"], **settings))
    for seed in range(1, 9):
        save_adapter(tmp_path / str(seed), modules_of(SPECS["128"]), seed, size=0.5, r=1 + 2 * seed % 16)
        for runner in runners[:2]:
            runner.load_adapter(seed, str(tmp_path / str(seed)))

    def compute(runner, *slots: int) -> list[torch.Tensor]:
        """A prompt of each and two tokens after it."""
        driver, tokens, found = Driver(runner), {slot: prompt(3 + 13 * slot % 200, slot) for slot in slots}, []
        for slot in slots:
            driver.open(slot, tokens[slot], adapter=slot % 9)
            driver.step((slot, 0, len(tokens[slot]), 0))
        for step in range(2):
            driver.step(*((slot, len(tokens[slot]) + step, 1, 1) for slot in slots))
            found.append(driver.logits)
        return found

    together = compute(runners[0], *range(40))
    assert len(runners[0].steps.adapter_graphs) == len(runners[0].steps.graph_runner) > 0
    for logits, launched in zip(together, compute(runners[1], *range(40)), strict=True):
        assert torch.equal(logits, launched)
    for slot in range(12):
        for logits, alone in zip(together, compute(runners[0], slot), strict=True):
            assert torch.equal(logits[slot], alone[0]), slot
    for logits, plain in zip(together, compute(runners[2], 9), strict=True):
        assert torch.equal(logits[9], plain[0])


def test_loads_while_steps_go_on(tmp_path):
    """Rows of other adapters sample the same tokens as without the loads, and the last load counts."""
    spec = SPECS["64"]
    for seed in (1, 2, 3):
        save_adapter(tmp_path / str(seed), modules_of(spec), seed, size=0.5, r=8)
    runner = tiny_runner(
        spec, device="cuda", max_loras=2, max_lora_rank=8, max_num_seqs=8, max_model_len=700, num_threads=None
    )
    runner.load_adapter(1, str(tmp_path / "1"))

    def decode(num_loads: int) -> list[list[int]]:
        driver = Driver(runner)
        for slot in range(8):
            driver.open(slot, prompt(20, slot), adapter=slot % 2, room=200)
        found = [driver.step(*((slot, 0, 20, 1) for slot in range(8))).token_ids.tolist()]
        paths = [str(tmp_path / str(2 + i % 2)) for i in range(num_loads)]
        thread = threading.Thread(target=lambda: [runner.load_adapter(2, path) for path in paths])
        thread.start()
        for step in range(100):
            found.append(driver.step(*((slot, 20 + step, 1, 1) for slot in range(8))).token_ids.tolist())
        thread.join()
        return found

    assert decode(20) == decode(0)

    def logits_of(index: int, of: object = runner) -> torch.Tensor:
        driver = Driver(of)
        driver.open(0, prompt(40), adapter=index)
        return driver.prefill(0, prompt(40))

    runner.load_adapter(1, str(tmp_path / "3"))
    assert torch.equal(logits_of(1), logits_of(2))

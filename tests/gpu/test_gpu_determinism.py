"""EngineConfig.deterministic on a GPU: logits are bit-equal alone, in batches of 7, 32 and 256, chunked, after a prefix
hit and after recompute. Decode steps run as CUDA graphs and without."""

from functools import cache

import pytest
import torch

from runtime.base.types import SamplingParams
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import dense_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SHAPE = {"num_layers": 3, "ffn_size": 1536, "vocab_size": 4099, "max_positions": 2048, "norm_eps": 1e-5}
SPECS = {
    "64": dense_spec(hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, tied_head=True, **SHAPE),
    "128": dense_spec(hidden_size=1024, num_heads=8, num_kv_heads=2, head_dim=128, qk_norm="head", **SHAPE),
}
KINDS = [(spec, dtype, graphs) for spec in SPECS for dtype in ("bfloat16", "float32") for graphs in (True, False)]
LENGTHS = (1, 2, 16, 17, 63, 200, 511, 513, 600, 1300)


@cache
def driver_of(spec: str, dtype: str, graphs: bool) -> Driver:
    runner = tiny_runner(
        SPECS[spec], device="cuda", dtype=dtype, deterministic=True, cuda_graphs=graphs, max_num_seqs=256,
        max_model_len=1600, num_kv_blocks=14_000, max_num_batched_tokens=8192, num_threads=None,
    )  # fmt: skip
    return Driver(runner)


def fresh(kind: tuple[str, str, bool]) -> Driver:
    return Driver(driver_of(*kind).runner)


def prompt(length: int, salt: int = 0) -> list[int]:
    return torch.randint(0, 4099, (length,), generator=torch.Generator().manual_seed(7919 * salt + length)).tolist()


@cache
def reference(spec: str, dtype: str, length: int) -> torch.Tensor:
    """The last logits of a prompt computed alone, in one chunk, without graphs."""
    driver = fresh((spec, dtype, False))
    driver.open(0, prompt(length))
    return driver.prefill(0, prompt(length))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 32, 256])
@pytest.mark.parametrize("mixed", [False, True])
def test_batch_mates_do_not_show(kind, size, mixed):
    driver, rows = fresh(kind), []
    for slot in range(size):
        tokens = prompt(LENGTHS[slot % len(LENGTHS)])
        driver.open(slot, tokens)
        start = 0 if mixed and slot % 3 == 0 and len(tokens) <= 64 else len(tokens) - 1
        if start:
            driver.step((slot, 0, start, 0))
        rows.append((slot, start, len(tokens) - start, 1))
    driver.step(*rows)
    for slot in range(size):
        length = LENGTHS[slot % len(LENGTHS)]
        assert torch.equal(driver.logits[slot], reference(*kind[:2], length)), length


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (16, 17), (64, 512, 513), (100, 200, 300, 1299)])
def test_chunks_do_not_show(kind, cuts):
    for length in (17, 600, 1300):
        driver = fresh(kind)
        driver.open(3, prompt(length))
        assert torch.equal(driver.prefill(3, prompt(length), cuts), reference(*kind[:2], length)), length


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_prefix_hits_do_not_show(kind):
    driver, tokens = fresh(kind), prompt(600)
    driver.open(0, tokens[:550])
    driver.prefill(0, tokens[:550])
    driver.open(1, tokens, shared=driver.tables[0][:34])  # 544 tokens are another's
    assert torch.equal(driver.prefill(1, tokens, start=544), reference(*kind[:2], 600))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_decoding_equals_recomputing(kind):
    """After a preemption the output is prefilled: the same bits as when it was decoded beside other rows."""
    driver, tokens, mate = fresh(kind), prompt(500), prompt(40, salt=1)
    hot = SamplingParams(max_tokens=64, temperature=1.0)
    driver.open(0, tokens, hot, seed=77)
    driver.open(1, mate, hot, seed=78)
    tokens += driver.step((0, 0, 500, 1), (1, 0, 40, 1)).token_ids[:1].tolist()
    decoded = [driver.logits[0]]
    for step in range(24):
        tokens += driver.step((0, 500 + step, 1, 1), (1, 40 + step, 1, 1)).token_ids[:1].tolist()
        decoded.append(driver.logits[0])
    for at in (0, 11, 12, 24):
        known = tokens[: 500 + at]
        again = fresh(kind)
        again.open(2, known, hot, prompt_len=500, seed=77)
        assert again.step((2, 0, len(known), 1)).token_ids.tolist() == tokens[len(known) : len(known) + 1]
        assert torch.equal(again.logits[0], decoded[at]), at

"""Steps with prompts as CUDA graphs. In deterministic mode they have the same bits around every bucket's edges, alone
and beside decode rows. Without it they have the same logits up to rounding."""

from functools import lru_cache

import pytest
import torch

from benchmarks.library.models import spec_of
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import SamplingParams
from runtime.worker.runner import ModelRunner
from tests.support.models.family_cases import spec_of as family_spec_of
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import changed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

VOCAB = 4099
SPECS: dict[str, DecoderSpec] = {
    "smollm2-135m": changed(spec_of("smollm2-135m"), num_layers=3, vocab_size=VOCAB),
    "llama-3.2-1b": changed(spec_of("llama-3.2-1b"), num_layers=2, vocab_size=VOCAB),
    "llama-3.2-3b": changed(spec_of("llama-3.2-3b"), num_layers=2, vocab_size=VOCAB),
}
HOT = SamplingParams(max_tokens=64, temperature=0.8)
GARBAGE = 1 << 30


@lru_cache(2)  # each has 2 GiB, on a GPU that several workers may share
def runner_of(shape: str, dtype: str, deterministic: bool) -> ModelRunner:
    return tiny_runner(
        SPECS[shape], device="cuda", dtype=dtype, deterministic=deterministic, max_num_seqs=200, max_model_len=2048,
        num_kv_blocks=8000, max_num_batched_tokens=4096, num_threads=None, prefill_graph_tokens=1536,
    )  # fmt: skip


def buckets(runner: ModelRunner) -> list[int]:
    return sorted({g.shape.num_tokens for g in runner.steps.graph_runner.prefill_graphs})


def prompt(length: int, salt: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(7919 * salt + length)).tolist()


def with_and_without(runner: ModelRunner, run) -> list[torch.Tensor]:
    """The results of `run` on a fresh driver: with graphs, after garbage was written into their input buffers, and
    without."""
    graph_runner, results = runner.steps.graph_runner, []
    graphs = graph_runner.prefill_graphs
    assert graphs
    try:
        for usable in (graphs, []):
            torch.cuda.synchronize()
            with torch.inference_mode():  # the buffers are inference tensors
                graph_runner.rows.fill_(GARBAGE)
                runner.steps.kernels.graph_logits.fill_(torch.nan)
            torch.cuda.synchronize()
            graph_runner.prefill_graphs = usable
            results.append(run(Driver(runner)))
    finally:
        graph_runner.prefill_graphs = graphs
    for layer in runner.steps.cache.layers:
        assert torch.isfinite(layer.values[:, :, 0]).all(), "padding leaves the null block finite"
    return results


def mixed(driver: Driver, num_tokens: int, num_decoding: int) -> torch.Tensor:
    """The logits of a step of `num_tokens` tokens: decode rows, a chunk behind a cached prefix, and a new prompt."""
    rows = []
    for slot in range(num_decoding):
        length = 1 + 37 * slot % 600
        driver.open(slot, prompt(length + 1, salt=slot), HOT, seed=slot)
        rows.append((slot, length, 1, 1))
    for first in range(0, num_decoding, 20):
        driver.step(*((slot, 0, length, 0) for slot, length, *_ in rows[first : first + 20]))
    chunk = (num_tokens - num_decoding) // 3
    driver.open(198, prompt(500))
    driver.prefill(198, prompt(500)[:400])
    shared = driver.tables[198][:25]
    if chunk > 1:
        driver.open(197, prompt(500)[:400] + prompt(chunk + 3, salt=1), shared=shared)
        rows.append((197, 400, chunk, 1))
    else:
        chunk = 0
    rest = num_tokens - num_decoding - chunk
    driver.open(199, prompt(rest, salt=2), HOT, seed=5)
    rows.append((199, 0, rest, 1))
    driver.step(*rows)
    return driver.logits.clone()


def cases(runner: ModelRunner, num_decoding: int) -> list[int]:
    edges = buckets(runner)
    lengths = {size + change for size in edges for change in (-1, 0, 1)}
    return sorted(n for n in lengths if num_decoding + 1 < n <= edges[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SPECS)
def test_deterministic_bits_of_prompts_at_every_edge(shape, dtype):
    runner = runner_of(shape, dtype, True)
    for length in [2, 3, 17, *cases(runner, 0)]:

        def alone(driver: Driver, length: int = length) -> torch.Tensor:
            driver.open(0, prompt(length))
            logits = driver.prefill(0, prompt(length)).clone()
            blocks = torch.tensor(driver.tables[0][: -(-length // 16)])
            kept = [
                layer.values[:, :, blocks].flatten(2, 3)[:, :, :length].float() for layer in runner.steps.cache.layers
            ]
            return torch.cat([logits.flatten(), *(x.flatten() for x in kept)])

        graphed, launched = with_and_without(runner, alone)
        assert torch.equal(graphed, launched), length


@pytest.mark.parametrize("num_decoding", [1, 16, 17, 150])
@pytest.mark.parametrize("shape", SPECS)
def test_deterministic_bits_of_mixed_steps_around_every_edge(shape, num_decoding):
    runner = runner_of(shape, "bfloat16", True)
    lengths = cases(runner, num_decoding)
    for length in lengths if num_decoding == 16 else lengths[::4]:
        graphed, launched = with_and_without(runner, lambda driver, n=length: mixed(driver, n, num_decoding))
        assert torch.equal(graphed, launched), length


@pytest.mark.parametrize("cuts", [(1,), (63, 128), (64, 127, 500), (200, 700, 1299)])
def test_deterministic_bits_of_chunks(cuts):
    runner = runner_of("llama-3.2-3b", "bfloat16", True)
    for length in (65, 600, 1300):

        def chunks(driver: Driver, cuts: tuple[int, ...], length: int = length) -> torch.Tensor:
            driver.open(3, prompt(length))
            return driver.prefill(3, prompt(length), cuts).clone()

        graphed, launched = with_and_without(runner, lambda driver: chunks(driver, cuts))
        whole, _ = with_and_without(runner, lambda driver: chunks(driver, ()))
        assert torch.equal(graphed, launched), length
        assert torch.equal(graphed, whole), length


@pytest.mark.parametrize("lengths", [(1700,), (2000, 3), (1300, 1400), (2000, 90, 1900)])
@pytest.mark.parametrize("shape", SPECS)
def test_deterministic_bits_of_steps_in_pieces(shape, lengths, monkeypatch):
    """Prompts behind rows that decode, in a step of more tokens than any graph has."""
    runner = runner_of(shape, "bfloat16", True)
    find, num_graphs = runner.steps.graphs_for, []
    monkeypatch.setattr(runner.steps, "graphs_for", lambda *of: num_graphs.append(len(found := find(*of))) or found)

    def step(driver: Driver) -> list[torch.Tensor]:
        for slot in range(20):
            driver.open(slot, prompt(30 + slot, salt=slot), HOT, seed=slot)
        driver.step(*((slot, 0, 30 + slot, 0) for slot in range(20)))
        rows = [(slot, 29 + slot, 1, 1) for slot in range(20)]
        for slot, length in enumerate(lengths, 20):
            driver.open(slot, prompt(length, salt=slot), HOT, seed=slot)
            rows.append((slot, 0, length, 1))
        kept = [torch.from_numpy(driver.step(*rows).token_ids)]
        for slot, start, count, _ in rows:
            blocks = torch.tensor(driver.tables[slot])
            for layer in runner.steps.cache.layers:
                kept.append(layer.values[:, :, blocks].flatten(2, 3)[:, :, : start + count].clone())
        return kept

    graphed, launched = with_and_without(runner, step)
    assert max(num_graphs) > 1
    assert num_graphs[-1] == 0
    for a, b in zip(graphed, launched, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("num_decoding", [0, 5, 100])
@pytest.mark.parametrize("shape", SPECS)
def test_logits_without_deterministic_mode(shape, num_decoding):
    runner = runner_of(shape, "bfloat16", False)
    for length in cases(runner, num_decoding)[:: 1 if num_decoding == 5 else 3]:
        graphed, launched = with_and_without(runner, lambda driver, n=length: mixed(driver, n, num_decoding))
        assert graphed.shape == launched.shape
        error = (graphed - launched).norm(dim=-1) / launched.norm(dim=-1)
        assert error.max() < 3e-2, (length, error.max())


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe", "gemma2", "gemma3", "gpt2", "gpt-oss"])
def test_families(case):
    """Windows, soft caps and experts: deterministic bits of prompts in graphs and launched."""
    runner = tiny_runner(
        family_spec_of(case), device="cuda", num_kv_blocks=320, max_num_seqs=4, max_model_len=192, deterministic=True,
        num_threads=None, prefill_graph_tokens=1024,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for length in (2, 63, 64, 65, 100):
        ids = torch.randint(3, 101, (length,), generator=generator).tolist()

        def alone(driver: Driver, ids: list[int] = ids) -> torch.Tensor:
            driver.open(0, ids, room=8)
            driver.open(1, ids[::-1], room=8)
            driver.step((0, 0, len(ids) // 2 + 1, 1))
            rest = len(ids) - len(ids) // 2 - 1
            rows = [(0, len(ids) // 2 + 1, rest, 1)] if rest else []
            driver.step(*rows, (1, 0, len(ids), 1))
            return driver.logits.clone()

        graphed, launched = with_and_without(runner, alone)
        assert torch.equal(graphed, launched), length


def test_memory_of_graphs_is_within_the_plan():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    runner = tiny_runner(
        changed(spec_of("llama-3.2-3b"), num_layers=4), device="cuda", max_num_seqs=256, max_model_len=4096,
        num_kv_blocks=3000, max_num_batched_tokens=8192, num_threads=None, dtype="bfloat16", prefill_graph_tokens=4096,
    )  # fmt: skip
    graph_runner = runner.steps.graph_runner
    few = type(graph_runner)(runner.steps.slots.flat_state, 256, 4096, 16)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    runner.steps.graph_runner, runner.steps.graph_io = few, few.graph_io
    runner.steps.capture_graphs((), 4096)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = before - torch.cuda.mem_get_info()[0]
    assert len(few) == len(graph_runner)
    print(f"{len(few)} graphs take {taken / (1 << 20):.0f} MiB, planned {runner.memory.graphs / (1 << 20):.0f}")
    assert taken < runner.memory.graphs

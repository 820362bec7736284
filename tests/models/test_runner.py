"""ModelRunner with hand-made plans: slots, blocks, chunks, faults; and the real model."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, SamplingParams
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.quant.at_load import quantized_at_load
from runtime.worker.memory import available_memory, plan_memory
from runtime.worker.runner import ModelRunner, choose_numerics
from runtime.worker.sources import CheckpointSource
from tests.support.models.runner_driver import GREEDY, TINY, Driver, tiny_runner
from tests.support.models.specs import dense_spec


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_runner(num_kv_blocks=520)


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, count).tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 150)), min_size=1, max_size=20), st.randoms(), st.data())
def test_any_mix_of_rows_gives_each_row_its_own_logits(runner, requests, random, data):
    """Rows in any order, each with any part of its tokens in the cache, against each computed alone."""
    driver = Driver(runner, seed=data.draw(st.integers(0, 9)))
    rows, want = [], []
    for slot, (length, cached) in enumerate(requests):
        tokens = tokens_of(slot, length)
        driver.open(slot, tokens)
        want.append(driver.prefill(slot, tokens))
        cached = min(cached, length - 1)
        rows.append((slot, cached, length - cached, 1))
    order = random.sample(range(len(rows)), len(rows))
    result = driver.step(*(rows[i] for i in order))
    for row, i in enumerate(order):
        torch.testing.assert_close(driver.logits[row], want[i], atol=1e-4, rtol=1e-4)
        assert result.token_ids[row] == driver.logits[row].argmax()
        assert runner.steps.slots.tokens[i, requests[i][0]] == result.token_ids[row]


def test_results_follow_the_rows_that_sample(runner):
    driver = Driver(runner)
    for slot, count in enumerate((20, 5, 9)):
        driver.open(slot, tokens_of(slot, count), SamplingParams(temperature=0, logprobs=None if slot == 1 else slot))
    result = driver.step((0, 0, 10, 0), (2, 0, 9, 1), (1, 0, 5, 1))
    assert result.token_ids.dtype == np.int32
    assert len(result.token_ids) == 2
    assert result.logprob_rows.tolist() == [0]
    assert result.ranks.tolist() == [1]
    assert result.top_ids.shape == (1, 2)
    assert result.top_ids[0, 0] == result.token_ids[0]
    assert result.top_logprobs[0, 0] == result.logprobs[0] == pytest.approx(driver.logits[0].log_softmax(0).max())
    assert result.num_best == 2
    nothing = driver.step((0, 10, 5, 0))
    assert len(nothing.token_ids) == 0
    assert nothing.step_id == 1


def test_log_probabilities_by_token_id_come_after_the_best(runner):
    driver = Driver(runner)
    wanted = [SamplingParams(logprobs=2, logprob_token_ids=(7, 3, 2**31 - 1)), SamplingParams(logprobs=1)]
    wanted.append(SamplingParams(temperature=0, logprobs=0, logprob_token_ids=(5,)))
    for slot, params in enumerate(wanted):
        driver.open(slot, tokens_of(slot, 5), params)
    result = driver.step((0, 0, 5, 1), (1, 0, 5, 1), (2, 0, 5, 1))
    raw = driver.logits.log_softmax(-1)
    for row, params in enumerate(wanted):
        num_top = params.logprobs
        found = result.sampled_logprobs(row, params).top
        last = raw.shape[1] - 1
        ids = raw[row].topk(num_top).indices.tolist() + [min(i, last) for i in params.logprob_token_ids]
        assert [i for i, _ in found] == list(dict.fromkeys(ids))
        assert [value for _, value in found] == pytest.approx([raw[row, i].item() for i, _ in found])


def test_a_plan_may_reuse_a_slot_and_its_blocks_at_once(runner):
    driver = Driver(runner)
    alone = tokens_of(7, 40)
    driver.open(5, alone)
    want = driver.prefill(5, alone)
    driver.open(0, tokens_of(1, 100), SamplingParams(temperature=1, presence_penalty=2.0, logit_bias=((1, 9.0),)))
    driver.step((0, 0, 100, 1))
    blocks = driver.tables[0]
    driver.free(0)
    driver.open(0, alone)
    assert set(driver.tables[0]) <= set(blocks)
    result = driver.step((0, 0, 40, 1))
    torch.testing.assert_close(driver.logits[0], want, atol=1e-5, rtol=1e-5)
    assert result.token_ids[0] == want.argmax()  # the earlier parameters are forgotten


def test_rows_may_share_a_prefix_computed_in_their_step(runner):
    driver = Driver(runner)
    tokens = tokens_of(3, 70)
    driver.open(0, tokens)
    want = driver.prefill(0, tokens)
    driver.open(1, tokens)
    driver.open(2, tokens, shared=driver.tables[1][:4])
    driver.step((2, 64, 6, 1), (1, 0, 70, 1))
    torch.testing.assert_close(driver.logits, want.expand(2, -1), atol=1e-5, rtol=1e-5)


def test_decode_continues_from_tokens_of_the_device(runner):
    driver = Driver(runner)
    prompt = tokens_of(4, 30)
    driver.open(0, prompt)
    sampled = [int(driver.step((0, 0, 30, 1)).token_ids[0])]
    sampled += [int(driver.step((0, 30 + i, 1, 1)).token_ids[0]) for i in range(12)]
    known = prompt + sampled[:-1]
    driver.open(1, known)
    driver.prefill(1, known)
    assert driver.logits[0].argmax() == sampled[-1]
    assert runner.steps.slots.tokens[0, 30:43].tolist() == sampled


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fault_stays_with_its_request(deterministic):
    """One embedding row is NaN: a request that uses it fails; its batch mates and the next owners of its blocks do not
    (C9)."""
    runner = tiny_runner(deterministic=deterministic)
    runner.decoder.embed[7] = math.nan
    clean = [t if t != 7 else 8 for t in tokens_of(1, 50)]
    driver = Driver(runner)
    driver.open(0, clean)
    want = driver.prefill(0, clean)
    driver.open(1, [*clean[:30], 7])
    driver.open(2, clean)
    assert driver.step((1, 0, 31, 1), (2, 0, 50, 1)).token_ids.tolist() == [-1, int(want.argmax())]
    assert driver.step((1, 31, 1, 1), (2, 50, 1, 1)).token_ids[0] == -1  # planned before the fault was known
    blocks = driver.tables[1]
    driver.free(1)
    driver.open(3, clean)
    driver.open(4, clean[:20])
    assert set(driver.tables[3]) & set(blocks)
    result = driver.step((3, 0, 50, 1), (4, 0, 20, 1))
    assert result.token_ids[0] == want.argmax()
    assert result.token_ids[1] >= 0
    driver.step((3, 49, 1, 1), (4, 19, 1, 1))  # rows that decode together read whole tiles, masked positions included
    torch.testing.assert_close(driver.logits[0], want, atol=1e-4, rtol=1e-4)


def test_reset_forgets_requests(runner):
    driver = Driver(runner)
    driver.open(0, tokens_of(1, 10), SamplingParams(temperature=0, logit_bias=((3, 100.0),)))
    assert driver.step((0, 0, 10, 1)).token_ids.tolist() == [3]
    runner.reset()
    assert not runner.steps.slots.tables.any()
    assert not runner.steps.sampler.bias
    driver.open(0, tokens_of(1, 10))
    assert driver.step((0, 0, 10, 1)).token_ids.tolist() != [3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("toggle", [{"kv_layout": "contiguous", "num_kv_blocks": None}, {"packed_weights": False}])
def test_toggles_change_no_greedy_token(dtype, toggle):
    prompts = [tokens_of(i, n) for i, n in enumerate((3, 60, 20))]
    outputs = []
    for config in ({}, toggle):
        driver = Driver(tiny_runner(dtype=dtype, **config))
        for slot, prompt in enumerate(prompts):
            driver.open(slot, prompt, GREEDY)
        steps = [driver.step(*((slot, 0, len(p), 1) for slot, p in enumerate(prompts))).token_ids]
        steps += [driver.step(*((s, len(p) + i, 1, 1) for s, p in enumerate(prompts))).token_ids for i in range(6)]
        outputs.append(np.stack(steps).tolist())
    assert outputs[0] == outputs[1]


# ---- memory -------------------------------------------------------------------------------------------------------

BIG = dense_spec(
    num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, head_dim=64, ffn_size=8192, vocab_size=128256,
    max_positions=131072, norm_eps=1e-5, tied_head=True,
)  # fmt: skip
GIB = 1 << 30


def cpu(dtype: torch.dtype, packed: bool) -> Numerics:
    return Numerics(dtype, torch.device("cpu"), "torch", packed, deterministic=False)


def test_the_memory_plan_adds_up_and_names_the_flags():
    plan = plan_memory(EngineConfig(max_model_len=4096).sized_for("cpu"), BIG, cpu(torch.bfloat16, True), 16 * GIB)
    assert plan.kv == plan.num_kv_blocks * 16 * 2 * 16 * 8 * 64 * 2
    assert 0.9 * GIB < plan.kv <= GIB
    assert plan.weights == 2 * (1_235_814_400 + 128256 * 2048)  # Llama 3.2 1B, and the packed head
    assert plan.max_model_len == 4096
    text = str(plan)
    for word in ("weights 2.79 GiB", "KV cache 1.00 GiB", "working memory", "num_kv_blocks", "max_model_len"):
        assert word in text


def test_the_cache_is_never_larger_than_the_requests_can_use():
    plan = plan_memory(
        EngineConfig(max_num_seqs=2, max_model_len=100).sized_for("cpu"), TINY, cpu(torch.float32, True), GIB
    )
    assert plan.num_kv_blocks == 2 * 7 + 1
    assert (
        plan_memory(EngineConfig(max_num_seqs=2).sized_for("cpu"), TINY, cpu(torch.float32, True), GIB).max_model_len
        == TINY.max_positions
    )


def test_the_cache_grows_for_the_wanted_context():
    config = EngineConfig(max_model_len=60_000).sized_for("cpu")
    plan = plan_memory(config, BIG, cpu(torch.bfloat16, True), 16 * GIB)
    assert plan.num_kv_blocks == 60_000 // 16 + 1


def test_contiguous_blocks_are_as_long_as_the_context():
    config = EngineConfig(kv_layout="contiguous", max_num_seqs=3, max_model_len=100).sized_for("cpu")
    plan = plan_memory(config, TINY, cpu(torch.float32, True), GIB)
    assert (plan.block_size, plan.num_kv_blocks, plan.max_model_len) == (100, 4, 100)


@pytest.mark.parametrize(
    ("available", "config", "message"),
    [
        (2 * GIB, {}, r"Too little memory.*weights 2.79 GiB.*; \d.\d\d GiB are missing\.$"),
        (8 * GIB, {"num_kv_blocks": 20_000}, "Too little memory; lower num_kv_blocks"),
        (8 * GIB, {"kv_cache_memory": 9.0}, "Too little memory; lower kv_cache_memory"),
        (16 * GIB, {"max_model_len": 60_000, "kv_cache_memory": 1.0}, "raise kv_cache_memory or lower max_model_len"),
        (5 * GIB, {"max_model_len": 100_000}, "The KV cache holds fewer|Too little memory"),
        (16 * GIB, {"max_model_len": 200_000}, "max_model_len is 200000; the model's context is 131072"),
    ],
)
def test_too_little_memory_is_refused_with_the_flag_to_change(available, config, message):
    with pytest.raises(CallboardError, match=message):
        plan_memory(EngineConfig(**config).sized_for("cpu"), BIG, cpu(torch.bfloat16, True), available)


def test_an_exclusive_gpu_is_filled():
    on_gpu = Numerics(torch.bfloat16, torch.device("cuda"), "triton", packed=False, deterministic=False)
    config = EngineConfig(max_num_seqs=256, prefill_graph_tokens=1024).sized_for("cuda")
    plan = plan_memory(config, BIG, on_gpu, 80 * GIB)
    total = plan.weights + plan.kv + plan.working + plan.graphs
    assert 79.9 * GIB < total <= 80 * GIB
    fewer = EngineConfig(max_num_seqs=256, prefill_graph_tokens=0).sized_for("cuda")
    assert plan_memory(fewer, BIG, on_gpu, 80 * GIB).graphs < plan.graphs
    assert "CUDA graphs" in str(plan)


@pytest.mark.parametrize(("form", "is_widened"), [("int4", True), ("fp8", False)])
def test_a_gpu_has_room_to_dequantize_one_weight(monkeypatch, form, is_widened):
    monkeypatch.setattr("runtime.kernels.linear.tiles.multiplies_fp8", lambda device: True)
    on_gpu = Numerics(torch.bfloat16, torch.device("cuda"), "triton", packed=False, deterministic=False)
    config = EngineConfig(quantization=form).sized_for("cuda")
    dense, codes = (plan_memory(config, spec, on_gpu, 80 * GIB) for spec in (BIG, quantized_at_load(BIG, config)))
    widened = 2 * 2 * BIG.ffn.size * BIG.hidden_size * is_widened  # gate and up in bfloat16
    assert codes.weights < 0.7 * dense.weights
    assert codes.working - dense.working == codes.graphs - dense.graphs == widened


def test_available_memory_is_plausible():
    assert 1 << 24 < available_memory(torch.device("cpu")) < 1 << 44


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@mock.patch("runtime.worker.runner.INTERPRETED", False)
def test_missing_devices_and_backends_are_refused():
    with pytest.raises(CallboardError, match="device is cuda"):
        choose_numerics(EngineConfig(device="cuda"))
    with pytest.raises(CallboardError, match="kernel_backend is triton"):
        choose_numerics(EngineConfig(kernel_backend="triton"))
    assert choose_numerics(EngineConfig()).dtype == torch.float32


# ---- the real model, on one thread: on busy cores two wait for each other at every operation -----------------------

CHAT_IDS = "What is the capital of France? Answer in one sentence."
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.<|im_end|>


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_smollm2_answers(dtype, deterministic, smollm2_path):
    from runtime.text.tokenizer import Tokenizer

    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{CHAT_IDS}<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = Tokenizer.load(smollm2_path).encode(text)
    config = EngineConfig(device="cpu", dtype=dtype, deterministic=deterministic, num_threads=1, max_model_len=256)
    driver = Driver(build_runner(config, CheckpointSource(smollm2_path)))
    for slot in range(3):
        driver.open(slot, tokens)
    rows = [(slot, 0, len(tokens), 1) for slot in range(3)]
    for want in ANSWER:
        assert driver.step(*rows).token_ids.tolist() == [want] * 3
        rows = [(slot, start + count, 1, 1) for slot, start, count, _ in rows]


@pytest.mark.thorough
def test_smollm2_logits_equal_transformers(smollm2_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(smollm2_path)
    theirs = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    assert theirs.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    tokens = np.random.default_rng(0).integers(20, 49152, 300).tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0, -1]
    driver = Driver(
        build_runner(EngineConfig(device="cpu", num_threads=1, max_model_len=512), CheckpointSource(smollm2_path))
    )
    driver.open(0, tokens)
    torch.testing.assert_close(driver.prefill(0, tokens, cuts=(200, 299)), want, atol=2e-3, rtol=1e-3)

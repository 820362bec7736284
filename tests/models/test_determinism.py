"""EngineConfig.deterministic: logits are bit-equal for any batch, chunks, cache hits and restarts."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.images import ImageSpan
from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.types import SamplingParams
from runtime.kernels.cpu_support import obstacle
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.models.runner_driver import TINY, Driver, tiny_runner
from tests.support.models.specs import dense_spec
from tests.support.models.tiny_images import TOKEN_ID, span_of, tiny_tower

SPECS = {
    "tiny": TINY,
    # Every dimension is odd to a vector register; a feed-forward layer is deep enough for oneDNN's one-row kernel.
    "odd": dense_spec(
        num_layers=2, hidden_size=100, num_heads=7, num_kv_heads=1, head_dim=10, ffn_size=1600, vocab_size=333,
        max_positions=256, norm_eps=1e-6, tied_head=True, qkv_bias=True,
    ),
    "mixture": dense_spec(
        num_layers=2, hidden_size=60, num_heads=6, num_kv_heads=2, head_dim=10, ffn_size=44, vocab_size=101,
        max_positions=256, norm_eps=1e-6, experts=ExpertsSpec(7, 3, True), norm="layer", activation="gelu_tanh",
        window=(70, 0), soft_cap=1.5, logit_soft_cap=4.0,
    ),
    # As gpt-oss: eight heads share keys, windows alternate, and the router's softmax is over the chosen experts.
    "sinks": dense_spec(
        num_layers=2, hidden_size=64, num_heads=16, num_kv_heads=2, head_dim=64, ffn_size=80, vocab_size=101,
        max_positions=256, norm_eps=1e-6, window=(128, 0), sinks=True, activation="swiglu_clamped",
        experts=ExpertsSpec(9, 3, False, scores="softmax_of_chosen", router_bias=True),
    ),
    # As DeepSeek V3: a sigmoid's scores, with a correction, choose groups and then experts.
    "latents": dense_spec(
        num_layers=2, hidden_size=60, num_heads=6, num_kv_heads=1, head_dim=20, ffn_size=(88, 44), vocab_size=101,
        max_positions=256, norm_eps=1e-6, mixer=LatentSpec(6, 24, 8, 12, 10, q_rank=16), experts=(None, ExpertsSpec(
            8, 2, True, shared=1, scores="sigmoid", choice_bias=True, groups=4, top_groups=2, group_score="top2",
            scale=2.5,
        )),
    ),
    # Weights that compiled kernels multiply, with a padded head and heads of two vectors.
    "quantized": dense_spec(
        num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32, ffn_size=160, vocab_size=333,
        max_positions=256, norm_eps=1e-6, tied_head=True, qk_norm="head",
    ),
    "images": TINY,
}  # fmt: skip
NUMERICS = {"int4": {"quantization": "int4"}, "int8": {"quantization": "int8", "cpu_activations": "int8"}}
COMPILED = pytest.mark.skipif(bool(obstacle()), reason=f"int4 and int8 need compiled kernels: {obstacle()}")
KINDS = [pytest.param("quantized", numerics, marks=COMPILED) for numerics in NUMERICS]
KINDS += [(spec, dtype) for spec in ("tiny", "odd", "images") for dtype in ("float32", "bfloat16")]
KINDS += [(spec, "float32") for spec in ("mixture", "sinks", "latents")]


def _runner(spec: str, numerics: str, **config) -> ModelRunner:
    own = NUMERICS.get(numerics, {"dtype": numerics})
    tower = tiny_tower(SPECS[spec].hidden_size) if spec == "images" else None
    return tiny_runner(SPECS[spec], tower=tower, deterministic=True, **own, **config)


@cache
def runner_of(spec: str, dtype: str, **config) -> ModelRunner:
    return _runner(spec, dtype, num_threads=2, **config)


def tokens_of(seed: int, count: int, vocab: int, spans: Sequence[ImageSpan] = ()) -> list[int]:
    tokens = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    for span in spans:
        tokens[span.begin : span.end] = [TOKEN_ID] * len(tokens[span.begin : span.end])
    return tokens


def prompt_of(spec: str, seed: int, count: int) -> tuple[list[int], Sequence[ImageSpan]]:
    """Random tokens, among images where the model takes them. The prompt may end within an image."""
    spans = (span_of(20, seed, 4, 6), span_of(90, seed + 10, 5, 5)) if spec == "images" else ()
    return tokens_of(seed, count, SPECS[spec].vocab_size, spans), spans


@cache
def reference(spec: str, dtype: str, seed: int, count: int) -> torch.Tensor:
    """The last logits of a prompt computed alone, in one chunk, in a fresh runner."""
    driver = Driver(runner_of(spec, dtype), seed=99)
    tokens, spans = prompt_of(spec, seed, count)
    driver.open(0, tokens, spans=spans)
    return driver.prefill(0, tokens)


LENGTHS = st.sampled_from([1, 2, 5, 63, 64, 65, 100, 129, 150])


@pytest.mark.parametrize(("spec", "dtype"), KINDS)
@settings(max_examples=15, deadline=None)
@given(count=LENGTHS, cuts=st.sets(st.integers(1, 149), max_size=5), seed=st.integers(0, 3), place=st.integers(0, 9))
def test_chunks_and_blocks_do_not_show(spec, dtype, count, cuts, seed, place):
    tokens, spans = prompt_of(spec, seed, count)
    driver = Driver(runner_of(spec, dtype), seed=place)
    driver.open(3, tokens, spans=spans)
    assert torch.equal(driver.prefill(3, tokens, tuple(cuts)), reference(spec, dtype, seed, count))


@pytest.mark.parametrize(("spec", "dtype"), KINDS)
@settings(max_examples=8, deadline=None)
@given(
    mates=st.lists(st.tuples(LENGTHS, st.integers(0, 3), st.booleans()), min_size=1, max_size=6)
    | st.lists(st.tuples(LENGTHS, st.integers(0, 3), st.just(True)), min_size=31, max_size=31),
    count=LENGTHS,
    seed=st.integers(0, 3),
)
def test_batch_mates_do_not_show(spec, dtype, mates, count, seed):
    """Rows that decode their last token and rows that prefill, in one step; each of them is checked."""
    driver = Driver(runner_of(spec, dtype, num_kv_blocks=1040))
    requests = [(count, seed, True), *mates]
    rows = []
    for slot, (length, own_seed, decodes) in enumerate(requests):
        tokens, spans = prompt_of(spec, own_seed, length)
        driver.open(slot, tokens, spans=spans)
        start = length - 1 if decodes else 0
        if start:
            driver.step((slot, 0, start, 0))
        rows.append((slot, start, length - start, 1))
    driver.step(*rows)
    for row, (length, own_seed, _) in enumerate(requests):
        assert torch.equal(driver.logits[row], reference(spec, dtype, own_seed, length))


@pytest.mark.parametrize(("spec", "dtype"), KINDS)
def test_prefix_hits_and_restarts_do_not_show(spec, dtype):
    driver = Driver(runner_of(spec, dtype), seed=5)
    tokens, spans = prompt_of(spec, 1, 129)
    driver.open(0, tokens[:100], spans=spans)
    driver.prefill(0, tokens[:100])
    driver.open(1, tokens, shared=driver.tables[0][:6], spans=spans)  # 96 tokens are another's: they end in an image
    assert torch.equal(driver.prefill(1, tokens, start=96), reference(spec, dtype, 1, 129))
    fresh = _runner(spec, dtype, num_threads=2)
    driver = Driver(fresh)
    driver.open(0, tokens, spans=spans)
    assert torch.equal(driver.prefill(0, tokens), reference(spec, dtype, 1, 129))


@pytest.mark.parametrize(("spec", "dtype"), KINDS)
def test_decoding_equals_recomputing(spec, dtype):
    """After a preemption the output is prefilled, with the same bits as when it was decoded beside other rows."""
    vocab = SPECS[spec].vocab_size
    driver = Driver(runner_of(spec, dtype))
    (tokens, spans), mate = prompt_of(spec, 2, 60), tokens_of(3, 9, vocab)
    hot = SamplingParams(max_tokens=64, temperature=1.0)
    driver.open(0, tokens, hot, seed=77, spans=spans[:1])
    driver.open(1, mate, hot, seed=78)
    tokens += driver.step((0, 0, 60, 1), (1, 0, 9, 1)).token_ids[:1].tolist()
    decoded = [driver.logits[0]]
    for step in range(10):
        tokens += driver.step((0, 60 + step, 1, 1), (1, 9 + step, 1, 1)).token_ids[:1].tolist()
        decoded.append(driver.logits[0])
    for at in (0, 3, 4, 10):
        known = tokens[: 60 + at]
        again = Driver(driver.runner, seed=at)
        again.open(2, known, hot, prompt_len=60, seed=77, spans=spans[:1])
        again.step((2, 0, len(known), 1))
        assert torch.equal(again.logits[0], decoded[at])
        assert int(again.runner.steps.slots.tokens[2, len(known)]) == tokens[len(known)]


@pytest.mark.parametrize(
    "toggle",
    [
        {"packed_weights": False},
        {"block_size": 64},
        {"block_size": 5},
        {"kv_layout": "contiguous", "num_kv_blocks": None, "max_model_len": 180},
    ],
    ids=str,
)
@pytest.mark.parametrize(("spec", "dtype"), KINDS)
def test_toggles_do_not_show(spec, dtype, toggle):
    """C6: in deterministic mode a policy changes not one bit, except num_threads, which decides how work is split."""
    want = reference(spec, dtype, 1, 129)
    runner = _runner(spec, dtype, **{"num_kv_blocks": 200, "num_threads": 2} | toggle)
    tokens, spans = prompt_of(spec, 1, 129)
    driver = Driver(runner)
    driver.open(0, tokens, spans=spans)
    driver.open(1, tokens[:50])
    assert torch.equal(driver.prefill(0, tokens, (40, 128)), want)


@COMPILED
def test_quantized_weights_need_no_deterministic_mode():
    """Compiled kernels give the same bits with and without it, with tapes and without, for any number of threads."""
    tokens, logits = tokens_of(4, 90, 333), []
    for config in ({"deterministic": True}, {}, {"num_threads": 2}):
        runner = tiny_runner(SPECS["quantized"], quantization="int4", **config)
        if not config:
            runner.steps.tapes = None
        driver = Driver(runner)
        driver.open(0, tokens)
        rows = [driver.prefill(0, tokens, (40,))]
        for step in range(3):
            driver.step((0, 90 + step, 1, 1))
            rows.append(driver.logits[0])
        logits.append(torch.stack([row.flatten() for row in rows]))
    assert all(torch.equal(each, logits[0]) for each in logits)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_is_bit_equal_alone_and_in_batches(dtype, smollm2_path):
    config = EngineConfig(device="cpu", dtype=dtype, deterministic=True, num_threads=2, max_model_len=512)
    runner = build_runner(config, CheckpointSource(smollm2_path))
    lengths = [1, 64, 100, 130, 17]
    prompts = [tokens_of(i, n, 49152) for i, n in enumerate(lengths)]
    alone = []
    for prompt in prompts:
        driver = Driver(runner)
        driver.open(0, prompt)
        alone.append(driver.prefill(0, prompt))
    driver = Driver(runner, seed=1)
    for slot, prompt in enumerate(prompts):
        driver.open(slot, prompt)
    driver.step(*((slot, 0, n - 1, 0) for slot, n in enumerate(lengths) if n > 1))
    driver.step(*((slot, n - 1, 1, 1) for slot, n in enumerate(lengths)))
    for row, want in enumerate(alone):
        assert torch.equal(driver.logits[row], want)

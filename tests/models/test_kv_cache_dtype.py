"""EngineConfig.kv_cache_dtype: bits depend on no batch, chunk or hit; memory, identity, scales of a checkpoint."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.core.prefix_cache import root_hash
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import write
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import dense_spec

SPEC = dense_spec(
    num_layers=2, hidden_size=60, num_heads=6, num_kv_heads=2, head_dim=10, ffn_size=44, vocab_size=101,
    max_positions=256, norm_eps=1e-6, window=(70, 0), soft_cap=1.5, sinks=True,
)  # fmt: skip
KINDS = pytest.mark.parametrize("kind", ["fp8", "int8"])


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, SPEC.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@KINDS
def test_batch_chunks_and_hits_do_not_show(kind):
    runner = tiny_runner(SPEC, kv_cache_dtype=kind, deterministic=True)
    tokens = tokens_of(0, 130)
    driver = Driver(runner)
    driver.open(0, tokens)
    alone = driver.prefill(0, tokens).clone()
    plain = Driver(tiny_runner(SPEC, deterministic=True))
    plain.open(0, tokens)
    exact = plain.prefill(0, tokens)
    assert 0 < (alone - exact).norm() / exact.norm() < (0.1 if kind == "fp8" else 0.02)

    driver = Driver(runner, seed=4)
    driver.open(0, tokens)
    assert torch.equal(driver.prefill(0, tokens, (1, 63, 100, 129)), alone)
    driver.open(1, tokens, shared=driver.tables[0][:6])  # a prefix hit: 96 tokens are another's
    driver.open(2, tokens_of(1, 77))
    driver.open(3, tokens)
    driver.step((3, 0, 129, 0), (2, 0, 70, 0))
    driver.step((1, 96, 34, 1), (2, 70, 7, 1), (3, 129, 1, 1))
    assert torch.equal(driver.logits[0], alone)
    assert torch.equal(driver.logits[2], alone)


@KINDS
def test_a_block_takes_fewer_bytes_and_is_zeroed_with_its_scales(kind):
    runner, plain = (tiny_runner(num_kv_blocks=None, kv_cache_memory=0.0005, kv_cache_dtype=k) for k in (kind, "auto"))
    scales = 2 if kind == "int8" else 0
    bytes_per_token = 2 * 2 * 2 * (16 + scales)
    assert runner.memory.kv_cache.bytes_per_token == bytes_per_token
    assert runner.info.num_kv_blocks == (1 << 30) * 5 // 10000 // (16 * bytes_per_token)
    assert runner.info.num_kv_blocks > 3.5 * plain.info.num_kv_blocks
    cache = runner.steps.cache
    for layer in cache.layers:
        layer.values[:, :, 3] = float("nan") if kind == "fp8" else 1
        if kind == "int8":
            layer.scales[:, 3] = float("nan")
    cache.clear(3)
    assert all(layer.values[:, :, 3].float().eq(0).all() for layer in cache.layers)
    assert kind == "fp8" or all(layer.scales[:, 3].eq(0).all() for layer in cache.layers)


def test_blocks_of_another_dtype_are_not_found():
    """A block's hash begins with the fingerprint, which also distinguishes a restarted engine from its predecessor."""
    prints = [tiny_runner(kv_cache_dtype=kind).info.fingerprint for kind in ("auto", "fp8", "int8")]
    assert len({root_hash(fingerprint, "") for fingerprint in prints}) == 3


def test_a_draft_stores_keys_as_its_model_does():
    assert EngineConfig(kv_cache_dtype="int8", draft="d").draft_config().kv_cache_dtype == "int8"


def runner_of(folder, kind: str) -> ModelRunner:
    config = EngineConfig(device="cpu", kv_cache_dtype=kind, num_kv_blocks=20, max_model_len=64, num_threads=1)
    return build_runner(config, CheckpointSource(folder))


@pytest.mark.parametrize(("scheme", "dtype"), [("float", torch.float8_e4m3fn), ("int", torch.float32)])
def test_auto_follows_the_checkpoint(tmp_path, scheme, dtype):
    """A kv_cache_scheme as compressed-tensors writes it, and one that no cache here supports."""
    form = FORMATS["ct-fp8-channel"]
    described = {"num_bits": 8, "type": scheme, "strategy": "tensor", "dynamic": False, "symmetric": True}
    folder, _ = write(tmp_path, replace(form, config=form.config | {"kv_cache_scheme": described}))
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.k_scale": torch.tensor([0.5])}, path)
    layer, _ = runner_of(folder, "auto").steps.cache.layers
    assert layer.values.dtype == dtype
    if scheme == "float":
        assert layer.scales[0].eq(0.5).all()
    assert runner_of(folder, "none").steps.cache.layers[0].values.dtype == torch.float32


def test_fp8_uses_the_scales_of_the_checkpoint(tmp_path):
    folder, _ = write(tmp_path, FORMATS["fp8-block"])
    path, layer = folder / "model.safetensors", "model.layers.{}.self_attn."
    tensors = load_file(path)

    def scales_with(**names: torch.Tensor) -> list[torch.Tensor]:
        added = {layer.format(name[1]) + name[3:].replace("__", "."): value for name, value in names.items()}
        save_file(tensors | added, path)
        return [kv.scales for kv in runner_of(folder, "fp8").steps.cache.layers]

    heads = scales_with()[0].shape[1]
    assert all(scales.eq(1).all() for scales in scales_with())
    first, second = scales_with(
        l0_k_scale=torch.tensor(0.5), l0_v_scale=torch.full((heads, 1, 1), 0.25).bfloat16(),
        l1_kv_scale=torch.tensor([0.125]), l1_k_proj__k_scale=torch.tensor(3.0),
    )  # fmt: skip
    assert (first[0].tolist(), first[1].tolist()) == ([0.5] * heads, [0.25] * heads)
    assert (second[0].tolist(), second[1].tolist()) == ([3.0] * heads, [0.125] * heads)
    unusable, _ = scales_with(l0_k_scale=torch.tensor(-1.0), l0_v_scale=torch.tensor(0.0))
    assert unusable.eq(1).all()
    with pytest.raises(CallboardError, match=rf"k_scale has 5 scales, neither one nor one of each of {heads} heads"):
        scales_with(l0_k_scale=torch.ones(5))
    assert runner_of(folder, "int8").steps.cache.layers[0].scales.dtype == torch.float16

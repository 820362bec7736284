"""Decoders of ranks, which are threads here: their logits equal one rank's, and with rank_invariant bit by bit."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, RopeSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.layer_spec import POST_NORMS, PRE_NORMS
from runtime.base.model.mixer_spec import DeltaRuleSpec, ShortConvSpec
from runtime.base.model.sharding import parts_of
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.features.adapter_weights import RunnerAdapters
from runtime.kernels.attention.attention_torch import AttentionShape, plan_attention
from runtime.kernels.attention.paged_attention import PagedBatch, PagedRows
from runtime.kernels.attention.tiled_rows import TiledRows, attention_tiles
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.step.state_rows import StateRows
from runtime.models import load_spec
from runtime.models.decoder_build import draw_decoder
from runtime.models.families import gemma4, lfm, phi, qwen_hybrid
from runtime.models.forward_batch import ForwardBatch, GroupRows
from runtime.models.published import PUBLISHED
from runtime.models.weight_map import WeightMap
from runtime.quant.at_load import quantized_at_load
from runtime.quant.parsers import parse_gguf
from runtime.quant.scheme import QuantizationScheme
from runtime.worker.kv_cache import KVCache
from runtime.worker.runner import choose_numerics
from runtime.worker.state_cache import StateCache
from tests.support.models.specs import changed, dense_spec
from tests.support.ranks.rank_threads import on_ranks

BASE = dense_spec(
    num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=16, ffn_size=128, vocab_size=201,
    max_positions=64, norm_eps=1e-5,
)  # fmt: skip
GEMMA_4 = changed(
    BASE, num_layers=4, norms=PRE_NORMS + POST_NORMS, activation="gelu_tanh", embed_scale=8.0, tied_head=True,
    logit_soft_cap=20.0, window=(8, 0), rope=(RopeSpec(), RopeSpec(type="proportional", partial=0.25)), scale=1.0,
    qk_norm="head", v_norm=True, head_dim=(16, 32), has_factor=True,
)  # fmt: skip
SPECS = {
    "llama": BASE,
    "qwen": changed(BASE, qk_norm="head", qkv_bias=True, out_bias=True, tied_head=True),
    "gemma": changed(
        BASE, norms=PRE_NORMS + POST_NORMS, activation="gelu_tanh", embed_scale=8.0, tied_head=True, soft_cap=30.0,
        logit_soft_cap=20.0, window=(8, 0), num_kv_heads=2,
    ),
    "mixture": changed(BASE, experts=ExpertsSpec(4, 2, normalized=True), ffn_size=64),
    "mixture with shared experts": changed(
        BASE, ffn_size=(128, 64), experts=(None, ExpertsSpec(
            4, 2, True, shared=2, shared_gate=True, scores="sigmoid", choice_bias=True, sum_eps=1e-6
        )),
    ),
    "mixture with biases": changed(
        BASE, ffn_size=64, ffn_bias=True, activation="swiglu_clamped",
        experts=ExpertsSpec(4, 2, False, shared=1, scores="softmax_of_chosen", router_bias=True),
    ),
    "mixture of groups": changed(
        BASE, ffn_size=64,
        experts=ExpertsSpec(
            8, 2, True, scores="sigmoid", choice_bias=True, groups=4, top_groups=2, group_score="top2", sum_eps=1e-20
        ),
    ),
    "gpt": changed(
        BASE, rope=RopeSpec(partial=0.0), activation="gelu_tanh", gated=False, norm="layer", learned_positions=True,
        qkv_bias=True, out_bias=True, ffn_bias=True, fused_qkv=True, num_kv_heads=8,
    ),
    "glm, smollm3, granite": changed(
        BASE, rope=(RopeSpec(partial=0.5, interleaved=True), RopeSpec(partial=0.0)), qkv_bias=True,
        fused_gate_up=True, norms=PRE_NORMS + POST_NORMS, logit_scale=0.5, num_kv_heads=2,
    ),
    "gemma 4": changed(
        GEMMA_4, kv_source=(None, None, 0, 1), ffn_size=(128, 128, 256, 256), embed_size=12, num_kv_heads=(4, 1)
    ),
    "gemma 4 mixture": changed(
        GEMMA_4, ffn_size=64, beside=128, keys_as_values=(False, True), num_kv_heads=(4, 2),
        experts=ExpertsSpec(4, 2, True, expert_scales=True, own_norm=True),
    ),
    "sinks": changed(BASE, sinks=True, window=(8, 0)),
    "olmo": changed(BASE, norms=POST_NORMS, qk_norm="all"),
    "delta rule": changed(
        BASE, output_gate=True, qk_norm="head", rope=RopeSpec(partial=0.25),
        mixer=(DeltaRuleSpec(key_heads=8, value_heads=16, key_dim=8, value_dim=12, width=4), None),
    ),
    "delta rule by key head": changed(
        BASE, output_gate=True, num_kv_heads=2,
        mixer=(None, DeltaRuleSpec(key_heads=8, value_heads=16, key_dim=12, value_dim=8, width=3, by_key_head=True)),
    ),
    "tiled delta rule": changed(
        BASE, output_gate=True,
        mixer=(DeltaRuleSpec(key_heads=4, value_heads=12, key_dim=8, value_dim=16, width=4, tiled=True), None),
    ),
    "short convolution": changed(BASE, mixer=(ShortConvSpec(64, 3, bias=True), None)),
    "latents": changed(BASE, mixer=LatentSpec(8, 24, 8, 12, 10, split_up=True, rope=RopeSpec(interleaved=True))),
    "latents of q, mixture": changed(
        BASE, mixer=LatentSpec(8, 24, 8, 12, 10, q_rank=16), ffn_size=(128, 64), experts=(None, ExpertsSpec(
            8, 2, True, shared=1, scores="sigmoid", choice_bias=True, groups=4, top_groups=2, group_score="top2",
        )),
    ),
    "phi": changed(BASE, fused_qkv=True, fused_gate_up=True, rope=RopeSpec(partial=0.5), num_kv_heads=1),
}  # fmt: skip


WEIGHT_MAPS = {
    "delta rule": qwen_hybrid.WEIGHT_MAP, "delta rule by key head": qwen_hybrid.NEXT_WEIGHT_MAP,
    "short convolution": lfm.WEIGHT_MAP, "gemma 4": gemma4.WEIGHT_MAP, "gemma 4 mixture": gemma4.WEIGHT_MAP,
}  # fmt: skip


def weight_map_of(spec: DecoderSpec) -> WeightMap:
    """Names for the modules of an adapter."""
    return next((own for family, own in WEIGHT_MAPS.items() if SPECS[family] == spec.whole), phi.WEIGHT_MAP)


def rank_logits(spec: DecoderSpec, config: EngineConfig, communicator: Communicator, adapter: str = "") -> torch.Tensor:
    """A rank's logits [rows, ids] of a prompt and of the token after it, with the adapter of `folder`, if any. Another
    row is in the same steps."""
    torch.set_num_threads(1)
    numerics = choose_numerics(config)
    own = quantized_at_load(spec, config).of_rank(Shard(communicator.rank, communicator.size))
    decoder = draw_decoder(own, numerics, 64, communicator=communicator)
    if adapter:
        RunnerAdapters(decoder, weight_map_of(spec), config.max_loras, config.max_lora_rank).load(1, adapter)
    cache_spec, states = own.kv_cache(numerics.dtype_name, config.kv_cache_dtype), None
    if cache_spec.states is not None:
        states = StateCache(cache_spec.states, 3, 2, numerics.device)
    num_blocks = 1 + 4 * len(cache_spec.groups)
    cache = KVCache(cache_spec, num_blocks, 16, numerics.device, states=states)
    apart = 1 if cache_spec.is_mixed else num_blocks
    of_numerics = numerics.dtype, numerics.device, numerics.deterministic
    shapes = [AttentionShape(own.num_heads, g.num_kv_heads, apart, 16, *of_numerics) for g in cache_spec.groups]
    all_tables = [
        np.array([[1, 2, 0, 0], [3, 4, 0, 0]], np.int32) + np.array([4 * g, 4 * g, 0, 0], np.int32)
        for g in range(len(shapes))
    ]
    all_tables = [tables * factor for tables, factor in zip(all_tables, cache.table_factors, strict=True)]
    ids = torch.arange(44).mul_(37) % spec.vocab_size
    places = torch.tensor([[1, 19, 0, 0], [2, 18, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    device = numerics.device

    def forward(rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        row_of = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        most, total = max(counts), sum(counts)
        numbers = [torch.tensor(n, dtype=torch.int32, device=device) for n in (rows, starts, np.cumsum([0, *counts]))]
        state_rows = StateRows(*numbers, places.to(device), len(rows), total, most)
        groups = []
        for tables, shape in zip(all_tables, shapes, strict=True):
            if device.type == "cuda":
                part = PagedRows(*numbers, torch.from_numpy(tables).to(device), len(rows), total, most, 22)
                plan = PagedBatch(total, [part])
            elif decoder.kernels.launcher is not None:
                in_tiles = attention_tiles(*(np.array(n, np.int32) for n in (starts, counts, rows)))
                plan = TiledRows(sum(counts), torch.from_numpy(in_tiles), torch.from_numpy(tables))
            else:
                plan = plan_attention(tables[rows], np.array(starts, np.int32), np.array(counts, np.int32), shape)
            blocks = torch.from_numpy(tables)[row_of, positions // 16].long()
            groups.append(GroupRows((blocks * 16 + positions % 16).to(device), plan))
        token_ids = ids[row_of * 22 + positions].to(device)
        adapters = row_of.to(device) if adapter else None
        batch = ForwardBatch(token_ids, positions.to(device), groups, adapters, state_rows)
        return decoder.logits(decoder.forward(batch, cache.layers)).float().clone()  # from a buffer

    with torch.inference_mode():
        return torch.cat((forward([0, 1], [0, 0], [20, 19]), forward([1, 0], [19, 20], [1, 1])))


def all_logits(spec: DecoderSpec, size: int, adapter: str = "", **settings) -> torch.Tensor:
    """All ranks' logits side by side."""
    config = EngineConfig(**{"device": "cpu", "tensor_parallel_size": size} | settings)
    run: Callable[[Communicator], torch.Tensor] = lambda ranks: rank_logits(spec, config, ranks, adapter)  # noqa: E731
    if size == 1:
        return run(OneRank())
    return torch.cat(on_ranks(size, run, tree=config.rank_invariant), 1)


@pytest.mark.parametrize(
    ("family", "size"), [*((family, 2) for family in SPECS), ("gemma", 4), ("sinks", 8), ("olmo", 8), ("phi", 8)]
)
def test_ranks_together_have_the_logits_of_one(family, size):
    want = all_logits(SPECS[family], 1)
    assert want.std() > 0.1
    torch.testing.assert_close(all_logits(SPECS[family], size), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama", 2), ("gemma", 4), ("gpt", 2), ("phi", 8), ("sinks", 4), *((family, 2) for family in WEIGHT_MAPS)],
)
def test_ranks_with_an_adapter_have_the_logits_of_one(family, size, tmp_path):
    spec = SPECS[family]
    save_adapter(tmp_path, modules_of(spec, weight_map_of(spec)), size=0.5)
    settings = {"adapter": str(tmp_path), "max_loras": 1, "max_lora_rank": 4}
    want = all_logits(spec, 1, **settings)
    assert float((want - all_logits(spec, 1)).abs().max()) > 0.1
    torch.testing.assert_close(all_logits(spec, size, **settings), want, rtol=1e-4, atol=1e-4)


def test_heads_and_tokens_by_threes():
    spec = changed(BASE, num_heads=9, num_kv_heads=3, ffn_size=96)
    torch.testing.assert_close(all_logits(spec, 3), all_logits(spec, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [family for family in SPECS if family != "tiled delta rule"])
def test_rank_invariant_logits_are_equal_to_the_bit(family):
    spec = SPECS[family]
    want = all_logits(spec, 1, rank_invariant=True)
    torch.testing.assert_close(want, all_logits(spec, 1), rtol=1e-4, atol=1e-4)
    for size in (2, 8):
        assert torch.equal(all_logits(spec, size, rank_invariant=True), want), size


def test_rank_invariant_logits_of_quantized_weights():
    """All groups quantize a leaf alike."""
    spec = changed(BASE, hidden_size=512, head_dim=64, ffn_size=512)
    settings = {"quantization": "int4", "head_quantization": "int8", "rank_invariant": True}
    for backend in ("llvm", "torch"):
        want = all_logits(spec, 1, kernel_backend=backend, **settings)
        assert torch.equal(all_logits(spec, 4, kernel_backend=backend, **settings), want)


def test_quantized_experts_keep_their_biases():
    spec = SPECS["mixture with biases"]
    want = all_logits(spec, 1)
    found = all_logits(spec, 1, quantization="int8", kernel_backend="llvm")
    assert 0 < (found - want).norm() < 0.05 * want.norm()
    torch.testing.assert_close(
        all_logits(spec, 2, quantization="int8", kernel_backend="llvm"), found, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("backend", ["torch", "llvm"])
def test_ranks_have_whole_blocks_of_experts_in_mxfp4(backend):
    """Two ranks have 128 and 64 of the 192 intermediate values."""
    spec = changed(SPECS["mixture with biases"], ffn_size=192)
    scheme = QuantizationScheme("mxfp4", "fp4", group_size=32, scale_dtype="float8_e8m0fnu")
    names = [name for name in spec.shapes() if ".experts." in name and name.endswith(".weight")]
    spec = replace(spec, quantization=dict.fromkeys(names, scheme))
    assert [spec.of_rank(Shard(rank, 2)).ffn.size for rank in (0, 1)] == [128, 64]
    want = all_logits(spec, 1, kernel_backend=backend)
    torch.testing.assert_close(all_logits(spec, 2, kernel_backend=backend), want, rtol=2e-3, atol=2e-3)
    with pytest.raises(CallboardError, match="2 ranks need equal parts of experts in mxfp4"):
        spec.check(EngineConfig(tensor_parallel_size=2, rank_invariant=True))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_gpt_oss_has_whole_blocks_on_every_rank(size):
    spec, _ = load_spec(PUBLISHED["gpt-oss-120b"] | {"num_hidden_layers": 1})
    parts = [parts_of(spec.of_rank(Shard(rank, size)), "layers.0.experts.7.down.weight")[0] for rank in range(size)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 2880
    assert all(part.start % 64 == part.stop % 64 == 0 for part in parts)


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_have_parts_of_weights_that_differ_in_form(tied):
    kinds = {"q": "Q5_0", "k": "Q5_0", "v": "Q8_0", "out": "Q4_0", "gate": "Q4_1", "up": "Q4_1", "down": "Q5_1"}
    spec = changed(BASE, hidden_size=256, head_dim=32, ffn_size=256, tied_head=tied)
    names = {f"layers.{layer}.{part}.weight": kind for layer in range(2) for part, kind in kinds.items()}
    rule = parse_gguf({"types": {f"{name}.weight": kind for name, kind in (names | {"embed": "Q8_0"}).items()}})
    spec = replace(spec, quantization={name: rule(name, name) for name in (*names, "embed")})
    want = all_logits(spec, 1)
    torch.testing.assert_close(all_logits(spec, 2), want, rtol=1e-3, atol=1e-3)
    in_leaves = all_logits(spec, 1, rank_invariant=True)
    torch.testing.assert_close(in_leaves, want, rtol=1e-3, atol=1e-3)
    for size in (2, 4):
        assert torch.equal(all_logits(spec, size, rank_invariant=True), in_leaves)

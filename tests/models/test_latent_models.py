"""Latent attention: its two forms, the size of its cache, and its refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.kernels.attention import latent_torch
from runtime.kernels.attention.attention_torch import AttentionShape, plan_attention
from runtime.kernels.attention.latent_torch import latent_attention_exact, latent_attention_torch, latent_up
from runtime.kernels.linear.linear_torch import cpu_product
from runtime.kernels.numerics import Numerics
from runtime.models import load_spec
from runtime.models.published import PUBLISHED
from runtime.quant.model_formats import check_products
from tests.support.models.family_cases import spec_of
from tests.support.models.specs import changed

RANK, ROPE, NOPE, VALUE, HEADS = 20, 6, 12, 10, 5


@pytest.mark.parametrize("together", [1, 1 << 24])
@pytest.mark.parametrize(
    ("start", "count", "first_key"),
    [(0, 200, 0), (37, 150, 0), (180, 1, 0), (5, 100, 0), (1, 150, 1), (7, 1, 1), (5, 9, 1)],
)
def test_both_forms_are_attention_over_keys_and_values(start, count, first_key, together, monkeypatch):
    monkeypatch.setattr(latent_torch, "MAX_EXPANDED", together)
    torch.manual_seed(0)
    length = start + count
    kv = torch.full((1, 1, 20, 16, RANK + ROPE), torch.nan)
    kv[0, 0, 0] = 0.0
    table = np.random.default_rng(0).permutation(np.arange(1, 20))[:15].astype(np.int32)
    latents = torch.randn(length, RANK + ROPE)
    positions = torch.arange(15 * 16)
    kv[0, 0, torch.from_numpy(table).long()] = 0.0
    kv[0, 0, torch.from_numpy(table)[positions[:length] // 16].long(), positions[:length] % 16] = latents
    weight, q = torch.randn(HEADS, NOPE + VALUE, RANK), torch.randn(count, HEADS, NOPE + ROPE)
    k_and_v = torch.einsum("lr,hdr->hld", latents[:, :RANK], weight)
    k = torch.cat((k_and_v[..., :NOPE], latents[:, RANK:].expand(HEADS, -1, -1)), -1)
    scores = torch.einsum("thd,hld->htl", q, k) * 0.1
    seen = torch.arange(length) <= torch.arange(start, length)[:, None]
    seen[:, :first_key] = False
    kv[0, 0, table[0], :first_key] = torch.nan
    want = torch.einsum("htl,hld->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), k_and_v[..., NOPE:])
    numbers = np.array([start], np.int32), np.array([count], np.int32)
    for exact in (False, True):
        shape = AttentionShape(HEADS, 1, 20, 16, torch.float32, torch.device("cpu"), exact)
        up = latent_up(weight, NOPE, (lambda w: cpu_product(w, None, False, True)) if exact else None)
        attend = latent_attention_exact if exact else latent_attention_torch
        got = attend(q, kv, plan_attention(table[None], *numbers, shape), up, 0.1, first_key)
        torch.testing.assert_close(got, want.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "of_layer", "layers"),
    [("glm-4.7-flash", 1152, 47), ("deepseek-v2-lite", 1152, 27), ("deepseek-v3", 1152, 61)],
)
def test_a_token_has_the_published_bytes(model, of_layer, layers):
    spec = load_spec(PUBLISHED[model])[0]
    cache = spec.kv_cache("bfloat16", longest=1 << 14)
    assert cache.bytes_per_token == layers * of_layer
    assert len(cache.groups) == 1
    assert spec.of_rank(Shard(0, 4)).kv_cache("bfloat16").bytes_per_token == layers * of_layer


@pytest.mark.parametrize(
    ("model", "billions"), [("glm-4.7-flash", 29.9), ("deepseek-v2-lite", 15.7), ("deepseek-v3", 671.0)]
)
def test_a_model_has_the_published_number_of_parameters(model, billions):
    shapes = load_spec(PUBLISHED[model])[0].shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9 == pytest.approx(billions, abs=0.1)


def test_yarn_scales_scores_by_the_square_of_its_factor():
    spec = load_spec(PUBLISHED["deepseek-v3"])[0]
    assert spec.latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert spec.latent.rope.attention_factor == 1.0
    assert load_spec(PUBLISHED["glm-4.7-flash"])[0].latent.scale == pytest.approx(256**-0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8; this model's cache has latents"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8; this model's cache has latents"),
        ({"max_loras": 2}, "max_loras is 2; it must be 0, since adapters are not supported for models with latent"),
    ],
)
def test_settings_without_a_form_for_latents_are_refused(settings, message):
    spec = replace(spec_of("deepseek v3"), fp8_kv_cache=True)
    spec.check(EngineConfig())
    with pytest.raises(CallboardError, match=message):
        spec.check(EngineConfig(**settings))


def test_leaves_have_no_latent_kernels_on_a_gpu():
    numerics = Numerics(torch.float32, torch.device("meta"), "triton", False, True, rank_invariant=True)
    spec = changed(spec_of("deepseek v3"), experts=None)
    with pytest.raises(CallboardError, match="for which latent attention has no kernels on a GPU"):
        check_products(spec, numerics, EngineConfig(rank_invariant=True))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek v2", {"norm_topk_prob": True}, "only weights of a softmax that are not normalized"),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported are greedy"),
        ("deepseek v3", {"scoring_func": "softmax"}, "supported are noaux_tc and sigmoid"),
        ("deepseek v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek v3", {"attention_bias": True}, "latent attention has no biases"),
        ("deepseek v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even"),
        ("deepseek v3", {"kv_lora_rank": 0}, "kv_lora_rank 0"),
        ("glm 4.7 flash", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "only the first layers may be dense"),
        ("glm 4.7 flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_variants_without_support_are_refused(case, changes, message):
    with pytest.raises(CallboardError, match=message):
        spec_of(case, **changes)

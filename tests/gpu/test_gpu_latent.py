"""The compiled kernels of latent attention: against float64, in graphs, and whole models."""

from typing import Any

import pytest
import torch

from benchmarks.library.models import spec_of
from runtime.kernels.attention import latent_expanded
from runtime.kernels.attention.latent_attention import latent_attention_triton
from runtime.kernels.attention.latent_heads import head_product_triton
from runtime.kernels.attention.latent_torch import LatentUp
from runtime.kernels.attention.paged_attention import AttentionForm, PagedBatch, paged_attention_torch
from tests.support.kernels.latent_cases import LatentSizes, latent_case
from tests.support.models.family_steps import logits_of
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import changed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SIZES = [LatentSizes(16, 512, 64, 128), LatentSizes(20, 512, 64, 192), LatentSizes(128, 512, 64, 128)]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_expanded_form_equals_the_absorbed_one(sizes, monkeypatch):
    spans = [(0, 600), (2000, 700), (130, 900)]
    _, q, kv, rows = latent_case(spans, sizes, 16, torch.bfloat16, "cuda")
    value_dim, generator = sizes.nope_dim, torch.Generator("cuda").manual_seed(1)
    q[..., : sizes.nope_dim] = torch.randn(q[..., : sizes.nope_dim].shape, generator=generator, device="cuda")
    shape = sizes.num_heads, sizes.nope_dim + value_dim, sizes.rank
    weight = torch.randn(shape, generator=generator, device="cuda").mul_(sizes.rank**-0.5).bfloat16()
    plan, up = PagedBatch(len(q), [rows]), LatentUp(weight, sizes.nope_dim)
    found = []
    for least in (100, 1 << 20):
        monkeypatch.setattr(latent_expanded, "_LEAST_TOKENS", least)
        found.append(latent_attention_triton(q, kv, plan, up, scale=0.05).float())
    assert (found[0] - found[1]).norm() < 2e-2 * found[1].norm()


@pytest.mark.parametrize("num_tokens", [1, 40, 100, 3000])
@pytest.mark.parametrize("deterministic", [False, True])
def test_products_of_heads(num_tokens, deterministic):
    x = torch.randn(num_tokens, 20, 256, device="cuda", dtype=torch.bfloat16)[..., :192]
    weight = torch.randn(20, 448, 512, device="cuda", dtype=torch.bfloat16)[:, :192]
    want = torch.einsum("nhk,hkm->nhm", x.double(), weight.double())
    got = head_product_triton(x, weight, deterministic)
    assert (got.double() - want).norm() / want.norm() < 4e-3
    if deterministic:
        assert torch.equal(head_product_triton(x[-1:], weight, True), got[-1:])


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_launch_follows_the_lengths(num_rows, deterministic):
    """Between replays only the state on the device changes."""
    sizes = SIZES[1]
    _, q, kv, rows = latent_case([(2000, 1)] * num_rows, sizes, 16, torch.bfloat16, "cuda")
    rows.max_len = 1 << 15
    up = LatentUp(torch.randn(20, 448, 512, device="cuda", dtype=torch.bfloat16) / 16, 192)
    q = q.nan_to_num(0.5)
    starts, stream = rows.starts, torch.cuda.Stream()
    plan = PagedBatch(len(q), [rows])
    with torch.cuda.stream(stream):
        latent_attention_triton(q, kv, plan, up, scale=0.02, deterministic=deterministic)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            # The second layer reads the segments that the first one has found.
            outs = [latent_attention_triton(q, kv, plan, up, 0.02, deterministic=deterministic) for _ in range(2)]
    for first in (0, 50, 1900, 64, 700):
        starts.copy_(torch.arange(first, first + num_rows))
        starts[-1] = 1999 - first  # once much longer than the others
        torch.cuda.synchronize()
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        absorbed = torch.einsum("nhk,hkm->nhm", q[..., :192].double(), up.keys_weight.double())
        wide = torch.cat((absorbed, q[..., 192:].double()), -1)
        mixed = paged_attention_torch(wide, kv.double().expand(2, *kv.shape[1:]), rows, AttentionForm(0.02))
        mixed = mixed.view(*wide.shape)[..., :512]
        want = torch.einsum("nhr,hdr->nhd", mixed, up.values_weight.double()).flatten(1)
        for out in outs:
            assert (out.double() - want).norm() / want.norm() < 1e-2


def model_logits(model: str, **config: Any) -> torch.Tensor:
    """Logits of a model with two layers of published width: prompts in chunks, then decode steps."""
    spec = changed(spec_of(model), num_layers=2, vocab_size=1024)
    runner = tiny_runner(
        spec, device="cuda", dtype="bfloat16", num_kv_blocks=200, max_num_seqs=4, max_model_len=1024, **config
    )
    tokens = torch.randint(3, 1024, (712,), generator=torch.Generator().manual_seed(5)).tolist()
    return logits_of(Driver(runner), tokens[:700], tokens[700:])


@pytest.mark.parametrize("model", ["glm-4.7-flash", "deepseek-v2-lite"])
def test_models_of_published_width(model):
    want = model_logits(model, kernel_backend="torch")
    for config in ({"cuda_graphs": True}, {"cuda_graphs": False}, {"deterministic": True}):
        error = (model_logits(model, **config) - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.median() < 3e-2, config
    without_graphs = model_logits(model, deterministic=True, cuda_graphs=False)
    assert torch.equal(model_logits(model, deterministic=True, cuda_graphs=True), without_graphs)

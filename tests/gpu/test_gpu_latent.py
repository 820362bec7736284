"""The compiled kernels of latent attention: against float64, in graphs, and whole models."""

from typing import Any

import pytest
import torch

from benchmarks.library.models import spec_of
from runtime.kernels.attention import latent_expanded
from runtime.kernels.attention.latent_attention import attend_rows, latent_attention_triton
from runtime.kernels.attention.latent_heads import head_product_triton
from runtime.kernels.attention.latent_torch import LatentUp
from runtime.kernels.attention.paged_attention import AttentionForm, PagedBatch, paged_attention_torch
from tests.support.kernels.attention_cases import rows_of
from tests.support.kernels.latent_cases import LatentSizes, check_latents, latent_case
from tests.support.models.family_steps import logits_of
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import changed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SIZES = [LatentSizes(16, 512, 64, 128), LatentSizes(20, 512, 64, 192), LatentSizes(128, 512, 64, 128)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*SIZES, LatentSizes(5, 96, 16)])
def test_attention(sizes, dtype):
    lengths = [0, 62, 63, 64, 133, 700, 2047, 5000]
    check_latents(latent_case([(n, 1) for n in lengths], sizes, 16, dtype, "cuda", padding_rows=3), sizes, 0.05)
    check_latents(latent_case([(n, 1) for n in lengths[:5] * 40], sizes, 32, dtype, "cuda"), sizes, 0.05)
    check_latents(latent_case([(3000, 1)], sizes, 64, dtype, "cuda"), sizes, 0.05)
    spans = [(0, 1), (0, 71), (65, 133), (129, 1), (1500, 60), (0, 213)]
    check_latents(latent_case(spans, sizes, 16, dtype, "cuda"), sizes, 0.05)


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


@pytest.mark.parametrize("sizes", SIZES)
def test_deterministic_bits_depend_only_on_the_token(sizes):
    over_latents, q, kv, rows = latent_case([(0, 1300)], sizes, 16, torch.bfloat16, "cuda")

    def attend(spans: list[tuple[int, int]]) -> torch.Tensor:
        tokens, part = rows_of(rows, spans)
        rope = q[tokens][..., sizes.nope_dim :]
        return attend_rows(over_latents[tokens], rope, kv, part, scale=0.05, deterministic=True)

    want = attend([(0, 1300)])
    assert torch.equal(torch.cat((attend([(0, 7), (7, 600)]), attend([(607, 693)]))), want)
    assert torch.equal(attend([(i, 1) for i in range(1200, 1300)]), want[1200:])
    assert torch.equal(attend([(1299, 1)]), want[1299:])


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
            out = latent_attention_triton(q, kv, plan, up, scale=0.02, deterministic=deterministic)
    for first in (0, 50, 1900, 64, 700):
        starts.copy_(torch.arange(first, first + num_rows))
        torch.cuda.synchronize()
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        absorbed = torch.einsum("nhk,hkm->nhm", q[..., :192].double(), up.keys_weight.double())
        wide = torch.cat((absorbed, q[..., 192:].double()), -1)
        mixed = paged_attention_torch(wide, kv.double().expand(2, *kv.shape[1:]), rows, AttentionForm(0.02))
        mixed = mixed.view(*wide.shape)[..., :512]
        want = torch.einsum("nhr,hdr->nhd", mixed, up.values_weight.double()).flatten(1)
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

"""Decoders of ranks on one GPU, in threads that take turns: with rank_invariant, 1, 2, 4 and 8 ranks have the same
bits."""

from dataclasses import replace

import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.kernels.collectives.communicator import OneRank
from tests.models.test_divided_decoder import SPECS, rank_logits
from tests.support.models.specs import changed, field_of
from tests.support.ranks.lockstep_ranks import LockstepGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

# Mixtures and latent attention refuse rank_invariant on a GPU (runtime.quant.model_formats.check_products).
IN_LEAVES = [name for name, spec in SPECS.items() if spec.experts is None and spec.latent is None]


def all_logits(spec: DecoderSpec, size: int, rank_invariant: bool, dtype: str = "bfloat16", **settings) -> torch.Tensor:
    config = EngineConfig(
        device="cuda", dtype=dtype, tensor_parallel_size=size, rank_invariant=rank_invariant, **settings
    )
    if size == 1:
        return rank_logits(spec, config, OneRank())
    group = LockstepGroup(size, tree=rank_invariant)
    return torch.cat(group.run(lambda rank: rank_logits(spec, config, rank)), 1)


def of_gpus_shape(family: str) -> DecoderSpec:
    """The family's model with larger layers. Sizes that follow from others stay in proportion."""
    spec, latent = SPECS[family], SPECS[family].latent
    if latent is not None:
        mixer = replace(latent, rank=128, rope_dim=16, nope_dim=48, value_dim=32, q_rank=4 * latent.q_rank)
        return changed(spec, hidden_size=512, ffn_size=1024, mixer=mixer)
    head_dims = (64, 128) if isinstance(field_of(spec, "head_dim"), tuple) else 64
    return changed(spec, hidden_size=512, head_dim=head_dims, ffn_size=1024)


def exact_logits(spec: DecoderSpec) -> torch.Tensor:
    return all_logits(spec, 1, False, "float32")


def check_as_near(got: torch.Tensor, usual: torch.Tensor, exact: torch.Tensor) -> None:
    """`got` is as near to the logits in float32 as one rank's logits are.

    The distance depends on the family. It is a median over rows, because rounding may choose another expert where two
    are nearly as good."""

    def error(logits: torch.Tensor) -> torch.Tensor:
        return ((logits - exact).norm(dim=1) / exact.norm(dim=1)).median()

    assert error(got) < 1.5 * error(usual)


@pytest.mark.parametrize("family", SPECS)
def test_two_ranks_have_the_logits_of_one(family: str):
    spec = of_gpus_shape(family)
    exact = exact_logits(spec)
    in_float32 = all_logits(spec, 2, False, "float32")
    assert (in_float32 - exact).abs().max() < 1e-4 * exact.abs().max()
    check_as_near(all_logits(spec, 2, False), all_logits(spec, 1, False), exact)


@pytest.mark.parametrize("family", IN_LEAVES)
def test_rank_invariant_logits_are_equal_to_the_bit(family: str):
    spec = of_gpus_shape(family)
    want = all_logits(spec, 1, True)
    check_as_near(want, all_logits(spec, 1, False), exact_logits(spec))
    most = spec.states.key_heads if isinstance(spec.states, DeltaRuleSpec) else 8  # states are divided by key heads
    for size in (size for size in (2, 4, 8) if size <= most):
        assert torch.equal(all_logits(spec, size, True), want), size


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_rank_invariant_logits_of_quantized_weights(quantization: str):
    spec = changed(of_gpus_shape("llama"), ffn_size=4096, hidden_size=1024)
    want = all_logits(spec, 1, True, quantization=quantization)
    for size in (2, 8):
        assert torch.equal(all_logits(spec, size, True, quantization=quantization), want), size

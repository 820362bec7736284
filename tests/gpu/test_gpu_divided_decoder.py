"""Decoders of ranks on one GPU, in threads that take turns: with rank_invariant, 1, 2, 4 and 8 ranks have the same
bits."""

from dataclasses import replace

import pytest
import torch

from runtime.kernels.collectives.communicator import OneRank
from runtime.spec.config import EngineConfig
from runtime.spec.decoder_spec import DecoderSpec
from runtime.spec.mixer_spec import DeltaRuleSpec
from tests.models.test_divided_decoder import SPECS, rank_logits
from tests.support.ranks.lockstep_ranks import LockstepGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

DENSE = [name for name, spec in SPECS.items() if spec.experts is None]  # mixtures are refused on a GPU


def all_logits(spec: DecoderSpec, size: int, rank_invariant: bool, **settings) -> torch.Tensor:
    config = EngineConfig(
        device="cuda", dtype="bfloat16", tensor_parallel_size=size, rank_invariant=rank_invariant, **settings
    )
    if size == 1:
        return rank_logits(spec, config, OneRank())
    group = LockstepGroup(size, tree=rank_invariant)
    return torch.cat(group.run(lambda rank: rank_logits(spec, config, rank)), 1)


def of_gpus_shape(family: str) -> DecoderSpec:
    return replace(SPECS[family], hidden_size=512, head_dim=64, ffn_size=1024)


def check_close(got: torch.Tensor, want: torch.Tensor, spec: DecoderSpec) -> None:
    """A delta rule in bfloat16 is twice as far from float32 as attention is."""
    atol = 0.25 if isinstance(spec.mixer, DeltaRuleSpec) else 0.08
    torch.testing.assert_close(got, want, rtol=0.05, atol=atol)


@pytest.mark.parametrize("family", SPECS)
def test_two_ranks_have_the_logits_of_one(family: str):
    want = all_logits(of_gpus_shape(family), 1, False)
    got = all_logits(of_gpus_shape(family), 2, False)
    if SPECS[family].experts is None:
        check_close(got, want, SPECS[family])
    else:  # a token may choose another expert where two are as good but for rounding
        assert torch.isclose(got, want, rtol=0.05, atol=0.08).all(1).float().mean() > 0.9


@pytest.mark.parametrize("family", DENSE)
def test_rank_invariant_logits_are_equal_to_the_bit(family: str):
    spec = of_gpus_shape(family)
    want = all_logits(spec, 1, True)
    check_close(all_logits(spec, 1, False), want, spec)
    most = spec.mixer.key_heads if isinstance(spec.mixer, DeltaRuleSpec) else 8  # states are divided by key heads
    for size in (size for size in (2, 4, 8) if size <= most):
        assert torch.equal(all_logits(spec, size, True), want), size


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_rank_invariant_logits_of_quantized_weights(quantization: str):
    spec = replace(of_gpus_shape("llama"), ffn_size=4096, hidden_size=1024)
    want = all_logits(spec, 1, True, quantization=quantization)
    for size in (2, 8):
        assert torch.equal(all_logits(spec, size, True, quantization=quantization), want), size

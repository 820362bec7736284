"""MtpHead: the layer that a checkpoint brings to draft tokens (MTP, NextN), behind its target's last layer.

x = fc([norm(token embedding); norm(hidden states one position earlier)]), then the layer and a norm. The
target's output head makes the logits. The next pass takes the normed result in place of hidden states
(DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from runtime.base.model.attention_spec import AttentionSpec
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.layer_spec import LayerSpec
from runtime.base.types import CallboardError
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import layer_builder
from runtime.models.forward_batch import ForwardBatch
from runtime.models.heads.head import DraftHead
from runtime.models.mixers.mixer import LayerCache
from runtime.models.weights import ReadWeight

FC, TOKEN_NORM, HIDDEN_NORM = "fc.weight", "token_norm", "hidden_norm"  # parameters besides the layer's


def mtp_spec(target: DecoderSpec) -> HeadSpec:
    """A head with one layer, like the target's last one with attention. Its weights are not quantized.

    Raises CallboardError for a model without such a layer."""
    kinds = [layer for layer in target.layers if isinstance(layer.mixer, AttentionSpec | LatentSpec)]
    if not kinds or target.norm != "rms":
        raise CallboardError("draft is mtp, for which the model's layers must have attention and RMS norms.")
    hidden = target.hidden_size
    decoder = replace(
        target.whole,
        layers=(_without_first(kinds[-1]),),
        draft_layers=(),
        quantization=None,
        lent=frozenset(("embed", "head")),
        others=((FC, (hidden, 2 * hidden)), (TOKEN_NORM, (hidden,)), (HIDDEN_NORM, (hidden,))),
    )
    return HeadSpec("mtp", decoder, hidden)


def _without_first(layer: LayerSpec) -> LayerSpec:
    """The layer with position 0 hidden: a head lacks keys there."""
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec | LatentSpec)
    return replace(layer, mixer=replace(mixer, first_key=1))


class MtpHead(DraftHead):
    """One layer with its own weights, between the target's embedding and its output head."""

    def __init__(self, spec: HeadSpec, target: Decoder, read: ReadWeight, num_positions: int) -> None:
        """`spec` is the rank's, and `read` returns its parameters."""
        super().__init__(spec, target)
        self.eps = spec.decoder.norm_eps
        builder = layer_builder(spec.decoder, target.numerics, num_positions, read, target.communicator)
        weight = builder.maps.read(FC)
        self.fc = builder.maps.kernels.linear([weight.operand], None)  # whole on each rank
        self.token_norm, self.hidden_norm = builder.norm(TOKEN_NORM), builder.norm(HIDDEN_NORM)
        self.layers = builder.stack(target.numerics, target.communicator)
        self.norm, self.head_norm = builder.final_norms()

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        norm = self.target.kernels.norm
        tokens = norm(self.target.embedded(batch), self.token_norm, self.eps)
        h = self.fc.product(torch.cat((tokens, norm(hidden, self.hidden_norm, self.eps)), 1))
        return self.layers.run(h, batch, caches)

    def recycled(self, x: torch.Tensor) -> torch.Tensor:
        return self.target.kernels.norm(x, self.norm, self.eps)

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.target.logits_after(x, self.head_norm, self.eps, out, self.output_copy)

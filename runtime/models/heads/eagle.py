"""EAGLE heads (arXiv 2401.15077, 2503.01840): they draft from their target's hidden states and the next token.

- eagle3: `fc` combines the inputs from some target layers. The first layer reads embedding and hidden states. The
  logits follow the head's own norm.
- eagle (1 and 2): `fc` combines the embedding and the target's normed hidden states. No norm precedes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.base.model.head_spec import HeadSpec
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.operations import SOFT_CAP
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import LayerBuilder, layer_builder
from runtime.models.forward_batch import ForwardBatch
from runtime.models.heads.head import DraftHead
from runtime.models.mixers.mixer import LayerCache
from runtime.models.weights import ReadWeight

NORM_BEFORE_RESIDUAL = "norm_before_residual"  # the first layer adds to the hidden states after their norm
NORM_BEFORE_FC = "norm_before_fc"  # one norm over all taps
FC_NORM = "fc_norm"  # a norm for each tap
NORM_OUTPUT = "norm_output"  # the next single pass takes the hidden states after the final norm


class EagleHead(DraftHead):
    """A head of either kind."""

    def __init__(
        self, spec: HeadSpec, target: Decoder, read: ReadWeight, num_positions: int, ids: torch.Tensor | None = None
    ) -> None:
        """`spec` is the rank's, and `read` returns its parameters.

        `ids` [num_ids] are the draft vocabulary's; without them it is spread over the target's."""
        super().__init__(spec, target)
        own, numerics, ranks = spec.decoder, target.numerics, target.communicator
        builder = layer_builder(own, numerics, num_positions, read, ranks)
        shapes, self.eps = own.shapes(), own.norm_eps
        self.embed_tokens = builder.maps.embedding().lookup if spec.own_embedding else None
        self.norms = {name: builder.norm(name) for name in shapes if "." not in name and name.endswith("_norm")}
        bias = builder.dense("fc.bias") if "fc.bias" in shapes else None
        self.fc = builder.maps.kernels.linear([builder.maps.read("fc.weight").operand], bias)
        self.stack = builder.stack(numerics, ranks)
        self.head_norm = builder.final_norms()[1] if "final_norm" in shapes else None
        if spec.num_ids and ids is None:
            ids = torch.arange(spec.num_ids) * own.whole.vocab_size // spec.num_ids
        self._ids = ids
        self._columns: torch.Tensor | None = None  # each own logit's column
        self.head = self._own_head(builder) if spec.own_head else None

    def _own_head(self, builder: LayerBuilder) -> Linear:
        """The rows of the head for the rank's token ids."""
        held, tokens = builder.maps.read("draft_head"), self.spec.decoder.token_ids
        device, ids = held.tensors[0].device, torch.arange(held.num_rows) if self._ids is None else self._ids
        is_own = (ids >= tokens.start) & (ids < tokens.stop)
        if not is_own.all():
            held = held._replace(tensors=tuple(tensor[is_own.to(device)] for tensor in held.tensors))
        if self._ids is not None:
            self._columns = (ids[is_own] - tokens.start).to(device)
        return builder.maps.kernels.linear([held.operand], None)

    def combined(self, features: torch.Tensor) -> torch.Tensor:
        if self.spec.kind == "eagle":
            return features
        norm, norms = self.stack.kernels.norm, self.norms
        if NORM_BEFORE_FC in self.spec.flags:
            features = norm(features, norms["input_norm"], self.eps)
        if FC_NORM in self.spec.flags:
            taps = features.unflatten(1, (len(self.spec.taps), -1)).unbind(1)
            normed = [norm(tap.contiguous(), norms[f"tap_{i}_norm"], self.eps) for i, tap in enumerate(taps)]
            features = torch.cat(normed, 1)
        return self.fc.product(features)

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        norm, width = self.stack.kernels.norm, self.hidden_size
        embedded = (self.embed_tokens or self.target.embed_tokens)(batch.token_ids, 1.0)
        if self.spec.kind == "eagle":
            return self.stack.run(self.fc.product(torch.cat((embedded, hidden), 1)), batch, caches)
        both = hidden.new_empty(len(hidden), 2 * width)
        both[:, :width] = norm(embedded, self.norms["embed_norm"], self.eps)
        both[:, width:] = norm(hidden, self.norms["hidden_norm"], self.eps)
        residual = both[:, width:] if NORM_BEFORE_RESIDUAL in self.spec.flags else hidden
        x = residual.clone(memory_format=torch.contiguous_format)
        return self.stack.run(x, batch, caches, first_input=both)

    def recycled(self, x: torch.Tensor) -> torch.Tensor:
        if NORM_OUTPUT not in self.spec.flags:
            return x
        return self.stack.kernels.norm(x, self.norms["final_norm"], self.eps)

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._columns is None:
            own = self._own_logits(x, out)
            return own if out is None or own is out else out.copy_(own)
        if out is None:
            out = x.new_empty((len(x), len(self.spec.decoder.token_ids)), dtype=torch.float32)
        return out.fill_(-torch.inf).index_copy_(1, self._columns, self._own_logits(x))

    def _own_logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, own ids] float32, with the columns of the head that makes them."""
        if self.head_norm is not None:
            if self.head is None:
                return self.target.logits_after(x, self.head_norm, self.eps, out, self.output_copy).float()
            return self.head.logits(x, self.head_norm, self.eps, out).float()
        logits = (self.head or self.output_copy or self.target.head).in_float32(x)
        if (scale := self.spec.decoder.logit_scale) != 1.0:
            logits.mul_(scale)
        cap = self.target.spec.logit_soft_cap if self.head is None else 0.0
        return self.target.kernels[SOFT_CAP](logits, cap) if cap else logits

"""AssistantHead: Gemma 4's assistant models. Their layers read the target's keys and values, and write none.

x = pre_projection([the target's token embedding; its hidden states one position earlier]), then layers and a norm. The
next pass takes post_projection(x) in place of hidden states. A round's passes have one position, and see the keys
before its first token. With centroids, only the tokens of the best ones have logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.base.model.head_spec import HeadSpec
from runtime.kernels.operations import SOFT_CAP
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import layer_builder
from runtime.models.forward_batch import ForwardBatch
from runtime.models.heads.head import DraftHead
from runtime.models.mixers.mixer import LayerCache
from runtime.models.weights import ReadWeight

PRE, POST, CENTROIDS, TABLE = "pre_projection.weight", "post_projection.weight", "centroids.weight", "draft_head"
# Variants that other engines have. In transformers, passes have the position of their round's first token, and rows in
# the table follow the token ids.
LAST_KEY_POSITION = "last_key_position"  # vLLM, SGLang: a pass has the position of the last key that it sees
CENTROID_ORDER = "centroid_order"  # SGLang: the rows of `TABLE` lie in the centroids' order
_ROWS_AT_ONCE = 16  # rows with the embeddings of their centroids' tokens in memory


class AssistantHead(DraftHead):
    """Layers between the target's embedding and an output head of their own."""

    def __init__(
        self, spec: HeadSpec, target: Decoder, read: ReadWeight, num_positions: int, ids: torch.Tensor | None = None
    ) -> None:
        """`spec` is the rank's, and `read` returns its parameters.

        `ids` [vocabulary] are the tokens in the centroids' order, by default rising."""
        super().__init__(spec, target)
        own, shift = spec.decoder, int(LAST_KEY_POSITION not in spec.flags)
        builder = layer_builder(own, target.numerics, num_positions + shift, read, target.communicator)
        maps, self.eps = builder.maps, own.norm_eps
        self.pre, self.post = (maps.kernels.linear([maps.read(name).operand], None) for name in (PRE, POST))
        self.stack = builder.stack(target.numerics, target.communicator)
        self.stack.ropes = [table[:, shift:].contiguous() for table in self.stack.ropes]
        self.norm = builder.final_norms()[0]
        if not spec.num_ids:
            self.head = maps.head(maps.embedding().table)
            return
        self.table, centroids = builder.dense(TABLE), builder.dense(CENTROIDS)
        ids = torch.arange(len(self.table)) if ids is None else ids
        rows = torch.arange(len(self.table)) if CENTROID_ORDER in spec.flags else ids
        # [centroids, tokens of each]: token ids, and rows in the table
        self.ids, self.rows = (x.view(len(centroids), -1).to(self.table.device) for x in (ids, rows))
        self.centroids = maps.kernels.linear([centroids], None)

    @property
    def hidden_size(self) -> int:
        return self.spec.target_hidden

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        h = self.pre.product(torch.cat((self.target.embedded(batch), hidden), 1))
        return self.stack.run(h, batch, caches)

    def recycled(self, x: torch.Tensor) -> torch.Tensor:
        return self.post.normed(x, self.norm, self.eps)

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.spec.num_ids:
            own = self._logits_of_centroids(x)
        else:
            own = self._capped(self.head.logits(x, self.norm, self.eps, out).float())
        return own if out is None or own is out else out.copy_(own)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.spec.decoder.logit_soft_cap
        return self.stack.kernels[SOFT_CAP](logits, cap) if cap else logits

    def _logits_of_centroids(self, x: torch.Tensor) -> torch.Tensor:
        """[n, own vocabulary of the rank] float32. Each rank computes all logits, since they are few."""
        x = self.stack.kernels.norm(x, self.norm, self.eps)
        best = self.centroids.product(x).topk(self.spec.num_ids // self.ids.shape[1], dim=1).indices
        ids, rows = (each[best].flatten(1) for each in (self.ids, self.rows))  # [n, num_ids]
        parts = zip(x.split(_ROWS_AT_ONCE), rows.split(_ROWS_AT_ONCE), strict=True)
        found = torch.cat([torch.bmm(self.table[places], own[:, :, None]).squeeze(2) for own, places in parts])
        vocabulary, own_ids = len(self.table), self.spec.decoder.token_ids
        logits = torch.full((len(x), vocabulary), -torch.inf, dtype=torch.float32, device=x.device)
        logits.scatter_(1, ids, self._capped(found.float()))
        return logits[:, own_ids.start : own_ids.stop].contiguous()

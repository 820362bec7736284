"""RunnerImages: encodes a step's images, and keeps their embeddings in a pool of rows that the engine assigns.

Each image is one forward pass of the tower, so its embeddings depend on it alone. Every rank encodes it whole. The
engine assigns the pool's rows to images (features/images.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from runtime.base.images import Image, ImageInfo
from runtime.base.model.tower_spec import TowerSpec
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.core.plan import Encoding, StepPlan
from runtime.kernels.numerics import Numerics
from runtime.models.forward_batch import Embeds
from runtime.worker.extras import Copies, RunnerParts, Take
from runtime.worker.sources import ModelSource, Tower, image_info


class RunnerImages:
    """An ImageEncoder: the tower of a model, and its pool."""

    def __init__(self, tower: Tower, info: ImageInfo, spec: TowerSpec, numerics: Numerics) -> None:
        self.tower, self.info, self._side = tower, info, spec.patch_size * spec.merge
        self._shape, self._numerics = (info.pool_rows, spec.width), numerics
        self.pool = torch.empty((0, spec.width), dtype=numerics.dtype, device=numerics.device)

    @classmethod
    def of(cls, parts: RunnerParts) -> RunnerImages | None:
        """For a runner's model and its settings of images; None if it takes no images."""
        info, spec, numerics = image_info(parts.source, parts.config), parts.source.tower, parts.decoder.numerics
        if info is None or spec is None:
            return None
        return cls(parts.source.load_tower(numerics), info, spec, numerics)

    def open(self) -> None:
        """Allocate the pool."""
        dtype, device = self._numerics.dtype, self._numerics.device
        self.pool = torch.zeros(self._shape, dtype=dtype, device=device)

    def read_weights(self, source: ModelSource, take: Take) -> None:
        """Read the tower again, after an update of the weights."""
        self.tower = take(self.tower, source.load_tower(self._numerics))

    def describe(self, info: ModelInfo) -> ModelInfo:
        return replace(info, images=self.info)

    def smallest(self) -> Encoding:
        side = self._side
        return Encoding(Image(b"", ((side, side),), bytes(3 * side * side)), 0, 1)

    def embeds(self, plan: StepPlan, firsts: np.ndarray, copies: Copies) -> Embeds | None:
        for encoding in plan.encodings:
            embeddings = self.tower.encode(encoding.image, copies.upload)
            if len(embeddings) != encoding.num_rows:  # else it would overwrite another image
                raise CallboardError(
                    f"An image of {encoding.image.sizes} has {len(embeddings)} embeddings, but {encoding.num_rows} "
                    "tokens of its prompt stand for them; send the tokens that the model's image processor makes."
                )
            self.pool[encoding.row : encoding.row + encoding.num_rows] = embeddings
        if not plan.embeds.size:
            return None
        tokens, rows, counts = plan.embeds.astype(np.int64)
        begins = np.cumsum(plan.num_tokens) - plan.num_tokens  # each row's first token, in the plan's order
        row_of = np.searchsorted(begins, tokens, side="right") - 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(firsts[row_of] + tokens - begins[row_of], counts) + within
        found = copies.upload(places.astype(np.int64), np.repeat(rows, counts) + within).view(2, -1)
        return Embeds(found[0], self.pool.index_select(0, found[1]))

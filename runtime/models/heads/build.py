"""Builds a head by its kind, from a checkpoint's weights or from random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.base.model.head_spec import HeadSpec
from runtime.base.types import CallboardError
from runtime.models.decoder import Decoder
from runtime.models.heads.assistant import AssistantHead
from runtime.models.heads.eagle import EagleHead
from runtime.models.heads.head import DraftHead
from runtime.models.heads.mtp import MtpHead
from runtime.models.weights import ReadWeight, draw
from runtime.quant.weight_format import TensorSource

# key: HeadSpec.kind. Arguments: the rank's spec, the target, the weights, a request's most positions
KINDS: dict[str, Callable[[HeadSpec, Decoder, ReadWeight, int], DraftHead]] = {
    "mtp": MtpHead, "eagle3": EagleHead, "eagle": EagleHead, "assistant": AssistantHead
}  # fmt: skip


def build_head(spec: HeadSpec, target: Decoder, read: ReadWeight, num_positions: int) -> DraftHead:
    """The head of the parameters that `read` returns. Raises CallboardError for a kind that this build lacks."""
    if spec.kind not in KINDS:
        raise CallboardError(f"The head is of kind {spec.kind!r}; this build has {', '.join(KINDS)}.")
    return KINDS[spec.kind](spec, target, read, num_positions)


@dataclass(frozen=True, slots=True)
class DrawnHead:
    """A head with seeded random weights, for tests and benchmarks (HeadSource)."""

    spec: HeadSpec
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        return f"dummy-{self.seed}-{self.spec}"

    def load(
        self, target: Decoder, spec: HeadSpec, num_positions: int, updated: TensorSource | None = None
    ) -> DraftHead:
        return build_head(spec, target, draw(spec.decoder, target.numerics, self.seed + 1), num_positions)

"""RunnerHead: a runner's head, from its description to the object that drafts in steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model_info import HeadInfo, ModelInfo
from runtime.base.shard import Shard
from runtime.base.types import MAX_DRAFT_TOKENS, CallboardError
from runtime.kernels.numerics import Numerics
from runtime.models.decoder import Decoder
from runtime.models.heads.find import CheckpointHead
from runtime.models.heads.head import DraftHead
from runtime.models.heads.quantized_head import layer_encodings, quantized_head
from runtime.quant.weight_format import TensorSource
from runtime.worker.cpu.cpu_steps import CpuSteps
from runtime.worker.extras import Take
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.heads.cpu_head import CpuHead, HeadInputs
from runtime.worker.heads.gpu_head import GpuHead
from runtime.worker.sources import HeadSource, ModelSource
from runtime.worker.steps import Steps


class RunnerHead:
    """One rank's share of a head."""

    head: DraftHead  # set by `load`
    _in_steps: CpuHead | GpuHead  # set by `for_steps`

    @classmethod
    def of(
        cls, config: EngineConfig, source: ModelSource, target: DecoderSpec, numerics: Numerics
    ) -> RunnerHead | None:
        """The head that `config.draft` names; None if it names none. `target` is the rank's.

        Raises CallboardError if the model lacks it, or the device lacks products for its weights."""
        found = source.head(config.draft, config.head_layers)
        if config.draft_layers is not None and (found is None or not found.spec.taps):
            raise CallboardError(f"draft_layers is for EAGLE-3 heads, and draft is {config.draft}; leave it out.")
        if found is None:
            return None
        whole = quantized_head(found.spec, target, config, numerics)
        return cls(found, whole, target.shard, layer_encodings(whole.decoder, numerics))

    def __init__(self, source: HeadSource, whole: HeadSpec, shard: Shard, encodings: Mapping[str, str]) -> None:
        """`encodings` has each quantized layer's, by parameter."""
        self._source, self.stored, self.whole, self.spec = source, source.spec, whole, whole.for_rank(shard)
        self.fingerprint = f"{source.fingerprint} {encodings}" if encodings else source.fingerprint

    def load(self, decoder: Decoder, num_positions: int, updated: TensorSource | None = None) -> None:
        """Read the weights, after the decoder's. `updated` has the checkpoint's tensors with updates over them."""
        self.head = self._source.load(decoder, self.spec, num_positions, updated)
        self._sizes = decoder, self.spec, num_positions

    def follow(self, updated: TensorSource | None, take: Take) -> None:
        """The target has new weights. `updated` has the head's, if the update brings some."""
        if updated is None:
            self.head.follow_output(take)
            return
        assert isinstance(self._source, CheckpointHead), "others have no tensors in the checkpoint"
        self.head = self._in_steps.head = take(self.head, self._source.read(*self._sizes, updated))

    def describe(self, info: ModelInfo) -> ModelInfo:
        """`info` with the head."""
        return replace(info, head=HeadInfo(self.spec.kind, min(MAX_DRAFT_TOKENS, info.block_size - 1)))

    def for_steps(self, steps: Steps) -> CpuHead | GpuHead:
        """The object that drafts in these steps."""
        self._in_steps = self._new(steps)
        return self._in_steps

    def _new(self, steps: Steps) -> CpuHead | GpuHead:
        if isinstance(steps, GpuSteps):
            return GpuHead(self.head, steps.kernels, steps.graph_runner)
        assert isinstance(steps, CpuSteps)
        inputs = HeadInputs(steps.sampler, steps.images, steps.attention_shapes, steps.is_tiled)
        return CpuHead(self.head, steps.decoder, steps.cache, steps.num_slots, steps.max_model_len, inputs)

"""A runner's start without a GPU: it records the kernels of all steps before the first request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Part, parts_of
from runtime.base.shard import ALONE, Shard
from runtime.compilation.pretended_gpu import GpuFacts, pretended_gpu
from runtime.compilation.triton_cache import Compilation, recorded_launches
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.numerics import Numerics
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import build_decoder
from runtime.models.weight_map import WeightMap
from runtime.models.weights import _IN_FLOAT32
from runtime.quant.held_weight import HeldWeight
from runtime.quant.model_formats import weight_formats
from runtime.worker.sources import DummySource


class SpecSource(DummySource):
    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        shapes, format_of = spec.whole.shapes(), weight_formats(spec, numerics)

        def read(parameter: str, part: Part | None = None) -> HeldWeight:
            weight_format, parts = format_of(parameter), parts_of(spec, parameter) if part is None else (part,)
            is_wide = self.weight_map.adds_one(parameter) or parameter.endswith(_IN_FLOAT32)
            dtype = torch.float32 if is_wide else numerics.dtype
            drawn = weight_format.random(shapes[parameter], torch.Generator())
            if drawn is not None:
                tensors = weight_format.parts_of_random(drawn, parts, numerics)
            else:
                tensors = weight_format.encode(torch.empty(shapes[parameter], dtype=dtype, device=numerics.device), parts)
            return HeldWeight((parameter,), weight_format, tensors)

        return build_decoder(spec, numerics, max_model_len, read, communicator)


def kernels_of(config, source, facts, shard=None, is_draft=False):
    with recorded_launches(facts.capability) as found, pretended_gpu(facts):
        build_runner(config, source, shard, is_draft)
    return found

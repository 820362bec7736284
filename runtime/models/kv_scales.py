"""Scales for keys and values that a checkpoint brings for an 8-bit KV cache, as exporters name them."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import CallboardError
from runtime.quant.weight_format import TensorSource

# All that belongs to such a cache. Zero points belong to integers, and queries are never rounded, so both are unused.
KV_SCALES = r".*\.(([kvq]|kv|prob)_(scale|zero_point|global_scale)|[kv]_proj\.output_(scale|zero_point))"
_USED = re.compile(r".*\blayers\.(\d+)\..*?\b(kv|k|v)(?:_scale|_proj\.output_scale)")
_PLACES = {"kv": [0, 1], "k": [0], "v": [1]}


def has_kv_scales(source: TensorSource) -> bool:
    """True if `read_kv_scales` has something to read."""
    return bool(_found(source))


def _found(source: TensorSource) -> list[re.Match[str]]:
    return [match for match in map(_USED.fullmatch, source.names()) if match]


def read_kv_scales(source: TensorSource, spec: DecoderSpec) -> torch.Tensor | None:
    """float32 [num_layers, 2, most num_kv_heads] on the CPU, 1 for scales that are absent or 0; None if all are absent.

    Raises CallboardError for a tensor with another number of scales than one, or one a head."""
    found = _found(source)
    if not found:
        return None
    scales = torch.ones(spec.num_layers, 2, max(layer.mixer.num_kv_heads for layer in spec.layers))
    for match in sorted(found, key=lambda match: match[2] != "kv"):  # one for both gives way to one each
        own = source.tensor(match[0], torch.float32, scales.device).flatten()
        layer = int(match[1])
        num_heads = spec.layers[layer].mixer.num_kv_heads
        if len(own) not in (1, num_heads):
            raise CallboardError(
                f"Tensor {match[0]} has {len(own)} scales, neither one nor one of each of {num_heads} heads of "
                "keys and values; use kv_cache_dtype=none or int8, which do not read it."
            )
        scales[layer, _PLACES[match[2]], :num_heads] = own
    return torch.where((scales > 0) & scales.isfinite(), scales, 1.0)


def scales_of_rank(scales: torch.Tensor, spec: DecoderSpec) -> torch.Tensor:
    """The scales for a rank's heads: each layer's first ones. The layers of a draft head have 1."""
    firsts = torch.tensor([spec.first_kv_head(i) for i in range(spec.num_layers)])
    heads = firsts[:, None] + torch.arange(max(layer.mixer.num_kv_heads for layer in spec.layers))
    own = scales.gather(2, heads.clamp(max=scales.shape[2] - 1)[:, None].expand(-1, 2, -1))
    if not spec.draft_layers:
        return own
    most = max(own.shape[2], *(layer.mixer.num_kv_heads for layer in spec.draft_layers))
    return F.pad(own, (0, most - own.shape[2], 0, 0, 0, len(spec.draft_layers)), value=1.0)

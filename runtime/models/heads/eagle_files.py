"""An EAGLE head's folder: its spec, its tensors' names, and what Callboard refuses.

EAGLE's own format and that of the speculators library have the same tensors. In the second, config.json has the
layer's fields in `transformer_layer_config`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.layer_spec import PRE_NORMS, LayerSpec
from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.models.config_checks import checked_config
from runtime.models.decoder import Decoder
from runtime.models.families import llama
from runtime.models.families.defaults import with_defaults
from runtime.models.heads.eagle import FC_NORM, NORM_BEFORE_FC, NORM_BEFORE_RESIDUAL, NORM_OUTPUT, EagleHead
from runtime.models.weight_map import WeightMap
from runtime.models.weights import read_from
from runtime.quant import parse_schemes
from runtime.quant.weight_format import TensorSource

logger = logging.getLogger(__name__)
_FLAGS = (NORM_BEFORE_RESIDUAL, NORM_BEFORE_FC, FC_NORM, NORM_OUTPUT)
_OTHER_NORMS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_topk_prob", "use_qk_norm", "qk_norm")
_PARALLEL = ("mask_hidden", "mask_token_id", "pard_token", "ptd_token_id", "parallel_drafting")
# A field or a tensor -> the kind of head that has it, which does not run here
_OTHER_KINDS = {
    **dict.fromkeys(_PARALLEL, "P-EAGLE"),
    **dict.fromkeys(("dflash_config", "target_layer_ids", "markov_w1"), "DFlash"),
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers"), "Medusa"),
}
_ARCHITECTURE = re.compile(
    r"(llama|qwen2|qwen3)?(forcausallm)?eagle3?(llama|qwen2|qwen3)?(forcausallm|model|speculator|draftmodel)?"
)
_ID_FIELDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
_SAMPLED_ROWS = 256  # rows at which two embeddings are compared
_TOLERANCE = 2.0**-6  # part of a row's norm: a quantized embedding counts as the same


@dataclass(frozen=True)
class EagleFiles:
    """The head in a folder (HeadSource)."""

    spec: HeadSpec
    weight_map: WeightMap
    tensors: TensorSource
    ids: torch.Tensor | None  # [num_ids] target ids of the draft vocabulary
    fingerprint: str

    def load(
        self, target: Decoder, spec: HeadSpec, num_positions: int, updated: TensorSource | None = None
    ) -> EagleHead:
        """Read the weights, after a check of all tensors. `spec` is this head's, or one rank's share."""
        read = read_from(self.tensors, spec.decoder, self.weight_map, target.numerics)
        return EagleHead(spec, target, read, num_positions, self.ids)


def folder_head(
    config: Mapping[str, Any],
    tensors: TensorSource,
    fingerprint: str,
    target: DecoderSpec,
    embedding: tuple[TensorSource, str] | None = None,
    boundaries: Sequence[int] | None = None,
) -> EagleFiles:
    """Return the head in a folder with this config.json and these tensors.

    Args:
    embedding: the target's token embedding. A different copy in the folder is read.
    boundaries: target layers that give their inputs as features (draft_layers); None for the config's ids.

    Raises CallboardError, in one sentence, if the head does not fit the target or this build lacks its kind."""
    names = set(tensors.names())
    _refuse_other_kinds(config, names)
    is_speculators = config.get("speculators_model_type") is not None
    flat = _flat(config)
    stored = _Stored(names)
    kind = "eagle3" if is_speculators or _is_eagle3(flat, stored, tensors) else "eagle"
    own = checked_config(with_defaults({**flat, "tie_word_embeddings": False}, "LlamaForCausalLM"))
    _check_sizes(own, flat, target)
    flags = _flags(flat, stored) if kind == "eagle3" else frozenset[str]()
    spec = HeadSpec(kind, _decoder(own, flat, kind, stored, tensors, target), target.hidden_size, flags=flags)
    width = own["hidden_size"]
    num_taps = _check_fc(spec, width, stored, tensors)
    if kind == "eagle3":
        taps = tuple(boundaries) if boundaries is not None else _taps(flat, is_speculators, target.num_layers, num_taps)
        if len(taps) != num_taps or not all(0 <= tap <= target.num_layers for tap in taps):
            raise CallboardError(
                f"The head reads {num_taps} of the target's {target.num_layers} layers, but its ids are {list(taps)}, "
                "counted by the inputs of layers; draft_layers sets them."
            )
        logger.info("the head reads the hidden states that enter layers %s (draft_layers)", ", ".join(map(str, taps)))
        spec = replace(spec, taps=taps)
    ids = _draft_ids(stored, tensors, target.vocab_size)
    spec = _with_tables(spec, width, ids, stored, tensors, embedding)
    weight_map = _weight_map(spec, stored)
    schemes = parse_schemes(config, lambda: weight_map.names_of(spec.decoder), "model.")
    spec = replace(spec, decoder=replace(spec.decoder, quantization=schemes or None))
    return EagleFiles(spec, weight_map, tensors, ids, fingerprint)


class _Stored:
    """The names of a head's tensors, which exports begin with `model.` or not."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        found = [name for name in names if ".self_attn.q_proj." in name]
        prefixes = {name.partition("self_attn.")[0] for name in found}
        middle = next((prefix for prefix in prefixes if prefix.endswith("midlayer.")), None)
        numbered = next((re.sub(r"\d+\.$", "{}.", prefix) for prefix in sorted(prefixes)), "layers.{}.")
        self.layer = middle or numbered  # {} is the layer

    def of(self, name: str) -> str:
        """The tensor that the file has for a name, or the name."""
        return next((each for each in (name, f"model.{name}") if each in self.names), name)

    def has(self, name: str) -> bool:
        """True if the file has the tensor."""
        return self.of(name) in self.names

    def layer_has(self, name: str) -> bool:
        """True if the first layer has the tensor."""
        return self.layer.format(0) + name in self.names


def _refuse_other_kinds(config: Mapping[str, Any], names: set[str]) -> None:
    nested = config.get("eagle_config")
    fields = {**config, **(nested if isinstance(nested, Mapping) else {})}
    for field, kind in _OTHER_KINDS.items():
        if fields.get(field) not in (None, False) or field in names or f"model.{field}" in names:
            raise CallboardError(f"The head has {field}, a field of {kind}; supported are EAGLE-3 and EAGLE-1 heads.")
    algorithm, named = config.get("speculators_model_type"), config.get("architectures")
    if algorithm not in (None, "eagle3"):
        raise CallboardError(f"The head's speculators_model_type is {algorithm!r}; supported is eagle3.")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if algorithm is None and name != "LlamaForCausalLM" and not _ARCHITECTURE.fullmatch(name.lower()):
        raise CallboardError(
            f"The head's architecture is {name or 'missing'}; supported are LlamaForCausalLMEagle3 and, for EAGLE-1, "
            "LlamaForCausalLM."
        )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a config.json in one object."""
    layer, nested = config.get("transformer_layer_config"), config.get("eagle_config")
    return {
        **(layer if isinstance(layer, Mapping) else {}),
        **(nested if isinstance(nested, Mapping) else {}),
        **{name: value for name, value in config.items() if value is not None},
    }


def _is_eagle3(flat: Mapping[str, Any], stored: _Stored, tensors: TensorSource) -> bool:
    """True if the first layer reads embedding and hidden states side by side."""
    q, hidden = stored.layer.format(0) + "self_attn.q_proj.weight", flat.get("hidden_size")
    if q in tensors and isinstance(hidden, int):
        return tensors.shape(q)[-1] == 2 * hidden
    return "eagle3" in str(flat.get("architectures")).lower()


def _check_sizes(own: Mapping[str, Any], flat: Mapping[str, Any], target: DecoderSpec) -> None:
    if own["vocab_size"] != target.vocab_size:
        raise CallboardError(
            f"The head is for a vocabulary of {own['vocab_size']} tokens; the target's has {target.vocab_size}."
        )
    hidden = flat.get("target_hidden_size") or own["hidden_size"]
    if hidden != target.hidden_size:
        raise CallboardError(f"The head is for a hidden size of {hidden}; the target's is {target.hidden_size}.")


def _flags(flat: Mapping[str, Any], stored: _Stored) -> frozenset[str]:
    """The variants of EAGLE-3's pass, by the config, or by the tensors if it is silent."""
    for name, value in flat.items():
        if "norm" in name and value not in (None, False) and name not in (*_FLAGS, *_OTHER_NORMS):
            raise CallboardError(f"The head's config.json has {name}, which changes its pass in an unknown way.")
    by_tensors = {
        NORM_BEFORE_FC: stored.has("input_norm.weight"),
        FC_NORM: any(stored.has(name) for name in ("fc_norm.0.weight", "aux_norm_low.weight")),
    }
    return frozenset(flag for flag in _FLAGS if flat.get(flag, by_tensors.get(flag, False)))


def _decoder(
    own: Mapping[str, Any],
    flat: Mapping[str, Any],
    kind: str,
    stored: _Stored,
    tensors: TensorSource,
    target: DecoderSpec,
) -> DecoderSpec:
    """The layers. The file decides on biases, and on norms for q and k."""
    has_bias = {
        name: stored.layer_has(f"{name}.bias") for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    }
    attention = llama.attention(
        own,
        qkv_bias=has_bias["self_attn.q_proj"] or bool(own["attention_bias"]),
        out_bias=has_bias["self_attn.o_proj"],
        qk_norm="head" if stored.layer_has("self_attn.q_norm.weight") else "none",
        first_key=1,
    )
    later = LayerSpec(attention, llama.ffn(own, ffn_bias=has_bias["mlp.up_proj"]))
    wide = replace(attention, input_factor=2 if kind == "eagle3" else 1)
    first = replace(later, mixer=wide, norms=PRE_NORMS[1:])
    scale = flat.get("logit_scale")
    if not isinstance(scale, int | float | None) or scale == 0:
        raise CallboardError(f"The head's logit_scale is {scale!r}; it must be a number above 0.")
    if not stored.has("lm_head.weight"):
        scale = target.logit_scale if scale is None else scale
    layers = (first, *[later] * (own["num_hidden_layers"] - 1))
    lent = {"embed", "head"} if kind == "eagle3" else {"embed", "head", "final_norm"}
    return llama.decoder(own, layers, lent=frozenset(lent), logit_scale=float(scale or 1.0))


def _check_fc(spec: HeadSpec, width: int, stored: _Stored, tensors: TensorSource) -> int:
    """Return how many of the target's layers `fc` reads; for EAGLE-1 none."""
    name, hidden = stored.of("fc.weight"), spec.target_hidden
    if name not in tensors:
        raise CallboardError("The head lacks fc.weight, which maps the target's hidden states to its own.")
    shape = tuple(tensors.shape(name))
    if spec.kind == "eagle":
        if shape != (width, 2 * width) or width != hidden:
            raise CallboardError(f"The head's fc.weight has shape {list(shape)}; it must be {[hidden, 2 * hidden]}.")
        return 0
    if len(shape) != 2 or shape[0] != width or not shape[1] or shape[1] % hidden:
        raise CallboardError(
            f"The head's fc.weight has shape {list(shape)}; it must be {width} by a multiple of the target's {hidden}."
        )
    return shape[1] // hidden


def _taps(flat: Mapping[str, Any], is_speculators: bool, num_layers: int, num_taps: int) -> tuple[int, ...]:
    """The layers with the inputs that the head reads.

    A config names them so (speculators, and where the largest is the number of layers), or by the layers before."""
    ids = next((flat[name] for name in _ID_FIELDS if flat.get(name)), None)
    if ids is None:
        if num_taps != 3:
            raise CallboardError(f"The head's fc.weight reads {num_taps} of the target's layers, and no ids name them.")
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CallboardError(f"The head's {_ID_FIELDS[0]} is {str(ids)[:40]}; it must be a list of whole numbers.")
    are_outputs = not is_speculators and ids[0] == 1 and max(ids) != num_layers
    return tuple(i + are_outputs for i in ids)


def _draft_ids(stored: _Stored, tensors: TensorSource, vocab_size: int) -> torch.Tensor | None:
    """[num_ids] target ids of the draft vocabulary, which the file has as offsets; None without one."""
    name = stored.of("d2t")
    if name not in tensors or not stored.has("lm_head.weight"):
        return None
    offsets = tensors.tensor(name, torch.int64)
    ids = offsets + torch.arange(len(offsets))
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != len(ids):
        raise CallboardError(f"The head's d2t names ids beyond the target's {vocab_size} tokens, or one of them twice.")
    return ids


def _with_tables(
    spec: HeadSpec,
    width: int,
    ids: torch.Tensor | None,
    stored: _Stored,
    tensors: TensorSource,
    embedding: tuple[TensorSource, str] | None,
) -> HeadSpec:
    """The spec with the head's own embedding and output head, and the parameters besides its layers."""
    decoder, hidden = spec.decoder, spec.target_hidden
    own_head = stored.has("lm_head.weight")
    embed = stored.of("embed_tokens.weight")
    own_embedding = embed in tensors and (
        width != hidden or embedding is None or not _are_alike(tensors, embed, *embedding)
    )
    for is_own, name in ((own_head, "lm_head.weight"), (own_embedding, "embed_tokens.weight")):
        if not is_own and width != hidden:
            raise CallboardError(
                f"The head lacks {name}, and the target's cannot replace it: it has {hidden} inputs, the head {width}."
            )
    rows = decoder.vocab_size if ids is None else len(ids)
    others: dict[str, tuple[int, ...]] = {"fc.weight": tuple(tensors.shape(stored.of("fc.weight")))}
    if stored.has("fc.bias"):
        others["fc.bias"] = (width,)
    if spec.kind == "eagle3":
        others |= {"embed_norm": (width,), "hidden_norm": (width,)}
    if NORM_BEFORE_FC in spec.flags:
        others["input_norm"] = (spec.feature_width,)
    if FC_NORM in spec.flags:
        others |= {f"tap_{i}_norm": (hidden,) for i in range(len(spec.taps))}
    if own_head:
        others["draft_head"] = (rows, width)
    lent = decoder.lent - {"embed"} if own_embedding else decoder.lent
    decoder = replace(decoder, lent=lent, others=tuple(others.items()))
    num_ids = 0 if ids is None else rows
    return replace(spec, decoder=decoder, own_embedding=own_embedding, own_head=own_head, num_ids=num_ids)


def _are_alike(first: TensorSource, first_name: str, second: TensorSource, second_name: str) -> bool:
    """Compare some rows of two embeddings."""
    if second_name not in second or first.shape(first_name) != second.shape(second_name):
        return False
    num_rows = first.shape(first_name)[0]
    for row in range(0, num_rows, max(1, num_rows // _SAMPLED_ROWS)):
        part = Part(0, row, row + 1)
        a, b = (s.tensor(n, torch.float32, part=part) for s, n in ((first, first_name), (second, second_name)))
        if (a - b).norm() > _TOLERANCE * b.norm():
            return False
    return True


def _weight_map(spec: HeadSpec, stored: _Stored) -> WeightMap:
    """The file's names for the parameters."""
    names = {
        part: stored.layer + name.partition("layers.{}.")[2]
        for part, name in llama.WEIGHT_MAP.names.items()
        if "layers.{}." in name
    }
    norms = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
    names |= {part: stored.layer + name for part, name in norms.items()}
    first = stored.layer.format(0)
    names |= {"embed_norm": f"{first}input_layernorm.weight", "hidden_norm": f"{first}hidden_norm.weight"}
    old = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
    for i in range(len(spec.taps)):
        name = f"fc_norm.{i}.weight"
        names[f"tap_{i}_norm"] = stored.of(old[i] if i < len(old) and stored.has(old[i]) else name)
    tables = {"embed": "embed_tokens.weight", "final_norm": "norm.weight", "draft_head": "lm_head.weight"}
    names |= {part: stored.of(name) for part, name in {**tables, "input_norm": "input_norm.weight"}.items()}
    names["fc"] = stored.of("fc.weight").removesuffix(".weight")
    return WeightMap(
        names | {"head": names["draft_head"]},
        ignored=r"(model\.)?(d2t|t2d|embed_tokens\.weight|lm_head\.weight)|.*rotary_emb\.inv_freq",
    )

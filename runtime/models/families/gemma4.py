"""The text part of Gemma 4. Beyond Gemma 3:

- layers that attend to all positions have another head_dim, and perhaps no map for values;
- the last layers may read the keys and values of an earlier layer;
- each layer may have its own token embedding;
- a mixture of experts may run in parallel to each feed-forward layer.

Norms multiply by w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, LayerSpec
from runtime.base.model.layer_spec import POST_NORMS, PRE_NORMS
from runtime.base.types import CallboardError
from runtime.models.families import gemma, llama
from runtime.models.weight_map import WeightMap

_LAYER = "layers.{}."
_NAMES = {
    **{part: name.removeprefix("model.") for part, name in gemma.WEIGHT_MAP.names.items()},
    "layer_embed": "embed_tokens_per_layer.weight",
    "layer_embed_map": "per_layer_model_projection",
    "layer_embed_norm": "per_layer_projection_norm.weight",
    "layer_gate": f"{_LAYER}per_layer_input_gate",
    "layer_out": f"{_LAYER}per_layer_projection",
    "post_layer_norm": f"{_LAYER}post_per_layer_input_norm.weight",
    "factor": f"{_LAYER}layer_scalar",
}
_NAMES |= {  # names in mixtures
    "router": f"{_LAYER}router.proj",
    "router_norm": f"{_LAYER}router.scale",
    "expert_scales": f"{_LAYER}router.per_expert_scale",
    "experts_norm": f"{_LAYER}pre_feedforward_layernorm_2.weight",
    "post_dense_norm": f"{_LAYER}post_feedforward_layernorm_1.weight",
    "post_experts_norm": f"{_LAYER}post_feedforward_layernorm_2.weight",
    **{f"dense_{part}": f"{_LAYER}mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"routed.{part}": f"{_LAYER}experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
WEIGHT_MAP = WeightMap(
    _NAMES,
    "model.language_model.",  # models with images
    # Sound, and k and v maps in layers with shared keys and values.
    ignored=r"(model\.)?(audio_tower|embed_audio)\..*|layers\.\d+\.self_attn\.[kv]_(proj|norm)\..*",
)


def decoder_spec(config: Mapping[str, Any], sources: Mapping[str, int] | None = None) -> DecoderSpec:
    """The spec for a text model's config, or for a text part's.

    `sources` maps each kind to the layer with the keys and values that the last layers read. By default it is the last
    one that stores some; a head reads its target's (models/heads/assistant_files.py)."""
    _check(config)
    num_layers, ropes = config["num_hidden_layers"], config["rope_parameters"]
    kinds = config["layer_types"] or [
        "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)
    ]
    kinds = [*kinds[: num_layers - 1], "full_attention"]
    own = num_layers - config["num_kv_shared_layers"]  # layers that store keys and values
    sources = sources or {kind: i for i, kind in enumerate(kinds[:own])}
    if missing := set(kinds) - set(sources):
        raise CallboardError(
            f"The model's num_kv_shared_layers is {num_layers - own}, so no layer of kind {min(missing)} stores keys "
            "and values."
        )
    dim, kv_heads = _full_heads(config, kinds)
    full, sliding = (
        llama.attention(
            {**config, "rope_scaling": None, "rope_parameters": ropes[kind]}, qk_norm="head", v_norm=True, scale=1.0
        )
        for kind in ("full_attention", "sliding_attention")
    )
    full = replace(full, head_dim=dim, num_kv_heads=kv_heads, keys_as_values=config["attention_k_eq_v"])
    whole_images = config.get("use_bidirectional_attention") == "vision"
    sliding = replace(sliding, window=config["sliding_window"], whole_images=whole_images)
    factor = 2 if config["use_double_wide_mlp"] else 1  # in layers with shared keys and values
    ffn, wide = gemma.ffn(config), gemma.ffn(config, size=factor * config["intermediate_size"])
    if config["enable_moe_block"]:
        ffn = wide = gemma.ffn(
            config,
            size=config["moe_intermediate_size"],
            beside=config["intermediate_size"],
            experts=ExpertsSpec(
                config["num_experts"], config["top_k_experts"], normalized=True, expert_scales=True, own_norm=True
            ),
        )
    layer, layers = LayerSpec(full, ffn, PRE_NORMS + POST_NORMS, config["hidden_size_per_layer_input"], True), []
    for i, kind in enumerate(kinds):
        mixer = sliding if kind == "sliding_attention" else full
        if i >= own:
            mixer = replace(mixer, kv_source=sources[kind])
        layers.append(replace(layer, mixer=mixer, ffn=ffn if i < own else wide))
    return gemma.decoder(config, layers)


def _full_heads(config: Mapping[str, Any], kinds: list[str]) -> tuple[int, int]:
    """Return head_dim and the number of k and v heads in the layers that attend to all positions."""
    dim, kv_heads = config["global_head_dim"], None
    if config["attention_k_eq_v"]:
        kv_heads = config["num_global_key_value_heads"]
    if "per_layer_config" in config:
        by_layer = {int(i): own for i, own in (config["per_layer_config"] or {}).items()}  # "05" of 30 layers
        known = [by_layer.get(i, {}) for i, kind in enumerate(kinds) if kind == "full_attention"]
        if any(own != known[0] for own in known) or len(by_layer) > len(known):
            raise CallboardError(
                "The model's per_layer_config differs within one kind of layers, which is not supported."
            )
        dim = known[0].get("head_dim", config["head_dim"])
        kv_heads = known[0].get("num_key_value_heads")
    return dim, kv_heads or config["num_key_value_heads"]


def _check(config: Mapping[str, Any]) -> None:
    """Raises CallboardError for variants that are not supported."""
    if config.get("use_bidirectional_attention") == "all":
        raise CallboardError("The model's use_bidirectional_attention is 'all'; only causal attention is supported.")
    sizes = config["vocab_size_per_layer_input"], config["vocab_size"]
    if config["hidden_size_per_layer_input"] and sizes[0] != sizes[1]:
        raise CallboardError(
            f"The model's vocab_size_per_layer_input is {sizes[0]} and its vocab_size {sizes[1]}; they must be equal."
        )
    if config["enable_moe_block"] and config["num_kv_shared_layers"] and config["use_double_wide_mlp"]:
        raise CallboardError("The model has use_double_wide_mlp beside experts, which is not supported.")
    rope = config["rope_parameters"]["full_attention"]
    if rope.get("rope_type", "default") == "default" and (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CallboardError(
            "The model's full_attention rotates a part of each head; supported is rope_type proportional."
        )

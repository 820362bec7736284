"""The Llama family: Llama 2 and 3.x, SmolLM2, and other models published as LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec, FfnSpec, LayerSpec
from runtime.base.types import CallboardError
from runtime.models.rope import context, rope_spec
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap({
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.o_proj",
    "sinks": "model.layers.{}.self_attn.sinks",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
})  # fmt: skip

# Idefics 3 and SmolVLM
IMAGE_TEXT_WEIGHT_MAP = WEIGHT_MAP.inside("model.text_model.")


def image_text_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for the text part of a model with images; raises CallboardError for another kind than Llama's."""
    if (kind := config.get("model_type") or "llama") not in ("llama", "smolvlm", "idefics3"):
        raise CallboardError(f"The model's text_config is of type {kind!r}; supported is llama.")
    return decoder_spec(config)


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation or a rope type that is not supported."""
    layer = LayerSpec(attention(config), ffn(config))
    return decoder(config, [layer] * config["num_hidden_layers"])


def attention(config: Mapping[str, Any], **own: Any) -> AttentionSpec:
    """A layer's attention. The fields in `own` replace the config's."""
    heads = config["num_attention_heads"]
    stated: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": config["num_key_value_heads"] or heads,
        "head_dim": config["head_dim"] or config["hidden_size"] // heads,
        "qkv_bias": config["attention_bias"],
        "out_bias": config.get("stored_out_bias", config["attention_bias"]),  # a GGUF file states both
    }
    return AttentionSpec(**stated | {"rope": rope_spec(config)} | own)


def attentions(
    config: Mapping[str, Any],
    full: AttentionSpec,
    slides: Callable[[int], bool],
    sliding: AttentionSpec | None = None,
) -> list[AttentionSpec]:
    """The attention of each layer: `full`, or `sliding` with the config's window (`full` with it if None).

    `slides` returns True for layers that have a window if the config lacks layer_types."""
    layers, sliding = range(config["num_hidden_layers"]), replace(sliding or full, window=config["sliding_window"] or 0)
    kinds = config["layer_types"] or ["sliding_attention" if slides(i) else "full_attention" for i in layers]
    return [sliding if kinds[i] == "sliding_attention" else full for i in layers]


def ffn(config: Mapping[str, Any], **own: Any) -> FfnSpec:
    """A feed-forward layer. The fields in `own` replace the config's."""
    if config["hidden_act"] != "silu":
        raise CallboardError(f"The model's hidden_act is {config['hidden_act']!r}; supported is silu.")
    return FfnSpec(**{"size": config["intermediate_size"], "ffn_bias": config["mlp_bias"]} | own)


def decoder(config: Mapping[str, Any], layers: Iterable[LayerSpec], **own: Any) -> DecoderSpec:
    """A decoder of these layers. The fields in `own` replace the config's."""
    stated: dict[str, Any] = {
        "layers": (layers := tuple(layers)),
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "tied_head": config["tie_word_embeddings"],
    }
    ropes = [rope for layer in layers if (rope := getattr(layer.mixer, "rope", None))]
    if not ropes:
        raise CallboardError("The model's config.json has no layer with attention; at least one must have it.")
    return DecoderSpec(**stated | {"max_positions": max(context(config, rope) for rope in ropes)} | own)

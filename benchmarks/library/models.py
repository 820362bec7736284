"""The shapes of the measured models: published ones, and tiny ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.base.model.attention_spec import AttentionSpec
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.layer_spec import PRE_NORMS
from runtime.base.model.tower_spec import TowerSpec
from runtime.models import load_spec
from runtime.models.heads.assistant_files import assistant_spec
from runtime.models.heads.mtp import mtp_spec
from runtime.models.published import PUBLISHED
from runtime.models.towers.specs import tower_spec


def _dense(config: dict[str, Any]) -> dict[str, Any]:
    """A published shape without the quantization of its files."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _cut(config: dict[str, Any]) -> dict[str, Any]:
    """The first eight layers of a published shape, with a small vocabulary: for a CPU."""
    layers = {name: kinds[:8] for name, kinds in config.items() if name in ("layer_types", "mlp_layer_types")}
    return config | layers | {"num_hidden_layers": 8, "vocab_size": 32768}


_CUT = "gpt-oss-20b", "qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite"
CONFIGS: dict[str, dict[str, Any]] = {
    **PUBLISHED,
    # Dense experts, for other quantization formats
    **{f"{name}-bf16": _dense(PUBLISHED[name]) for name in ("gpt-oss-20b", "gpt-oss-120b")},
    **{f"{name}-cut": _cut(PUBLISHED[name]) for name in _CUT},
    "lfm2-135m": {  # SmolLM2-135M's size; two layers of five have attention
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 49152, "num_hidden_layers": 30,
        "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "max_position_embeddings": 8192, "norm_eps": 1e-5, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if layer % 5 in (2, 4) else "conv" for layer in range(30)],
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
    },
    "tiny": {  # made up, for trying a benchmark on a CPU
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 32768,
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": True,
    },
    "tiny-hybrid": {  # likewise
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu",
        "vocab_size": 32768, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "eos_token_id": 1,
        "tie_word_embeddings": True, "mtp_num_hidden_layers": 1,
    },
    "tiny-gpt-oss": {  # likewise
        **PUBLISHED["gpt-oss-20b"], "vocab_size": 32768, "num_hidden_layers": 2, "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
        "num_local_experts": 8, "bos_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip


def tower_of(model: str) -> TowerSpec | None:
    """The image encoder of a name in CONFIGS."""
    return tower_spec(CONFIGS[model])


def spec_of(model: str) -> DecoderSpec:
    """The spec of a name in CONFIGS."""
    return load_spec(CONFIGS[model])[0]


def eagle3_head(target: DecoderSpec, num_ids: int = 32_000) -> HeadSpec:
    """The shape of an EAGLE-3 head with a layer like the target's first, as published for Llama-3.1-8B."""
    hidden, layer = target.hidden_size, target.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    norms = {"embed_norm": (hidden,), "hidden_norm": (hidden,)}
    decoder = replace(
        target,
        layers=(replace(layer, mixer=replace(layer.mixer, first_key=1, input_factor=2), norms=PRE_NORMS[1:]),),
        quantization=None,
        tied_head=False,
        lent=frozenset(("embed", "head")),
        others=(("fc.weight", (hidden, 3 * hidden)), *norms.items(), ("draft_head", (num_ids, hidden))),
    )
    taps = (2, target.num_layers // 2, target.num_layers - 3)
    return HeadSpec("eagle3", decoder, hidden, taps, own_head=True, num_ids=num_ids)


def assistant_head(target: DecoderSpec) -> HeadSpec:
    """The shape of the assistant that is published for Gemma 4 26B-A4B, for a target with its keys and values."""
    text = {
        **CONFIGS["gemma-4-26b-a4b"], "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"], "enable_moe_block": False,
    }  # fmt: skip
    return assistant_spec({"text_config": text, "backbone_hidden_size": target.hidden_size}, target)


def head_of(model: str) -> HeadSpec | None:
    """The head in the checkpoint of a name in CONFIGS; None if it has none."""
    has_head = any(CONFIGS[model].get(field) for field in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    return mtp_spec(spec_of(model)) if has_head else None

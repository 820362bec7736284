"""Which architectures run, and the spec of a checkpoint's config."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import CallboardError
from runtime.models.config_checks import checked_config
from runtime.models.families import (
    deepseek,
    gemma,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    granite,
    lfm,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_hybrid,
    seed,
    smollm,
)
from runtime.models.families.defaults import with_defaults
from runtime.models.weight_map import WeightMap
from runtime.quant import has_fp8_kv_cache, parse_schemes

CLASSIFIER = "score.weight"  # [num_labels, hidden], applied to the last token's hidden state
_MODEL = "model."  # precedes the names in a decoder that was saved with its head
_WITHOUT_HEAD = re.compile("(Model|ForSequenceClassification)$")
_RANDOM = "logits and greedy tokens of random weights, against transformers"


class ChatForm(NamedTuple):
    """What a published chat template was found to write."""

    template: str  # which one
    tools: str  # the tool-call format, a value of --tool-call-parser; generic if the template lacks tools
    reasons: bool = False  # the model may write reasoning before its answer


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as people know it, and how its checkpoints are read."""

    models: str  # the published models that it stands for
    example: str  # one model on the Hugging Face hub
    decoder_spec: Callable[[Mapping[str, Any]], DecoderSpec]  # reads a config.json
    weight_map: WeightMap
    verified: str = _RANDOM  # what was compared, and with what
    chats: tuple[ChatForm, ...] = ()  # published models' forms; empty without a template


_GEMMA4_CHATS = tuple(  # ordered by publication
    ChatForm(name, "gemma4", reasons=True) for name in ("gemma4-release", "gemma4-revised", "gemma4")
)
_MISTRAL_V11 = ChatForm("mistral-v11", "mistral_v11")
_MINISTRAL3_REASONING = ChatForm("ministral-3", "mistral_v11", reasons=True)
_QWEN35 = ChatForm("qwen3.5", "qwen3_coder", reasons=True)
_QWEN3_VL_CHATS = ChatForm("qwen3-vl", "hermes"), ChatForm("qwen3-vl-thinking", "hermes", reasons=True)
FAMILIES: dict[str, Family] = {  # key: the name in a config.json's `architectures`
    "DeepseekV2ForCausalLM": Family(
        "DeepSeek V2, V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat", deepseek.v2_decoder_spec, deepseek.WEIGHT_MAP,
        chats=(ChatForm("deepseek-v2", "generic"),),
    ),
    "DeepseekV3ForCausalLM": Family(
        "DeepSeek V3, V3.1, R1", "deepseek-ai/DeepSeek-V3", deepseek.v3_decoder_spec, deepseek.WEIGHT_MAP,
        chats=(
            ChatForm("deepseek-v3.1", "deepseek_v31", reasons=True), ChatForm("deepseek-r1", "generic", reasons=True),
        ),
    ),
    "GPT2LMHeadModel": Family("GPT-2, DistilGPT2", "openai-community/gpt2", gpt2.decoder_spec, gpt2.WEIGHT_MAP),
    "Gemma2ForCausalLM": Family(
        "Gemma 2", "google/gemma-2-2b-it", gemma.gemma2_spec, gemma.WEIGHT_MAP, chats=(ChatForm("gemma2", "generic"),),
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3 270M, 1B", "google/gemma-3-270m", gemma.gemma3_spec, gemma.WEIGHT_MAP,
        f"{_RANDOM}; texts and perplexity of Gemma 3 270M", (ChatForm("gemma3", "generic"),),
    ),
    "Gemma3ForConditionalGeneration": Family(
        "Gemma 3 4B, 12B, 27B", "google/gemma-3-4b-it", gemma.gemma3_spec, gemma.WEIGHT_MAP,
        chats=(ChatForm("gemma3", "generic"),),
    ),
    "Gemma4ForCausalLM": Family(
        "Gemma 4 as text models", "google/gemma-4-E2B-it", gemma4.decoder_spec, gemma4.WEIGHT_MAP, chats=_GEMMA4_CHATS,
    ),
    "Gemma4ForConditionalGeneration": Family(
        "Gemma 4 E2B, E4B, 31B, 26B-A4B, without sound", "google/gemma-4-E2B-it", gemma4.decoder_spec,
        gemma4.WEIGHT_MAP, chats=_GEMMA4_CHATS,
    ),
    "Glm4ForCausalLM": Family(
        "GLM-4-0414 9B, 32B; GLM-Z1", "zai-org/GLM-4-9B-0414", glm.post_norms_decoder_spec, glm.POST_NORMS_WEIGHT_MAP,
        chats=(ChatForm("chatglm-4", "glm4"),),
    ),
    "Glm4MoeForCausalLM": Family(
        "GLM-4.5, 4.5-Air, 4.6, 4.7", "zai-org/GLM-4.5-Air", glm.moe_decoder_spec, glm.MOE_WEIGHT_MAP,
        chats=(ChatForm("glm-4.5", "glm45", reasons=True), ChatForm("glm-4.7", "glm47", reasons=True)),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "GLM-4.7-Flash", "zai-org/GLM-4.7-Flash", deepseek.flash_decoder_spec, deepseek.WEIGHT_MAP,
        chats=(ChatForm("glm-4.7", "glm47", reasons=True),),
    ),
    "Glm4vForConditionalGeneration": Family(
        "GLM-4.1V 9B, GLM-4.6V-Flash 9B", "zai-org/GLM-4.1V-9B-Thinking", glm.post_norms_decoder_spec,
        glm.POST_NORMS_IMAGE_TEXT_WEIGHT_MAP,
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        "GLM-4.5V, 4.6V 106B-A12B", "zai-org/GLM-4.5V", glm.moe_decoder_spec, glm.MOE_IMAGE_TEXT_WEIGHT_MAP,
    ),
    "GlmForCausalLM": Family(
        "GLM-4-9B", "zai-org/glm-4-9b-chat-hf", glm.decoder_spec, glm.WEIGHT_MAP,
        chats=(ChatForm("chatglm-4", "glm4"),),
    ),
    "GptOssForCausalLM": Family(
        "gpt-oss 20b, 120b", "openai/gpt-oss-20b", gpt_oss.decoder_spec, gpt_oss.WEIGHT_MAP,
        chats=(ChatForm("gpt-oss", "harmony", reasons=True),),
    ),
    "GraniteForCausalLM": Family(
        "Granite 3.0-3.3", "ibm-granite/granite-3.3-2b-instruct", granite.decoder_spec, granite.WEIGHT_MAP,
        chats=(ChatForm("granite-3", "granite"),),
    ),
    "GraniteMoeForCausalLM": Family(
        "Granite 3.0, 3.1 with experts", "ibm-granite/granite-3.1-1b-a400m-instruct", granite.moe_decoder_spec,
        granite.MOE_WEIGHT_MAP, chats=(ChatForm("granite-3", "granite"),),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "Granite 4.0 Micro, without state-space layers", "ibm-granite/granite-4.0-micro", granite.hybrid_decoder_spec,
        granite.HYBRID_WEIGHT_MAP, chats=(ChatForm("granite-4", "hermes"),),
    ),
    "Idefics3ForConditionalGeneration": Family(
        "Idefics3, SmolVLM", "HuggingFaceTB/SmolVLM-256M-Instruct", llama.image_text_spec, llama.IMAGE_TEXT_WEIGHT_MAP,
        chats=(ChatForm("smolvlm", "generic"),),
    ),
    "InternVLForConditionalGeneration": Family(
        "InternVL3 in transformers' format", "OpenGVLab/InternVL3-1B-hf", qwen.internvl_spec, qwen.INTERNVL_WEIGHT_MAP,
        chats=(ChatForm("internvl-3", "generic"),),
    ),
    "Lfm2ForCausalLM": Family(
        "LFM2, LFM2.5", "LiquidAI/LFM2-1.2B", lfm.decoder_spec, lfm.WEIGHT_MAP,
        chats=(ChatForm("lfm-2", "lfm2"), ChatForm("lfm-2.5", "lfm2", reasons=True)),
    ),
    "Lfm2MoeForCausalLM": Family(
        "LFM2-MoE 8B-A1B, 24B-A2B", "LiquidAI/LFM2-8B-A1B", lfm.moe_decoder_spec, lfm.MOE_WEIGHT_MAP,
        chats=(ChatForm("lfm-2", "lfm2"),),
    ),
    "Lfm2VlForConditionalGeneration": Family(
        "LFM2-VL", "LiquidAI/LFM2-VL-450M", lfm.decoder_spec, lfm.IMAGE_TEXT_WEIGHT_MAP,
        chats=(ChatForm("lfm-2", "lfm2"),),
    ),
    "LlamaForCausalLM": Family(
        "Llama 2, 3, 3.1, 3.2; SmolLM2", "HuggingFaceTB/SmolLM2-135M-Instruct", llama.decoder_spec, llama.WEIGHT_MAP,
        f"{_RANDOM}; texts and perplexity of SmolLM2-135M-Instruct",
        (
            ChatForm("llama3.2", "llama3_json"), ChatForm("llama3", "generic"), ChatForm("llama2", "generic"),
            ChatForm("smollm2", "generic"),
        ),
    ),
    "Ministral3ForCausalLM": Family(
        "Ministral 3, text alone", "mistralai/Ministral-3-8B-Base-2512", mistral.ministral3_spec, mistral.WEIGHT_MAP,
        chats=(_MISTRAL_V11, _MINISTRAL3_REASONING),
    ),
    "MinistralForCausalLM": Family(
        "Ministral 8B", "mistralai/Ministral-8B-Instruct-2410", mistral.decoder_spec, mistral.WEIGHT_MAP,
        chats=(ChatForm("mistral-v0.3", "mistral"),),
    ),
    "Mistral3ForConditionalGeneration": Family(
        "Mistral Small 3.1, 3.2; Ministral 3 3B, 8B, 14B",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506", mistral.image_text_spec, mistral.IMAGE_TEXT_WEIGHT_MAP,
        chats=(ChatForm("mistral-v0.3", "mistral"), _MISTRAL_V11, _MINISTRAL3_REASONING),
    ),
    "MistralForCausalLM": Family(
        "Mistral 7B v0.1-v0.3, Nemo, Small 3", "mistralai/Mistral-7B-Instruct-v0.3", mistral.decoder_spec,
        mistral.WEIGHT_MAP, chats=(ChatForm("mistral-v0.3", "mistral"), ChatForm("mistral-v0.1", "generic")),
    ),
    "MixtralForCausalLM": Family(
        "Mixtral 8x7B, 8x22B", "mistralai/Mixtral-8x7B-Instruct-v0.1", mistral.moe_decoder_spec, mistral.MOE_WEIGHT_MAP,
        f"{_RANDOM}; a text of SmolLM2-135M-Instruct with copies of its feed-forward layers as experts",
        (ChatForm("mistral-v0.3", "mistral"), ChatForm("mistral-v0.1", "generic")),
    ),
    "Olmo2ForCausalLM": Family(
        "OLMo 2", "allenai/OLMo-2-1124-7B-Instruct", olmo.olmo2_spec, olmo.WEIGHT_MAP,
        chats=(ChatForm("olmo-2", "generic"),),
    ),
    "Olmo3ForCausalLM": Family(
        "OLMo 3, 3.1", "allenai/Olmo-3-7B-Instruct", olmo.olmo3_spec, olmo.WEIGHT_MAP,
        chats=(ChatForm("olmo-3", "olmo3"),),
    ),
    "OlmoeForCausalLM": Family(
        "OLMoE", "allenai/OLMoE-1B-7B-0924-Instruct", olmo.moe_decoder_spec, olmo.MOE_WEIGHT_MAP,
        chats=(ChatForm("olmo-2", "generic"),),
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "microsoft/Phi-4-mini-instruct", phi.decoder_spec, phi.WEIGHT_MAP,
        chats=(ChatForm("phi4-mini", "phi4_mini"), ChatForm("phi3", "generic")),
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen2, Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct", qwen.decoder_spec, qwen.WEIGHT_MAP,
        chats=(ChatForm("qwen2.5", "hermes"),),
    ),
    "Qwen2MoeForCausalLM": Family(
        "Qwen2-MoE, Qwen1.5-MoE", "Qwen/Qwen2-57B-A14B-Instruct", qwen.qwen2_moe_decoder_spec,
        qwen.QWEN2_MOE_WEIGHT_MAP, chats=(ChatForm("qwen2", "generic"),),
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen3", "Qwen/Qwen3-0.6B", qwen.decoder_spec, qwen.WEIGHT_MAP,
        chats=(ChatForm("qwen3", "hermes", reasons=True),),
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-MoE", "Qwen/Qwen3-30B-A3B", qwen.moe_decoder_spec, qwen.MOE_WEIGHT_MAP,
        chats=(ChatForm("qwen3", "hermes", reasons=True), ChatForm("qwen3-coder", "qwen3_coder")),
    ),
    "Qwen3NextForCausalLM": Family(
        "Qwen3-Next 80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", qwen_hybrid.next_decoder_spec,
        qwen_hybrid.NEXT_WEIGHT_MAP, chats=(ChatForm("qwen3", "hermes", reasons=True),),
    ),
    "Qwen3VLForConditionalGeneration": Family(
        "Qwen3-VL", "Qwen/Qwen3-VL-2B-Instruct", qwen.decoder_spec, qwen.IMAGE_TEXT_WEIGHT_MAP,
        chats=_QWEN3_VL_CHATS,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "Qwen3-VL with experts", "Qwen/Qwen3-VL-30B-A3B-Instruct", qwen.image_text_moe_spec,
        qwen.IMAGE_TEXT_MOE_WEIGHT_MAP, chats=_QWEN3_VL_CHATS,
    ),
    "Qwen3_5ForCausalLM": Family(
        "Qwen3.5, 3.6, 3.8 as text models", "Qwen/Qwen3.5-9B", qwen_hybrid.decoder_spec, qwen_hybrid.WEIGHT_MAP,
        chats=(_QWEN35,),
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        "Qwen3.5, 3.6, 3.8", "Qwen/Qwen3.5-9B", qwen_hybrid.decoder_spec, qwen_hybrid.WEIGHT_MAP,
        chats=(_QWEN35,),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "Qwen3.5-MoE, 3.6-MoE as text models", "Qwen/Qwen3.6-35B-A3B", qwen_hybrid.moe_decoder_spec,
        qwen_hybrid.MOE_WEIGHT_MAP, chats=(_QWEN35,),
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "Qwen3.5-MoE, 3.6-MoE", "Qwen/Qwen3.6-35B-A3B", qwen_hybrid.moe_decoder_spec,
        qwen_hybrid.MOE_WEIGHT_MAP, chats=(_QWEN35,),
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS 36B", "ByteDance-Seed/Seed-OSS-36B-Instruct", seed.decoder_spec, seed.WEIGHT_MAP,
        chats=(ChatForm("seed-oss", "seed_oss", reasons=True),),
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3", "HuggingFaceTB/SmolLM3-3B", smollm.decoder_spec, smollm.WEIGHT_MAP,
        chats=(ChatForm("smollm3", "hermes", reasons=True),),
    ),
    "SmolVLMForConditionalGeneration": Family(
        "SmolVLM2", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", llama.image_text_spec, llama.IMAGE_TEXT_WEIGHT_MAP,
        chats=(ChatForm("smolvlm", "generic"),),
    ),
}  # fmt: skip


def has_experts_in_turn(config: Mapping[str, Any]) -> bool:
    """Return `WeightMap.experts_in_turn` of the family in a config.json."""
    named = config.get("architectures")
    family = FAMILIES.get(str(named[0])) if isinstance(named, list) and named else None
    return family is not None and family.weight_map.experts_in_turn


def hidden_size(config: Mapping[str, Any]) -> int:
    """Return the hidden size in a config.json; 0 if it states none."""
    text = config.get("text_config")
    return int((text if isinstance(text, Mapping) else config).get("hidden_size") or 0)


def load_spec(
    config: Mapping[str, Any], tensors: Collection[str] = (), tied: bool | None = None
) -> tuple[DecoderSpec, WeightMap]:
    """The spec of a config.json, and how its checkpoint, which has these tensors if they are known, stores it.
    `tied` replaces its config's tie_word_embeddings.

    Raises CallboardError if the architecture, or a variant in the config, is not supported."""
    named = config.get("architectures")
    stored = str(named[0] if isinstance(named, list) and named else None)
    name = stored if stored in FAMILIES else _WITHOUT_HEAD.sub("ForCausalLM", stored)  # GPT2LMHeadModel ends so, too
    if name not in FAMILIES:
        raise CallboardError(f"The model's architecture is {stored}; supported are {', '.join(sorted(FAMILIES))}.")
    family = FAMILIES[name]
    text = checked_config(with_defaults(config, name))
    try:
        spec = family.decoder_spec({**text, "architectures": [name]})
    except KeyError as e:
        raise CallboardError(f"The model's config.json lacks {e.args[0]}, which {name} needs.") from e
    if tied is not None:
        spec = replace(spec, tied_head=tied)
    weight_map = family.weight_map
    if num_drafting := text.get("num_nextn_predict_layers"):  # layers behind the others, which draft tokens
        behind = "|".join(str(spec.num_layers + i) for i in range(num_drafting))
        weight_map = replace(weight_map, ignored=rf"{weight_map.ignored}|((model\.)?layers|blk)\.({behind})\..*")
    if not weight_map.base and tensors and not any(tensor.startswith(_MODEL) for tensor in tensors):
        weight_map = replace(weight_map, names={p: n.removeprefix(_MODEL) for p, n in weight_map.names.items()})
        weight_map, stored = replace(weight_map, base=_MODEL), ""
    if weight_map.base.startswith(_MODEL) and tensors and not any(t.startswith(weight_map.base) for t in tensors):
        weight_map = replace(weight_map, base=_MODEL)  # only the text part of a model with images
    if stored != name and weight_map.names["head"] not in tensors:  # it was saved without its head
        spec = replace(spec, tied_head=True, makes_text=spec.tied_head and not stored)
        weight_map = replace(weight_map, ignored=rf"{weight_map.ignored}|{CLASSIFIER}")
    schemes = parse_schemes(config, lambda: weight_map.names_of(spec), weight_map.base)
    return replace(spec, quantization=schemes or None, fp8_kv_cache=has_fp8_kv_cache(config)), weight_map

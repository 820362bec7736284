"""The fields of other servers' requests (OpenAI, vLLM, SGLang, TGI, llama.cpp, Ollama and their front ends) that are
none of ours, and what becomes of each.

A field that would change the answer is refused, unless its value asks for nothing. One that means nothing here is
ignored, and named in a header of the answer; so is every field that no table has.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Refused(NamedTuple):
    """A field that would change the answer."""

    harmless: tuple[Any, ...]  # values that ask for nothing
    instead: str  # what a client can do


def _no(*harmless: Any, instead: str = "leave it out") -> Refused:
    return Refused((None, *harmless), instead)


def _structured(kind: str) -> Refused:
    return _no([], instead=f"send structured_outputs.{kind}")


def _all(names: str, refused: Refused) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), refused)


_CHAT = "send it to /v1/chat/completions"
_COMPLETIONS = "send it to /v1/completions"
_TOOLS = "use tools, tool_choice and tool_calls instead of OpenAI's old fields"
_THINKING = "send what the model's template knows, such as chat_template_kwargs.enable_thinking"

# Fields that mean nothing here: hints, fields of what is refused below, and of what there is not (images, routing).
_IGNORED = """
    parallel_tool_calls include_reasoning add_generation_prompt prediction metadata store service_tier safety_identifier
    prompt_cache_key prompt_cache_options prompt_cache_retention guided_decoding_backend mm_processor_kwargs
    media_io_kwargs spaces_between_special_tokens session_id custom_params custom_labels rid extra_key ngram_corpus_id
    routed_experts_start_len max_dynamic_patch min_dynamic_patch use_audio_in_video bootstrap_host bootstrap_port
    bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank details mirostat_tau mirostat_eta dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent n_keep n_discard
    cache_prompt id_slot timings_per_token return_progress keep_alive num_ctx num_keep num_batch num_gpu num_thread
    provider models route usage
"""
IGNORED_FIELDS = frozenset(_IGNORED.split())

UNSUPPORTED_FIELDS: dict[str, Refused] = {
    # ---- without another way
    **_all("suffix guideline negative_prompt", _no("")),
    **_all(
        "include logits_processors prompt_embeds input_embeds samplers grammar_triggers lora image_data "
        "response_fields images transforms plugins",
        _no([]),
    ),
    **_all(
        "audio web_search_options moderation repetition_detection custom_logit_processor lora_path task "
        "adapter_id thinking_budget",
        _no(),
    ),
    **_all(
        "use_beam_search early_stopping watermarking return_hidden_states return_routed_experts "
        "return_meta_info watermark penalize_nl post_sampling_probs grammar_lazy thinking_forced_open",
        _no(False),
    ),
    **_all("length_penalty num_beams guidance_scale", _no(1)),
    **_all("kv_transfer_params ec_transfer_params vllm_xargs session_params images_config", _no({})),
    **_all("separate_reasoning stream_reasoning parse_tool_calls", _no(True)),
    **_all("xtc_probability n_indent penalty_alpha", _no(0)),
    # ---- of the other endpoint, or of OpenAI's other interfaces
    "messages": _no(instead=_CHAT),
    "prompt": _no(instead=_COMPLETIONS),
    "echo": _no(False, instead=_COMPLETIONS),
    "best_of": _no(1, instead="send n"),
    "max_completion_tokens": _no(instead="send max_tokens"),
    "max_output_tokens": _no(instead="send max_tokens"),
    "top_logprobs": _no(0, instead="send logprobs"),
    "tools": _no([], instead=_CHAT),
    "tool_choice": _no("none", "auto", instead=_CHAT),
    "chat_template_kwargs": _no({}, instead=_CHAT),
    "continue_final_message": _no(False, instead=_CHAT),
    "input": _no(instead="send messages or prompt"),
    "instructions": _no(instead="send a message of the role system"),
    "previous_response_id": _no(instead="send the whole conversation as messages"),
    "text": _no({}, instead="send response_format"),
    "truncation": _no("disabled", instead="send truncate_prompt_tokens"),
    # ---- OpenAI's chats
    "functions": _no([], instead=_TOOLS),
    "function_call": _no([], "none", instead=_TOOLS),
    "reasoning_effort": _no(instead=_THINKING),
    "reasoning": _no({}, instead=_THINKING),
    # ---- vLLM
    "guided_json": _structured("json"),
    "guided_regex": _structured("regex"),
    "guided_choice": _structured("choice"),
    "guided_grammar": _no(instead="send a JSON Schema or a regular expression as structured_outputs"),
    "guided_whitespace_pattern": _no(instead="send structured_outputs.regex where white space matters"),
    "structural_tag": _no(instead="send tools with strict functions, or response_format"),
    "documents": _no([], instead="send chat_template_kwargs.documents, if the model's template reads them"),
    "chat_template": _no(instead="a template is a program: the operator sets it with --chat-template"),
    "allowed_token_ids": _no([], instead="send structured_outputs.choice or logit_bias"),
    "bad_words": _no([], instead="send logit_bias"),
    "logprob_token_ids": _no([], instead="send logprobs"),
    "return_tokens_as_token_ids": _no(False, instead="send return_token_ids"),
    "return_prompt_text": _no(False, instead="send return_token_ids"),
    # ---- SGLang
    "regex": _structured("regex"),
    "ebnf": _no(instead="send a JSON Schema or a regular expression as structured_outputs"),
    "json_schema": _structured("json"),
    "stop_regex": _no([], instead="send stop"),
    "no_stop_trim": _no(False, instead="send include_stop_str_in_output"),
    "input_ids": _no([], instead="send the ids as the prompt of /v1/completions"),
    "return_cached_tokens_details": _no(False, instead="read usage.prompt_tokens_details"),
    "return_prompt_token_ids": _no(False, instead="send return_token_ids"),
    # ---- TGI
    "max_new_tokens": _no(instead="send max_tokens"),
    "do_sample": _no(True, instead="send temperature 0"),
    "return_full_text": _no(False, instead="send echo to /v1/completions"),
    "truncate": _no(instead="send truncate_prompt_tokens"),
    "typical_p": _no(1, instead="send top_p or min_p"),
    "top_n_tokens": _no(0, instead="send logprobs"),
    "decoder_input_details": _no(False, instead="send prompt_logprobs"),
    "tool_prompt": _no("", instead="send a message of the role system"),
    # ---- llama.cpp
    "n_predict": _no(-1, instead="send max_tokens"),
    "repeat_penalty": _no(1, instead="send repetition_penalty"),
    "repeat_last_n": _no(-1, instead="penalties look at all tokens here; leave it out"),
    "tfs_z": _no(1, instead="send top_p or min_p"),
    "top_n_sigma": _no(-1, 0, instead="send top_p or min_p"),
    "mirostat": _no(0, instead="send temperature and top_p"),
    "dry_multiplier": _no(0, instead="send repetition_penalty"),
    "dynatemp_range": _no(0, instead="send temperature"),
    "n_probs": _no(0, instead="send logprobs"),
    "grammar": _no("", instead="send a JSON Schema or a regular expression as structured_outputs"),
    "t_max_predict_ms": _no(0, -1, instead="send max_tokens"),
    # ---- Ollama
    "options": _no({}, instead="send its fields beside the others, by OpenAI's names"),
    "format": _no("", instead="send response_format"),
    "num_predict": _no(-1, instead="send max_tokens"),
    "think": _no(instead=_THINKING),
    "system": _no("", instead="send a message of the role system"),
    "template": _no("", instead="send the rendered prompt to /v1/completions"),
    "context": _no([], instead="send the whole conversation"),
    "raw": _no(False, instead="send the rendered prompt to /v1/completions"),
    # ---- Anthropic, hosted services and front ends
    "stop_sequences": _no([], instead="send stop"),
    "max_tokens_to_sample": _no(instead="send max_tokens"),
    "thinking": _no({}, {"type": "disabled"}, instead=_THINKING),
    "enable_thinking": _no(instead="send chat_template_kwargs.enable_thinking"),
    "top_a": _no(0, instead="send min_p"),
    "typical": _no(1, instead="send top_p or min_p"),
    "tfs": _no(1, instead="send top_p or min_p"),
    "epsilon_cutoff": _no(0, instead="send min_p"),
    "eta_cutoff": _no(0, instead="send min_p"),
    "mirostat_mode": _no(0, instead="send temperature and top_p"),
    "smoothing_factor": _no(0, instead="send temperature"),
    "dynamic_temperature": _no(False, instead="send temperature"),
    "no_repeat_ngram_size": _no(0, instead="send repetition_penalty"),
    "encoder_repetition_penalty": _no(1, instead="send repetition_penalty"),
    "banned_tokens": _no([], "", instead="send logit_bias"),
    "token_bans": _no([], instead="send logit_bias"),
    "safe_prompt": _no(False, instead="send a message of the role system"),
    "random_seed": _no(instead="send seed"),
    "modalities": _no(["text"]),
    "verbosity": _no("medium"),
    "truncation_side": _no("left"),
    "thinking_token_budget": _no(-1),
    "reasoning_budget": _no(-1),
    "min_keep": _no(0, 1),
    "reasoning_format": _no("auto", "deepseek"),
}

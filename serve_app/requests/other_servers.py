"""The fields of other servers' requests (OpenAI, vLLM, SGLang, TGI, llama.cpp, Ollama and their front ends) that are
none of ours, and what becomes of each.

A field that would change the answer is refused, unless its value asks for nothing. One that means nothing here is
ignored, and named in a header of the answer; so is every field that stands in no table.
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


_IGNORED = None
_CHAT = "send it to /v1/chat/completions"
_COMPLETIONS = "send it to /v1/completions"
_TOOLS = "use tools, tool_choice and tool_calls instead of OpenAI's old fields"
_THINKING = "send what the model's template knows, such as chat_template_kwargs.enable_thinking"

UNSUPPORTED_FIELDS: dict[str, Refused | None] = {
    # ---- of the other endpoint, or of OpenAI's other interfaces
    "messages": _no(instead=_CHAT),
    "prompt": _no(instead=_COMPLETIONS),
    "echo": _no(False, instead=_COMPLETIONS),
    "suffix": _no(""),
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
    "include": _no([]),
    "parallel_tool_calls": _IGNORED,
    "include_reasoning": _IGNORED,
    "add_generation_prompt": _IGNORED,
    # ---- OpenAI's chats
    "functions": _no([], instead=_TOOLS),
    "function_call": _no([], "none", instead=_TOOLS),
    "audio": _no(),
    "modalities": _no(["text"]),
    "reasoning_effort": _no(instead=_THINKING),
    "reasoning": _no({}, instead=_THINKING),
    "verbosity": _no("medium"),
    "web_search_options": _no(),
    "moderation": _no(),
    "prediction": _IGNORED,  # a hint of what the answer may be
    "metadata": _IGNORED,
    "store": _IGNORED,
    "service_tier": _IGNORED,
    "safety_identifier": _IGNORED,
    "prompt_cache_key": _IGNORED,
    "prompt_cache_options": _IGNORED,
    "prompt_cache_retention": _IGNORED,
    # ---- vLLM
    "guided_json": _structured("json"),
    "guided_regex": _structured("regex"),
    "guided_choice": _structured("choice"),
    "guided_grammar": _no(instead="send a JSON Schema or a regular expression as structured_outputs"),
    "guided_whitespace_pattern": _no(instead="send structured_outputs.regex where white space matters"),
    "guided_decoding_backend": _IGNORED,
    "structural_tag": _no(instead="send tools with strict functions, or response_format"),
    "documents": _no([], instead="send chat_template_kwargs.documents, if the model's template reads them"),
    "chat_template": _no(instead="a template is a program: the operator sets it with --chat-template"),
    "use_beam_search": _no(False),
    "length_penalty": _no(1),
    "early_stopping": _no(False),
    "allowed_token_ids": _no([], instead="send structured_outputs.choice or logit_bias"),
    "bad_words": _no([], instead="send logit_bias"),
    "logits_processors": _no([]),
    "logprob_token_ids": _no([], instead="send logprobs"),
    "return_tokens_as_token_ids": _no(False, instead="send return_token_ids"),
    "return_prompt_text": _no(False, instead="send return_token_ids"),
    "truncation_side": _no("left"),
    "repetition_detection": _no(),
    "thinking_token_budget": _no(-1),
    "watermarking": _no(False),
    "prompt_embeds": _no([]),
    "kv_transfer_params": _no({}),
    "ec_transfer_params": _no({}),
    "vllm_xargs": _no({}),
    "mm_processor_kwargs": _IGNORED,  # there are only texts
    "media_io_kwargs": _IGNORED,
    "spaces_between_special_tokens": _IGNORED,
    "session_id": _IGNORED,
    # ---- SGLang
    "regex": _structured("regex"),
    "ebnf": _no(instead="send a JSON Schema or a regular expression as structured_outputs"),
    "json_schema": _structured("json"),
    "stop_regex": _no([], instead="send stop"),
    "no_stop_trim": _no(False, instead="send include_stop_str_in_output"),
    "separate_reasoning": _no(True),
    "stream_reasoning": _no(True),
    "custom_logit_processor": _no(),
    "input_ids": _no([], instead="send the ids as the prompt of /v1/completions"),
    "input_embeds": _no([]),
    "lora_path": _no(),
    "session_params": _no({}),
    "task": _no(),
    "return_hidden_states": _no(False),
    "return_routed_experts": _no(False),
    "return_cached_tokens_details": _no(False, instead="read usage.prompt_tokens_details"),
    "return_prompt_token_ids": _no(False, instead="send return_token_ids"),
    "return_meta_info": _no(False),
    "images_config": _no({}),
    "custom_params": _IGNORED,
    "custom_labels": _IGNORED,
    "rid": _IGNORED,
    "extra_key": _IGNORED,
    "ngram_corpus_id": _IGNORED,
    "routed_experts_start_len": _IGNORED,
    "max_dynamic_patch": _IGNORED,
    "min_dynamic_patch": _IGNORED,
    "use_audio_in_video": _IGNORED,
    "bootstrap_host": _IGNORED,
    "bootstrap_port": _IGNORED,
    "bootstrap_room": _IGNORED,
    "routed_dp_rank": _IGNORED,
    "disagg_prefill_dp_rank": _IGNORED,
    "data_parallel_rank": _IGNORED,
    # ---- TGI
    "max_new_tokens": _no(instead="send max_tokens"),
    "do_sample": _no(True, instead="send temperature 0"),
    "return_full_text": _no(False, instead="send echo to /v1/completions"),
    "truncate": _no(instead="send truncate_prompt_tokens"),
    "typical_p": _no(1, instead="send top_p or min_p"),
    "top_n_tokens": _no(0, instead="send logprobs"),
    "decoder_input_details": _no(False, instead="send prompt_logprobs"),
    "watermark": _no(False),
    "adapter_id": _no(),
    "tool_prompt": _no("", instead="send a message of the role system"),
    "guideline": _no(""),
    "details": _IGNORED,
    # ---- llama.cpp
    "n_predict": _no(-1, instead="send max_tokens"),
    "repeat_penalty": _no(1, instead="send repetition_penalty"),
    "repeat_last_n": _no(-1, instead="penalties look at all tokens here; leave it out"),
    "penalize_nl": _no(False),
    "tfs_z": _no(1, instead="send top_p or min_p"),
    "top_n_sigma": _no(-1, 0, instead="send top_p or min_p"),
    "min_keep": _no(0, 1),
    "mirostat": _no(0, instead="send temperature and top_p"),
    "dry_multiplier": _no(0, instead="send repetition_penalty"),
    "xtc_probability": _no(0),
    "dynatemp_range": _no(0, instead="send temperature"),
    "samplers": _no([]),
    "n_probs": _no(0, instead="send logprobs"),
    "post_sampling_probs": _no(False),
    "grammar": _no("", instead="send a JSON Schema or a regular expression as structured_outputs"),
    "grammar_lazy": _no(False),
    "grammar_triggers": _no([]),
    "n_indent": _no(0),
    "t_max_predict_ms": _no(0, -1, instead="send max_tokens"),
    "lora": _no([]),
    "image_data": _no([]),
    "reasoning_format": _no("auto", "deepseek"),
    "reasoning_budget": _no(-1),
    "thinking_forced_open": _no(False),
    "parse_tool_calls": _no(True),
    "response_fields": _no([]),
    "mirostat_tau": _IGNORED,  # mean something only with what is refused above
    "mirostat_eta": _IGNORED,
    "dry_base": _IGNORED,
    "dry_allowed_length": _IGNORED,
    "dry_penalty_last_n": _IGNORED,
    "dry_sequence_breakers": _IGNORED,
    "xtc_threshold": _IGNORED,
    "dynatemp_exponent": _IGNORED,
    "n_keep": _IGNORED,  # the context is never shifted
    "n_discard": _IGNORED,
    "cache_prompt": _IGNORED,
    "id_slot": _IGNORED,
    "timings_per_token": _IGNORED,
    "return_progress": _IGNORED,
    # ---- Ollama
    "options": _no({}, instead="send its fields beside the others, by OpenAI's names"),
    "format": _no("", instead="send response_format"),
    "num_predict": _no(-1, instead="send max_tokens"),
    "think": _no(instead=_THINKING),
    "system": _no("", instead="send a message of the role system"),
    "template": _no("", instead="send the rendered prompt to /v1/completions"),
    "context": _no([], instead="send the whole conversation"),
    "raw": _no(False, instead="send the rendered prompt to /v1/completions"),
    "images": _no([]),
    "keep_alive": _IGNORED,
    "num_ctx": _IGNORED,  # what does not fit is refused
    "num_keep": _IGNORED,
    "num_batch": _IGNORED,
    "num_gpu": _IGNORED,
    "num_thread": _IGNORED,
    # ---- Anthropic, hosted services and front ends
    "stop_sequences": _no([], instead="send stop"),
    "max_tokens_to_sample": _no(instead="send max_tokens"),
    "thinking": _no({}, {"type": "disabled"}, instead=_THINKING),
    "enable_thinking": _no(instead="send chat_template_kwargs.enable_thinking"),
    "thinking_budget": _no(),
    "top_a": _no(0, instead="send min_p"),
    "typical": _no(1, instead="send top_p or min_p"),
    "tfs": _no(1, instead="send top_p or min_p"),
    "epsilon_cutoff": _no(0, instead="send min_p"),
    "eta_cutoff": _no(0, instead="send min_p"),
    "mirostat_mode": _no(0, instead="send temperature and top_p"),
    "smoothing_factor": _no(0, instead="send temperature"),
    "dynamic_temperature": _no(False, instead="send temperature"),
    "penalty_alpha": _no(0),
    "num_beams": _no(1),
    "no_repeat_ngram_size": _no(0, instead="send repetition_penalty"),
    "encoder_repetition_penalty": _no(1, instead="send repetition_penalty"),
    "guidance_scale": _no(1),
    "negative_prompt": _no(""),
    "banned_tokens": _no([], "", instead="send logit_bias"),
    "token_bans": _no([], instead="send logit_bias"),
    "safe_prompt": _no(False, instead="send a message of the role system"),
    "random_seed": _no(instead="send seed"),
    "transforms": _no([]),
    "plugins": _no([]),
    "provider": _IGNORED,
    "models": _IGNORED,
    "route": _IGNORED,
    "usage": _IGNORED,  # it is always there
}

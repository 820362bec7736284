"""Other servers' unsupported fields: OpenAI, vLLM, SGLang, TGI, llama.cpp, Ollama and their front ends.

A field that would change the answer is refused, unless its value has no effect. All other fields are ignored, and a
header in the answer names them. Fields for less context, a style or an effort are ignored, too, and offers of tools."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class UnsupportedField(NamedTuple):
    """A field that would change the answer."""

    harmless: tuple[Any, ...]  # values without an effect
    instead: str  # the remedy for clients


# Remedies, each with the fields that it replaces. Values without an effect follow "="; null is always one of them.
_INSTEAD = {
    "load the adapter and give its name as the model": "lora=[] lora_path adapter_id",
    "leave it out": """
        guideline="" negative_prompt="" include=[] logits_processors=[] prompt_embeds=[] input_embeds=[]
        grammar_triggers=[] image_data=[] response_fields=[] images=[] plugins=[]
        audio web_search_options moderation repetition_detection custom_logit_processor task
        use_beam_search=false early_stopping=false watermarking=false return_hidden_states=false
        return_meta_info=false watermark=false penalize_nl=false post_sampling_probs=false
        grammar_lazy=false thinking_forced_open=false length_penalty=1 num_beams=1 guidance_scale=1
        kv_transfer_params={} ec_transfer_params={} vllm_xargs={} session_params={} images_config={}
        separate_reasoning=true stream_reasoning=true parse_tool_calls=true xtc_probability=0 n_indent=0 penalty_alpha=0
        modalities=["text"] truncation_side="left" image enable_response_messages=false
        reasoning_format="auto"|"deepseek" min_keep=0|1 penalize_newline=true""",
    "send it to /v1/chat/completions": """
        messages tools=[] tool_choice="none"|"auto" chat_template_kwargs={} continue_final_message=false
        thinking_token_budget=-1""",
    "send it to /v1/completions": 'prompt suffix="" echo=false prompt_len',
    "send it to /v1/responses": "background=false",
    "send n": "best_of=1",
    "send max_tokens": """
        max_output_tokens max_new_tokens n_predict=-1 t_max_predict_ms=0|-1 num_predict=-1
        max_tokens_to_sample""",
    "send logprobs": "top_logprobs=0 top_n_tokens=0 n_probs=0",
    "send messages or prompt": "input previous_input_messages=[]",
    "send a message of the role system": 'instructions tool_prompt="" system="" safe_prompt=false',
    "send the whole conversation as messages": "previous_response_id conversation thread",
    "send response_format": 'text={} format="" output_config={} output_format',
    "use tools, tool_choice and tool_calls instead of OpenAI's old fields": 'functions=[] function_call=[]|"none"',
    "send what the model's template knows, such as chat_template_kwargs.enable_thinking": """
        think thinking={}|{"type":"disabled"}""",
    "send structured_outputs.json": "guided_json=[] json_schema=[]",
    "send structured_outputs.regex": "guided_regex=[]",
    "send structured_outputs.choice": "guided_choice=[]",
    "send structured_outputs.regex where white space matters": "guided_whitespace_pattern",
    "send it within structured_outputs or as response_format": "structural_tag",
    "send chat_template_kwargs.documents, if the model's template reads them": "documents=[]",
    "a template is a program: the operator sets it with --chat-template": "chat_template",
    "send logit_bias": 'banned_tokens=[]|"" token_bans=[]',
    "send return_token_ids": "return_prompt_text=false",
    "send stop": "stop_regex=[] stop_sequences=[]",
    "send include_stop_str_in_output": "no_stop_trim=false",
    "send the ids as the prompt of /v1/completions": "input_ids=[]",
    "read usage.prompt_tokens_details": "return_cached_tokens_details=false",
    "send temperature 0": "do_sample=true",
    "send echo to /v1/completions": "return_full_text=false",
    "send top_p or min_p": "typical_p=1 tfs_z=1 top_n_sigma=-1|0 typical=1 tfs=1",
    "send routed_experts": "return_routed_experts=false",
    "send prompt_logprobs": "decoder_input_details=false",
    "send repetition_penalty": "repeat_penalty=1 dry_multiplier=0 no_repeat_ngram_size=0 encoder_repetition_penalty=1",
    "send temperature and top_p": "mirostat=0 mirostat_mode=0",
    "send temperature": "dynatemp_range=0 smoothing_factor=0 dynamic_temperature=false",
    "send its fields beside the others, by this API's names": "options={}",
    "send the rendered prompt to /v1/completions": 'template="" raw=false',
    "send the whole conversation": "context=[]",
    "send chat_template_kwargs.enable_thinking": "enable_thinking",
    "send min_p": "top_a=0 epsilon_cutoff=0 eta_cutoff=0",
    "send seed": "random_seed",
}


def _refused(instead: str, field: str) -> tuple[str, UnsupportedField]:
    name, _, values = field.partition("=")
    return name, UnsupportedField((None, *map(json.loads, values.split("|") if values else ())), instead)


def refused_fields(instead: dict[str, str]) -> dict[str, UnsupportedField]:
    """Return fields by their names, from a table of remedies like the one above."""
    return dict(_refused(remedy, field) for remedy, fields in instead.items() for field in fields.split())


UNSUPPORTED_FIELDS = refused_fields(_INSTEAD)

# Fields without an effect on answers here, by the reason. The header names them like unknown fields.
_IGNORED = {
    "a hint to caches; equal prefixes are found without it": """
        cache_prompt session_id extra_key n_keep num_keep n_discard id_slot keep_alive""",
    "names the client for the operator of another service": """
        safety_identifier metadata user_profile_id workspace_id custom_labels rid usage provider""",
    "a tariff or location of another service": "service_tier inference_geo speed access_programs route models",
    "only /v1/responses and fronts of OpenAI's store answers": "store background_options",
    "this server does not call tools itself": "max_tool_calls mcp_servers container",
    "asks for less context; too long a prompt is refused, not cut": """
        context_management truncation truncate transforms shift""",
    "asks for a style or an effort that the model does not read": """
        verbosity reasoning reasoning_effort thinking_budget reasoning_budget""",
    "penalties look at all tokens here": "repeat_last_n",
    "completions do not call tools": "parallel_tool_calls",
    "completions are not parsed for reasoning": "include_reasoning",
    "completions do not use a template": "add_generation_prompt channel_grammar",
    "an option of a refused feature": """
        custom_params mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
        xtc_threshold dynatemp_exponent routed_experts_start_len routed_experts_prompt_start ngram_corpus_id""",
    "the model's files say how images are prepared; sounds are not supported": """
        mm_processor_kwargs media_io_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video return_mm_kwargs""",
    "one engine handles all grammars": "guided_decoding_backend",
    "the tokenizer decides the spelling of tokens": "spaces_between_special_tokens",
    "the router chooses the place of computation": """
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank num_ctx
        num_batch num_gpu num_thread main_gpu numa use_mmap use_mlock low_vram""",
    "a hint, which does not change tokens": "prediction stream_interval",
    "only completions report accepted draft tokens": "return_draft_spans",
    "a report that answers here lack": "details timings_per_token return_progress diagnostics return_token_offsets",
}
IGNORED_FIELDS = {name: why for why, names in _IGNORED.items() for name in names.split()}

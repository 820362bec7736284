"""Fields of other servers' requests that would change the answer, and that are not supported here."""

from __future__ import annotations

from typing import Any

# Fields of OpenAI, vLLM, SGLang and TGI that would change the answer, with the values that ask for nothing.
KNOWN_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "max_completion_tokens": (None,),  # of a completion; a chat has it
    "top_logprobs": (None, 0),
    "echo": (None, False),  # of a chat; a completion has it
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "structural_tag": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "grammar": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "custom_logit_processor": (None,),
    "logprob_token_ids": (None,),
    "return_tokens_as_token_ids": (None, False),
    "truncation_side": (None, "left"),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "watermarking": (None, False),
    "watermark": (None, False),
    "typical_p": (None, 1),
    "top_n_tokens": (None, 0),
    "max_new_tokens": (None,),
    "prompt_embeds": (None,),
    "input_embeds": (None,),
    "lora_path": (None,),
    "adapter_id": (None,),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
}

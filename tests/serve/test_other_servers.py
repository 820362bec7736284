"""Every field that another server's requests may have is one of ours, refused by name, or ignored by name."""

import re

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from serve_app.requests import ChatRequest, CompletionRequest
from serve_app.requests.other_servers import UNSUPPORTED_FIELDS
from tests.serve.test_http import assert_error
from tests.support.fake_engine import FakeEngine, chat, client_of, post

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": chat()}
KINDS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
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
DOCUMENTED = {  # as their documentation lists them, without those that OpenAI has too
    "vLLM": """
        best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output
        ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
        prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
        add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        structured_outputs guided_json guided_regex guided_choice guided_grammar structural_tag guided_decoding_backend
        guided_whitespace_pattern priority request_id session_id logits_processors return_tokens_as_token_ids
        return_token_ids return_prompt_text cache_salt kv_transfer_params ec_transfer_params vllm_xargs prompt_embeds
        include_reasoning thinking_token_budget repetition_detection watermarking""",
    "SGLang": """
        top_k min_p min_tokens regex ebnf json_schema repetition_penalty stop_token_ids stop_regex no_stop_trim
        ignore_eos continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning
        stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video images_config
        custom_logit_processor custom_params input_ids rid extra_key cache_salt ngram_corpus_id priority bootstrap_host
        bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank custom_labels
        return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
        return_prompt_token_ids return_token_ids return_meta_info reasoning task""",
    "TGI": """
        adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar max_new_tokens
        repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p watermark
        tool_prompt guideline""",
    "llama.cpp": """
        prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_discard stream
        stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base
        dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
        mirostat_eta grammar grammar_lazy grammar_triggers json_schema seed ignore_eos logit_bias n_probs min_keep
        t_max_predict_ms image_data id_slot cache_prompt samplers timings_per_token return_progress post_sampling_probs
        response_fields lora top_n_sigma tfs_z penalize_nl reasoning_format reasoning_budget thinking_forced_open
        parse_tool_calls chat_template_kwargs""",
    "Ollama": """
        suffix images think format options system template stream raw keep_alive context tools messages num_keep seed
        num_predict top_k top_p min_p typical_p repeat_last_n temperature repeat_penalty presence_penalty
        frequency_penalty penalize_nl stop num_ctx num_batch num_gpu num_thread mirostat mirostat_tau mirostat_eta
        tfs_z""",
}


def known(path: str, name: str) -> bool:
    return name in KINDS[path].model_fields or name in IGNORED_FIELDS | UNSUPPORTED_FIELDS.keys()


@pytest.mark.parametrize("path", PATHS)
def test_the_tables_have_all_of_them(path: str):
    base = {"/v1/completions": completion_create_params, "/v1/chat/completions": chat_create_params}[path]
    names = {"openai": base.CompletionCreateParamsBase.__annotations__}
    names |= {server: listed.split() for server, listed in DOCUMENTED.items()}
    assert {s: [n for n in listed if not known(path, n)] for s, listed in names.items()} == {
        server: [] for server in names
    }


def test_what_is_told_to_send_is_there():
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, "usage", "role", "strict", "tool_calls"}
    for name, refused in UNSUPPORTED_FIELDS.items():
        told = re.findall(r"\b(?:[a-z]+_[a-z_]+)\b", refused.instead)
        assert not [n for n in told if n not in fields | {"enable_thinking", "prompt_tokens_details"}], name


@pytest.mark.parametrize("path", PATHS)
async def test_what_each_of_them_does(path: str):
    async with client_of(FakeEngine()) as client:
        for name, refused in {**UNSUPPORTED_FIELDS, **dict.fromkeys(IGNORED_FIELDS)}.items():
            if name in KINDS[path].model_fields:
                continue
            response = await client.post(path, json={**PATHS[path], name: "something"})
            if refused is None:
                assert response.status_code == 200, name
                assert response.headers["x-callboard-ignored-fields"] == name
            else:
                assert_error(response, 400, name, refused.instead)
                fields = [{name: value} for value in refused.harmless]
                answers = [await client.post(path, json={**PATHS[path], **field}) for field in fields]
                assert all(answer.status_code == 200 for answer in answers), name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_json": {"type": "object"}}, "structured_outputs.json"),
        ({"guided_regex": "a+"}, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "structured_outputs.choice"),
        ({"structural_tag": "{}"}, "structured_outputs"),
        ({"documents": [{"text": "a"}]}, "chat_template_kwargs.documents"),
        ({"repeat_penalty": 1.1}, "repetition_penalty"),
        ({"mirostat": 2}, "top_p"),
        ({"typical_p": 0.9}, "min_p"),
        ({"options": {"num_predict": 3}}, "OpenAI's names"),
        ({"reasoning_effort": "high"}, "chat_template_kwargs"),
    ],
)
async def test_a_client_is_told_what_to_send_instead(fields: dict, says: str):
    http = client_of(FakeEngine())
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=re.escape(says)) as error:
        await client.chat.completions.create(**chat(), extra_body=fields)
    assert error.value.param == next(iter(fields))


async def test_a_prediction_is_a_hint():
    http = client_of(FakeEngine())
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)
    prediction = {"type": "content", "content": "Hello"}
    raw = await client.chat.completions.with_raw_response.create(**chat(), prediction=prediction)
    assert raw.headers["x-callboard-ignored-fields"] == "prediction"
    assert raw.parse().choices[0].message.content.startswith("Hello")


async def test_messages_with_what_is_not_supported():
    for name in ("audio", "refusal"):
        body = chat(messages=[{"role": "assistant", "content": "a", name: {"id": "1"}}])
        assert_error(await post(FakeEngine(), body, "/v1/chat/completions"), 400, f"messages.0.{name}", "not supported")
        body["messages"][0][name] = None
        assert (await post(FakeEngine(), body, "/v1/chat/completions")).status_code == 200

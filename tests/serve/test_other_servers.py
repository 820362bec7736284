"""Every request field of another server is one of ours, refused by name, or ignored by name."""

import re

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.protocol.other_servers import IGNORED_FIELDS, UNSUPPORTED_FIELDS
from tests.support import api_page
from tests.support.http.fake_engine import FakeEngine, assert_error, chat, client_of, post

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": chat()}
KINDS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
DOCUMENTED = {  # as their documentation lists them, without the fields of OpenAI
    "vLLM": api_page.VLLM,
    "SGLang": api_page.SGLANG,
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
def test_the_tables_have_every_field_of_other_servers(path: str):
    base = {"/v1/completions": completion_create_params, "/v1/chat/completions": chat_create_params}[path]
    names = {"openai": base.CompletionCreateParamsBase.__annotations__}
    names |= {server: listed.split() for server, listed in DOCUMENTED.items()}
    assert {s: [n for n in listed if not known(path, n)] for s, listed in names.items()} == {
        server: [] for server in names
    }


def test_fields_recommended_instead_exist():
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, "usage", "role", "strict", "tool_calls"}
    for name, refused in UNSUPPORTED_FIELDS.items():
        told = re.findall(r"\b(?:[a-z]+_[a-z_]+)\b", refused.instead)
        assert not [n for n in told if n not in fields | {"enable_thinking", "prompt_tokens_details"}], name


@pytest.mark.parametrize("path", PATHS)
async def test_each_field_has_its_documented_effect(path: str):
    async with client_of(FakeEngine()) as client:
        for name, refused in {**UNSUPPORTED_FIELDS, **dict.fromkeys(IGNORED_FIELDS)}.items():
            if name in KINDS[path].model_fields:
                continue
            response = await client.post(path, json={**PATHS[path], name: "something"})
            if refused is None:
                assert response.status_code == 200, name
                assert response.headers["x-callboard-ignored-fields"] == name
            else:
                instead = KINDS[path].dialect.names.in_remedy(f"; {refused.instead}")
                assert_error(response, 400, name, instead)
                fields = [{name: value} for value in refused.harmless]
                answers = [await client.post(path, json={**PATHS[path], **field}) for field in fields]
                assert all(answer.status_code == 200 for answer in answers), name


def test_the_page_of_fields_follows_the_models():
    assert api_page.PAGE.read_text() == api_page.page(), "run python -m tests.support.api_page"
    for name in api_page.names():
        for route, kind in api_page.ROUTES.items():
            fate = api_page.fate(kind, name)
            assert fate.why or fate.kind == "**works**", f"{name} needs a reason in {route}"


async def test_the_page_describes_the_effects_of_routes():
    bodies = {"responses": {"input": "a"}, "messages": {"messages": chat()["messages"], "max_tokens": 9}}
    async with client_of(FakeEngine()) as client:
        for route, body in bodies.items():
            for name in api_page.names():
                fate = api_page.fate(api_page.ROUTES[route], name)
                if fate.kind != "**works**":
                    answer = await client.post(f"/v1/{route}", json={**body, name: "something"})
                    assert answer.status_code == (200 if fate.kind == "ignored" else 400), (route, name)
                    told = answer.headers.get("x-callboard-ignored-fields", answer.text)
                    assert name in told, (route, name)


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
        ({"options": {"num_predict": 3}}, "this API's names"),
    ],
)
async def test_a_refusal_names_the_field_to_send_instead(fields: dict, says: str):
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


async def test_messages_with_unsupported_fields():
    for name in ("audio", "refusal"):
        body = chat(messages=[{"role": "assistant", "content": "a", name: {"id": "1"}}])
        assert_error(await post(FakeEngine(), body, "/v1/chat/completions"), 400, f"messages.0.{name}", "not supported")
        body["messages"][0][name] = None
        assert (await post(FakeEngine(), body, "/v1/chat/completions")).status_code == 200

"""`python -m tests.support.api_page`: writes docs/api.md, the fields of all requests and how each is treated.

The models that check requests decide the treatment of a field. The names come from these models and from the documents
of OpenAI, Anthropic, vLLM, SGLang and Ollama. Those of the first two are read from their client packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import AfterValidator

from serve_app.apis.anthropic.request import FIELDS_OF_CHATS, MessagesChat, MessagesRequest
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.apis.ollama.request import OllamaChat, OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.protocol.dialects import OLLAMA_CHAT, Dialect
from serve_app.protocol.other_servers import IGNORED_FIELDS, UNSUPPORTED_FIELDS, UnsupportedField
from serve_app.protocol.sampling import SamplingFields
from serve_app.protocol.shapes import RequestModel

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
ROUTES: dict[str, type[RequestModel]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
VLLM = """
    best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens detokenize spaces_between_special_tokens truncate_prompt_tokens
    truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
    add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    structured_outputs guided_json guided_regex guided_choice guided_grammar structural_tag guided_decoding_backend
    guided_whitespace_pattern priority request_id session_id logits_processors return_tokens_as_token_ids
    return_token_ids return_prompt_text cache_salt kv_transfer_params ec_transfer_params vllm_xargs prompt_embeds
    include_reasoning thinking_token_budget repetition_detection watermarking stream_interval return_token_offsets
    return_mm_kwargs routed_experts_prompt_start enable_response_messages previous_input_messages"""
SGLANG = """
    top_k min_p min_tokens regex ebnf json_schema repetition_penalty stop_token_ids stop_regex no_stop_trim
    ignore_eos continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning
    stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video images_config
    custom_logit_processor custom_params input_ids rid extra_key cache_salt ngram_corpus_id priority bootstrap_host
    bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank custom_labels
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_prompt_token_ids return_token_ids return_meta_info reasoning task"""
_OLLAMA_SHARED = "model stream format options think keep_alive logprobs top_logprobs truncate shift"
OLLAMA: dict[type[RequestModel], str] = {
    OllamaChatRequest: f"{_OLLAMA_SHARED} messages tools",
    OllamaGenerateRequest: f"{_OLLAMA_SHARED} prompt suffix images system template raw context",
}
OLLAMA_OPTIONS = """
    num_keep seed num_predict top_k top_p min_p tfs_z typical_p repeat_last_n temperature repeat_penalty
    presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline stop numa num_ctx num_batch
    num_gpu main_gpu use_mmap num_thread"""

_HEAD = """\
# Fields of requests

`python -m tests.support.api_page` writes this page from the models that check requests; [http.md](http.md) explains
them. The table lists the fields of OpenAI, Anthropic, vLLM, SGLang and Callboard for `/v1/completions`,
`/v1/chat/completions`, `/v1/responses` and `/v1/messages`.

| word | meaning |
| --- | --- |
| **works** | as its owner documents it |
| refused | a 400 that names the field: it would change the answer and is not supported |
| ignored | it changes nothing here; the header `x-callboard-ignored-fields` names it |

The last column has the replacement of a refused field. Null, and the values in brackets, are accepted: they change
nothing. Fields outside this table are ignored unless `serve_app/protocol/other_servers.py` refuses them, which also
covers TGI, llama.cpp and Ollama.

| field | of | completions | chat | responses | messages | what to send instead, or why |
| --- | --- | --- | --- | --- | --- | --- |
"""


_OLLAMA_HEAD = """
## Ollama's requests

`POST /api/chat` and `POST /api/generate` answer with lines of JSON, or with `"stream": false` with one object. Chat
fields that this table lacks (`chat_template_kwargs`, `structured_outputs` ...) may be added to these.

| field | chat | generate | what to send instead, or why |
| --- | --- | --- | --- |
"""


class Fate(NamedTuple):
    """The treatment of a field."""

    kind: Literal["**works**", "refused", "ignored", ""]
    why: str = ""


def fate(kind: type[RequestModel], name: str) -> Fate:
    """Return the treatment of a field by one kind of request."""
    if (field := kind.model_fields.get(name)) is not None:
        checks = [m.func for m in field.metadata if isinstance(m, AfterValidator)]
        remedy = [check.remedy for check in checks if hasattr(check, "remedy")]
        return Fate("refused", remedy[0]) if remedy else Fate("**works**")
    if kind is MessagesRequest:
        absent = name in FIELDS_OF_CHATS
        return Fate("refused", "send it to /v1/chat/completions") if absent else fate(MessagesChat, name)
    if kind in OLLAMA:
        return fate(OllamaChat, name)
    assert issubclass(kind, SamplingFields)
    return _fate_elsewhere(kind.refused, kind.dialect, name)


def _fate_elsewhere(refused_fields: Mapping[str, UnsupportedField], dialect: Dialect, name: str) -> Fate:
    """Return the treatment of a field that a request does not have."""
    if (refused := refused_fields.get(name)) is not None:
        instead = dialect.names.in_remedy(f"; {refused.instead}").removeprefix("; ")
        harmless = ", ".join(f"`{value!r}`" for value in refused.harmless if value is not None)
        return Fate("refused", instead + (f" ({harmless})" if harmless else ""))
    return Fate("ignored", IGNORED_FIELDS.get(name, ""))


def names() -> dict[str, list[str]]:
    """Return all fields, each with the servers that document it."""
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    of_openai = [completion.CompletionCreateParamsBase, chat.CompletionCreateParamsBase]
    documented: dict[str, set[str]] = {
        "OpenAI": {
            "stream",
            *(name for params in [*of_openai, responses.ResponseCreateParamsBase] for name in params.__annotations__),
        },
        "Anthropic": {"stream", "temperature", "top_p", "top_k", *MessageCreateParamsBase.__annotations__},
        "vLLM": set(VLLM.split()),
        "SGLang": set(SGLANG.split()),
    }
    own = {name for kind in ROUTES.values() for name in kind.model_fields}
    known = sorted(own.union(*documented.values()))
    return {name: [who for who, theirs in documented.items() if name in theirs] for name in known}


def page() -> str:
    """The text of docs/api.md."""
    rows = []
    for name, who in names().items():
        fates = [fate(kind, name) for kind in ROUTES.values()]
        whys = dict.fromkeys(fate.why for fate in fates if fate.why)
        cells: list[Any] = [f"`{name}`", ", ".join(who) or "Callboard", *(fate.kind for fate in fates), "; ".join(whys)]
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows) + _OLLAMA_HEAD + "".join(_ollama_rows())


def _ollama_rows() -> list[str]:
    names = sorted({name for documented in OLLAMA.values() for name in documented.split()})
    rows = []
    for name in names:
        fates = [fate(kind, name) if name in fields.split() else Fate("") for kind, fields in OLLAMA.items()]
        whys = dict.fromkeys(fate.why for fate in fates if fate.why)
        rows.append(f"| `{name}` | {' | '.join(fate.kind for fate in fates)} | {'; '.join(whys)} |\n")
    for name in sorted(OLLAMA_OPTIONS.split()):
        of = _fate_of_option(name)
        rows.append(f"| `options.{name}` | {of.kind} | {of.kind} | {of.why} |\n")
    return rows


def _fate_of_option(name: str) -> Fate:
    if name == "repeat_last_n":
        return Fate("**works**", "as -1: penalties look at all tokens, and other values beside them are refused")
    return (
        Fate("**works**")
        if name in OllamaOptions.model_fields
        else _fate_elsewhere(UNSUPPORTED_FIELDS, OLLAMA_CHAT, name)
    )


if __name__ == "__main__":
    PAGE.write_text(page())

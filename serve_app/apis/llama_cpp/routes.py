"""GET /props and /slots, POST /apply-template: what llama.cpp's clients read first."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from runtime.base.types import SamplingParams
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.llama_cpp.answers import LlamaError, LlamaPrompt, LlamaProps, LlamaSlot
from serve_app.http.json_routes import get_json, json_response, post_json
from serve_app.protocol.dialects import DRAWING
from serve_app.protocol.errors import unavailable
from serve_app.protocol.operation import BODY, route
from serve_app.protocol.parsing import parse
from serve_app.service.models import Models
from serve_app.service.service import Service
from serve_app.settings import HttpSettings


def llama_cpp_routes(models: Models, settings: HttpSettings) -> list[Route]:
    errors: dict[str, Any] = {"errors": (503,), "error": LlamaError}
    facts = get_json(partial(props, models.first))
    template = post_json(partial(apply_template, models), settings, may_render=True)

    async def all_slots(request: HttpRequest) -> Response:
        found = slots(models.first)
        if request.query_params.get("fail_on_no_slot") and all(slot.is_processing for slot in found):
            raise unavailable("All slots are busy.")
        return json_response(found)

    return [
        route("/props", facts, "The model, in llama.cpp's form", LlamaProps, **errors),
        route("/slots", all_slots, "A front's requests, in llama.cpp's form", list[LlamaSlot], **errors),
        route(
            "/apply-template",
            template,
            "The prompt of a chat",
            LlamaPrompt,
            (ChatRequest,),
            (*BODY, 404, 503),
            error=LlamaError,
        ),
    ]


def props(service: Service) -> LlamaProps:
    """Return facts about the server and its model; raises ApiError while the service is loading."""
    model = service.named(None)
    tokenizer, info, client = model.tokenizer, model.info, service.engine_client()
    params = {"n_predict": -1} | {name: getattr(SamplingParams(), name) for name in DRAWING}
    return LlamaProps(
        default_generation_settings={
            "id": 0,
            "n_ctx": info.max_model_len,
            "speculative": model.speculates,
            "is_processing": False,
            "params": params | service.description()["sampling"],
        },
        total_slots=info.max_num_seqs,
        model_alias=model.name,
        model_path=model.name,
        chat_template=tokenizer.chat_template or "",
        bos_token=tokenizer.special_tokens.get("bos_token", ""),
        eos_token=tokenizer.special_tokens.get("eos_token", ""),
        modalities={"vision": model.images is not None, "audio": False},
        build_info=f"callboard-{version('callboard')}",
        is_sleeping=client.is_asleep,
    )


def slots(service: Service) -> list[LlamaSlot]:
    """Return a slot for each request that an engine runs at once, busy ones first."""
    model, num_busy = service.named(None), service.num_live
    context, speculates = model.info.max_model_len, model.speculates
    return [LlamaSlot(i, context, speculates, i < num_busy) for i in range(model.info.max_num_seqs)]


def apply_template(models: Models, body: bytes) -> LlamaPrompt:
    """Return the prompt of a chat as a text; raises FieldError or ApiError."""
    request = parse(ChatRequest, body)
    model = models.named(request.model)
    ids = CHAT.prompt(request, model).token_ids
    return LlamaPrompt(model.tokenizer.decode(ids, skip_special_tokens=False))

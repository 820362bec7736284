"""OpenAI's model object: /v1/models lists one for each name of a model or adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from actors.wire.adapter_entry import AdapterEntry
from serve_app.protocol.prepared_request import ServedModel

_PERMISSION = {  # vLLM still has it, and OpenAI's models once had
    "object": "model_permission",
    "organization": "*",
    "group": None,
    "is_blocking": False,
    **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
    **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False),
}


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    permission: list[dict[str, Any]]
    max_model_len: int  # vLLM's name; other names serve clients of OpenRouter, Groq and Anthropic
    context_length: int
    context_window: int
    max_input_tokens: int
    architecture: dict[str, Any]  # OpenRouter's, and llama.cpp's: what the model takes and gives
    weights: str
    draft: str | None


def model_card(name: str, base: str, model: ServedModel, adapter: AdapterEntry | None, created: int) -> ModelCard:
    """Return the object of `name`, for the model or an adapter; `base` is the model's first name."""
    takes = ["text", "image"] if model.images is not None else ["text"]
    return ModelCard(
        id=name,
        object="model",
        created=adapter.version // 10**9 if adapter and adapter.version else created,
        owned_by="callboard",
        root=base if adapter is None else Path(adapter.path).name,  # the name without its folder
        parent=None if adapter is None else base,
        permission=[{**_PERMISSION, "id": f"modelperm-{name}", "created": created}],
        max_model_len=model.info.max_model_len,
        context_length=model.info.max_model_len,
        context_window=model.info.max_model_len,
        max_input_tokens=model.info.max_model_len,
        architecture={"input_modalities": takes, "output_modalities": ["text"]},
        weights=model.info.weight_formats,
        draft=model.draft,
    )

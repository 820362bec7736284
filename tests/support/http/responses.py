"""Requests to /v1/responses through OpenAI's client."""

import json
from typing import Any

import httpx
import openai

from tests.support.http.fake_engine import TEMPLATE, FakeEngine, byte_tokenizer, client_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "About a city.", "parameters": PARAMETERS, "strict": False}
    for name in ("get_weather", "get_time")
]


def engine_of(text: str, group: int = 1, **fields: Any) -> FakeEngine:
    return FakeEngine(text, group=group, max_model_len=4096, **fields)


def openai_client(engine: FakeEngine, template: str = TEMPLATE) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=client_of(engine, byte_tokenizer(template)),
        _strict_response_validation=True,
    )


def said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def data_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

"""`callboard replay`: send a request again with the seed of its answer, and compare the two answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from runtime.base.types import CallboardError

_MOST_FRONTS = 32  # tries to find the front with a request, each on a new connection
_PATHS = {
    "text_completion": "/v1/completions",
    "chat.completion": "/v1/chat/completions",
    "response": "/v1/responses",
    "message": "/v1/messages",
}
_ALL_PATHS = (
    *_PATHS.values(),
    *("/api/chat", "/api/generate", "/completion", "/infill"),
)  # answers for Ollama and llama.cpp do not contain their path, so their files must
_DRAWN = ("choices", "output", "content", "message", "response")
_LEFT_OUT = frozenset({"stream_options", "background", "request_id", "response_fields"})  # fields left out of a request
_CHANCE = frozenset({"id", "call_id"})  # fields that differ in any two answers


def replay(source: str, url: str, api_key: str | None, save: str | None) -> int:
    """Replay a request by its id or from a file; return 0 if the answer is the same to the bit."""
    server, file = _Server(url, api_key), Path(source)
    is_recorded = not file.exists()
    first = server.recorded(source) if is_recorded else _read(file)
    path, seed, request = first["path"], first["seed"], _plain(first["path"], first["request"])
    answer = server.post(path, request | {"seed": seed} if seed is not None else request)
    if save is not None:
        exchange = {"path": path, "seed": seed, "request": request, "answer": answer}
        Path(save).write_text(json.dumps(exchange, ensure_ascii=False, indent=1) + "\n")
    if is_recorded:
        before, after = first["choices"], server.recorded(answer["id"])["choices"]
        if any(choice["finish_reason"] is None for choice in before):
            raise CallboardError(f"The answer to {source} is incomplete, so it cannot be compared.")
        was, now = first["system_fingerprint"], answer.get("system_fingerprint", first["system_fingerprint"])
    else:
        before, after = _drawn(first["answer"]), _drawn(answer)
        was, now = (of.get("system_fingerprint", "") for of in (first["answer"], answer))
    print(f"POST {path} with seed {seed}: {_size(after, answer)}")
    if (difference := _difference(before, after, "")) is None:
        print("The answer is the same, to the bit.")
        return 0
    print(f"The answer differs: {difference}.")
    if was != now:
        print(f"The model or its settings have changed: {was} then, {now} now.")
    else:
        print("Only a server with --deterministic promises the same answer under any load.")
    return 1


class _Server:
    """A server of Callboard."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"connection": "close"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})

    def recorded(self, request_id: str) -> dict[str, Any]:
        """Return a recorded request of any front."""
        for _ in range(_MOST_FRONTS):
            response = self._send("GET", f"/v1/requests/{request_id}")
            if response.status_code != 404:
                return _content(response)
        raise CallboardError(
            f"There is no file {request_id!r}, and no front of {self._url} has such a request among its latest "
            "(--recorded-request-bytes); pass the id of an answer, or a file with a request and its answer."
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return _content(self._send("POST", path, json=body))

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return httpx.request(method, self._url + path, headers=self._headers, timeout=None, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise CallboardError(f"No server answers at {self._url}: {e}; check --url.") from e


def _content(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
        if response.status_code == 200 and isinstance(content, dict):
            return content
        raise CallboardError(str(content["error"]["message"]))
    except (ValueError, KeyError, TypeError) as e:
        raise CallboardError(f"The server answered {response.status_code}: {response.text[:200]}") from e


def _read(file: Path) -> dict[str, Any]:
    """Return an exchange from a file: `request`, `answer`, and their `path` and `seed` unless the answer has them."""
    try:
        exchange = json.loads(file.read_text())
        request, answer = exchange["request"], exchange["answer"]
        path = exchange.get("path") or _PATHS[answer.get("object") or answer.get("type")]
        seed = exchange.get("seed", answer.get("seed", request.get("seed")))
        if seed is None and (choices := answer.get("choices")):
            seeds = [choice.get("seed") for choice in choices][:: request.get("n") or 1]
            seed = seeds[0] if len(set(seeds)) == 1 else seeds
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CallboardError(f"{file} must hold a JSON object with a request and its answer.") from e
    if path not in _ALL_PATHS:  # any other text after the URL could send the API key to another host
        raise CallboardError(f"{file} has the path {str(path)[:60]!r}; it must be one of {', '.join(_ALL_PATHS)}.")
    return {"path": path, "seed": seed, "request": request, "answer": answer}


def _plain(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the equivalent request without a stream and without storage."""
    same = {name: value for name, value in request.items() if name not in _LEFT_OUT}
    return same | {"stream": False} | ({"store": False} if path == "/v1/responses" else {})


def _drawn(answer: dict[str, Any]) -> Any:
    """Return the part of an answer that depends on the seed."""
    drawn = next((answer[name] for name in _DRAWN if name in answer), None)
    return drawn if isinstance(drawn, list) else [drawn]


def _difference(before: Any, after: Any, at: str) -> str | None:
    """Return the first difference between two JSON values; None for equal ones."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if name not in _CHANCE]
        pairs = [(str(name), before.get(name), after.get(name)) for name in names]
    elif isinstance(before, list) and isinstance(after, list):
        pairs = [(str(i), b, a) for i, (b, a) in enumerate(zip(before, after, strict=False))]
        pairs.append(("length", len(before), len(after)))
    else:
        return None if before == after else f"{at.lstrip('.')} was {str(before)[:60]!r} and is {str(after)[:60]!r}"
    found = (_difference(b, a, f"{at}.{name}") for name, b, a in pairs)
    return next((difference for difference in found if difference is not None), None)


def _size(choices: Any, answer: dict[str, Any]) -> str:
    usage = answer.get("usage") or {}
    others = answer.get("eval_count", answer.get("tokens_predicted"))
    num_tokens = usage.get("completion_tokens", usage.get("output_tokens", others))
    return f"{num_tokens} tokens in {len(choices)} parts"

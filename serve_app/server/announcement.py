"""The lines of a ready `callboard serve`: the page, the API, and a model to try next."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress

from runtime.base.config import DEFAULT_MODEL
from serve_app.settings import ModelSettings

NETWORK_S = 3.0  # limit for an answer from a hub or a package index
_NEXT = "The default model is small and often wrong. For better answers: callboard serve Qwen/Qwen3-0.6B"


def announcement(models: Sequence[ModelSettings], url: str) -> list[str]:
    """Return the lines for stdout; `url` reaches the server."""
    name = models[0].names[0]
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": name, "messages": [question], "temperature": 0, "stream": True})
    pinned = [model.names[0] for model in models if model.config.pinned_acceptance is not None]
    return [
        *(
            f"pinned_acceptance is set: the tokens of {name} are not the model's. It is for benchmarks."
            for name in pinned
        ),
        f"Callboard serves {', '.join(map(_described, models))} at {url}/v1",
        f"Chat: {url}/   API: {url}/v1   Ctrl-C stops",
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    ]


def _described(model: ModelSettings) -> str:
    config = model.config
    draft = f" (draft: {config.draft})" if config.draft else ""
    adapters = f" with the adapters {', '.join(config.adapters)}" if config.lora else ""
    return f"{model.names[0]}{draft}{adapters}"


class NextStep:
    """A better model to try after the default one, if the hub answers while the server starts."""

    def __init__(self, model: str) -> None:
        self._hub_answers = False
        if model == DEFAULT_MODEL and not os.environ.get("HF_HUB_OFFLINE"):
            threading.Thread(target=self._ask_hub, daemon=True).start()

    def _ask_hub(self) -> None:
        from huggingface_hub.constants import ENDPOINT

        with suppress(Exception):  # any error, since this is only advice
            self._hub_answers = unreachable(ENDPOINT) is None

    def line(self) -> str:
        """Return the advice; empty for another model or without an answer of the hub so far."""
        return _NEXT if self._hub_answers else ""


def unreachable(url: str) -> str | None:
    """Return the reason why a web address does not answer, or None if it answers."""
    import httpx

    try:
        trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
        status = httpx.head(url, timeout=NETWORK_S, verify=trusted).status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as e:
        return str(e) or type(e).__name__
    return f"it answers {status}" if status >= 500 else None  # such as a proxy without a route

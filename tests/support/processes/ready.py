"""The wait for an application. `serve.run` returns before HAProxy knows its fronts: the last ones may still answer."""

import time
from contextlib import suppress

import httpx


def wait_for_model(url: str, model: str, seconds: float = 60.0) -> None:
    """Wait until the server at `url` is ready with a model of this name."""
    end = time.monotonic() + seconds
    while True:
        with suppress(httpx.HTTPError, KeyError, ValueError):
            served = [entry["id"] for entry in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]
            if model in served and httpx.get(f"{url}/ready", timeout=60).status_code == 200:
                return
        assert time.monotonic() < end, f"{model} is not served"
        time.sleep(0.2)

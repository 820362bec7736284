"""A published model without a chat template behind the HTTP service."""

import httpx
import pytest

from tests.models.test_real_models import STORY, TEXTS
from tests.support.processes.ready import wait_for_model


@pytest.mark.thorough
def test_gemma3_writes_a_story_over_http(gemma3_path, serve_url):
    from ray import serve

    from callboard.app import AppArgs, build_app

    settings = {"num_threads": 1, "kv_cache_memory": 0.1, "kv_tier_memory": 0, "max_model_len": 512, "num_fronts": 1}
    serve.run(build_app(AppArgs(model=str(gemma3_path), **settings)), name="callboard")
    try:
        wait_for_model(serve_url, str(gemma3_path))
        body = {"prompt": STORY, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{serve_url}/v1/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["text"] == TEXTS["gemma3"][STORY][: len(answer["choices"][0]["text"])]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (14, 16)
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        refused = httpx.post(f"{serve_url}/v1/chat/completions", json=chat)
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]
    finally:
        serve.delete("callboard")

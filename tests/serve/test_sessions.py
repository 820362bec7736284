"""The names of sessions that programs send, for the choice of an engine."""

from typing import Any

import pytest

from tests.support.http.fake_engine import FakeEngine, chat, client_of


@pytest.mark.parametrize(
    ("path", "body", "headers", "session"),
    [
        ("/v1/chat/completions", chat(prompt_cache_key="k"), {"session_id": "h"}, "k"),
        ("/v1/responses", {"input": "a", "prompt_cache_key": "k"}, {}, "k"),
        ("/v1/completions", {"prompt": "a", "n": 2, "prompt_cache_key": "k"}, {}, "k"),
        ("/v1/messages", chat(max_tokens=5, metadata={"user_id": '{"session_id":"x"}'}), {}, '{"session_id":"x"}'),
        ("/v1/messages", chat(max_tokens=5, metadata={"user_id": "x" * 2000}), {}, "x" * 1024),
        ("/v1/messages", chat(max_tokens=5), {"X-Claude-Code-Session-Id": "c"}, "c"),
        ("/v1/chat/completions", chat(), {"X-Session-Affinity": "o"}, "o"),
        ("/v1/chat/completions", chat(), {"X-Session-Id": "o"}, "o"),
        ("/v1/responses", {"input": "a"}, {"session_id": "c"}, "c"),
        ("/v1/responses", {"input": "a"}, {"session-id": "c"}, "c"),
        ("/api/chat", chat(), {"X-Session-Id": "o"}, "o"),
        ("/v1/chat/completions", chat(user="u"), {}, ""),
    ],
)
async def test_requests_name_their_session(path: str, body: dict[str, Any], headers: dict[str, str], session: str):
    engine = FakeEngine()
    async with client_of(engine) as client:
        response = await client.post(path, json={"model": "fake", **body}, headers=headers)
    assert response.status_code == 200, response.text
    assert {request.session for request in engine.requests} == {session}
    assert "prompt_cache_key" not in response.headers.get("x-callboard-ignored-fields", "")

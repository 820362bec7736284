"""Requests to the application's own routes from within its process, for batches and for calls by a Serve handle."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Send


async def _never() -> Message:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def post(
    app: ASGIApp, path: str, body: bytes, send: Send, *, owner: str = "", request_id: str = "", leaves: Receive = _never
) -> None:
    """Send a body of JSON to a route; its answer goes to `send`. `leaves` returns when the client does."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "request_id": request_id,
        "owner": owner,
    }
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return messages.pop() if messages else await leaves()

    await app(scope, receive, send)

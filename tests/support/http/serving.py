"""The HTTP front over a link to an engine loop, on real sockets."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.engine.links import Engine, eventually, link_to
from tests.support.http.fake_engine import MODEL, byte_tokenizer


@asynccontextmanager
async def serving(settings=None, **config):
    """An engine and the url of its front door."""
    engine = Engine(**config)
    link = link_to(engine)
    await link.start()
    app = build_http_app(Service(link, byte_tokenizer(), MODEL), settings)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that a reader can fall behind
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve([listener]))
    await eventually(lambda: server.started)
    try:
        yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await running
        link.close()
        engine.loop.close()


def body(num_prompt=5, max_tokens=300, **fields):
    return {"prompt": [1 + i % 7 for i in range(num_prompt)], "max_tokens": max_tokens, "ignore_eos": True, **fields}


def live(engine):
    return len(engine.loop.core.scheduler.requests)

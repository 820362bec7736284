"""Streams about pictures while engines, runners and fronts are killed: each has the tokens that it has alone."""

import asyncio
import base64
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.output.image_forms import file_of
from tests.support.models.tiny_images import write_tiny_smolvlm
from tests.support.processes.fault_cells import deployed

NUM_STREAMS = 24


@pytest.fixture(scope="module")
def application(serve_url: str, tmp_path_factory: pytest.TempPathFactory):
    model = write_tiny_smolvlm(tmp_path_factory.mktemp("smolvlm"), context=4096)
    yield from deployed(Path(model), serve_url)


def body_of(number: int) -> dict[str, Any]:
    """Two pictures, which other requests share in another order, and a question of its own."""
    urls = []
    for seed in (number % 5, number % 3):
        picture = np.random.default_rng(seed).integers(0, 256, (40 + 9 * seed, 70, 3), np.uint8)
        urls.append("data:image/png;base64," + base64.b64encode(file_of("picture", picture)).decode())
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": f"What is {number}?"}]}],
        "max_tokens": 300, "ignore_eos": True, "seed": number, "temperature": 0.8 * (number % 2),
        "return_token_ids": True,
    }  # fmt: skip


async def answered(client: httpx.AsyncClient, number: int) -> list[int]:
    """The tokens of an answer. The request is sent again if its connection breaks, before an answer (502) or in it."""
    while True:
        try:
            response = await client.post("/v1/chat/completions", json=body_of(number))
        except httpx.TransportError:
            continue
        if response.status_code == httpx.codes.BAD_GATEWAY and response.json()["error"]["code"] == "engine_unavailable":
            continue
        tokens: list[int] = response.raise_for_status().json()["choices"][0]["token_ids"]
        return tokens


async def test_killed_processes_change_no_token(application):
    async with httpx.AsyncClient(base_url=application.url, timeout=300) as client:
        alone = [await answered(client, number) for number in range(NUM_STREAMS)]
        assert len({tuple(tokens) for tokens in alone}) > NUM_STREAMS // 2
        for role in ("engine", "runner", "front"):
            tasks = [asyncio.create_task(answered(client, number)) for number in range(NUM_STREAMS)]
            while (await client.get("/load")).json()["server_load"] < NUM_STREAMS // 4:
                await asyncio.sleep(0.01)
            pid = next(pid for name, _, pid in application.application.processes() if name == role)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*tasks) == alone, role
            async with asyncio.timeout(120):
                while application.application.strength():
                    await asyncio.sleep(0.1)

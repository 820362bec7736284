"""Fronts over engine loops, and their /metrics as numbers."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.engine.links import Engine, link_to
from tests.support.http.fake_engine import byte_tokenizer

MODEL = "m"


def parsed(text: str) -> dict[str, float]:
    """Samples by name, each with its labels except model_name and engine. Samples of several engines are summed."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name + "".join(f",{k}={v}" for k, v in sorted(labels.items()))
            samples[key] = samples.get(key, 0) + sample.value
    return samples


class Fronts:
    """HTTP fronts that share engines, over real sockets."""

    def __init__(self, *engines: Engine) -> None:
        self.engines, self.links, self.clients, self.services = engines, [], [], []

    async def add(self) -> httpx.AsyncClient:
        links = link_to(*self.engines)
        await links.start()
        self.services.append(Service(links, byte_tokenizer(), MODEL))
        app = build_http_app(self.services[-1])
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        self.links.append(links)
        self.clients.append(client)
        return client

    async def scrape(self, at: int = 0) -> dict[str, float]:
        for service in self.services:
            if service is not self.services[at]:
                await service.metrics.report()  # as each does once a second
        return parsed((await self.clients[at].get("/metrics")).text)

    async def close(self) -> None:
        for client, links in zip(self.clients, self.links, strict=True):
            await client.aclose()
            links.close()
        for engine in self.engines:
            if engine.loop:
                engine.loop.close()


async def complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, **fields) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)

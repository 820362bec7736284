"""A tier of a running application, as its clients and its files show it."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from runtime.tier.place import base_folder
from runtime.tier.region import Region

DEADLINE_S = 300.0  # only a fault reaches it
PROMPT_LEN, BLOCK = 2000, 16
WHOLE = (PROMPT_LEN - 1) // BLOCK * BLOCK  # tokens that a later request with the same prompt does not compute


def prompt_of(number: int) -> list[int]:
    """Prompts with nothing in common."""
    return np.random.default_rng(number).integers(3, 250, PROMPT_LEN + number % 7).tolist()


def body_of(number: int, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt_of(number), "max_tokens": num_tokens, "ignore_eos": True, "seed": number,
        "temperature": 0.8 * (number % 2), "return_token_ids": True,
    }  # fmt: skip


async def answered(client: httpx.AsyncClient, number: int, num_tokens: int) -> tuple[list[int], int]:
    """An answer's tokens, and how many tokens of the prompt were not computed.

    The request is sent again if its connection breaks or no engine is there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                answer = await client.post("/v1/completions", json=body_of(number, num_tokens))
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 503:
                await asyncio.sleep(0.05)
                continue
            found = answer.raise_for_status().json()
            cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found["choices"][0]["token_ids"], cached


async def all_answered(
    client: httpx.AsyncClient, numbers: Iterable[int], num_tokens: int
) -> list[tuple[list[int], int]]:
    return await asyncio.gather(*(answered(client, number, num_tokens) for number in numbers))


async def summed_figures(client: httpx.AsyncClient) -> Counter[str]:
    """The metrics of the tier without their prefix, as sums over the engines."""
    text, found = (await client.get("/metrics")).raise_for_status().text, Counter[str]()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("callboard:kv_tier_"):
            for sample in family.samples:
                found[family.name.removeprefix("callboard:kv_tier_")] += sample.value
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


def regions_of(name: str, base: Path | None = None) -> list[Path]:
    return sorted(head.parent for head in (base or base_folder()).glob(f"{name}-*/head"))


def opened(folder: Path) -> Region:
    """The region in a folder, by its own head."""
    text = (folder / "head").read_text()
    size, ranks, slots = map(int, re.search(r"(\d+) bytes, (\d+) ranks, slots: (\d+)", text).groups())
    layout = text.partition("\n")[2].rpartition("\n" + f"{size} bytes, ")[0]
    return Region.open(folder, layout, slots, size, ranks)


def num_entries(name: str, base: Path | None = None) -> int:
    """READY entries of a tier, in memory or in another folder."""
    count = 0
    for folder in regions_of(name, base):
        region = opened(folder)
        count += region.figures().entries
        region.close()
    return count


def flip_bits(name: str) -> None:
    """Flip a bit in each slot of each payload."""
    for folder in regions_of(name):
        region = opened(folder)
        for rank in range(region.num_ranks):
            region.payload(rank)[:, 8] ^= 1
        region.close()

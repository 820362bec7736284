"""Suggests names for a typing error: stored models, short names, each family's example, and its other sizes."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from runtime.loading.sources.short_names import SHORT_NAMES, near_name

_MORE = (  # in addition to the examples of `runtime.models.FAMILIES`: common names without a size
    "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-Coder-7B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct", "google/gemma-3-270m-it", "google/gemma-3-1b-it", "google/gemma-3-12b-it",
    "microsoft/phi-4", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
)  # fmt: skip
_CLOSE = 0.75  # least difflib ratio between near names


def meant(name: str) -> str:
    """Return a question for the end of a sentence: `; meant Qwen/Qwen3-0.6B?`. Empty for a known name, or without a
    near one."""
    if is_known(name):
        return ""
    near = near_name(name) if "/" not in name else None
    near = near or nearest(name, [*_cached(), *_known()])
    return f"; meant {near}?" if near else ""


def is_known(name: str) -> bool:
    """Return whether a hub name is an example, a short name's file, or stored here."""
    repos = (file.partition(":")[0] for tags in SHORT_NAMES.values() for file in tags.values())
    return name.partition(":")[0] in {*_cached(), *_known(), *repos}


def nearest(name: str, known: list[str]) -> str | None:
    """Return the first of `known` with an equal beginning or a similar spelling. `name` may lack the organization."""
    asked = name.rpartition("/")[2]
    others = {each: _letters(each.rpartition("/")[2]) for each in known if each.lower() != name.lower()}
    for part in dict.fromkeys((asked, asked.partition(":")[0])):  # the second part in Ollama's names is often a size
        letters = _letters(part)
        if len(letters) < 3:
            continue
        if found := next((each for each, its in others.items() if its.startswith(letters)), None):
            return found
        if close := get_close_matches(letters, others.values(), 1, _CLOSE):
            return next(each for each, its in others.items() if its == close[0])
    return None


def _letters(name: str) -> str:
    """Return a name in lower case without punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _known() -> list[str]:
    from runtime.models import FAMILIES

    return [*(family.example for family in FAMILIES.values()), *_MORE]


def _cached() -> list[str]:
    """Return the hub ids in this machine's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = sorted(Path(HF_HUB_CACHE).glob("models--*/"))
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders if any(folder.iterdir())]

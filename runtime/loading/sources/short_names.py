"""Short names of models as Ollama's library has them, such as `llama3.2:1b`, and their files on the hub.

A line has a name, and for each tag a repository with GGUF files. The first tag is the one that a name without a tag
means. A repository without `:LABEL` has the usual quantization."""

from __future__ import annotations

import re
from difflib import get_close_matches

from runtime.loading.sources.gguf_choice import DEFAULT

_TABLE = """
codellama 7b=TheBloke/CodeLlama-7B-Instruct-GGUF 13b=TheBloke/CodeLlama-13B-Instruct-GGUF
codellama 34b=TheBloke/CodeLlama-34B-Instruct-GGUF
deepseek-r1 8b=unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF 1.5b=unsloth/DeepSeek-R1-Distill-Qwen-1.5B-GGUF
deepseek-r1 7b=unsloth/DeepSeek-R1-Distill-Qwen-7B-GGUF 14b=unsloth/DeepSeek-R1-Distill-Qwen-14B-GGUF
deepseek-r1 32b=unsloth/DeepSeek-R1-Distill-Qwen-32B-GGUF 70b=unsloth/DeepSeek-R1-Distill-Llama-70B-GGUF
gemma2 9b=bartowski/gemma-2-9b-it-GGUF 2b=bartowski/gemma-2-2b-it-GGUF 27b=bartowski/gemma-2-27b-it-GGUF
gemma3 4b=ggml-org/gemma-3-4b-it-GGUF 270m=ggml-org/gemma-3-270m-it-GGUF:Q8_0 1b=ggml-org/gemma-3-1b-it-GGUF
gemma3 12b=ggml-org/gemma-3-12b-it-GGUF 27b=ggml-org/gemma-3-27b-it-GGUF
gemma4 e4b=unsloth/gemma-4-E4B-it-GGUF e2b=unsloth/gemma-4-E2B-it-GGUF
gpt-oss 20b=ggml-org/gpt-oss-20b-GGUF:MXFP4 120b=ggml-org/gpt-oss-120b-GGUF:MXFP4
granite3.3 8b=ibm-granite/granite-3.3-8b-instruct-GGUF 2b=ibm-granite/granite-3.3-2b-instruct-GGUF
llama2 7b=TheBloke/Llama-2-7B-Chat-GGUF 13b=TheBloke/Llama-2-13B-chat-GGUF 70b=TheBloke/Llama-2-70B-Chat-GGUF
llama3 8b=bartowski/Meta-Llama-3-8B-Instruct-GGUF 70b=bartowski/Meta-Llama-3-70B-Instruct-GGUF
llama3.1 8b=bartowski/Meta-Llama-3.1-8B-Instruct-GGUF 70b=bartowski/Meta-Llama-3.1-70B-Instruct-GGUF
llama3.2 3b=bartowski/Llama-3.2-3B-Instruct-GGUF 1b=bartowski/Llama-3.2-1B-Instruct-GGUF
llama3.3 70b=bartowski/Llama-3.3-70B-Instruct-GGUF
mistral 7b=bartowski/Mistral-7B-Instruct-v0.3-GGUF
mistral-nemo 12b=bartowski/Mistral-Nemo-Instruct-2407-GGUF
mistral-small 24b=bartowski/Mistral-Small-24B-Instruct-2501-GGUF
olmo2 7b=allenai/OLMo-2-1124-7B-Instruct-GGUF 13b=allenai/OLMo-2-1124-13B-Instruct-GGUF
phi3.5 3.8b=bartowski/Phi-3.5-mini-instruct-GGUF
phi4 14b=bartowski/phi-4-GGUF
phi4-mini 3.8b=bartowski/microsoft_Phi-4-mini-instruct-GGUF
qwen2 7b=Qwen/Qwen2-7B-Instruct-GGUF 0.5b=Qwen/Qwen2-0.5B-Instruct-GGUF 1.5b=Qwen/Qwen2-1.5B-Instruct-GGUF
qwen2.5 7b=Qwen/Qwen2.5-7B-Instruct-GGUF 0.5b=Qwen/Qwen2.5-0.5B-Instruct-GGUF 1.5b=Qwen/Qwen2.5-1.5B-Instruct-GGUF
qwen2.5 3b=Qwen/Qwen2.5-3B-Instruct-GGUF 14b=Qwen/Qwen2.5-14B-Instruct-GGUF 32b=Qwen/Qwen2.5-32B-Instruct-GGUF
qwen2.5-coder 7b=Qwen/Qwen2.5-Coder-7B-Instruct-GGUF 0.5b=Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF
qwen2.5-coder 1.5b=Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF 3b=Qwen/Qwen2.5-Coder-3B-Instruct-GGUF
qwen2.5-coder 14b=Qwen/Qwen2.5-Coder-14B-Instruct-GGUF 32b=Qwen/Qwen2.5-Coder-32B-Instruct-GGUF
qwen3 8b=Qwen/Qwen3-8B-GGUF 0.6b=Qwen/Qwen3-0.6B-GGUF:Q8_0 1.7b=Qwen/Qwen3-1.7B-GGUF:Q8_0 4b=Qwen/Qwen3-4B-GGUF
qwen3 14b=Qwen/Qwen3-14B-GGUF 32b=Qwen/Qwen3-32B-GGUF 30b=Qwen/Qwen3-30B-A3B-GGUF 30b-a3b=Qwen/Qwen3-30B-A3B-GGUF
qwen3-coder 30b=unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF
qwen3.5 9b=unsloth/Qwen3.5-9B-GGUF
qwq 32b=Qwen/QwQ-32B-GGUF
smollm2 1.7b=HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF 135m=bartowski/SmolLM2-135M-Instruct-GGUF
smollm2 360m=bartowski/SmolLM2-360M-Instruct-GGUF
tinyllama 1.1b=TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF
"""
_LATEST = "latest"
_REST = re.compile(
    r"(?P<size>[\w.]+(?:-a\d+b)?)(?:-(?:instruct|it|chat|text))?(?:-(?P<label>(?:i?q|tq|bf|f|fp)\d\w*))?"
)


def _tags() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in _TABLE.split("\n"):
        name, *tags = line.split() or [""]
        found.setdefault(name, {}).update((tag.partition("=")[0], tag.partition("=")[2]) for tag in tags)
    del found[""]
    return found


SHORT_NAMES = _tags()  # repository, or repository and quantization, by name and tag


def hub_file(model: str) -> tuple[str, str] | None:
    """Return the repository and the quantization of a short name; None for another name.

    A tag may add a quantization to a size, as in `qwen3:8b-q8_0`."""
    name, _, tag = model.lower().partition(":")
    if (tags := SHORT_NAMES.get(name)) is None or "/" in tag:
        return None
    rest = _REST.fullmatch(tag)
    size, label = (tag, "") if tag in tags or rest is None else (rest["size"], (rest["label"] or "").upper())
    if tag in ("", _LATEST):
        size = next(iter(tags))
    if (found := tags.get(size)) is None:
        return None
    repo, _, usual = found.partition(":")
    return repo, label or usual or DEFAULT


def near_name(model: str) -> str | None:
    """Return the short name that a wrong one may mean; None without a near one."""
    name, _, tag = model.lower().partition(":")
    close = next(iter(get_close_matches(name, SHORT_NAMES, 1, 0.75)), None)
    return f"{close}:{tag}" if close is not None and tag in SHORT_NAMES[close] else close

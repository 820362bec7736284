"""Starts agent programs with the variables, flags or temporary files that name a server and its model.

Values that a program receives at its start come before its own configuration, which stays unchanged."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError

_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a running server."""

    url: str  # the URL without /v1
    key: str
    model: str
    context: int  # tokens
    has_tools: bool


@dataclass(slots=True)
class Start:
    """What a program is started with."""

    flags: list[str] = field(default_factory=list)  # before the user's arguments
    variables: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # variables that would name another server
    file: tuple[str, str] | None = None  # a flag, and the text in the file that it names


def _claude(served: Served) -> Start:
    names = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL", "SMALL_FAST_MODEL")
    variables = {f"ANTHROPIC_{name}": served.model for name in names}
    variables |= {"ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_AUTH_TOKEN": served.key}
    # The program's own number is 32,000, which must fit into the context with its prompt.
    variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(32_000, served.context // 4))
    # A CPU may read the first prompt for longer than the program's own limits, 5 and 10 minutes.
    variables |= dict.fromkeys(("CLAUDE_STREAM_IDLE_TIMEOUT_MS", "API_TIMEOUT_MS"), "3600000")
    variables["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    return Start([], variables, ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"))


def _codex(served: Served) -> Start:
    provider = {
        "name": "Callboard",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": "CALLBOARD_KEY",  # the variable below
    }
    settings = {"model": served.model, "model_provider": "callboard", "model_context_window": served.context}
    settings |= {f"model_providers.callboard.{name}": value for name, value in provider.items()}
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Start(flags, {"CALLBOARD_KEY": served.key})


def _opencode(served: Served) -> Start:
    limit = {"context": served.context, "output": served.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Callboard",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model, "tool_call": True, "limit": limit}},
    }
    model = f"callboard/{served.model}"
    settings = {"model": model, "small_model": model, "provider": {"callboard": provider}}
    return Start([], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _qwen(served: Served) -> Start:
    variables = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.key, "OPENAI_MODEL": served.model}
    return Start(["--auth-type", "openai", "--model", served.model], variables)


def _continue(served: Served) -> Start:
    model: dict[str, Any] = {"name": served.model, "provider": "openai", "model": served.model}
    model |= {"apiBase": f"{served.url}/v1", "apiKey": served.key, "roles": ["chat"], "capabilities": ["tool_use"]}
    model["defaultCompletionOptions"] = {"contextLength": served.context, "maxTokens": served.context // 4}
    settings = {"name": "Callboard", "version": "0.0.1", "schema": "v1", "models": [model]}
    return Start(file=("--config", json.dumps(settings)))  # YAML includes JSON


@dataclass(frozen=True, slots=True)
class Agent:
    """A program."""

    command: str
    package: str  # npm package
    context: int  # tokens that its first prompt and an answer need
    start: Callable[[Served], Start]


AGENTS = {
    "claude": Agent("claude", "@anthropic-ai/claude-code", 32_768, _claude),
    "codex": Agent("codex", "@openai/codex", 16_384, _codex),
    "opencode": Agent("opencode", "opencode-ai", 16_384, _opencode),
    "qwen": Agent("qwen", "@qwen-code/qwen-code", 24_576, _qwen),
    "continue": Agent("cn", "@continuedev/cli", 16_384, _continue),
}


def launch(name: str, arguments: Sequence[str], url: str, model: str | None, key: str | None, dry_run: bool) -> int:
    """Start a program and return its exit code; raises CallboardError if a part is missing."""
    agent = AGENTS[name]
    program = shutil.which(agent.command)
    if program is None and not dry_run:
        raise CallboardError(f"{agent.command} is not installed; `npm install -g {agent.package}` installs it.")
    served = served_model(url, model, key)
    if not served.has_tools:
        raise CallboardError(
            f"{served.model} has no chat template with tools, which {agent.command} needs; serve another model."
        )
    if served.context < agent.context:
        raise CallboardError(
            f"{served.model} is served with a context of {served.context} tokens, and {agent.command} needs about "
            f"{agent.context}; start the server with --max-model-len {agent.context} or a model that allows it."
        )
    start = agent.start(served)
    with tempfile.TemporaryDirectory(prefix="callboard-launch-") as folder:
        flags = list(start.flags)
        if start.file is not None:
            path = Path(folder, "config.yaml")
            path.write_text(start.file[1], "utf-8")
            flags += [start.file[0], str(path)]
        words = [program or agent.command, *flags, *arguments]
        if dry_run:
            gone = [word for variable in start.without for word in ("-u", variable)]
            given = [f"{variable}={value}" for variable, value in start.variables.items()]
            print(shlex.join(["env", *gone, *given, *words]))
            return 0
        own = {variable: value for variable, value in os.environ.items() if variable not in start.without}
        process = subprocess.Popen(words, env=own | start.variables)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def served_model(url: str, model: str | None, key: str | None) -> Served:
    """Return the model to use, and what its server reports; raises CallboardError."""
    import httpx

    root = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=root, timeout=_TIMEOUT_S, headers=headers) as http:
            names = [card["id"] for card in http.get("/v1/models").raise_for_status().json()["data"]]
            name = names[0] if model is None else model
            if name not in names:
                raise CallboardError(f"{root} has no model {name!r}; it has {', '.join(names)}.")
            facts = http.post("/api/show", json={"model": name}).raise_for_status().json()
        context = next(value for key, value in facts["model_info"].items() if key.endswith(".context_length"))
        return Served(root, key or "none", name, int(context), "tools" in facts["capabilities"])
    except httpx.HTTPStatusError as e:
        status = e.response.status_code
        why = "needs an API key; pass --api-key" if status == 401 else f"answers {status}; is it loading its model?"
        raise CallboardError(f"{root} {why}.") from e
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, StopIteration, TypeError) as e:
        raise CallboardError(f"No Callboard answers at {root}: {e}; `callboard serve MODEL` starts one.") from e

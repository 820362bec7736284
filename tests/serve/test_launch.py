"""The start of agent programs by `callboard launch`, and its errors."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app import cli
from serve_app.tools.launch import AGENTS
from tests.support.http.chats import QWEN
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of

URL = "http://127.0.0.1:8000"
PROGRAM = """\
#!{python}
import json, os, pathlib, sys
files = [pathlib.Path(word).read_text() for word in sys.argv if word.endswith(".yaml")]
pathlib.Path("started.json").write_text(json.dumps([sys.argv[1:], dict(os.environ), files]))
sys.exit(7)
"""


class Front(httpx.BaseTransport):
    """The HTTP front, for a client that blocks."""

    def __init__(self, context: int, template: str | None) -> None:
        self.context, self.template = context, template

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        import asyncio

        async def answer() -> httpx.Response:
            engine = FakeEngine(max_model_len=self.context)
            async with client_of(engine, byte_tokenizer(self.template)) as client:
                return await client.request(request.method, request.url.path, content=request.read())

        got = asyncio.run(answer())
        return httpx.Response(got.status_code, content=got.content, request=request)


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Front:
    """A front in place of the network, and a stand-in for each program in an empty home."""
    found = Front(131_072, QWEN)
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **given: client(**given, transport=found))
    programs = tmp_path / "programs"
    programs.mkdir()
    for agent in AGENTS.values():
        (programs / agent.command).write_text(PROGRAM.format(python=sys.executable))
        (programs / agent.command).chmod(0o755)
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "another")
    monkeypatch.delenv("CALLBOARD_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return found


def started(tmp_path: Path, *words: str) -> tuple[list[str], dict[str, str], list[str]]:
    assert cli.main(["launch", *words]) == 7
    arguments, variables, files = json.loads((tmp_path / "started.json").read_text())
    return arguments, variables, files


@pytest.mark.parametrize("agent", list(AGENTS))
def test_a_program_starts_with_the_servers_model(front: Front, tmp_path: Path, agent: str):
    arguments, variables, files = started(tmp_path, agent, "--url", URL, "--", "-p", "--url")
    assert arguments[-2:] == ["-p", "--url"]
    given: Any = [arguments, [value for name, value in variables.items() if os.environ.get(name) != value], files]
    assert URL in json.dumps(given)
    assert MODEL in json.dumps(given)


def test_a_launch_writes_no_file_that_stays(front: Front, tmp_path: Path):
    for agent in AGENTS:
        started(tmp_path, agent)
    assert [*(tmp_path / "HOME").iterdir(), *(tmp_path / "TMPDIR").glob("callboard*")] == []


def test_another_servers_key_is_not_handed_on(front: Front, tmp_path: Path):
    _, variables, _ = started(tmp_path, "claude", "--api-key", "mine")
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "mine"
    assert "ANTHROPIC_API_KEY" not in variables


def test_codex_settings_are_toml(front: Front, tmp_path: Path):
    import tomllib

    arguments, _, _ = started(tmp_path, "codex")
    values = dict(word.split("=", 1) for word in arguments if word != "-c")
    settings = {name: tomllib.loads(f"a = {value}")["a"] for name, value in values.items()}
    assert settings["model_providers.callboard.base_url"] == f"{URL}/v1"
    assert settings["model_context_window"] == 131_072


def test_claude_code_waits_for_a_slow_first_prompt(front: Front, tmp_path: Path):
    _, variables, _ = started(tmp_path, "claude")
    assert int(variables["CLAUDE_STREAM_IDLE_TIMEOUT_MS"]) >= 1_800_000
    assert int(variables["API_TIMEOUT_MS"]) >= 1_800_000


def test_a_dry_run_starts_nothing(front: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["launch", "claude", "--dry-run"]) == 0
    assert f"ANTHROPIC_BASE_URL={URL}" in capsys.readouterr().out
    assert not (tmp_path / "started.json").exists()


@pytest.mark.parametrize(
    ("words", "fields", "says"),
    [
        (["claude", "--model", "other"], {}, f"has no model 'other'; it has {MODEL}"),
        (["claude"], {"context": 8192}, "--max-model-len 32768"),
        (["codex"], {"template": None}, "no chat template with tools"),
    ],
)
def test_what_is_missing_is_named(
    front: Front, capsys: pytest.CaptureFixture[str], words: list[str], fields: dict[str, Any], says: str
):
    for name, value in fields.items():
        setattr(front, name, value)
    assert cli.main(["launch", *words]) == 1
    assert says in capsys.readouterr().err


def test_a_missing_program_is_named(front: Front, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PATH", "")
    assert cli.main(["launch", "opencode"]) == 1
    assert "npm install -g opencode-ai" in capsys.readouterr().err


def test_a_missing_server_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["launch", "claude", "--dry-run", "--url", "http://127.0.0.1:9"]) == 1
    assert "callboard serve MODEL" in capsys.readouterr().err

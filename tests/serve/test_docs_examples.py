"""The examples of docs/http.md, docs/images.md and docs/apis run against the HTTP front and a scripted engine.

A fenced block of a page is one of these:

- bash: a curl command is sent; other commands are left out.
- json, jsonl or text after a curl: its answer. Each field, line or event that the page shows must be there.
- jsonl before any curl: the file requests.jsonl.
- python: it runs, with OpenAI's and Anthropic's clients sent to the front. Blocks with `from callboard` are compiled.
"""

import asyncio
import json
import re
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from runtime.base.images import ImageInfo
from runtime.base.model.pooling import Pooling
from runtime.base.weight_version import WeightVersion
from runtime.structured.compiler import GrammarCompiler
from serve_app import cli
from serve_app.apis.batches import worker as batches_worker
from serve_app.apis.batches.worker import Batches
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.chats import CALL, QWEN
from tests.support.http.fake_engine import GAP_MARKS, FakeEngine, byte_tokenizer
from tests.support.http.fake_images import MARK, MARK_ID, TEMPLATE, FakeImages

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "http.md", DOCS / "images.md", *sorted((DOCS / "apis").glob("*.md"))]
MODEL = "Qwen/Qwen3-0.6B"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANSWERS = {"tools": CALL, "images": "Red."}  # by page; the others are answered with a sentence
_sleep = time.sleep


@pytest.fixture
def front(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_compiler: GrammarCompiler
) -> Iterator["Front"]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batches_worker, "_LOOK_S", 0.02)
    monkeypatch.setattr(time, "sleep", lambda seconds: _sleep(min(seconds, 0.02)))
    monkeypatch.delenv("CALLBOARD_API_KEY", raising=False)
    front = Front(request.param, tmp_path)
    openai_client, anthropic_client = openai.OpenAI, anthropic.Anthropic
    monkeypatch.setattr(openai, "OpenAI", lambda **given: openai_client(**given, http_client=front.http))
    monkeypatch.setattr(anthropic, "Anthropic", lambda **given: anthropic_client(**given, http_client=front.http2))
    yield front
    front.close()


class Front:
    """The front in an event loop of its own, for clients that block."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page = page
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.run(self._build(ANSWERS.get(page.stem, "The capital of France is Paris."), folder))
        self.http = httpx.Client(transport=_transport(httpx, self))
        self.http2 = httpx2.Client(transport=_transport(httpx2, self))

    async def _build(self, answer: str, folder: Path) -> None:
        pooling = Pooling("last", normalized=True, cuts_dimensions=True)
        engine = FakeEngine(answer, group=4, max_model_len=4096, pooling=pooling, weights=WeightVersion())
        engine.weight_versions = ((0, "7"), (5, "8"))
        settings = HttpSettings(
            batch_folder=str(folder / "batches"), lora_folder=str(folder), weight_folder=str(folder)
        )
        self.batches = Batches(settings)
        service = Service(engine, byte_tokenizer(QWEN, GAP_MARKS), MODEL)
        if self.page.stem == "images":
            engine.info = replace(engine.info, images=ImageInfo(MARK_ID, 4096, 4096))
            service.start(byte_tokenizer(TEMPLATE, (MARK,)), images=FakeImages())
            (folder / "photo.jpg").write_bytes(b"a photo")
        self.app = build_http_app(service, settings, batches=self.batches)
        self.batches.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def send(self, method: str, url: str, content: bytes, headers: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app)) as client:
            return await client.request(method, url, content=content, headers=headers)

    async def _stop(self) -> None:
        self.batches.stop()
        await asyncio.sleep(0)

    def close(self) -> None:
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)


def _transport(library: Any, front: Front) -> Any:
    """A transport of httpx or httpx2."""

    class Transport(library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            headers = list(request.headers.multi_items())
            answer = front.run(front.send(request.method, str(request.url), request.read(), headers))
            return library.Response(answer.status_code, headers=list(answer.headers.items()), content=answer.content)

    return Transport()


@dataclass
class Curl:
    """One command: options as curl has them."""

    method: str
    url: str
    headers: dict[str, str]
    body: str | None
    form: list[tuple[str, str]]

    @classmethod
    def parsed(cls, text: str) -> "Curl":
        words = iter(shlex.split(text.replace("\\\n", " "))[1:])
        curl = cls("", "", {}, None, [])
        for word in words:
            match word:
                case "-H":
                    name, _, value = next(words).partition(":")
                    curl.headers[name.strip()] = value.strip()
                case "-d" | "--json":
                    curl.body = next(words)
                    if word == "--json":
                        curl.headers["Content-Type"] = "application/json"
                case "-F":
                    name, _, value = next(words).partition("=")
                    curl.form.append((name, value))
                case "-X":
                    curl.method = next(words)
                case "-s" | "-N" | "-i":
                    pass
                case _:
                    assert word.startswith("http://127.0.0.1:8000/"), word
                    curl.url = word
        curl.method = curl.method or ("GET" if curl.body is None and not curl.form else "POST")
        return curl

    def send(self, http: httpx.Client) -> httpx.Response:
        files = {name: Path(value[1:]).read_bytes() for name, value in self.form if value.startswith("@")}
        fields = {name: value for name, value in self.form if not value.startswith("@")}
        more: dict[str, Any] = {"files": files, "data": fields} if files else {"content": self.body}
        return http.request(self.method, self.url, headers=self.headers, **more)


def check_shown(shown: Any, answer: Any, where: str = "answer") -> None:
    """What a page shows is a part of the answer: the same fields, with values of the same type."""
    if isinstance(shown, dict):
        assert isinstance(answer, dict), where
        assert shown.keys() <= answer.keys(), f"{where}: the answer has {sorted(answer)}"
        for name, value in shown.items():
            check_shown(value, answer[name], f"{where}.{name}")
    elif isinstance(shown, list):
        assert isinstance(answer, list), where
        assert len(shown) <= len(answer), where
        for at, (one, other) in enumerate(zip(shown, answer, strict=False)):
            check_shown(one, other, f"{where}.{at}")
    else:
        kinds = (bool, int | float, str, type(None))
        assert [isinstance(shown, k) for k in kinds] == [isinstance(answer, k) for k in kinds], f"{where}: {answer!r}"


def events_of(text: str) -> Iterator[Any]:
    """The events of a stream: names, JSON objects, and [DONE]. An id is one event, whatever it is."""
    for line in filter(None, text.splitlines()):
        line = "id: any" if line.startswith("id: ") else line
        kind, _, rest = line.partition(": ") if line.startswith(("data", "event")) else ("", "", line)
        yield json.loads(rest) if rest.startswith("{") else (kind, rest)


def check_answer(kind: str, shown: str, response: httpx.Response) -> None:
    if kind == "json":
        check_shown(json.loads(shown), response.json())
        return
    answered = events_of(response.text)
    for event in events_of(shown):
        assert any(_matches(event, other) for other in answered), event


def _matches(shown: Any, answer: Any) -> bool:
    try:
        check_shown(shown, answer) if isinstance(shown, dict) else None
    except AssertionError:
        return False
    return isinstance(shown, dict) or shown == answer


@pytest.mark.parametrize("front", PAGES, ids=lambda page: page.stem, indirect=True)
def test_examples_of_a_page_run(front: Front, tmp_path: Path):
    names: dict[str, Any] = {}
    response, num_run = None, 0
    for kind, text in BLOCK.findall(front.page.read_text("utf-8")):
        if kind == "bash" and text.startswith("curl"):
            response = Curl.parsed(text).send(front.http)
            num_run += 1
        elif kind == "jsonl" and response is None:
            (tmp_path / "requests.jsonl").write_text(text)
        elif kind in ("json", "jsonl", "text") and response is not None:
            check_answer(kind, text, response)
            if kind == "json" and "error" not in json.loads(text):
                assert response.status_code < 300, response.text
        elif kind == "python":
            code = compile(text, str(front.page), "exec")
            if "from callboard" not in text:
                exec(code, names)
                num_run += 1
    assert num_run > 0, "a page without an example"


COMMANDS = re.compile(
    r"callboard (serve|chat|launch|generate|models|inspect|pull|ls|rm|doctor|replay|bench|chaos)\b([^\n`#|]*)"
)


def test_flags_on_pages_exist(capsys: pytest.CaptureFixture[str]):
    known: dict[str, set[str]] = {}
    lost = []
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]:
        for command, rest in COMMANDS.findall(page.read_text("utf-8")):
            if command not in known:
                with pytest.raises(SystemExit):
                    cli.main([command, "--help=all"])
                known[command] = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out)) | {"--help"}
            flags = re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", rest)
            lost += [(page.name, command, flag) for flag in flags if flag not in known[command]]
    assert lost == []

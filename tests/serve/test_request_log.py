"""The line of each request: its fields, and its way to the terminal and the file of `callboard serve`."""

import os
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.base.reports import Verified
from runtime.base.types import Request, RequestOutput, SamplingParams
from serve_app.application import build_http_app
from serve_app.observability.context import ChoiceStats, RequestContext
from serve_app.observability.line_pipe import PipeWriter, RequestPipe, opened_pipe
from serve_app.observability.request_line import RequestLines, quoted
from serve_app.service.service import Service
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer


class Client(httpx.AsyncClient):
    """A client of a front. It keeps the front's log lines."""

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.service = Service(engine or FakeEngine(), byte_tokenizer(), "m")
        self.lines: list[str] = []
        self.service.metrics.lines.write = self.lines.append
        transport = httpx.ASGITransport(build_http_app(self.service), raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://test")


@pytest.fixture
async def client():
    async with Client() as client:
        yield client


async def test_an_unknown_field_is_in_the_line(client):
    await client.post("/v1/completions", json={"prompt": "a secret", "max_tokens": 2, "temprature": 0})
    (line,) = client.lines
    assert " ignored_fields=temprature" in line
    assert " method=POST path=/v1/completions model=m status=200 finish_reason=length prompt_tokens=8 " in line
    assert "secret" not in line


def test_a_line_has_accepted_draft_tokens_by_position():
    lines: list[str] = []
    choices = [ChoiceStats(Request("r", [1, 2], 2, SamplingParams())) for _ in range(2)]
    for choice, accepted in zip(choices, ((3, 1), (2, 0)), strict=True):
        reports = [Verified(0, 3, n) for n in accepted]
        choice.note(RequestOutput("r", [7] * 5, sampled_at=1.0, reports=reports))
    RequestLines("m", lines.append)("r", RequestContext(), choices, 200)
    assert " output_tokens=10 drafts=4 accepted=3,2,1 queue_s=" in lines[0]


async def test_a_refused_request_has_its_reason_in_the_line(client):
    headers = {"x-request-id": "r1"}
    await client.post("/v1/chat/completions", json={"messages": [], "top_p": 9}, headers=headers)
    (line,) = client.lines
    assert re.fullmatch(
        r"request id=r1 method=POST path=/v1/chat/completions status=400 total_s=[\d.]+ error=\".*\"", line
    )


async def test_a_refusal_of_the_engine_is_one_log_line():
    async with Client(FakeEngine(busy=True)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    (line,) = client.lines
    assert answer.status_code == 429
    assert " status=429 finish_reason=refused " in line
    assert f'error="{answer.json()["error"]["message"]}"' in line


async def test_a_stream_that_fails_has_its_reason_in_the_line():
    async with Client(FakeEngine(fails_after=2)) as client:
        await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    (line,) = client.lines
    assert line.endswith(' error="The model gave no finite logits."')


async def test_an_internal_error_has_its_type_in_the_line(client, monkeypatch):
    monkeypatch.setattr(client.service, "model_cards", lambda: 1 / 0)
    assert (await client.get("/v1/models")).status_code == 500
    (line,) = client.lines
    assert line.endswith(' error="ZeroDivisionError: division by zero"')


async def test_probes_and_files_of_the_page_have_no_line(client):
    for path in ("/health", "/ready", "/metrics", "/load", "/", "/page/style.css"):
        assert (await client.get(path)).status_code == 200
    assert client.lines == []


async def test_other_routes_have_a_short_line(client):
    await client.get("/v1/models")
    await client.get("/nothing")
    models, nothing = client.lines
    assert re.fullmatch(r"request id=\w+ method=GET path=/v1/models status=200 total_s=[\d.]+", models)
    assert " status=404 total_s=" in nothing
    assert ' error="There is no GET /nothing here; ' in nothing


async def test_client_text_cannot_forge_log_lines(client):
    await client.get("/a%0Arequest%20id=1%1B[2J%7F%C2%9B")
    (line,) = client.lines
    assert line.isascii()
    assert line.isprintable()
    assert 'path="/a\\nrequest id=1\\u001b[2J\\u007f\\u009b"' in line


async def test_without_lines_nothing_is_written(client):
    client.service.metrics.lines = None
    assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
    assert client.lines == []


async def test_http_requests_are_counted_by_route_and_status(client):
    for body in ({"prompt": "a", "max_tokens": 1}, {"prompt": 7}):
        await client.post("/v1/completions", json=body)
    await client.get("/v1/responses/resp_1")
    await client.get("/no/such/path")
    text = (await client.get("/metrics")).text
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == "http_requests")
    counts = {(s.labels["handler"], s.labels["method"], s.labels["status"]): s.value for s in family.samples}
    assert counts == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/responses/{response_id}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
    }


def test_words_are_logged_without_quotes():
    assert quoted("org/model-1.5:Q4_K_M", 100) == "org/model-1.5:Q4_K_M"
    assert quoted("two words", 100) == '"two words"'
    assert quoted("", 100) == '""'


# ---- from a front to the terminal and the file ----------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("serve_app.observability.line_pipe._LAST_S", 60.0)
    return RequestPipe(str(tmp_path), "127.0.0.1", 8000)


def test_lines_of_several_fronts_reach_the_terminal_and_the_file(pipe: RequestPipe, capfd):
    pipe.start()
    fronts = [PipeWriter(pipe.path) for _ in range(3)]
    for i in range(300):
        fronts[i % 3](f"request id={i} {'x' * 200}")
    pipe.close()
    shown = capfd.readouterr().err
    assert re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} request id=(\d+) x{200}$", shown, re.MULTILINE) == [
        str(i) for i in range(300)
    ]
    assert pipe.file.read_text() == shown
    assert str(pipe.file) in pipe.describe()


def test_a_front_drops_lines_rather_than_wait(pipe: RequestPipe, capfd):
    front = PipeWriter(pipe.path)
    for _ in range(2000):  # of a kibibyte each, unread so far: the pipe has room for a mebibyte
        front("x" * 1000)
    pipe.start()
    pipe.close()
    num_shown = len(capfd.readouterr().err.splitlines())
    assert 0 < num_shown < 2000
    front("the next")
    told = os.read(pipe._pipe, 1 << 16).decode()
    assert told.split(" ", 2)[2].startswith(f"({2000 - num_shown} lines were dropped)\n")
    assert told.endswith(" the next\n")


def test_the_terminal_gets_lines_if_the_file_fails(tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))
    with opened_pipe(str(tmp_path), "127.0.0.1", 8000, True) as pipe:
        pipe.start()
        PipeWriter(pipe.path)("request id=1")
        assert f"{pipe.file} cannot be written (" in pipe.describe()
    assert capfd.readouterr().err.endswith(" request id=1\n")


def test_no_request_log_makes_no_pipe(tmp_path: Path):
    with opened_pipe(str(tmp_path), "127.0.0.1", 8000, False) as pipe:
        assert pipe is None
    assert list(tmp_path.iterdir()) == []

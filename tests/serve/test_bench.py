"""`callboard bench`: its client, its prompts, its figures and its report."""

import asyncio
import base64
import json
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runtime.base.types import CallboardError
from serve_app import cli
from serve_app.bench.client import Client, Turn
from serve_app.bench.figures import distribution, draft_figures, figures
from serve_app.bench.load import Session, arrivals, play, play_streams
from serve_app.bench.prompts import WORDS, prompts_of, single_tokens
from serve_app.bench.report import draw, report
from tests.support.http.paced_server import MODEL, PacedServer

ROOT = Path(__file__).parents[2]


async def ask(server: PacedServer, turn: Turn, **options) -> Client:
    client = await asyncio.to_thread(Client, server.url, **options)
    await client.ask(turn)
    return client


# ---- the client -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("end_of_line", [b"\n", b"\r\n"])
@pytest.mark.parametrize("chunked", [True, False])
async def test_only_events_with_output_are_counted(chat: bool, end_of_line: bytes, chunked: bool):
    async with PacedServer(end_of_line=end_of_line, chunked=chunked) as server:
        await ask(server, turn := Turn("one two three", 5), chat=chat)
    assert (len(turn.events), turn.num_tokens, turn.num_prompt_tokens, turn.num_cached_tokens) == (5, 5, 3, 1)
    assert turn.sent < turn.events[0] <= turn.events[-1] <= turn.ended
    assert not turn.error
    sent = server.requests[0]
    assert (sent["model"], sent["max_tokens"], sent["ignore_eos"], sent["temperature"]) == (MODEL, 5, True, 0.0)


async def test_times_hold_the_pace_of_the_server():
    async with PacedServer(first_s=0.2, gap_s=0.01) as server:
        await ask(server, turn := Turn("one", 11))
    assert turn.events[0] - turn.sent >= 0.199
    assert turn.ended - turn.sent >= 0.299


async def test_a_connection_is_used_again():
    async with PacedServer() as server:
        client = await ask(server, Turn("one", 2))
        before = server.num_connections
        await client.ask(Turn("two", 2))
        assert server.num_connections == before


async def test_fields_replace_and_remove():
    async with PacedServer() as server:
        await ask(server, Turn("one", 2), fields={"ignore_eos": None, "temperature": 0.5, "top_k": 3}, model="other")
    sent = server.requests[0]
    assert "ignore_eos" not in sent
    assert (sent["temperature"], sent["top_k"], sent["model"]) == (0.5, 3, "other")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"refusals": 1}, "429: too many requests"),
        ({"fails": True}, "the engine is gone"),
        ({"cut_after": 2}, "closed the connection before its answer was complete"),
        ({"cut_after": 2, "chunked": False}, "ended without [DONE]"),
    ],
)
async def test_a_failed_request_has_its_reason(how: dict, says: str):
    async with PacedServer(**how) as server:
        turn = Turn("one", 4)
        with pytest.raises((CallboardError, OSError)):
            await ask(server, turn)
    assert says in turn.error
    assert not turn.ended


async def test_the_key_is_sent():
    async with PacedServer(api_key="k") as server:
        await ask(server, turn := Turn("one", 2), api_key="k")
        assert turn.num_tokens == 2
        with pytest.raises(CallboardError, match="answers 401: wrong key"):
            await asyncio.to_thread(Client, server.url)


def test_urls_of_other_kinds_are_refused():
    with pytest.raises(CallboardError, match="is not a URL of a server"):
        Client("ftp://127.0.0.1", model="x")
    assert Client("127.0.0.1:8000/v1/", model="x").url == "http://127.0.0.1:8000"


# ---- the load -------------------------------------------------------------------------------------------------------


async def test_streams_share_the_requests():
    running, most, asked = 0, 0, []

    async def answer(turn: Turn) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running -= 1
        asked.append(turn)

    await play_streams(iter([Turn("", 1) for _ in range(10)]), 3, None, answer)
    assert (len(asked), most) == (10, 3)
    await play_streams(iter([Turn("", 1) for _ in range(10)]), 3, 1e-9, answer)
    assert len(asked) == 13


async def test_requests_are_sent_at_their_times():
    times = {}

    async def answer(turn: Turn) -> None:
        times[turn.prompt] = time.perf_counter()

    begin = time.perf_counter()
    await play([Session(0.1, [Turn("late", 1)]), Session(0.0, [Turn("soon", 1)])], answer)
    assert times["soon"] < times["late"]
    assert times["late"] - begin >= 0.1


def test_arrivals_end_with_the_count_or_the_seconds():
    def of(count, seconds):
        return arrivals(np.random.default_rng(1), 50.0, count, seconds)

    assert len(of(7, None)) == 7
    assert of(7, None)[0] == 0.0
    assert of(None, 2.0)[-1] < 2.0
    assert len(of(1000, 2.0)) == len(of(None, 2.0))
    assert np.mean(np.diff(of(20_000, None))) == pytest.approx(1 / 50, rel=0.05)


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_words_of_several_tokens_are_left_out():
    tokens = dict.fromkeys(["time", "b", "c", "d", "e"], 1) | {"c": 2}
    found = single_tokens(list(tokens), lambda text: 1 + sum(tokens[word] for word in text.split()))
    assert found == ["time", "b", "d", "e"]
    assert single_tokens(["a"], lambda _: None) == []


@pytest.mark.parametrize("extra", [0, 1])  # tokens that the tokenizer puts before a text
def test_a_prompt_has_the_tokens_that_the_server_counts(extra: int):
    def count(text: str) -> int:
        return extra + len(text.split())

    prompts, is_counted = prompts_of(40, 10, count, rng := np.random.default_rng(0))
    drawn = [prompts.draw(rng) for _ in range(3)]
    assert is_counted
    assert [count(text) for text in drawn] == [50] * 3
    words = [text.split() for text in drawn]
    assert words[0][:10] == words[1][:10] == words[2][:10]
    assert words[0][10:] != words[1][10:]


def test_without_a_tokenizer_words_are_counted():
    prompts, is_counted = prompts_of(12, 0, lambda _: None, rng := np.random.default_rng(0))
    assert not is_counted
    assert len(prompts.draw(rng).split()) == 12
    assert len(set(WORDS)) == len(WORDS)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_distributions_accept_weights():
    found = distribution([1.0, 2.0, 3.0, 4.0])
    assert (found["mean"], found["p50"]) == (2.5, 2.5)
    found = distribution([9.0, 1.0, 2.0], [1, 90, 9])
    assert (found["p50"], found["p90"], found["p99"]) == (1.0, 1.0, 2.0)
    assert found["mean"] == pytest.approx(1.17)


def test_figures_follow_their_definitions():
    first = Turn("", 3, sent=10.0, events=[11.0, 11.5, 12.0], ended=12.5, num_tokens=3, num_prompt_tokens=7)
    # Two tokens in its second event.
    other = Turn("", 3, sent=10.5, events=[11.5, 13.5], ended=14.0, num_tokens=3, num_prompt_tokens=9)
    failed = Turn("", 3, sent=11.0, events=[11.2], error="gone")
    found = figures([first, other, failed])
    assert (found["requests"], found["errors"], found["first_error"], found["seconds"]) == (2, 1, "gone", 4.0)
    rates = [found[f"{name}_per_s"] for name in ("requests", "input_tokens", "output_tokens")]
    assert rates == [0.5, 4.0, 1.5]
    assert found["tokens_per_event"] == pytest.approx(6 / 5)
    means = {name: found[f"{name}_ms"]["mean"] for name in ("ttft", "itl", "tpot", "latency", "event_gap")}
    assert means == pytest.approx({"ttft": 1000, "itl": 750, "tpot": 5000 / 6, "latency": 3000, "event_gap": 1000})


def test_without_an_answer_there_are_only_counts():
    assert figures([Turn("", 3, sent=1.0, error="gone")]) == {"requests": 0, "errors": 1, "first_error": "gone"}
    one = figures([Turn("", 1, sent=1.0, events=[2.0], ended=2.0, num_tokens=1)])
    assert "itl_ms" not in one


# ---- the command ----------------------------------------------------------------------------------------------------


def run(server: PacedServer, *argv: str) -> int:
    return cli.main(["bench", server.url, "--prompt-tokens", "8", "--output-tokens", "4", *argv])


async def test_one_level_has_a_table_of_latencies(capsys):
    async with PacedServer() as server:
        assert await asyncio.to_thread(run, server, "--requests", "6", "--concurrency", "2", "--seed", "1") == 0
        assert len(server.requests) == 7  # one to warm up
        prompts = [request["messages"][0]["content"] for request in server.requests]
        assert len(set(prompts)) == 7
        assert await asyncio.to_thread(run, server, "--requests", "6", "--concurrency", "2", "--seed", "1") == 0
        again = [request["messages"][0]["content"] for request in server.requests[7:]]
        assert sorted(again) == sorted(prompts)
    out = capsys.readouterr().out
    assert "concurrency 2: 6 requests" in out
    assert "prompts of 8 tokens (counted by the server's tokenizer)" in out
    for row in ("output tokens/s", "time to first token (TTFT)", "inter-token latency (ITL)", "end-to-end latency"):
        assert row in out


METRICS = """vllm:spec_decode_num_drafts_total{engine="1"} 1N
vllm:spec_decode_num_drafts_total{engine="2"} N
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} N
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="2",position="0"} N
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} N
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="2"} 0
"""


async def test_acceptance_is_shown_by_position(capsys, tmp_path: Path):
    """Without the rounds before the load."""
    argv = "--requests", "4", "--concurrency", "1", "2", "--output", str(tmp_path / "bench.json")
    async with PacedServer(metrics=METRICS) as server:
        assert await asyncio.to_thread(run, server, *argv) == 0
    out = capsys.readouterr().out
    for level in (1, 2):
        assert f"concurrency {level}: draft tokens accepted by position: 100.0%, 50.0%; 2.50 tokens a round" in out
    first, _ = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert (first["rounds"], first["accepted_by_position"]) == (8, [1.0, 0.5])


def test_a_server_without_rounds_shows_no_acceptance():
    assert draft_figures([], []) == draft_figures([5.0, 3.0], [5.0, 3.0]) == {}
    assert draft_figures([], [4.0, 0.0]) == {"rounds": 4.0, "accepted_by_position": [], "tokens_per_round": 1.0}


async def test_pictures_precede_each_prompt(capsys):
    async with PacedServer() as server:
        command = "--requests", "4", "--warmup", "0", "--seed", "1", "--image", "40x24x2"
        assert await asyncio.to_thread(run, server, *command) == 0
        contents = [request["messages"][0]["content"] for request in server.requests]
        kinds = [[part["type"] for part in content] for content in contents]
        assert kinds == [["image_url", "image_url", "text"]] * 4
        urls = [part["image_url"]["url"] for content in contents for part in content[:2]]
        assert len(set(urls)) == 8
        pictures = [Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        assert {picture.size for picture in pictures} == {(40, 24)}
        assert await asyncio.to_thread(run, server, *command, "--api", "completions") == 1
    told = capsys.readouterr()
    assert ", pictures of 40 x 24, 2 each, answers" in told.out
    assert "--image needs --api chat; completions have no pictures." in told.err
    with pytest.raises(SystemExit):
        cli.main(["bench", "http://x", "--image", "40"])
    assert "must be a width and a height in pixels, such as 1024x768" in capsys.readouterr().err


async def test_several_levels_have_a_row_each_and_a_file(capsys, tmp_path: Path):
    async with PacedServer(has_tokenizer=False) as server:
        file = tmp_path / "found.json"
        flags = ["--requests", "3", "--rate", "500", "900", "--api", "completions", "--output", str(file)]
        assert await asyncio.to_thread(run, server, *flags) == 0
    out = capsys.readouterr().out
    assert "counted by words" in out
    assert "A: 500 requests/s, B: 900 requests/s" in out
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["results"]] == ["500 requests/s", "900 requests/s"]
    assert [len(answer["events_s"]) for answer in found["results"][1]["answers"]] == [4, 4, 4]
    assert found["results"][0]["ttft_ms"]["p50"] > 0
    assert found["model"] == MODEL


async def test_failed_requests_are_counted_and_reported(capsys):
    async with PacedServer(refusals=2) as server:
        assert await asyncio.to_thread(run, server, "--requests", "5", "--warmup", "0") == 1
    out = capsys.readouterr().out
    assert "3 requests" in out
    assert "concurrency 4: 2 errors, first: 429: too many requests" in out


async def test_a_refused_warmup_ends_the_command(capsys):
    async with PacedServer(refusals=1) as server:
        assert await asyncio.to_thread(run, server, "--requests", "5") == 1
    assert capsys.readouterr().err == "callboard: 429: too many requests\n"


def test_an_interrupted_load_reports_complete_requests():
    async def start() -> tuple[subprocess.Popen, str]:
        async with PacedServer(gap_s=0.01) as server:
            command = [
                sys.executable,
                "-m",
                "serve_app.cli",
                "bench",
                server.url,
                "--concurrency",
                "1",
                "--warmup",
                "0",
            ]
            command += ["--prompt-tokens", "8", "--output-tokens", "4"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while len(server.requests) < 4:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            return process, await asyncio.to_thread(process.stdout.read)

    process, out = asyncio.run(start())
    assert (process.wait(), process.stderr.read()) == (1, "callboard: interrupted\n")
    assert "concurrency 1: " in out
    assert " 0 errors" in out


async def test_a_plot_without_matplotlib_is_refused_first(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    async with PacedServer() as server:
        assert await asyncio.to_thread(run, server, "--plot", str(tmp_path / "p.png")) == 1
        assert server.requests == []
    assert "--plot needs matplotlib; install it by: pip install 'callboard[bench]'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rate", "0"], "'0' must be a number of requests per second above 0"),
        (["--fields", "[]"], "'[]' must be a JSON object"),
        (["--rate", "1", "--concurrency", "2"], "not allowed with"),
        (["--shared-prefix", "-1"], "--shared-prefix"),
    ],
)
def test_wrong_values_are_refused(argv: list[str], says: str, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", "http://127.0.0.1:1", *argv])
    assert e.value.code == 2
    assert says in capsys.readouterr().err


# ---- the report -----------------------------------------------------------------------------------------------------

ABOUT = {
    "url": "http://x", "model": "m", "chat": True, "prompt_tokens": 8, "shared_prefix": 2, "output_tokens": 4,
    "seed": 1, "prompt_tokens_counted_by": "words", "is_rate": False,
}  # fmt: skip


def level(number: int, num_failed: int = 0) -> dict:
    events = [1.0, 1.0 + number]
    done = Turn("", 2, sent=0.0, events=events, ended=events[-1], num_tokens=2 * number, num_prompt_tokens=8)
    turns = [Turn("", 2, error="gone")] * num_failed + [done] * (0 if num_failed else 1)
    return {"level": number, "name": f"concurrency {number}", **figures(turns)}


def test_the_plot_puts_throughput_to_the_right_and_latency_up():
    text = report(ABOUT, [level(1), level(8), level(4, num_failed=3)])
    assert "after 2 in common" in text
    lines = text.splitlines()
    (low,), (high,) = ([i for i, line in enumerate(lines) if "|" in line and name in line] for name in "AB")
    assert high < low
    assert lines[high].index("B") > lines[low].index("A")
    assert "concurrency 4: 3 errors, first: gone" in text


def test_a_level_without_answers_is_reported():
    assert "concurrency 1: no request was answered" in report(ABOUT, [level(1, num_failed=2)])


def test_a_plot_is_a_png(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed.")
    draw(ABOUT, [level(1), level(2), level(3, num_failed=1)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

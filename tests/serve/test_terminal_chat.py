"""`callboard chat`: its commands, its defaults, its output, and its connection to a server."""

import json
import pty
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

from runtime.base.types import CallboardError, FinishReason
from runtime.text.sampling_defaults import SamplingDefaults
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.terminal import loading, partners
from serve_app.terminal.partners import MAX_TOKENS, Ending, RemoteModel, read_event
from serve_app.terminal.talk import Talk
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "a"}]


class Echo:
    """A partner that repeats the last question."""

    def __init__(self, ending: Ending = Ending(3)) -> None:  # noqa: B008  # it is frozen
        self.ending, self.asked = ending, []

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, Ending]:
        self.asked.append(messages)
        yield from messages[-1]["content"]
        return self.ending


class Terminal:
    """A stderr that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch) -> Terminal:
    terminal = Terminal()
    for module in ("talk", "loading"):  # pytest gives sys a stderr of its own before each test
        monkeypatch.setattr(f"serve_app.terminal.{module}.sys", SimpleNamespace(stderr=terminal, stdin=sys.stdin))
    return terminal


def test_clear_forgets_turns_and_keeps_the_system_message():
    talk = Talk(partner := Echo(), "S", on_terminal=True)
    for line in ("one", "", "/clear", "two"):
        talk.take(line)
    system = {"role": "system", "content": "S"}
    assert partner.asked == [[system, {"role": "user", "content": text}] for text in ("one", "two")]


def test_system_sets_and_shows_the_system_message(stderr: Terminal):
    talk = Talk(Echo(), None, on_terminal=True)
    talk.take("/system")
    talk.take("/system Be brief.")
    talk.take("/system ")
    assert stderr.text.splitlines() == ["There is no system message.", *["The system message is: Be brief."] * 2]
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_save_writes_the_messages_of_a_request_once(stderr: Terminal, tmp_path: Path):
    talk, file = Talk(Echo(), None, on_terminal=True), tmp_path / "chat.json"
    for line in ("hé", f"/save {file}", f"/save {file}", "/save"):
        talk.take(line)
    assert json.loads(file.read_text("utf-8")) == {"messages": talk.messages}
    assert [turn["content"] for turn in talk.messages] == ["hé", "hé"]
    assert "2 messages are in" in stderr.text
    assert "File exists; give another name" in stderr.text
    assert "/save needs the name of a file" in stderr.text


def test_help_exit_and_near_misses(stderr: Terminal):
    talk = Talk(partner := Echo(), None, on_terminal=True)
    for line in ("/help", "/hepl", "/zzz", "/exit"):
        talk.take(line)
    assert talk.has_ended
    for command in ("/help", "/clear", "/system TEXT", "/save FILE", "/exit"):
        assert f"  {command} " in stderr.text
    assert "There is no command /hepl; did you mean /help?" in stderr.text
    assert "There is no command /zzz; /help lists them." in stderr.text
    assert not partner.asked


@pytest.mark.parametrize(("line", "on_terminal"), [("/exit", False), (" /exit", True), ("/etc/passwd is what?", True)])
def test_other_lines_with_a_slash_are_questions(line: str, on_terminal: bool):
    talk = Talk(partner := Echo(), None, on_terminal)
    talk.take(line)
    assert partner.asked == [[{"role": "user", "content": line}]]


def test_a_terminal_shows_the_speed_and_a_cut(stderr: Terminal, monkeypatch):
    clock = iter([10.0, 10.5, 11.0])
    monkeypatch.setattr("serve_app.terminal.talk.time", SimpleNamespace(monotonic=lambda: next(clock)))
    Talk(Echo(Ending(41, was_cut=True)), None, on_terminal=True).take("abc")
    assert stderr.text == "(41 tokens, 40 tokens/s) (cut; --max-tokens)\n"


def test_a_pipe_shows_a_cut_alone(capsys):
    Talk(Echo(Ending(41, was_cut=True)), None, on_terminal=False).take("abc")
    assert capsys.readouterr() == ("abc\n", "(cut; --max-tokens)\n")


def test_phases_of_a_load_replace_each_other(stderr: Terminal, monkeypatch):
    class Model:
        def __init__(self, on_phase, **config) -> None:
            for phase in ("finding the model", "reading the weights"):
                on_phase(phase)

    monkeypatch.setattr("runtime.llm.LLM", Model)
    loading.load(partners.EngineConfig())
    subject = "Loading HuggingFaceTB/SmolLM2-135M-Instruct"
    shown = [line for line in stderr.text.replace("\x1b[K", "").split("\r") if line]
    phases = ("importing PyTorch", "finding the model", "reading the weights")
    assert [line.rpartition(" (")[0] for line in shown] == [f"{subject}: {phase}" for phase in phases]
    assert stderr.text.endswith("\r\x1b[K")


def test_words_typed_during_a_load_are_kept_but_not_shown(monkeypatch: pytest.MonkeyPatch):
    keyboard, terminal = pty.openpty()
    with open(terminal) as stdin, open(keyboard, "wb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        echo = [bool(termios.tcgetattr(terminal)[3] & termios.ECHO)]
        with loading.without_echo():
            echo.append(bool(termios.tcgetattr(terminal)[3] & termios.ECHO))
            keys.write(b"Hello!\n")
        echo.append(bool(termios.tcgetattr(terminal)[3] & termios.ECHO))
        assert (echo, stdin.readline()) == ([True, False, True], "Hello!\n")


def test_a_load_shows_nothing_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("runtime.llm.LLM", lambda on_phase, **config: on_phase("reading the weights"))
    loading.load(partners.EngineConfig())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": [{}]}', '{"choices": 1}', '{"error": "busy"}'])
def test_odd_events_of_a_server_are_one_sentence(event):
    with pytest.raises(CallboardError, match=r"^The server"):
        read_event(event)


# ---- with a server --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_server():
    """An engine, the service before it, and the URL."""
    engine = FakeEngine("Hello, wörld!", max_model_len=90)
    service = Service(engine, byte_tokenizer(), MODEL)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_http_app(service), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield engine, service, f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=60)


def chat(url: str, *args: str, stdin: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve_app.cli", "chat", "--url", url, *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=600)


def test_chat_with_a_server_remembers_the_conversation(fake_server):
    engine, _, url = fake_server
    done = chat(url, "--system", "S", "--seed", "7", stdin="a\n\nb\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hello, wörld!\nHello, wörld!\n"
    prompts = [bytes(r.token_ids).decode() for r in engine.requests]
    assert prompts == ["<system>S<user>a<assistant>", "<system>S<user>a<assistant>Hello, wörld!<user>b<assistant>"]
    assert engine.requests[0].seed == 7


def test_chat_shows_the_error_of_the_server(fake_server):
    _, _, url = fake_server
    done = chat(f"{url}/v1/", stdin="x" * 100 + "\n")
    assert done.returncode == 1
    assert "maximum context length is 90 tokens" in done.stderr
    assert "Traceback" not in done.stderr


def answer_of(model: RemoteModel) -> tuple[str, Ending]:
    pieces, text = model.answer(QUESTION), ""
    while True:
        try:
            text += next(pieces)
        except StopIteration as e:
            return text, e.value


@pytest.mark.parametrize(
    ("own", "given", "temperature"),
    [({}, {}, 0.7), ({"temperature": 0.2}, {}, 0.2), ({"temperature": 0.2}, {"temperature": 0.9}, 0.9)],
)
def test_a_server_and_a_local_model_have_the_same_defaults(fake_server, own: dict, given: dict, temperature: float):
    engine, service, url = fake_server
    service.start(byte_tokenizer(), SamplingDefaults(own, "generation_config.json"))
    answer_of(RemoteModel(url, given))
    assert engine.requests[0].params.temperature == temperature


def test_another_server_chooses_its_sampling(fake_server, monkeypatch):
    engine, _, url = fake_server
    monkeypatch.setattr(RemoteModel, "_own_sampling", lambda self, root: None)
    answer_of(RemoteModel(url, {}))
    assert engine.requests[0].params.temperature == 1.0


def test_an_answer_of_a_server_has_a_ceiling(fake_server):
    engine, _, url = fake_server
    engine.info = replace(engine.info, max_model_len=4096)
    assert answer_of(RemoteModel(url, {})) == ("Hello, wörld!", Ending(15))
    assert engine.requests[0].params.max_tokens == MAX_TOKENS
    text, ending = answer_of(RemoteModel(url, {"max_tokens": 5}))
    assert (text, ending) == ("Hello", Ending(5, was_cut=True))


def test_an_answer_that_the_server_ended_is_an_error(fake_server):
    engine, _, url = fake_server
    engine.failure, engine.fails_after = (FinishReason.ABORT, ""), 5
    pieces = RemoteModel(url, {}).answer(QUESTION)
    with pytest.raises(CallboardError, match="ended this answer; send"):
        assert "".join(pieces) == "Hello"


def test_a_short_context_gives_all_that_fits(fake_server):
    engine, _, url = fake_server
    assert answer_of(RemoteModel(url, {}))[0] == "Hello, wörld!"
    (request,) = engine.requests
    assert request.params.max_tokens == 90 - len(request.token_ids)

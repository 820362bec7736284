"""A file from a web server is complete by its length or range, whatever the server answers."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from runtime.base.types import CallboardError
from runtime.loading.resolve import resolve
from runtime.loading.sources import download

WHOLE = b"GGUF" + bytes(range(250)) * 200
STORED = 1000  # bytes from an earlier, interrupted transfer
ETAG = '"one"'


class Answers(BaseHTTPRequestHandler):
    """Answers each request by the next script, then as a server should: (status, headers, content)."""

    script: ClassVar[list[tuple[int, dict[str, str], bytes]]]
    ranges: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        self.ranges.append(self.headers["Range"])
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        rest = {"Content-Range": f"bytes {start}-{len(WHOLE) - 1}/{len(WHOLE)}"} if start else {}
        usual = 206 if start else 200, {"ETag": ETAG, "Content-Length": str(len(WHOLE) - start)} | rest, WHOLE[start:]
        status, headers, content = self.script.pop(0) if self.script else usual
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def answers(tmp_path: Path, monkeypatch) -> Iterator[type[Answers]]:
    class Handler(Answers):
        script, ranges = [], []

    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(threading.Event, "wait", lambda *_: None)  # the pause before another try
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Handler.address = f"http://127.0.0.1:{server.server_port}/m.gguf"
    yield Handler
    server.shutdown()
    server.server_close()


def begin(answers: type[Answers], tmp_path: Path, num_bytes: int) -> None:
    """Store the first bytes of the file, as a killed process leaves them."""
    answers.script = [(200, {"ETag": ETAG, "Content-Length": str(len(WHOLE))}, WHOLE[:STORED])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "_TRIES", 0)
        with pytest.raises(CallboardError, match="cannot be fetched"):
            resolve(answers.address, progress=False)
    (kept,) = tmp_path.rglob("*.incomplete")
    kept.write_bytes(WHOLE[:num_bytes])
    answers.ranges.clear()


def test_a_file_without_a_length_is_refused(answers, tmp_path):
    answers.script = [(200, {}, WHOLE[:20_000])]
    with pytest.raises(CallboardError, match="is sent without its length"):
        resolve(answers.address, progress=False)
    assert not list(tmp_path.rglob("*.gguf"))


REST = f"bytes {STORED}-{len(WHOLE) - 1}/{len(WHOLE)}"


@pytest.mark.parametrize(
    "answer",
    [
        (206, {"Content-Range": f"bytes 0-{len(WHOLE) - 1}/{len(WHOLE)}"}, WHOLE),
        (206, {"Content-Range": f"bytes 500-{len(WHOLE) - 1}/{len(WHOLE)}"}, WHOLE[500:]),
        (206, {"Content-Range": f"bytes {STORED}-1999/*"}, WHOLE[STORED:2000]),
        (206, {"Content-Range": "pages 3-4/5"}, WHOLE[STORED:]),
        (206, {}, WHOLE[STORED:]),
        (206, {"Content-Range": REST, "ETag": '"other"'}, bytes(len(WHOLE) - STORED)),
        (416, {"Content-Range": "bytes */900"}, b""),
        (416, {}, b""),
    ],
)
def test_another_range_begins_the_file_anew(answers, tmp_path, answer):
    begin(answers, tmp_path, STORED)
    status, headers, content = answer
    answers.script = [(status, headers | {"Content-Length": str(len(content))}, content)]
    assert resolve(answers.address, progress=False).read_bytes() == WHOLE
    assert answers.ranges == [f"bytes={STORED}-", None]


def test_a_range_that_ends_early_is_continued(answers, tmp_path):
    begin(answers, tmp_path, STORED)
    part = {"Content-Range": f"bytes {STORED}-1999/{len(WHOLE)}", "Content-Length": "1000"}
    answers.script = [(206, part, WHOLE[STORED:2000])]
    assert resolve(answers.address, progress=False).read_bytes() == WHOLE
    assert answers.ranges == [f"bytes={STORED}-", "bytes=2000-"]


def test_a_complete_file_is_not_fetched_again(answers, tmp_path):
    begin(answers, tmp_path, len(WHOLE))
    answers.script = [(416, {"Content-Range": f"bytes */{len(WHOLE)}", "Content-Length": "0"}, b"")]
    assert resolve(answers.address, progress=False).read_bytes() == WHOLE
    assert answers.ranges == [f"bytes={len(WHOLE)}-"]


def test_a_server_of_wrong_ranges_is_given_up(answers):
    wrong = (206, {"Content-Range": f"bytes 7-9/{len(WHOLE)}", "Content-Length": "3"}, b"abc")
    answers.script = 100 * [wrong]
    with pytest.raises(CallboardError, match="the server answers with another part"):
        resolve(answers.address, progress=False)
    assert len(answers.ranges) == download._TRIES

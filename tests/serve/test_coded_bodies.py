"""Bodies in a content coding or another charset are decoded or refused, on every route."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of


def zipped(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)  # equal bytes in all processes, since tests are named by them


BODY = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
APP = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL))
POSTED = sorted({route.path for route in APP.routes if "POST" in (route.methods or ())})
_compressor = zlib.compressobj(wbits=-15)
CODED = {
    "gzip": zipped(BODY),
    "x-gzip": zipped(BODY[:7]) + zipped(BODY[7:]),
    "deflate": zlib.compress(BODY),
    "Deflate": _compressor.compress(BODY) + _compressor.flush(),
    "identity": BODY,
    "identity, GZIP": zipped(BODY),
}


async def post(body: bytes | AsyncIterator[bytes], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client_of(FakeEngine()) as client:
        return await client.post(path, content=body, headers={"content-type": "application/json", **named})


@pytest.mark.parametrize("coding", CODED)
async def test_known_codings_are_decoded_in_any_pieces(coding: str):
    async def by_byte() -> AsyncIterator[bytes]:
        for at in range(len(CODED[coding])):
            yield CODED[coding][at : at + 1]

    for body in (CODED[coding], by_byte()):
        answer = await post(body, content_encoding=coding)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)


@pytest.mark.parametrize("path", POSTED)
async def test_unknown_codings_are_a_415_on_every_route(path: str):
    for coding in ("br", "zstd", "compress", "gzip, br", "gzip, gzip"):
        answer = await post(BODY, path.replace("{", "").replace("}", ""), content_encoding=coding)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
        assert repr(coding) in answer.text
        error = answer.json()["error"]
        assert isinstance(error, str) == path.startswith("/api/")
        assert ("type" in answer.json()) == path.startswith("/v1/messages")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (zipped(b" " * (64 << 20)), 413, "body_too_large"),
        (zipped(zipped(b" " * (64 << 20))), 400, "invalid_json"),
        (CODED["gzip"][:-3], 400, "invalid_coding"),
        (CODED["gzip"][:-8] + b"12345678", 400, "invalid_coding"),
        (BODY, 400, "invalid_coding"),
        (b"", 400, "invalid_json"),
    ],
)
async def test_coded_bodies_have_limits_and_ends(body: bytes, status: int, code: str):
    answer = await post(body, content_encoding="gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_bomb_is_decoded_up_to_the_limit_alone(monkeypatch: pytest.MonkeyPatch):
    from serve_app.http import coding

    pieces: list[int] = []
    decoded = coding.DecodedBody._decoded

    def counted(self: coding.DecodedBody) -> bytes:
        piece = decoded(self)
        pieces.append(len(piece))
        return piece

    monkeypatch.setattr(coding.DecodedBody, "_decoded", counted)
    assert (await post(zipped(b" " * (64 << 20)), content_encoding="gzip")).status_code == 413
    assert max(pieces) <= 64 << 10
    assert sum(pieces) <= HttpSettings().longest_body(False) + (64 << 10)


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json; charset=utf-8", BODY, 200),
        ('Application/JSON;Charset="UTF-8"', BODY, 200),
        ("application/json", b"\xef\xbb\xbf" + BODY, 200),
        ("application/json; charset=utf-16", BODY.decode().encode("utf-16"), 415),
        ("application/json; charset=iso-8859-1", BODY, 415),
        ("text/plain", BODY, 415),
        ("multipart/form-data; boundary=x", BODY, 415),
    ],
)
async def test_charsets_and_types_of_bodies(kind: str, body: bytes, status: int):
    assert (await post(body, content_type=kind)).status_code == status


async def test_an_upload_may_be_coded(tmp_path: Path):
    settings = HttpSettings(batch_folder=str(tmp_path), batch_file_bytes=1 << 20)
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL), settings)

    def form(content: bytes) -> bytes:
        parts = b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="a.jsonl"\r\n\r\n' + content
        return b"".join(b"--x\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--x--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=x", "content-encoding": "gzip"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.post("/v1/files", content=zipped(form(b"{}\n")), headers=headers)
        assert (answer.status_code, answer.json().get("bytes")) == (200, 3), answer.text
        answer = await client.post("/v1/files", content=zipped(form(b" " * (8 << 20))), headers=headers)
        assert answer.status_code == 413


async def test_double_slashes_of_base_urls_are_one():
    async with client_of(FakeEngine()) as client:
        assert (await client.get("/v1//models")).status_code == 200
        assert (await client.post("/v1///completions", json={"prompt": "a"})).status_code == 200

"""The page at GET /: the files served, and their headers."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from serve_app.page import _HEADERS
from tests.support.http.fake_engine import FakeEngine, client_of

FOLDER = Path(__file__).parents[2] / "serve_app" / "page"
FILES = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
)
OWN = [name for name in FILES if not name.startswith("vendor/")]
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "woff2": "font/woff2",
}


async def test_the_page_needs_no_engine():
    async with client_of(FakeEngine(reason="The engine is loading.")) as client:
        response = await client.get("/")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert response.text == (FOLDER / "index.html").read_text()
        assert (await client.head("/")).headers["content-length"] == str(len(response.content))
        assert (await client.get("/page/nothing.js")).json()["error"]["code"] == "not_found"
        assert (await client.get("/page/__init__.py")).status_code == 404


@pytest.mark.parametrize("name", FILES)
async def test_files_are_typed_guarded_and_kept_by_the_browser(name: str):
    path = {"index.html": "/", "docs.html": "/docs"}.get(name, f"/page/{name}")
    async with client_of(FakeEngine()) as client:
        response = await client.get(path)
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert response.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        etag = response.headers["etag"]
        for known, status in [(etag, 304), (f'"old", W/{etag}', 304), ('"old"', 200)]:
            again = await client.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.headers["etag"], bool(again.content)) == (status, etag, status == 200)


def test_a_wheel_carries_every_file():
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["serve_app.page"]
    assert [name for name in FILES if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_files_name_no_other_host():
    namespace = "http://www.w3.org/2000/svg"
    text = "".join((FOLDER / name).read_text() for name in OWN).replace(namespace, "")
    assert re.findall(r"https?:|//[a-z]+\.|innerHTML|insertAdjacentHTML|document\.write", text) == []


def test_only_the_sanitiser_may_make_markup():
    directives = dict(d.strip().partition(" ")[::2] for d in _HEADERS["content-security-policy"].split(";"))
    assert directives["default-src"] == "'self'"
    assert directives["require-trusted-types-for"] == "'script'"
    assert directives["trusted-types"] == "dompurify"
    assert directives["img-src"] == "'self' data:"  # a user's own pictures, and none from elsewhere
    assert set(directives) & {"script-src", "style-src", "connect-src"} == set()


def test_every_library_is_named_with_its_licence():
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    libraries = {name.removeprefix("vendor/") for name in set(FILES) - set(OWN)} - {"LICENSES.txt"}
    assert libraries >= {"markdown-it.min.js", "purify.min.js", "temml.min.js"}
    assert [name for name in libraries if name not in licences] == []

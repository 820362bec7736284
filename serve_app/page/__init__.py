"""The pages at `GET /` and `GET /docs`: static files in this folder. They send requests to this server only.

`vendor` holds unchanged libraries (vendor/LICENSES.txt): markdown-it and Temml render a model's output to markup, and
DOMPurify sanitizes it. The browser enforces that no other code makes markup.

The routes work without an engine and without a key, so the page can show a start's phase and a field for the key."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
    "txt": "text/plain",
}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
_HEADERS = {
    "cache-control": "no-cache",  # browsers revalidate each time, so a new version shows at once
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "img-src 'self' data:; "
    "require-trusted-types-for 'script'; trusted-types dompurify",  # only DOMPurify may make markup
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _route(folder: str, file: Traversable) -> Route:
    name, content = file.name, file.read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]
    headers = {**_HEADERS, "etag": f'"{blake2b(content, digest_size=8).hexdigest()}"'}

    async def answer(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):  # it may be a list, or W/"..." from a proxy
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    path = _PAGES.get(name) or f"/page/{folder}{name}"
    return Route(path, answer, include_in_schema=False)


_PAGE = files(__name__)
ROUTES = [
    _route(folder, file)
    for folder in ("", "vendor/")
    for file in (_PAGE / folder).iterdir()
    if file.name.rpartition(".")[2] in _TYPES
]

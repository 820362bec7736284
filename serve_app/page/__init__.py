"""The page at `GET /`: this folder's static files, read once. They ask nothing but the server's own API.

The routes need no engine and no key: a page that cannot load could neither show the phase of a start nor ask for a key.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",  # kept by the browser, but asked about each time: a new version shows at once
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",  # the last one: no innerHTML, so a model's text never becomes markup
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _route(file: Traversable) -> Route:
    name, content = file.name, file.read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]
    headers = {**_HEADERS, "etag": f'"{blake2b(content, digest_size=8).hexdigest()}"'}

    async def answer(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):  # a list, perhaps, or W/"..." from a proxy
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return Route("/" if name == "index.html" else f"/page/{name}", answer, include_in_schema=False)


ROUTES = [_route(file) for file in files(__name__).iterdir() if file.name.rpartition(".")[2] in _TYPES]

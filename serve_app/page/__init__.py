"""The page at `GET /`: this folder's static files, read once. They ask nothing but the server's own API.

The routes need no engine and no key: a page that cannot load could neither show the phase of a start nor ask for a key.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.exceptions import HTTPException
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
_CONTENTS = {
    file.name: file.read_bytes() for file in files(__name__).iterdir() if file.name.rpartition(".")[2] in _TYPES
}
_ETAGS = {name: f'"{blake2b(content, digest_size=8).hexdigest()}"' for name, content in _CONTENTS.items()}


def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in _CONTENTS:
        raise HTTPException(404)
    headers = {**_HEADERS, "etag": _ETAGS[name]}
    if _ETAGS[name] in request.headers.get("if-none-match", ""):  # a list, perhaps, or W/"..." from a proxy
        return Response(status_code=304, headers=headers)
    return Response(_CONTENTS[name], headers=headers, media_type=_TYPES[name.rpartition(".")[2]])


ROUTES = [Route("/", _file), Route("/page/{name}", _file)]

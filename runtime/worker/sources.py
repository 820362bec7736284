"""Sources of a runner's model: the files of a checkpoint, or random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from runtime.core.config import ModelInfo
from runtime.core.decoder_spec import DecoderSpec
from runtime.core.types import CallboardError
from runtime.kernels.communicator import Communicator
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.decoder import Decoder
from runtime.models.kv_scales import read_kv_scales
from runtime.structured.vocabulary import Vocabulary
from runtime.text.tokenizer import Tokenizer


class ModelSource(Protocol):
    """A model that is described before its weights are read, so that memory can be planned."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def fingerprint(self) -> str:
        """Tells these weights from all others, and is equal wherever they are."""

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        """Read the weights; `spec` is this source's, perhaps with weights in other forms, or what of it a rank has."""

    def kv_scales(self) -> torch.Tensor | None:
        """[num_layers, 2 (k, v), num_kv_heads] of an fp8 KV cache; None: all are 1."""

    def vocabulary_reader(self, info: ModelInfo) -> Callable[[], Vocabulary] | None:
        """Reads the tokens that grammars choose from, which takes a while. None: the model serves no grammars."""


class CheckpointSource:
    """The folder or GGUF file of a model, as runtime.loading.resolve returns it."""

    def __init__(self, path: Path) -> None:
        """Raises CallboardError if the checkpoint is damaged or its model is not supported."""
        self.path, self.checkpoint = path, open_checkpoint(path)
        self.spec, self.weight_map = load_spec(self.checkpoint.config)
        self.eos_token_ids = self.checkpoint.eos_token_ids
        if (bad := next((i for i in self.eos_token_ids if not 0 <= i < self.spec.vocab_size), None)) is not None:
            raise CallboardError(
                f"{path} names the end-of-sequence id {bad}, which is not in its vocabulary of {self.spec.vocab_size}; "
                "correct eos_token_id in its config.json or generation_config.json."
            )

    @property
    def fingerprint(self) -> str:
        return self.checkpoint.fingerprint

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        return Decoder.load(self.checkpoint, spec, self.weight_map, numerics, max_model_len, communicator)

    def kv_scales(self) -> torch.Tensor | None:
        return read_kv_scales(self.checkpoint, self.spec)

    def vocabulary_reader(self, info: ModelInfo) -> Callable[[], Vocabulary]:
        return lambda: Vocabulary.of(Tokenizer.load(self.path), info)


@dataclass(frozen=True, slots=True)
class DummySource:
    """Seeded random weights, for tests and benchmarks. Without a vocabulary the model serves no grammars."""

    spec: DecoderSpec
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: Vocabulary | None = None

    @property
    def fingerprint(self) -> str:
        return f"dummy-{self.seed}-{self.spec}"

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        return Decoder.dummy(spec, numerics, max_model_len, self.seed, communicator)

    def kv_scales(self) -> None:
        return None

    def vocabulary_reader(self, info: ModelInfo) -> Callable[[], Vocabulary] | None:
        vocabulary = self.vocabulary
        return None if vocabulary is None else lambda: vocabulary

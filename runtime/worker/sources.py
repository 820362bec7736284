"""ModelSource: where a runner's model comes from, the files of a checkpoint or random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from runtime.base.config import HEAD, MTP, EngineConfig
from runtime.base.images import Image, ImageInfo
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.pooling import Pooling
from runtime.base.model.sharding import Part
from runtime.base.model.tower_spec import TowerSpec
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.pooling import PoolingFiles, read_pooling
from runtime.loading.resolve import resolve
from runtime.media.rule import ImageRule
from runtime.models import CLASSIFIER
from runtime.models.checkpoint_model import checkpoint_model
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import draw_decoder, load_decoder
from runtime.models.families import phi
from runtime.models.heads.assistant_files import assistant_files, is_assistant
from runtime.models.heads.build import DrawnHead
from runtime.models.heads.eagle_files import folder_head
from runtime.models.heads.find import checkpoint_head
from runtime.models.heads.head import DraftHead
from runtime.models.kv_scales import read_kv_scales
from runtime.models.towers.specs import tower_spec
from runtime.models.towers.tower import draw_tower, load_tower
from runtime.models.towers.tower_tensors import tower_tensors
from runtime.models.weight_map import WeightMap
from runtime.quant.weight_format import TensorSource
from runtime.text.tokenizer import Tokenizer
from runtime.text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class ModelSource(Protocol):
    """A model that describes itself before its weights are read, so that memory can be planned."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def weight_map(self) -> WeightMap:
        """The names of the model's linear maps in checkpoints and adapters."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def fingerprint(self) -> str:
        """Identifies these weights, on any machine."""

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        """Read the weights. `spec` is this source's, perhaps with weights in other encodings, or one rank's share."""

    @property
    def tower(self) -> TowerSpec | None:
        """The model's image encoder; None for a model that takes no images."""

    @property
    def image_token_id(self) -> int:
        """The token that stands in a prompt for each embedding of an image."""

    def load_tower(self, numerics: Numerics) -> Tower:
        """Read the image encoder's weights."""

    def pooling(self, wanted: str) -> Pooling | None:
        """How this model makes vectors of prompts, by the setting `pooling`; None if it makes none."""

    def classifier(self, wanted: str, device: torch.device) -> torch.Tensor | None:
        """[num_labels, hidden] float32, which makes scores of hidden states; None if the model makes none."""

    def kv_scales(self) -> torch.Tensor | None:
        """[num_layers, 2 (k, v), num_kv_heads] of an fp8 KV cache; None if all are 1."""

    def head(self, draft: str | None, layers: tuple[int, ...] | None = None) -> HeadSource | None:
        """The head that the setting `draft` names; None if it names none.

        `layers` replaces the ids in its config.json.
        Raises CallboardError for a head that the model cannot have."""

    def vocabulary_reader(self, info: ModelInfo) -> Callable[[], Vocabulary] | None:
        """A function that reads the tokens for grammars, which takes a while; None if the model serves no grammars."""


class HeadSource(Protocol):
    """A head that drafts within its target's steps. It describes itself before its weights are read."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def fingerprint(self) -> str:
        """Identifies these weights, on any machine."""

    def load(
        self, target: Decoder, spec: HeadSpec, num_positions: int, updated: TensorSource | None = None
    ) -> DraftHead:
        """Read the weights. `spec` is this source's, perhaps with weights in other encodings, or one rank's share.

        A head in the target's checkpoint reads them from `updated` if given: the tensors, with updates over them."""


class Tower(Protocol):
    """An image encoder with its weights."""

    def encode(self, image: Image, upload: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor:
        """[num_embeddings, TowerSpec.width] in the compute dtype. `upload` copies pixels to the device."""


def image_info(source: ModelSource, config: EngineConfig) -> ImageInfo | None:
    """What a model takes of images by `config`, which is `sized_for` a device; None if it takes none."""
    if config.images == "off" or source.tower is None:
        return None
    assert config.max_image_tokens is not None, "`config` is not sized for a device"
    stays_whole, pool_rows = source.spec.whole_images, config.image_pool_tokens
    return ImageInfo(source.image_token_id, pool_rows, config.max_image_tokens, stays_whole)


class CheckpointSource:
    """The folder or GGUF file of a model, as runtime.loading.resolve returns it."""

    def __init__(self, path: Path) -> None:
        """Raises CallboardError if the checkpoint is damaged or its model is not supported."""
        self.path, self.checkpoint = path, open_checkpoint(path)
        self._tensors: TensorSource = self.checkpoint
        self.spec, self.weight_map = checkpoint_model(self.checkpoint.config, self.checkpoint)
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
        # A rank reads only its part of each tensor.
        is_whole = spec.shard.size == 1 and self._tensors is self.checkpoint
        with self.checkpoint.reading_ahead(self.weight_map.unread) if is_whole else nullcontext():
            return load_decoder(self._tensors, spec, self.weight_map, numerics, max_model_len, communicator)

    @cached_property
    def tower(self) -> TowerSpec | None:
        spec, tensors = tower_spec(self.checkpoint.config), self.checkpoint
        if spec is None or (rule := self._image_rule) is None:
            return None
        if all(name in tensors for name in tower_tensors(tensors.names(), spec).values()):
            return replace(spec, mean=rule.mean, std=rule.std)
        logger.warning("%s lacks tensors of its image encoder; it takes no images", self.path)
        return None

    @cached_property
    def _image_rule(self) -> ImageRule | None:
        return self.checkpoint.image_rule

    @property
    def image_token_id(self) -> int:
        assert self._image_rule is not None
        return self._image_rule.token_id

    def load_tower(self, numerics: Numerics) -> Tower:
        assert self.tower is not None
        return load_tower(self._tensors, self.tower, numerics)

    def with_tensors(self, tensors: TensorSource) -> CheckpointSource:
        """This model with the tensors of updates."""
        updated = copy(self)
        updated._tensors = tensors
        return updated

    def pooling(self, wanted: str) -> Pooling | None:
        found = self._pooling_files(wanted)
        if found is None or found.pooling.num_labels != 1 or len(found.label_ids) == 1:
            return None if found is None else found.pooling
        is_qwen3 = str(self.checkpoint.config["architectures"][0]).startswith("Qwen3")
        return replace(found.pooling, pairs="qwen3") if is_qwen3 else found.pooling

    def classifier(self, wanted: str, device: torch.device) -> torch.Tensor | None:
        found, tensors, names = self._pooling_files(wanted), self._tensors, self.weight_map.names
        if found is None or not found.pooling.num_labels:
            return None
        if not found.label_ids:
            return tensors.tensor(CLASSIFIER, torch.float32, device)
        head = names["embed" if self.spec.tied_head else "head"]
        head = head if head in tensors else self.weight_map.base + head
        true, *false = (tensors.tensor(head, torch.float32, device, Part(0, i, i + 1)) for i in found.label_ids)
        return true - false[0] if false else true

    def _pooling_files(self, wanted: str) -> PoolingFiles | None:
        if wanted == "none":
            return None
        if wanted in ("last", "mean"):
            return PoolingFiles(Pooling("last" if wanted == "last" else "mean", normalized=True))
        if wanted == "yes_no":
            ids = Tokenizer.load(self.path).ids()
            if missing := [word for word in ("yes", "no") if word not in ids]:
                raise CallboardError(f"pooling is yes_no, but {missing[0]!r} is not one token of this model.")
            return PoolingFiles(Pooling("last", num_labels=1), (ids["yes"], ids["no"]))
        if CLASSIFIER in self.checkpoint:
            return PoolingFiles(Pooling("last", num_labels=self.checkpoint.shape(CLASSIFIER)[0]))
        return read_pooling(self.path, self.checkpoint.config)

    def kv_scales(self) -> torch.Tensor | None:
        return read_kv_scales(self.checkpoint, self.spec)

    def head(self, draft: str | None, layers: tuple[int, ...] | None = None) -> HeadSource | None:
        if draft == MTP:
            config, tensors = self.checkpoint.config, self._tensors
            return checkpoint_head(config, tensors, self.fingerprint, self.spec, self.weight_map)
        name = self.weight_map.names["embed"]
        name = name if name in self._tensors else self.weight_map.base + name
        return folder_head_of(draft, self.spec, (self._tensors, name), layers)

    def vocabulary_reader(self, info: ModelInfo) -> Callable[[], Vocabulary]:
        return lambda: Vocabulary.of(Tokenizer.load(self.path), info)


def folder_head_of(
    draft: str | None,
    target: DecoderSpec,
    embedding: tuple[TensorSource, str] | None = None,
    layers: tuple[int, ...] | None = None,
) -> HeadSource | None:
    """The head in the folder that the setting `draft` names; None if it names none.

    `embedding` is the target's; `layers` as for ModelSource.head."""
    if draft is None or not draft.startswith(HEAD):
        return None
    own = open_checkpoint(resolve(draft.removeprefix(HEAD), progress=False))
    if is_assistant(own.config):
        return assistant_files(own.config, own, own.fingerprint, target)
    return folder_head(own.config, own, own.fingerprint, target, embedding, layers)


@dataclass(frozen=True, slots=True)
class DummySource:
    """Seeded random weights, for tests and benchmarks. Without a vocabulary the model serves no grammars."""

    spec: DecoderSpec
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: Vocabulary | None = None
    num_labels: int = 0  # a classifier's labels
    weight_map: WeightMap = phi.WEIGHT_MAP  # names for fused maps and for Llama's maps
    tower: TowerSpec | None = None
    image_token_id: int = 1
    draft_head: HeadSpec | None = None  # what draft=mtp names

    @property
    def fingerprint(self) -> str:
        return f"dummy-{self.seed}-{self.spec}"

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        return draw_decoder(spec, numerics, max_model_len, self.seed, communicator)

    def load_tower(self, numerics: Numerics) -> Tower:
        assert self.tower is not None
        return draw_tower(self.tower, numerics, self.seed)

    def pooling(self, wanted: str) -> Pooling | None:
        if self.num_labels:
            return Pooling("last", num_labels=self.num_labels)
        return Pooling("last" if wanted == "last" else "mean") if wanted in ("last", "mean") else None

    def classifier(self, wanted: str, device: torch.device) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.num_labels, self.spec.hidden_size
        return torch.randn(shape, generator=generator).to(device) if self.num_labels else None

    def kv_scales(self) -> None:
        return None

    def head(self, draft: str | None, layers: tuple[int, ...] | None = None) -> HeadSource | None:
        return None if self.draft_head is None or draft != MTP else DrawnHead(self.draft_head, self.seed)

    def vocabulary_reader(self, info: ModelInfo) -> Callable[[], Vocabulary] | None:
        vocabulary = self.vocabulary
        return None if vocabulary is None else lambda: vocabulary

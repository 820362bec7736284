"""Interfaces for the features that plug into a runner. A runner without extras samples the same tokens.

    StepExtra       outputs other than tokens        Pooler (vectors), PromptScorer (log-probabilities of prompts),
                                                     ExpertRecorder (experts of tokens)
    MaskSource      masks of the tokens to sample    GrammarState
    ImageEncoder    embeddings of images             RunnerImages
    BlockCopier     blocks in a tier of host memory  CpuCopier, GpuCopier
    AdapterLoader   weights of adapters (LoRA)       RunnerAdapters
    StepHead        draft tokens by a head           CpuHead, GpuHead
    SleepMemory     memory given back in sleep       RunnerMemory
    WeightUpdates   new weights of a running model   RunnerUpdates

`runtime/features`, `runtime/updates`, `runtime/tier` and `runtime/worker/heads` implement them.
`runtime/assembly/runner.py` hands them to `ModelRunner` as `RunnerExtras`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model_info import ModelInfo
from runtime.base.shard import Shard
from runtime.base.weight_parts import GroupInfo, WeightPart
from runtime.base.weight_version import WeightVersion
from runtime.core.plan import Encoding, NewSlot, StepPlan, StepResult
from runtime.kernels.numerics import Numerics
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import Embeds, Taps
from runtime.quant.weight_format import TensorSource
from runtime.worker.kv_cache import KVCache
from runtime.worker.ranks.rank_group import RankGroup
from runtime.worker.sources import ModelSource

_NOTHING = torch.empty(0)
ReportWriter = Callable[[StepResult], None]  # writes one output into the result, once the step's data is on the host


class Needs(IntEnum):
    """The hidden states that an extra needs from a step."""

    NOTHING = 0
    SAMPLED_STATES = 1  # states of tokens before samples: launched steps and graphs with prompts have them
    ALL_STATES = 2  # every token's states: only launched steps have them


class Copies(Protocol):
    """Copies between the host and the device of a step."""

    def upload(self, *arrays: np.ndarray) -> torch.Tensor:
        """Arrays of one type, end to end, on the device; a single array keeps its shape."""

    def download(self, x: torch.Tensor) -> torch.Tensor:
        """`x` on the host. Its content is valid from the end of the step until the result is made."""


@dataclass(slots=True)
class StepWork:
    """One step while it is computed. Each stage reads what earlier stages have written here."""

    plan: StepPlan
    slots: Int32s  # [num_samples] slots of the samples, in the plan's order
    positions: Int32s  # [num_samples] positions of the tokens to be sampled
    tokens: torch.Tensor  # int32, flat: the token at `slot * stride + position`
    stride: int
    copies: Copies
    hidden: torch.Tensor = _NOTHING  # [num_tokens, hidden]; empty if the step runs as graphs
    last: np.ndarray | None = None  # [num_rows] each row's last token in `hidden`; None if it runs as graphs
    taps: Taps | None = None  # states for a head that reads layers' inputs
    sampled_states: torch.Tensor = _NOTHING  # [num_samples, hidden] states of the tokens before samples
    logits: torch.Tensor = _NOTHING  # [num_samples, vocab], or a rank's part
    token_ids: torch.Tensor = _NOTHING  # [num_samples]
    masks: TokenMasks | None = None  # the samples'
    reports: list[ReportWriter] = field(default_factory=list)


class SlotKeeper(Protocol):
    """Keeps facts about the requests in slots."""

    def reset(self) -> None:
        """Forget all requests."""

    def add(self, new: NewSlot) -> object:
        """A request enters its slot."""

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""


class StepExtra(SlotKeeper, Protocol):
    """An output other than tokens. It keeps state for the slots of requests that want it."""

    def describe(self, info: ModelInfo) -> ModelInfo:
        """`info` with the requests that the model serves by this extra."""

    def needs(self, plan: StepPlan) -> Needs:
        """The hidden states that it needs from this step."""

    def begin(self, plan: StepPlan) -> None:
        """The forward pass of a step begins, which runs kernel by kernel."""

    def run(self, work: StepWork) -> None:
        """Compute the output of this step, if any, and append its report. Runs before the step samples."""


class ImageEncoder(Protocol):
    """Encodes images, and keeps their embeddings in a pool of rows. The engine assigns the rows."""

    def open(self) -> None:
        """Allocate the pool."""

    def describe(self, info: ModelInfo) -> ModelInfo:
        """`info` with the images that the model takes."""

    def smallest(self) -> Encoding:
        """An image with one embedding, in the pool's first row."""

    def embeds(self, plan: StepPlan, firsts: np.ndarray, copies: Copies) -> Embeds | None:
        """Encode the plan's images, then return the embeddings of its rows' tokens; None if they have none.

        `firsts` [num_rows] has the index of each row's first token in the forward pass."""


class BlockCopier(Protocol):
    """Copies blocks and states between a rank's cache and a tier of host memory, which outlives the process."""

    def describe(self, info: ModelInfo) -> ModelInfo:
        """`info` with the tier."""

    def open(self, cache: KVCache, staging_bytes: int, handles: Sequence[bytes], barrier: Callable[[], None]) -> None:
        """Allocate up to `staging_bytes` on a GPU for copies. `handles` are the ranks', and `barrier` waits for all."""

    def ready(self) -> None:
        """The runner is ready for plans: what would slow its start down may begin in the background."""

    def start(self, plan: StepPlan) -> None:
        """Begin the plan's transfers. Stores read blocks as earlier plans leave them, and later plans may change them.

        Called in the order of plans, before the plan's rows."""

    def report(self, result: StepResult, wait: bool) -> None:
        """Write the numbers of ended transfers into a result, each into one. With `wait`, wait briefly for the next."""

    def reset(self) -> None:
        """Wait for the transfers in flight, and forget them."""

    def close(self) -> None:
        """Leave the tier. No plan follows."""


Take = Callable[[Any, Any], Any]  # returns an old object with a new one's weights, or the new one


class StepHead(SlotKeeper, Protocol):
    """A head that drafts tokens in a runner's steps. Each kind of steps calls it in its own way."""

    def drafts_of(self, plan: StepPlan) -> Int32s:
        """The plan's draft tokens, with the head's in place of DEVICE_DRAFT; -1 for a missing one."""


class DraftingHead(Protocol):
    """A head with its weights, from which steps get their StepHead."""

    spec: HeadSpec  # this rank's
    whole: HeadSpec
    stored: HeadSpec  # the whole head as its files have it, before it is quantized
    fingerprint: str

    def load(self, decoder: Decoder, num_positions: int, updated: TensorSource | None = None) -> None:
        """Read the weights, after the decoder's. `updated` has the checkpoint's tensors with updates over them."""

    def follow(self, updated: TensorSource | None, take: Take) -> None:
        """The target has new weights. `updated` has the head's, if the update brings some."""

    def describe(self, info: ModelInfo) -> ModelInfo:
        """`info` with the head."""

    def for_steps(self, steps: Any) -> Any:
        """The StepHead for these Steps."""


class TokenAutomata(Protocol):
    """Automata on the device, which rule out tokens and follow the sampled ones without the host."""

    def mask(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Rule out tokens in `logits`; `rows` have the layout of kernels/sampling/automata.py."""

    def advance(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Follow the sampled tokens."""


class TokenMasks(Protocol):
    """The tokens that the samples of one step may be. Samples without a mask may be any token."""

    numbers: Int32s  # [n] numbers of samples with a mask, rising
    words: Int32s  # [n, num_words] a bit for each token
    failed: Int32s  # numbers of samples that are not drawn
    tracked: Int32s  # rows that automata on the device follow, in the layout of kernels/sampling/automata.py

    @property
    def automata(self) -> TokenAutomata | None:
        """Those of `tracked`; None on a CPU."""

    def report(self, result: StepResult) -> None:
        """Write into the result which requests began, failed or must be planned again."""


class MaskSource(SlotKeeper, Protocol):
    """Follows outputs token by token and makes the masks of each step."""

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """The masks for the plan's samples; None if all may be any token."""

    def sampled(self, masks: TokenMasks, tokens: Callable[[], Int32s]) -> None:
        """`tokens()` waits for the samples, [num_samples], of the step that had these masks."""

    def open(self, info: ModelInfo, asynchronous: bool, large_step_us: float) -> None:
        """The runner is warm. `large_step_us` is the time of a decode step with many rows; infinite if not measured."""


class AdapterLoader(Protocol):
    """Loads adapters next to a decoder's weights."""

    def load(self, index: int, path: str, digest: str = "") -> None:
        """Load the adapter in a folder at an index. Raises CallboardError, before anything has changed."""


class MemoryPart(Protocol):
    """Memory of the device that can be given back and taken again."""

    def use(self) -> AbstractContextManager[None]:
        """A context in which this thread allocates on the device from this memory. Used once."""

    def for_graphs(self) -> tuple[int, int]:
        """The id of the pool in which CUDA graphs have this memory."""


class SleepMemory(Protocol):
    """All memory that a runner gives back while it sleeps."""

    @property
    def weights(self) -> MemoryPart: ...

    @property
    def cache(self) -> MemoryPart: ...

    @property
    def graphs(self) -> MemoryPart: ...

    def weights_changed(self) -> None:
        """The weights have changed since memory was last given back."""

    def give_back(self) -> None:
        """Give back the memory that is still here."""

    def take_again(self) -> None:
        """Take all of it again. Raises OSError if there is too little, and then all is given back."""


class RunnerParts(NamedTuple):
    """The parts of a runner from which extras are made: its weights are read, and it has run no step."""

    config: EngineConfig
    source: ModelSource
    decoder: Decoder
    num_slots: int
    is_draft: bool


class UpdateParts(NamedTuple):
    """What weight updates need from a runner before its weights are read."""

    config: EngineConfig
    source: ModelSource
    spec: DecoderSpec  # this rank's, with its weights' encodings
    numerics: Numerics
    least: Callable[[int], int]  # the ranks' smallest value; all call it at the same time
    head: DraftingHead | None = None


# Called when the decoder has new weights; with their source if the classifier or the image encoder has changed, too.
WeightsChanged = Callable[[ModelSource | None, Take], None]


class WeightUpdates(Protocol):
    """New weights of a running model. Errors are CallboardErrors."""

    version: WeightVersion  # version of the weights that the runner serves
    source: ModelSource  # the stored version, which the runner loads
    head_tensors: TensorSource | None  # the stored version's, for a head in the checkpoint; None for random weights
    draft_head: str  # what the last update did to the head: updated, partly or kept; empty without one

    def open(
        self, decoder: Decoder, max_model_len: int, room: int, changing: Callable[[], None], changed: WeightsChanged
    ) -> None:
        """The runner has loaded `source`. `room` has the bytes of the device that are planned for updates.

        `changing` and `changed` are called between two steps, before and after the decoder takes new weights."""

    def connect(self, group: GroupInfo) -> None:
        """Join a trainer's NCCL group. Waits until all have joined."""

    def disconnect(self) -> None:
        """Leave the trainer's group."""

    def receive(self, part: WeightPart) -> None:
        """Stage a part's tensors while steps run in another thread. After an error, none is staged."""

    def check(self) -> bool:
        """True if the staged tensors are all of the model's. Raises CallboardError if they cannot be applied."""

    def apply(self, version: WeightVersion) -> None:
        """Take the staged weights. No step runs meanwhile."""

    def store(self) -> None:
        """Write the applied weights to the store while steps run in another thread."""

    def discard(self) -> None:
        """Drop the staged tensors. A receive in another thread ends with an error."""


@runtime_checkable
class ReadsWeights(Protocol):
    """An extra with its own weights, in addition to the decoder's."""

    def read_weights(self, source: ModelSource, take: Take) -> None:
        """Read them again. `take` keeps them in their memory where that matters."""


class KernelsAhead(Protocol):
    """Kernels that other processes compile while a runner reads its weights."""

    def wait(self) -> None:
        """Wait until all are compiled, or have failed. Never raises, because a launch compiles a missing kernel."""


class KernelParts(NamedTuple):
    """A runner on a GPU, before its weights are read."""

    config: EngineConfig  # sized for the device
    source: ModelSource
    numerics: Numerics
    shard: Shard
    is_draft: bool
    head: HeadSpec | None  # DraftingHead.stored


@dataclass(frozen=True, slots=True)
class RunnerExtras:
    """The features that plug into a runner. The defaults plug in nothing."""

    outputs: Sequence[Callable[[RunnerParts], StepExtra]] = ()
    masks: Callable[[RunnerParts], MaskSource] | None = None
    images: Callable[[RunnerParts], ImageEncoder | None] | None = None
    tier: Callable[[RunnerParts], BlockCopier | None] | None = None
    adapters: Callable[[RunnerParts], AdapterLoader] | None = None
    head: Callable[[EngineConfig, ModelSource, DecoderSpec, Numerics], DraftingHead | None] | None = None
    sleep_memory: Callable[[torch.device], SleepMemory] | None = None
    updates: Callable[[UpdateParts], WeightUpdates] | None = None
    kernels: Callable[[KernelParts], KernelsAhead | None] | None = None
    group: Callable[[EngineConfig, DecoderSpec, Numerics], RankGroup] = RankGroup
    row_lens: Sequence[int] = ()  # tokens in a row, besides one, in frequent decode steps (speculation)


NO_EXTRAS = RunnerExtras()

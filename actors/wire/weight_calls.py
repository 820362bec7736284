"""Calls about an engine's weights, and their answers.

    Pause        hold, finish or abort the requests, then run no step
    Resume       run steps again
    GetState     the version, and whether an update or a pause is on
    Connect      join a trainer's NCCL group; Disconnect leaves it
    Start        open an update
    Receive      stage its parts, while steps go on
    Check        the facts that must be equal on all engines before an update ends
    Finish       apply the update; the answer is the new state
    Discard      drop the open update, and abort a part that is received
    Rename       name the version

A front sends each call to all engines (actors/front/weight_calls.py). `Pause` travels over the links, so that an engine
notices when its caller is gone. The other calls are Ray's."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from runtime.base.weight_parts import TensorInfo, WeightPart

MAX_LEASE_S = 31_536_000.0  # a year

A = TypeVar("A")


class WeightCall(msgspec.Struct, Generic[A], frozen=True):
    """A call about weights, with an answer of type A."""


class WeightState(msgspec.Struct, frozen=True):
    """The weights of one engine."""

    paused: bool
    version: str  # its name
    serial: int  # number of updates so far
    stored: bool  # restarted runners would have this version
    updating: bool  # an update is open
    world_size: int  # ranks
    draft_head: str = ""  # what the last update did to a head that drafts: updated, partly or kept; empty without one


class Applied(msgspec.Struct, frozen=True):
    """An update that a rank has taken."""

    fingerprint: str  # the model's new one
    draft_head: str = ""


class Checked(msgspec.Struct, frozen=True):
    """An open update and the version before it, on one engine."""

    update_id: str
    num_parts: int
    is_complete: bool  # all the model's tensors are staged
    serial: int
    name: str
    identity: str


class ObjectsPart(msgspec.Struct, frozen=True):
    """Tensors in Ray's object store. Each object is a dict: name -> tensor, array or StoredTensor."""

    refs: list[Any]  # ObjectRefs


class ActorPart(msgspec.Struct, frozen=True):
    """Tensors of an actor. Its method returns a list with one tensor for each requested Slice."""

    trainer: Any  # its handle
    method: str
    tensors: list[TensorInfo]


SentPart = WeightPart | ObjectsPart | ActorPart
UpdateInfo = dict[str, Any] | list[dict[str, Any]]  # vLLM's description of parts


class Pause(WeightCall[None], array_like=True, tag=17, frozen=True):
    """Compute no step until a resume or the end of the lease (actors/engine/sleep.py). The engine then answers Done.

    A pause that has not begun ends with its connection."""

    number: int = 0
    pause_id: str = ""  # the same for all engines
    mode: Literal["keep", "wait", "abort"] = "abort"  # what happens to running requests
    kv: Literal["recompute", "keep"] = "recompute"  # running requests' KV, if the weights change meanwhile
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)] | None = None  # None for trainer_timeout_s
    joins: bool = False  # it began before the engine: one that was paused or resumed ignores it


class Resume(WeightCall[None], frozen=True):
    """Run steps again."""


class GetState(WeightCall[WeightState], frozen=True):
    """Return the state."""


class Connect(WeightCall[None], frozen=True):
    """Join a trainer's group."""

    init_info: dict[str, Any]  # vLLM's
    rank_offset: int = 0  # place of the engine's first rank; the front sets it


class Disconnect(WeightCall[None], frozen=True):
    """Leave the trainer's group."""


class Start(WeightCall[None], frozen=True):
    """Open an update."""

    update_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))


class Receive(WeightCall[None], frozen=True):
    """Stage parts of the open update."""

    parts: list[SentPart] | None = None
    update_info: UpdateInfo | None = None  # replaces `parts`; the engine parses it, since it may be long


class Check(WeightCall[Checked], frozen=True):
    """Return the facts that must be equal on all engines."""


class Finish(WeightCall[WeightState], frozen=True):
    """Apply the open update."""

    weight_version: str | None = None  # its name; None for the number of updates so far
    wait_stored: bool = False  # answer when restarted runners would have the version, too
    kv: Literal["recompute", "keep"] | None = None  # running requests' KV; None for the pause's choice
    update_id: str | None = None  # refuse another update than this; the front sets it
    newest: tuple[int, str] | None = None  # serial and name that precede the update on all engines; the front sets it


class Discard(WeightCall[None], frozen=True):
    """Drop the open update."""

    update_id: str | None = None  # only this one


class Rename(WeightCall[None], frozen=True):
    """Name the version."""

    new_version: str

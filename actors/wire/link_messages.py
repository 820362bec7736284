"""The messages between a front and an engine on their link: msgpack, one message a frame (transport.py).

    front -> engine   Submit, Abort, AbortById, KeyedUpdate, Adapters, Follow, ResetPrefixCache, Sleep
                      Pause, CancelPause, Heartbeat, FrontFigures
    engine -> front   Tokens (at most one a step), Refused, Status
                      CacheUpdate (to followers: at most one a step and one in 20 ms)
                      Heartbeat, Snapshot (answers FrontFigures), Done (answers ResetPrefixCache, Sleep and Pause)

A stream is one live request. The front chooses its number, which is unique on the connection. The transport keeps order
and loses nothing while the connection lives. When it breaks, the engine aborts the connection's requests. The front
then resubmits each, with the tokens that it has received, to another engine or the next one: each token is delivered
exactly once (C8)."""

from __future__ import annotations

import secrets
from dataclasses import replace

import msgspec
from msgspec.structs import replace as replace_fields

from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.engine_client import Refusal, RefusalCode, WeightsRefused
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.weight_calls import Pause
from runtime.base.reports import Report, TokenLogprobs
from runtime.base.types import CallboardError, Request
from runtime.base.weight_version import WeightVersion
from runtime.policy.engine_load import EngineLoad

# A front sends a heartbeat every HEARTBEAT_S, and the engine answers each. An engine that misses LOST_AFTER_BEATS is
# lost, and its streams move to other engines: after 1.2 to 1.4 s if it was cut off. A process that pauses for less than
# 1.2 s is not lost. More patience would lengthen every real outage. A needless move recomputes only what the other
# engine has not cached of each prefix.
HEARTBEAT_S = 0.2
LOST_AFTER_BEATS = 6
LEASE_S = 15.0  # a front that is silent for longer has its requests aborted


class Submit(msgspec.Struct, array_like=True, tag=1):
    """Serve `request` as `stream`; its request_id is for logs and aborts.

    A resumed request, which an engine has accepted before, skips the queue's limits. The request names its grammar
    and its images by their keys. A KeyedUpdate brought them on this connection before (features/keyed_store.py)."""

    stream: int
    request: Request
    resumed: bool
    repeats: bool = False  # tokens and prediction are left out: they equal the connection's last Submit's


class _SubmitHead(msgspec.Struct, array_like=True, tag=1):
    stream: int


class SharedPrompts:
    """Leaves out of a Submit the tokens and the prediction that it shares with the one before it.

    A request's choices share them by identity. They cross a connection once, and are shared in the engine too.
    Each end of a connection has one instance, and both process the same Submits in the same order."""

    def __init__(self) -> None:
        self._last: tuple[list[int], tuple[int, ...]] | None = None  # tokens and prediction

    def sent(self, message: Submit) -> None:
        """Note a message that is on its way; one that could not be encoded is not."""
        self._last = message.request.token_ids, message.request.prediction

    def reduced(self, message: Submit) -> Submit:
        """The message to send."""
        request, last = message.request, self._last
        if last is None or last[0] is not request.token_ids or last[1] is not request.prediction:
            return message
        return Submit(message.stream, replace(request, token_ids=[], prediction=()), message.resumed, repeats=True)

    def restored(self, message: Submit) -> Submit:
        """Undo `reduced`. Raises CallboardError without a Submit to repeat."""
        if not message.repeats:
            self._last = message.request.token_ids, message.request.prediction
            return message
        if self._last is None:
            raise CallboardError("It repeats a request that was not read.")
        token_ids, prediction = self._last
        request = replace(message.request, token_ids=token_ids, prediction=prediction)
        return Submit(message.stream, request, message.resumed)

    def forget(self) -> None:
        """The last Submit could not be encoded or read, so that none may repeat it."""
        self._last = None


def client_id(request_id: str) -> str:
    """Return the ID in the KIND-ID-INDEX of a choice: the client's own if it gave one."""
    return request_id.rpartition("-")[0].partition("-")[2]


def owner_of(request_id: str) -> str:
    """Return the owner of the API key in [OWNER/]KIND-ID-INDEX; empty without keys."""
    return request_id.rpartition("/")[0]


class Abort(msgspec.Struct, array_like=True, tag=2):
    """Drop `stream`: its reader is gone. An unknown stream is ignored."""

    stream: int


class Heartbeat(msgspec.Struct, array_like=True, tag=3):
    """Proves that the sender is alive.

    The engine answers from the thread that reads the front's requests, so a frozen process does not answer. The engine
    itself detects a step thread that hangs."""


class AbortById(msgspec.Struct, array_like=True, tag=7):
    """End any front's request, or all its choices. An unknown id is ignored."""

    name: str

    def means(self, request_id: str) -> bool:
        """True if a choice's id, [OWNER/]KIND-ID-INDEX, belongs to the named request.

        A name is a choice's id, KIND-ID, or the client's own ID. A name without an owner matches every owner."""
        owner, _, name = self.name.rpartition("/")
        owner_of, _, choice = request_id.rpartition("/")
        return name in (choice, choice.rpartition("-")[0], client_id(choice)) and owner in ("", owner_of)

    def client_ids(self) -> tuple[str, ...]:
        """Every value of `client_id` that a named request can have."""
        name = self.name.rpartition("/")[2]
        return name, name.partition("-")[2], client_id(name)


class Ended(msgspec.Struct, array_like=True):
    """`stream` ended with FinishReason `reason`, after its last token."""

    stream: int
    reason: int
    stop_token_id: int | None
    error: str


class Tokens(msgspec.Struct, array_like=True, tag=4):
    """One step's output for one front, in int32 columns: `streams[i]` gained `token_ids[i]`."""

    streams: bytes = b""
    token_ids: bytes = b""
    ended: list[Ended] = []
    started: list[tuple[int, int, float, float]] = []  # (stream, cached tokens, s queued, s in prefill), once each
    logprobs: dict[int, TokenLogprobs] = {}  # key: index in the columns
    sampled_at: float = 0.0  # seconds on the engine's wall clock
    reports: list[tuple[int, Report]] = []  # (stream, report), before its tokens and its end
    accepted: list[tuple[int, bool]] = []  # (stream, whether it has a slot): once when queued, once when admitted


class FrontFigures(msgspec.Struct, array_like=True, tag=8):
    """The front's counts since its last report. The answer is a Snapshot."""

    figures: MetricValues


class Refused(msgspec.Struct, array_like=True, tag=5):
    """`stream` was not accepted, or timed out in the queue."""

    stream: int
    message: str
    reason: Refusal
    retry_after_s: float = 0.0  # set with Refusal.BUSY


class WaitLimits(msgspec.Struct, array_like=True, frozen=True):
    """The limits of requests that wait at a front for an engine. None is unlimited."""

    max_requests: int
    max_tokens: int  # tokens in all together; a single one may have more
    max_bytes: int  # bytes in all together, each grammar and image counted once; a single one may have more
    timeout_s: float | None
    trainer_timeout_s: float | None = None  # limit for a request that waits for weights


class Status(msgspec.Struct, array_like=True, tag=6):
    """The engine's health, adapters and weights, sent when a front connects and when they change.

    A draining engine finishes its requests and takes no new ones."""

    reason: str | None  # why it cannot serve; None if it is healthy
    draining: bool = False
    adapters: list[AdapterState] = []  # all in a connection's first Status, then changed ones
    is_asleep: bool = False  # its requests wait
    dropped: list[str] = []  # names that the engine has forgotten
    kept: dict[str, str] = {}  # folders of all adapters that resumed streams may use, by digest
    fingerprint: str = ""  # identifies the model with its current weights
    weights: WeightVersion | None = None  # version for the tokens that follow; None without weight_updates
    pause: Pause | None = None  # the current one
    limits: WaitLimits | None = None  # limits for requests that wait at the front


class Adapters(msgspec.Struct, array_like=True, tag=12):
    """News of adapters for the engine. The engine answers with a Status if its own state changes."""

    entries: list[AdapterEntry] = []  # newer than the engine's
    needs: dict[str, str] | None = None  # folders of the front's streams' adapters, by digest; None if unchanged


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=13):
    """Evict all cached blocks that no request holds. The engine answers Done; followers get a CacheUpdate."""

    number: int  # chosen by the front; repeated in the answer


class Sleep(msgspec.Struct, array_like=True, tag=15):
    """Sleep at a level (actors/engine/sleep.py), or wake up (0). The engine answers Done at that level.

    An engine that sleeps deeper already does not change."""

    number: int
    level: int


def checked(pause: Pause) -> Pause:
    """Return the pause with a new id unless it has one. Raises WeightsRefused if a field is wrong."""
    pause = replace_fields(pause, pause_id=pause.pause_id or secrets.token_hex(8))
    try:
        return msgspec.msgpack.decode(encode(pause), type=Pause)
    except msgspec.ValidationError as e:
        raise WeightsRefused(f"{pause} is not possible: {e}.", "bad_request") from e


class CancelPause(msgspec.Struct, array_like=True, tag=18):
    """Undo the pause with this id: its caller is gone, or another engine has refused it."""

    pause_id: str


class Done(msgspec.Struct, array_like=True, tag=14):
    """The engine has handled the ResetPrefixCache, the Sleep or the Pause with this number."""

    number: int
    error: str = ""  # why it failed; empty if it is done
    code: RefusalCode = "busy"  # why a Pause failed


class Follow(msgspec.Struct, array_like=True, tag=10):
    """Subscribe to the engine's CacheUpdates or, with False, unsubscribe. A subscription begins with a snapshot."""

    wanted: bool = True


class CacheUpdate(msgspec.Struct, array_like=True, tag=11):
    """The changes of an engine's prefix cache since the last update, and its load now.

    A block is named by the first KEY_BYTES of its hash (runtime/core/prefix_cache.py). Keys are concatenated,
    unordered."""

    number: int  # one more than the last update's; a snapshot repeats the last update's
    added: bytes  # int64 [n]: only the last change of each block counts
    evicted: bytes  # int64 [n]: may name blocks that were never added
    load: EngineLoad
    is_snapshot: bool = False  # `added` is the whole cache
    last_stream: int = 0  # the front's last Submit that `load` counts, by its stream; 0 if none


class EngineLoading(CallboardError):
    """The engine loads its model, and has an address only afterwards. The text names the current phase."""


# what the engine's step thread receives
FromFront = Submit | Abort | AbortById | Follow | Adapters | ResetPrefixCache | Sleep | Pause | CancelPause
FromEngine = Tokens | Refused | Status | Snapshot | Done | Heartbeat | CacheUpdate
encode = msgspec.msgpack.Encoder().encode
decode_from_front = msgspec.msgpack.Decoder(FromFront | Heartbeat | FrontFigures).decode
_decode_head = msgspec.msgpack.Decoder(_SubmitHead).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def submitted_stream(frame: bytes | bytearray) -> int | None:
    """Return the stream of a Submit with content that cannot be read; None for another message."""
    try:
        return _decode_head(frame).stream
    except msgspec.DecodeError:
        return None

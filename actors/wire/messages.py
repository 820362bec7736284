"""The messages between a front and an engine on their link: msgpack, one a frame (transport.py).

    front -> engine   GrammarUpdate, Submit, Abort, AbortById, Heartbeat, Report, Follow, Adapters, Forget, Sleep
    engine  -> front  Tokens (at most one a step), Refused, Status, Heartbeat, Snapshot and Done (the answers to a
                        Heartbeat, a Report, and a Forget or Sleep), CacheUpdate (to who follows: at most one a step
                        and 20 ms)

A stream is a number that the front chose for one live request, unique on its connection. The transport keeps order
and loses nothing while the connection lives; when it breaks, the engine aborts the connection's requests and the
front submits each, with the tokens that it has received, to another engine or to the next one that there is, so
tokens are delivered exactly once (C8).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.engine_client import Refusal
from actors.wire.metrics import MetricValues, Snapshot
from runtime.policy.engine_load import EngineLoad
from runtime.spec.types import CallboardError, GrammarUpdate, PromptLogprobs, Request, TokenLogprobs

# A front says that it is there, and the engine that it has heard it: every HEARTBEAT_S. An engine that has answered
# none of LOST_AFTER_BEATS is lost, and its streams move to others. So one that is cut off is lost after 1.2 to 1.4 s,
# and one whose process stands still for less than 1.2 s is not. More patience would make each real loss a longer pause;
# a needless one costs its streams no more than the computing of their prefixes, most of which is in the engine's cache.
HEARTBEAT_S = 0.2
LOST_AFTER_BEATS = 6
LEASE_S = 15.0  # a front that is silent for longer has its requests aborted


class Submit(msgspec.Struct, array_like=True, tag=1):
    """Serve `request` as `stream`; its request_id is for people and logs. One that an engine had accepted before is
    resumed: it skips the limits of the queue. It names its grammar by a key, whose text has come on this connection."""

    stream: int
    request: Request
    resumed: bool
    repeats: bool = False  # its tokens and prediction are left out: they are those of the connection's last Submit


class SharedPrompts:
    """Leaves out of a Submit the tokens and the prediction that it shares with the one before it.

    The choices of a request share them by identity. So they cross a connection once, and share them in the engine, too.
    Each end of a connection has one, and both see the same Submits in the same order."""

    def __init__(self) -> None:
        self._last: tuple[list[int], tuple[int, ...]] | None = None  # tokens and prediction

    def reduced(self, message: Submit) -> Submit:
        """The message to send."""
        request, last = message.request, self._last
        self._last = request.token_ids, request.prediction
        if last is None or last[0] is not request.token_ids or last[1] is not request.prediction:
            return message
        return Submit(message.stream, replace(request, token_ids=[], prediction=()), message.resumed, repeats=True)

    def restored(self, message: Submit) -> Submit:
        """The message that was reduced. Raises CallboardError if it repeats nothing."""
        if not message.repeats:
            self._last = message.request.token_ids, message.request.prediction
            return message
        if self._last is None:
            raise CallboardError("The first request on a link repeats another; its front must be restarted.")
        token_ids, prediction = self._last
        request = replace(message.request, token_ids=token_ids, prediction=prediction)
        return Submit(message.stream, request, message.resumed)


def client_id(request_id: str) -> str:
    """The ID in the KIND-ID-INDEX of a choice: the client's own, if it gave one."""
    return request_id.rpartition("-")[0].partition("-")[2]


class Abort(msgspec.Struct, array_like=True, tag=2):
    """Nobody reads `stream` any more; an unknown one is no error."""

    stream: int


class Heartbeat(msgspec.Struct, array_like=True, tag=3):
    """The sender is alive. The engine answers from the thread that reads the front's requests: what comes back has
    been through the process that must serve them, and a frozen one says nothing. A step thread that hangs is found by
    the engine itself."""


class AbortById(msgspec.Struct, array_like=True, tag=7):
    """End a request, or all choices of one, whichever front submitted it; an unknown id is no error."""

    name: str

    def means(self, request_id: str) -> bool:
        """The id of a choice is [OWNER/]KIND-ID-INDEX; a request goes by KIND-ID, or by its client's own ID, with its
        owner or, for who may end anybody's, without."""
        owner, _, name = self.name.rpartition("/")
        owner_of, _, choice = request_id.rpartition("/")
        return name in (choice, choice.rpartition("-")[0], client_id(choice)) and owner in ("", owner_of)

    def client_ids(self) -> tuple[str, ...]:
        """All that `client_id` can be of what is meant."""
        name = self.name.rpartition("/")[2]
        return name, name.partition("-")[2], client_id(name)


class Ended(msgspec.Struct, array_like=True):
    """`stream` ended with FinishReason `reason`, after its last token."""

    stream: int
    reason: int
    stop_token_id: int | None
    error: str


class Tokens(msgspec.Struct, array_like=True, tag=4):
    """All that one step gained for one front, in columns of int32: `streams[i]` gained `token_ids[i]`."""

    streams: bytes = b""
    token_ids: bytes = b""
    ended: list[Ended] = []
    started: list[tuple[int, int, float, float]] = []  # (stream, cached tokens, s queued, s in prefill), once each
    logprobs: dict[int, TokenLogprobs] = {}  # by index in the columns
    sampled_at: float = 0.0  # by the engine's wall clock, in seconds
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []  # (stream, all of its prompt), once a stream
    verified: list[tuple[int, int, int]] = []  # (stream, draft tokens, how many were right: its first tokens here)
    accepted: list[tuple[int, bool]] = []  # (stream, whether it has a slot): when it was taken, and when it has
    pooled: list[tuple[int, bytes]] = []  # (stream, float32 vector of its prompt), before its end


class Report(msgspec.Struct, array_like=True, tag=8):
    """The front's counts since its last report. The answer is a Snapshot."""

    figures: MetricValues


class Refused(msgspec.Struct, array_like=True, tag=5):
    """`stream` was not accepted, or given up before it was begun."""

    stream: int
    message: str
    reason: Refusal
    retry_after_s: float = 0.0  # with Refusal.BUSY


class Status(msgspec.Struct, array_like=True, tag=6):
    """The engine's health and its adapters, when a front comes and when they change. A draining engine finishes what
    it has and takes no new requests."""

    reason: str | None  # why it cannot serve; None: it is healthy
    draining: bool = False
    adapters: list[AdapterState] = []  # the first Status of a connection has all, later ones what has changed
    is_asleep: bool = False  # what it is asked waits
    dropped: list[str] = []  # names that the engine stores no more
    kept: dict[str, str] = {}  # folders by digest, of all adapters that resumed streams may have


class Adapters(msgspec.Struct, array_like=True, tag=12):
    """What the front knows of adapters that the engine does not. The answer is a Status if the engine changes."""

    entries: list[AdapterEntry] = []  # newer than the engine's
    needs: dict[str, str] | None = None  # folders by digest, of all adapters of the front's streams; None: as before


class Forget(msgspec.Struct, array_like=True, tag=13):
    """Evict all cached blocks that no request holds. The answer is Done; followers are told by a CacheUpdate."""

    number: int  # that the front chose, for the answer


class Sleep(msgspec.Struct, array_like=True, tag=15):
    """Sleep at a level (engine_sleep.py), or wake up (0). The answer is Done, when the engine has come to it; one that
    sleeps deeper already does not change."""

    number: int
    level: int


class Done(msgspec.Struct, array_like=True, tag=14):
    """The Forget or the Sleep with this number is done."""

    number: int
    error: str = ""  # why it is not, after all


class Follow(msgspec.Struct, array_like=True, tag=10):
    """The front wants to know (or, with False, no more) what the engine has cached and has to do. The answer is a
    CacheUpdate that is a snapshot, each time that it is asked."""

    wanted: bool = True


class CacheUpdate(msgspec.Struct, array_like=True, tag=11):
    """Gains and losses of an engine's prefix cache since the update before, in any order, and its load now. Blocks go
    by the first KEY_BYTES of their hashes (runtime/core/prefix_cache.py), one after another."""

    number: int  # one more than that of the update before; of a snapshot, that of the last update
    added: bytes  # int64 [n]: a block that was added and evicted meanwhile is in `evicted` alone, and so on
    evicted: bytes  # int64 [n]: it may name blocks that were never told of
    load: EngineLoad
    is_snapshot: bool = False  # `added` is all that there is
    last_stream: int = 0  # the last Submit of this front that `load` counts, by its stream; 0: none


class EngineLoading(CallboardError):
    """There is an engine, but it has no address yet: it loads its model. The text says how far it is."""


FromFront = (
    Submit | Abort | AbortById | Follow | Adapters | Forget | Sleep
)  # what a front tells an engine's step thread
FromEngine = Tokens | Refused | Status | Snapshot | Done | Heartbeat | CacheUpdate
encode = msgspec.msgpack.Encoder().encode
decode_from_front = msgspec.msgpack.Decoder(FromFront | GrammarUpdate | Heartbeat | Report).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

"""The choice of an engine for each request, by the engines' prefix caches and load.

Pure: no clock, no sockets, no tasks. Engines send their changes (`CacheUpdate`, made by `actors/engine/cache_feed.py`).
The router keeps a picture of each engine, and `choose` answers from it. Policy "prefix" scores each engine by

    (tokens still to compute + uncached tokens of this request + 1) x (requests of the engine + 1)

The first factor is the request's wait, the second the number of requests that share each step. No weights need
tuning. Among the engines within SLACK of the least score, the one with the longest cached prefix wins. A rendezvous
hash breaks ties. It hashes the request's session, else the first block that no engine holds. So several fronts agree on
the engine for a session or a new prefix without messages, and a block that every request has does not fill one engine
alone. Requests that this front has sent count until the engine's own figures include them.

Colocated prompts, such as a reranker's, arrive many at a time with one common prefix, which no engine holds yet. They
follow the first one while its engine can compute all its tokens in one step."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import compress, count, zip_longest
from operator import ne
from typing import Literal, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from actors.wire.link_messages import CacheUpdate
from runtime.base.images import ImageSpan
from runtime.base.model_info import ModelInfo
from runtime.core.prefix_cache import KEY_BYTES, hash_blocks, root_hash, state_key

RoutingPolicy = Literal["prefix", "least-load", "round-robin"]
SLACK = 1.25  # times the best score: up to this, cached tokens and then the hash decide
_FIRST_PIECE = 8  # blocks hashed before the first lookup; engines may hold fewer
_Kind = tuple[str, int]  # fingerprint and block size: engines of one kind use the same hash for a block


class Route(NamedTuple):
    """An engine for a request."""

    engine: str
    num_cached: int = 0  # the request's tokens in its cache, by the router's picture


class Prompt:
    """A request's known tokens as caches see them. Blocks are hashed once, and only when needed."""

    def __init__(
        self,
        token_ids: Sequence[int],
        salt: str = "",
        uses_cache: bool = True,
        hashes: dict[_Kind, list[bytes]] | None = None,
        adapter: str = "",
        colocate: bool = False,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Args:
        salt, adapter: requests with other values share no block with this one.
        uses_cache: False if the request uses no cached blocks.
        hashes: the known hashes of leading full blocks.
        colocate: route together with requests that share its prefix, even if they then wait.
        session: engines of nearly equal cost are chosen by it.
        images: spans in order."""
        self.token_ids, self.salt, self.uses_cache, self.adapter = token_ids, salt, uses_cache, adapter
        self.colocate = colocate and uses_cache
        self.session = session
        self.images = [structs.replace(span, image=span.image.named) for span in images]
        self.new_key = 0  # key of the first block that no engine held at the last choice
        self._hashes = {} if hashes is None else hashes  # hashes of leading blocks and the block after them

    def continued(self, token_ids: Sequence[int]) -> Prompt:
        """Return this prompt with more tokens, as for a stream that moves. Full blocks are not hashed again."""
        hashes, tokens = {kind: self.block_hashes(kind) for kind in self._hashes}, [*self.token_ids, *token_ids]
        return Prompt(tokens, self.salt, hashes=hashes, adapter=self.adapter, session=self.session, images=self.images)

    def block_hashes(self, kind: _Kind) -> list[bytes]:
        """Return the hashes of its leading full blocks that were computed."""
        return self._hashes.get(kind, [])[: self.num_hits(kind)]

    def num_shared(self, other: Prompt, kind: _Kind) -> int:
        """Return the tokens of the blocks that both share. Their salts and adapters must be equal."""
        num_hits, size = min(self.num_hits(kind), other.num_hits(kind)), kind[1]
        differ = compress(count(), map(ne, self.token_ids, other.token_ids))
        pairs = zip_longest(places(self.images), places(other.images), fillvalue=(num_hits * size, b""))
        image = next((min(pair)[0] for pair in pairs if pair[0] != pair[1]), num_hits * size)
        return min(num_hits, next(differ, image) // size, image // size) * size

    def num_hits(self, kind: _Kind) -> int:
        """Return the most blocks that a cache can supply. The last token must be computed to sample."""
        return (len(self.token_ids) - 1) // kind[1] if self.uses_cache else 0

    def keys(self, kind: _Kind) -> Iterator[list[int]]:
        """Yield the keys (int64) of these blocks and the block after them, in pieces that double in length."""
        (fingerprint, size), total = kind, self.num_hits(kind) + 1
        hashes = self._hashes.setdefault(kind, [])
        start, end = 0, min(_FIRST_PIECE, total)
        while start < end:
            if (known := len(hashes)) < end:
                parent = hashes[-1] if hashes else root_hash(fingerprint, self.salt, self.adapter)
                tokens = array("i", self.token_ids[known * size : end * size])
                hashes += hash_blocks(parent, tokens, size, self.images, known * size)
            yield memoryview(b"".join(hashes[start:end])).cast("q")[::2].tolist()
            start, end = end, min(2 * end, total)


def places(images: Sequence[ImageSpan]) -> list[tuple[int, bytes]]:
    """Return where each image begins, and its digest."""
    return [(span.begin, span.image.digest) for span in images]


class _Sent(NamedTuple):
    """A request that the engine's figures do not include yet."""

    stream: int
    num_uncached: int
    prompt: Prompt | None = None  # the prompt if it is colocated; else None
    key: int = 0  # key of the prompt's first block that no engine held


class _Engine:
    """One engine's picture, at a place in the router's columns.

    The place outlives the engine. Its blocks are cleared when the next engine there sends a snapshot, so that an
    engine's loss itself costs no time."""

    __slots__ = ("bit", "held", "index", "info", "kind", "name", "number", "sent", "states")

    def __init__(self, index: int) -> None:
        self.index, self.bit = index, 1 << index
        self.held: set[int] = set()  # keys of blocks with its bit

    def open(self, name: str, info: ModelInfo) -> None:
        """Assign the place to another engine."""
        self.name, self.info = name, info
        self.kind: _Kind = info.fingerprint, info.block_size
        self.states = None if info.kv_cache is None else info.kv_cache.states
        self.number: int | None = None  # the last update's number; None while its cache is unknown
        self.sent: deque[_Sent] = deque()  # requests that its load does not include yet


class _Candidates(NamedTuple):
    """Engines to choose from."""

    at: NDArray[np.int64]  # their places
    bits: dict[_Kind, int]  # engine bits by kind


class Router:
    """Chooses among the engines that were added. All fronts must use the same names."""

    def __init__(self, policy: RoutingPolicy = "prefix") -> None:
        self.policy = policy
        self._engines: dict[str, _Engine] = {}
        self._stateful: dict[str, _Engine] = {}  # the engines with states
        self._places: list[_Engine] = []  # engines by index
        self._free: list[_Engine] = []
        self._holders: dict[int, int] = {}  # block key -> bits of the engines that hold it
        self._known = 0  # bits of engines with known caches
        self._tokens = np.zeros(0, np.int64)  # tokens still to be computed, including `sent`, by index
        self._rows = np.zeros(0, np.int64)  # requests, including `sent`, by index
        self._salts = np.zeros(0, np.uint64)  # hash of the engine's name, by index
        self._turn = 0
        self._colocated: dict[int, dict[int, _Sent]] = {}  # the last one sent, by key and engine index
        self._all: _Candidates | None = None  # all engines; None after a change

    def add(self, engine: str, info: ModelInfo) -> None:
        """Add an engine with an unknown cache."""
        if not self._free:
            self._free.append(_Engine(len(self._places)))
            self._places.append(self._free[-1])
            self._tokens, self._rows = np.append(self._tokens, 0), np.append(self._rows, 0)
            self._salts = np.append(self._salts, np.uint64(0))
        place = self._engines[engine] = self._free.pop()
        self._all = None
        place.open(engine, info)
        if place.states is not None:
            self._stateful[engine] = place
        self._tokens[place.index] = self._rows[place.index] = 0
        self._salts[place.index] = _hash(engine)

    def __contains__(self, engine: str) -> bool:
        return engine in self._engines

    def fingerprint(self, engine: str) -> str:
        """Return the fingerprint with which an engine was added."""
        return self._engines[engine].info.fingerprint

    def remove(self, engine: str) -> None:
        """Remove an engine that is gone or disconnected."""
        place = self._engines.pop(engine)
        self._stateful.pop(engine, None)
        while place.sent:
            self._forget_first(place)
        self._all = None
        self._known &= ~place.bit
        self._free.append(place)

    def apply(self, engine: str, update: CacheUpdate) -> bool:
        """Apply the update of an engine.

        Returns False if an update before it is missing. The caller must then request a snapshot; until it arrives, the
        router assumes an empty cache."""
        place, load = self._engines[engine], update.load
        while place.sent and place.sent[0].stream <= update.last_stream:
            self._forget_first(place)
        self._tokens[place.index] = load.queued_tokens + sum(sent.num_uncached for sent in place.sent)
        self._rows[place.index] = load.num_running + load.num_waiting + len(place.sent)
        added = memoryview(update.added).cast("q").tolist()
        if update.is_snapshot:
            there = set(added)
            self._evict(place, place.held - there)
            self._insert(place, there)
            self._known |= place.bit
        elif place.number is None or update.number != place.number + 1:
            place.number = None
            self._known &= ~place.bit
            return False
        else:
            self._evict(place, memoryview(update.evicted).cast("q").tolist())
            self._insert(place, added)
        place.number = update.number
        return True

    def _insert(self, place: _Engine, keys: Collection[int]) -> None:
        holders, bit = self._holders, place.bit
        place.held.update(keys)
        for key in keys:
            others = holders.get(key)
            holders[key] = bit if others is None else others | bit  # one int object for all blocks that only it holds

    def _evict(self, place: _Engine, keys: Collection[int]) -> None:
        holders, bit = self._holders, place.bit
        for key in place.held.intersection(keys):
            if (others := holders[key] & ~bit) != 0:
                holders[key] = others
            else:
                del holders[key]
        place.held.difference_update(keys)

    def held(self, engine: str) -> set[int] | None:
        """Return the keys of the blocks that an engine holds; None if unknown."""
        place = self._engines.get(engine)
        return None if place is None or place.number is None else set(place.held)

    # ---- the choice -------------------------------------------------------------------------------------------------

    def choose(self, prompt: Prompt, candidates: Collection[str] | None = None) -> Route:
        """Choose the best of `candidates` (None for all engines) for a request with these known tokens."""
        at, bits = self._find_all() if candidates is None else self._find(candidates)
        if self.policy == "round-robin":
            return Route(self._in_turn(at))
        if self.policy == "least-load":
            rows = self._rows[at]
            return Route(self._in_turn(at[rows == rows.min()]))
        cached, key = self._cached_tokens(prompt, bits)
        prompt.new_key = key
        if prompt.colocate and (place := self._engine_of_same_prefix(prompt, at, cached)) is not None:
            return Route(place.name, int(cached[place.index]))
        cached = cached[at]
        scores = (self._tokens[at] + (len(prompt.token_ids) - cached + 1)) * (self._rows[at] + 1)
        cached_of_good = np.where(scores <= SLACK * scores.min(), cached, -1)
        most = cached_of_good.max()
        at = at[cached_of_good == most]
        key = _hash(prompt.session) if prompt.session else key
        index = int(at[0] if len(at) == 1 else at[_mix(self._salts[at], key).argmax()])
        return Route(self._places[index].name, int(most))

    def note_sent(self, engine: str, stream: int, num_uncached: int, prompt: Prompt | None = None) -> None:
        """Count a request that was sent to an engine.

        Args:
        stream: its number, higher than all before; CacheUpdate.last_stream refers to it.
        num_uncached: the tokens to compute.
        prompt: if it is colocated, later prompts with its prefix follow it."""
        place = self._engines[engine]
        if prompt is not None and prompt.colocate:
            sent = _Sent(stream, num_uncached, prompt, prompt.new_key)
            self._colocated.setdefault(sent.key, {})[place.index] = sent
        else:
            sent = _Sent(stream, num_uncached)
        place.sent.append(sent)
        self._tokens[place.index] += num_uncached
        self._rows[place.index] += 1

    def _forget_first(self, place: _Engine) -> None:
        """Drop the oldest sent request: the engine now counts it, or is gone."""
        sent = place.sent.popleft()
        if (alike := self._colocated.get(sent.key)) is not None and alike.get(place.index) is sent:
            del alike[place.index]
            if not alike:
                del self._colocated[sent.key]

    def _engine_of_same_prefix(
        self, prompt: Prompt, at: NDArray[np.int64], cached: NDArray[np.int64]
    ) -> _Engine | None:
        """Return an engine that was sent prompts with the same prefix, and can compute them and this one in one step.

        By then it holds the prefix's blocks: `cached` gets their tokens. `at` has the candidates' places.
        Returns None if there is none."""
        for index, sent in self._colocated.get(prompt.new_key, {}).items():
            place = self._places[index]
            assert sent.prompt is not None, "it is colocated"
            cached[index] = prompt.num_shared(sent.prompt, place.kind)
            num_tokens = self._tokens[index] + len(prompt.token_ids) - cached[index]
            fits = num_tokens <= place.info.max_num_batched_tokens and self._rows[index] < place.info.max_num_seqs
            if fits and index in at:
                return place
        return None

    def _find_all(self) -> _Candidates:
        if self._all is None:
            self._all = self._find(self._engines)
        return self._all

    def _find(self, names: Collection[str]) -> _Candidates:
        places, bits = [self._engines[name] for name in names], dict[_Kind, int]()
        for place in places:
            bits[place.kind] = bits.get(place.kind, 0) | place.bit
        return _Candidates(np.array([place.index for place in places]), bits)

    def _in_turn(self, at: NDArray[np.int64]) -> str:
        """Return the name of the next engine in turn among these places."""
        self._turn += 1
        return self._places[int(at[self._turn % len(at)])].name

    def _cached_tokens(self, prompt: Prompt, bits: dict[_Kind, int]) -> tuple[NDArray[np.int64], int]:
        """Return the tokens in the longest prefix that each engine holds, by index, and the key of the first block that
        none holds."""
        cached = np.zeros(len(self._places), np.int64)
        first_keys = [self._descend(prompt, kind, bits[kind] & self._known, cached) for kind in sorted(bits)]
        for place in self._stateful.values():
            if place.kind in bits and cached[place.index]:
                cached[place.index] = self._longest_snapshot(prompt, place, int(cached[place.index]))
        return cached, first_keys[-1]

    def _longest_snapshot(self, prompt: Prompt, place: _Engine, num_cached: int) -> int:
        """Return the longest part of a cached prefix that ends with a snapshot: a model with states continues there."""
        assert place.states is not None
        chunk, size, hashes = place.states.chunk, place.kind[1], prompt.block_hashes(place.kind)
        length = num_cached // chunk * chunk
        while length and not self._holders.get(state_key(_key(hashes[length // size - 1])), 0) & place.bit:
            length -= chunk
        return length

    def _descend(self, prompt: Prompt, kind: _Kind, mask: int, cached: NDArray[np.int64]) -> int:
        """`_cached_tokens` for the engines of one kind, given by bits.

        An engine that holds a block holds all blocks before it (block_pool.py), so few lookups suffice. If all engines
        hold the last block of a piece, that is the only lookup; else bisection finds the first block that not all
        hold."""
        holders, size, num_hits, depth = self._holders, kind[1], prompt.num_hits(kind), 0
        for keys in prompt.keys(kind):
            if not mask:
                return keys[0]
            at, end = 0, min(len(keys), num_hits - depth)
            while at < end and mask & holders.get(keys[end - 1], 0) != mask:
                last = end - 1
                while at < last:
                    middle = (at + last) // 2
                    if mask & holders.get(keys[middle], 0) == mask:
                        at = middle + 1
                    else:
                        last = middle
                rest = mask & holders.get(keys[at], 0)
                _fill(cached, mask & ~rest, (depth + at) * size)
                mask = rest
                if not mask:
                    return keys[at]
                at += 1
            depth += end
        _fill(cached, mask, depth * size)
        return keys[-1]


def _key(block_hash: bytes) -> int:
    """Return the key of a block's hash (int64)."""
    return int.from_bytes(block_hash[:KEY_BYTES], "little", signed=True)


def _hash(name: str) -> int:
    """Return 64 bits of a name, the same in every front."""
    return int.from_bytes(blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def _fill(column: NDArray[np.int64], mask: int, value: int) -> None:
    """Write `value` where `mask` has a bit. The column must be zero there."""
    if not value:
        return
    if mask.bit_count() > 16:
        bits = np.frombuffer(mask.to_bytes(len(column) // 8 + 1, "little"), np.uint8)
        column[np.unpackbits(bits, bitorder="little")[: len(column)].astype(bool)] = value
        return
    while mask:
        low = mask & -mask
        column[low.bit_length() - 1] = value
        mask ^= low


def _mix(salts: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return a pseudo-random number for each salt with the key (the finalizer of splitmix64)."""
    x = salts ^ np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

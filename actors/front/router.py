"""The choice of an engine for each request: by what engines hold in their prefix caches and by what they have to do.

Pure: no clock, no sockets, no tasks. Engines tell what changes (`CacheUpdate`, made by `wire/cache_feed.py`), the
router keeps a picture of each, and answers `choose` from it. With policy "prefix" the engine with the least

    (tokens that it has still to compute + those of this request that it has not cached + 1) x (its requests + 1)

is best: what the request would wait for, times what each step is shared with; there are no weights to tune. Of those
within SLACK of the best, the one that holds most of the request's prefix is taken, and of these one by a rendezvous
hash of the first block that none of them holds: several fronts agree on where a new prefix goes without talking, and
one that everybody sends does not fill one engine alone. What this front has sent is counted until the engine's own
figures have it.

Prompts that gather, such as a reranker's, come many at a time with one beginning, which no engine holds yet. They
follow the first of them for as long as its engine can compute all that it has in one step.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import compress, count
from operator import ne
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.wire.messages import CacheUpdate
from runtime.core.prefix_cache import hash_blocks, root_hash
from runtime.spec.config import ModelInfo

RoutingPolicy = Literal["prefix", "least-load", "round-robin"]
SLACK = 1.25  # how much worse than the best score an engine may be that holds more, or that the hash prefers
_FIRST_PIECE = 8  # blocks that are hashed before anything is looked up: nobody may hold more
_Kind = tuple[str, int]  # fingerprint and block size: engines of one kind know a block by the same hash


class Choice(NamedTuple):
    """An engine for a request."""

    engine: str
    num_cached: int = 0  # tokens of the request that it holds, as far as is known


class Prompt:
    """A request's known tokens as caches know them. Blocks are hashed once, and no further than somebody asks."""

    def __init__(
        self,
        token_ids: Sequence[int],
        salt: str = "",
        uses_cache: bool = True,
        hashes: dict[_Kind, list[bytes]] | None = None,
        adapter: str = "",
        gathers: bool = False,
    ) -> None:
        """Requests of another `salt` or `adapter` share no block with this one; one that `uses_cache` not has no hits.
        `hashes` are those of leading full blocks, as far as they are known. One that `gathers` had better be computed
        with those of the same beginning than at once."""
        self.token_ids, self.salt, self.uses_cache, self.adapter = token_ids, salt, uses_cache, adapter
        self.gathers = gathers and uses_cache
        self.new_key = 0  # of its first block that no engine held at the last choice
        self._hashes = {} if hashes is None else hashes  # of the leading blocks, and perhaps of what follows them

    def continued(self, token_ids: Sequence[int]) -> Prompt:
        """This one with more tokens at its end, as when a stream moves; full blocks are not hashed again."""
        hashes = {kind: self.block_hashes(kind) for kind in self._hashes}
        return Prompt([*self.token_ids, *token_ids], self.salt, hashes=hashes, adapter=self.adapter)

    def block_hashes(self, kind: _Kind) -> list[bytes]:
        """The hashes of its leading full blocks, as far as they were asked for."""
        return self._hashes.get(kind, [])[: self.num_hits(kind)]

    def num_shared(self, other: Prompt, kind: _Kind) -> int:
        """Tokens of the blocks that a cache can give both of them, which have a salt and an adapter in common."""
        num_hits, size = min(self.num_hits(kind), other.num_hits(kind)), kind[1]
        differ = compress(count(), map(ne, self.token_ids, other.token_ids))
        return min(num_hits, next(differ, num_hits * size) // size) * size

    def num_hits(self, kind: _Kind) -> int:
        """Blocks that a cache can give, at most: never the last token, which must be computed to sample."""
        return (len(self.token_ids) - 1) // kind[1] if self.uses_cache else 0

    def keys(self, kind: _Kind) -> Iterator[list[int]]:
        """The keys of these blocks and, as one more block, of what follows them (int64), a piece at a time: each goes
        as far again as all before it."""
        (fingerprint, size), total = kind, self.num_hits(kind) + 1
        hashes = self._hashes.setdefault(kind, [])
        start, end = 0, min(_FIRST_PIECE, total)
        while start < end:
            if (known := len(hashes)) < end:
                parent = hashes[-1] if hashes else root_hash(fingerprint, self.salt, self.adapter)
                hashes += hash_blocks(parent, array("i", self.token_ids[known * size : end * size]), size)
            yield memoryview(b"".join(hashes[start:end])).cast("q")[::2].tolist()
            start, end = end, min(2 * end, total)


class _Sent(NamedTuple):
    """A request on its way to an engine."""

    stream: int
    num_uncached: int
    prompt: Prompt | None = None  # if it gathers
    key: int = 0  # of this prompt's first block that no engine held


class _Engine:
    """The picture of one engine. Its place in the router's columns outlives it: what it held is cleared when another
    one has told what that holds, so that the loss of an engine costs nothing at that moment."""

    __slots__ = ("bit", "held", "index", "info", "kind", "name", "number", "sent")

    def __init__(self, index: int) -> None:
        self.index, self.bit = index, 1 << index
        self.held: set[int] = set()  # keys of blocks with its bit

    def open(self, name: str, info: ModelInfo) -> None:
        """The place is that of another engine."""
        self.name, self.info = name, info
        self.kind: _Kind = info.fingerprint, info.block_size
        self.number: int | None = None  # of the last update; None: what it holds is not known
        self.sent: deque[_Sent] = deque()  # what its load does not count yet


class _Candidates(NamedTuple):
    """Engines to choose from."""

    at: NDArray[np.int64]  # their places
    bits: dict[_Kind, int]  # by kind


class Router:
    """Chooses among the engines that were added. Engines go by any name that all fronts give them alike."""

    def __init__(self, policy: RoutingPolicy = "prefix") -> None:
        self.policy = policy
        self._engines: dict[str, _Engine] = {}
        self._places: list[_Engine] = []  # by index
        self._free: list[_Engine] = []
        self._holders: dict[int, int] = {}  # key of a block -> bits of the engines that hold it
        self._known = 0  # bits of the engines whose pictures are true
        self._tokens = np.zeros(0, np.int64)  # by index: tokens still to be computed, those of `sent` included
        self._rows = np.zeros(0, np.int64)  # by index: requests, those of `sent` included
        self._salts = np.zeros(0, np.uint64)  # by index: the hash of the engine's name
        self._turn = 0
        self._gathering: dict[int, dict[int, _Sent]] = {}  # by key and by index of an engine: the last one sent to it
        self._all: _Candidates | None = None  # all engines; None: they are not the same any more

    def add(self, engine: str, info: ModelInfo) -> None:
        """There is an engine, of which nothing is known but its model."""
        if not self._free:
            self._free.append(_Engine(len(self._places)))
            self._places.append(self._free[-1])
            self._tokens, self._rows = np.append(self._tokens, 0), np.append(self._rows, 0)
            self._salts = np.append(self._salts, np.uint64(0))
        place = self._engines[engine] = self._free.pop()
        self._all = None
        place.open(engine, info)
        self._tokens[place.index] = self._rows[place.index] = 0
        self._salts[place.index] = int.from_bytes(blake2b(engine.encode(), digest_size=8).digest(), "little")

    def __contains__(self, engine: str) -> bool:
        return engine in self._engines

    def remove(self, engine: str) -> None:
        """An engine is gone, or cut off: its picture is worth nothing any more."""
        place = self._engines.pop(engine)
        while place.sent:
            self._forget_first(place)
        self._all = None
        self._known &= ~place.bit
        self._free.append(place)

    def apply(self, engine: str, update: CacheUpdate) -> bool:
        """Take in what an engine has told. False: updates are missing before this one, so ask for a snapshot; until
        then the engine is taken to hold nothing."""
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
            holders[key] = bit if others is None else others | bit  # one number for all blocks that only it holds

    def _evict(self, place: _Engine, keys: Collection[int]) -> None:
        holders, bit = self._holders, place.bit
        for key in place.held.intersection(keys):
            if (others := holders[key] & ~bit) != 0:
                holders[key] = others
            else:
                del holders[key]
        place.held.difference_update(keys)

    def held(self, engine: str) -> set[int] | None:
        """The keys of the blocks that an engine holds; None: that is not known."""
        place = self._engines.get(engine)
        return None if place is None or place.number is None else set(place.held)

    # ---- the choice -------------------------------------------------------------------------------------------------

    def choose(self, prompt: Prompt, candidates: Collection[str] | None = None) -> Choice:
        """The best of `candidates` (at least one; None: of all engines) for a request with these known tokens."""
        at, bits = self._find_all() if candidates is None else self._find(candidates)
        if self.policy == "round-robin":
            return Choice(self._in_turn(at))
        if self.policy == "least-load":
            rows = self._rows[at]
            return Choice(self._in_turn(at[rows == rows.min()]))
        cached, key = self._cached_tokens(prompt, bits)
        prompt.new_key = key
        if prompt.gathers and (place := self._with_its_like(prompt, at, cached)) is not None:
            return Choice(place.name, int(cached[place.index]))
        cached = cached[at]
        scores = (self._tokens[at] + (len(prompt.token_ids) - cached + 1)) * (self._rows[at] + 1)
        cached_of_good = np.where(scores <= SLACK * scores.min(), cached, -1)
        most = cached_of_good.max()
        at = at[cached_of_good == most]
        index = int(at[0] if len(at) == 1 else at[_mix(self._salts[at], key).argmax()])
        return Choice(self._places[index].name, int(most))

    def placed(self, engine: str, stream: int, num_uncached: int, prompt: Prompt | None = None) -> None:
        """A request was sent to an engine as `stream` (CacheUpdate.last_stream: each higher than the last), which has
        so many tokens of it to compute. If it gathers, those like its `prompt` follow it."""
        place = self._engines[engine]
        if prompt is not None and prompt.gathers:
            sent = _Sent(stream, num_uncached, prompt, prompt.new_key)
            self._gathering.setdefault(sent.key, {})[place.index] = sent
        else:
            sent = _Sent(stream, num_uncached)
        place.sent.append(sent)
        self._tokens[place.index] += num_uncached
        self._rows[place.index] += 1

    def _forget_first(self, place: _Engine) -> None:
        """The engine counts the first of what was sent to it, or is gone."""
        sent = place.sent.popleft()
        if (alike := self._gathering.get(sent.key)) is not None and alike.get(place.index) is sent:
            del alike[place.index]
            if not alike:
                del self._gathering[sent.key]

    def _with_its_like(self, prompt: Prompt, at: NDArray[np.int64], cached: NDArray[np.int64]) -> _Engine | None:
        """The engine of those at these places that was sent prompts of the same beginning and can compute this one in
        one step with all that it has. It will have the blocks of that beginning by then: `cached` gets them."""
        for index, sent in self._gathering.get(prompt.new_key, {}).items():
            place = self._places[index]
            assert sent.prompt is not None, "it gathers"
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
        """The engine whose turn it is, of those at these places."""
        self._turn += 1
        return self._places[int(at[self._turn % len(at)])].name

    def _cached_tokens(self, prompt: Prompt, bits: dict[_Kind, int]) -> tuple[NDArray[np.int64], int]:
        """By index: the tokens of the prompt's longest prefix that each engine holds. And the key of the first block
        that none of them holds."""
        cached = np.zeros(len(self._places), np.int64)
        first_keys = [self._descend(prompt, kind, bits[kind] & self._known, cached) for kind in sorted(bits)]
        return cached, first_keys[-1]

    def _descend(self, prompt: Prompt, kind: _Kind, mask: int, cached: NDArray[np.int64]) -> int:
        """`_cached_tokens` of the engines of one kind, with these bits. Whoever holds a block holds all before it
        (block_pool.py), so that few of them are looked up: where all hold the last of a piece, no other; else the first
        one that not all hold is searched by halving."""
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


def _fill(column: NDArray[np.int64], mask: int, value: int) -> None:
    """Write `value` where `mask` has a bit; the column is full of zeros."""
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
    """Numbers that look random, one for each pair of a salt and a key (the finalizer of splitmix64)."""
    x = salts ^ np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

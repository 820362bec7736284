"""Which cached blocks stay when there is not room for all."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.block_pool import NULL_BLOCK, BlockPool
from runtime.core.prefix_cache import PrefixCache
from runtime.policy.branch_eviction import BRANCH_AGE_DIVISOR, BranchOrder
from tests.support.examples import examples

Path = tuple[int, ...]  # a block by its token and the tokens of the blocks before it


class Tree:
    """A pool and a cache. Requests are paths of blocks with one token each."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache()
        self.pool = BlockPool(1 + num_blocks, self.cache.evict, BranchOrder())
        self.held: list[list[int]] = []

    def begin(self, path: Path) -> bool:
        """Start a request with this path; False if it does not fit."""
        names = [repr(path[: i + 1]).encode() for i in range(len(path))]
        blocks = self.cache.match_prefix(names)
        num_new = len(names) - len(blocks)
        if num_new > self.pool.num_available - self.pool.num_unheld(blocks):
            return False
        self.pool.acquire(blocks)
        blocks += self.pool.allocate(num_new)
        for at in range(len(names) - num_new, len(names)):
            assert self.cache.insert([names[at]], [blocks[at]]) == [blocks[at]]
            self.pool.mark_cached([(blocks[at], names[at], blocks[at - 1] if at else NULL_BLOCK)])
        self.held.append(blocks)
        return True

    def end(self, number: int = 0) -> None:
        self.pool.release(self.held.pop(number))

    def ask(self, path: Path) -> None:
        assert self.begin(path)
        self.end()

    def num_cached(self, path: Path) -> int:
        return len(self.cache.match_prefix([repr(path[: i + 1]).encode() for i in range(len(path))]))

    def paths(self) -> set[Path]:
        return {eval(name) for name in self.cache._block_of}

    def find_faults(self) -> list[str]:
        held = Counter(block for blocks in self.held for block in blocks)
        return self.pool.find_faults(held) + self.cache.find_faults(self.pool.is_cached)


requests = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@settings(max_examples=examples(300))
@given(st.integers(6, 24), st.lists(st.one_of(requests, st.integers(0, 5)), max_size=60))
def test_a_held_block_holds_all_blocks_before_it(num_blocks, happenings):
    """Routers rely on it, too. Numbers are requests that end, and paths are requests that begin."""
    tree = Tree(num_blocks)
    for each in happenings:
        if isinstance(each, tuple):
            tree.begin(each)
        elif each < len(tree.held):
            tree.end(each)
        assert tree.find_faults() == []
        paths = tree.paths()
        assert all(path[:-1] in paths for path in paths if len(path) > 1)
    tree.pool.evict_unheld()
    assert len(tree.cache) == len({block for blocks in tree.held for block in blocks})
    assert tree.find_faults() == []


def test_shared_prefixes_outlive_single_ones():
    tree = Tree(20)
    instruction = (1, 1, 1, 1)
    tree.ask((*instruction, 2))
    tree.ask((*instruction, 3))
    for number in range(10):  # two pools of others
        tree.ask((10 + number, 0, 0, 0))
    assert tree.num_cached(instruction) == 4
    assert tree.num_cached((*instruction, 2)) == 4
    assert tree.num_cached((19, 0, 0, 0)) == 4
    for number in range(10 * BRANCH_AGE_DIVISOR):
        tree.ask((100 + number, 0, 0, 0))
    assert tree.num_cached(instruction) == 0, "nobody has asked for it any more"


def test_a_continued_conversation_has_no_priority():
    tree = Tree(20)
    history: Path = ()
    for turn in range(4):
        history += (turn, turn)
        tree.ask(history)
    for number in range(5):
        tree.ask((10 + number, 0, 0, 0))
    assert tree.num_cached(history) == 0


def test_an_ancestor_of_a_fork_is_shared():
    tree = Tree(12)
    instruction = (1, 1, 1)
    tree.begin((*instruction, 2))
    tree.begin(instruction[:2])
    tree.begin((*instruction, 3))
    tree.end(0)
    tree.end(1)
    tree.end(0)  # none of the three forks by itself
    for number in range(4):
        tree.ask((10 + number, 0, 0))
    assert tree.num_cached(instruction) == 3
    assert tree.find_faults() == []


def test_blocks_are_evicted_in_order_of_release():
    queue = BranchOrder()
    queue.reset(9)
    queue.on_cached([(3, b"a", 2), (4, b"b", 2)])  # a branch
    queue.add([5, 3], [3, 5])
    queue.add([4, 2], [2, 4])
    queue.remove([3])
    assert (len(queue), list(queue), 3 in queue, 2 in queue) == (3, [5, 4, 2], False, True)
    assert queue.take(3) == [5, 4, 2]
    with pytest.raises(KeyError):
        queue.take(1)

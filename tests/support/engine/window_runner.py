"""A runner with a second group of its KV cache, which attends to a window."""

from runtime.base.kv_cache_spec import KVCacheSpec, KVGroupSpec
from tests.support.engine.fake_runner import FakeRunner, mix


def groups(window: int) -> KVCacheSpec:
    full = KVGroupSpec((0, 2), num_kv_heads=1, head_dim=8, dtype="float32")
    return KVCacheSpec((full, KVGroupSpec((1, 3), num_kv_heads=1, head_dim=8, dtype="float32", window=window)))


class WindowRunner(FakeRunner):
    """A runner with a second group that attends to a window. It checks every read of a row there."""

    def __init__(self, config, info) -> None:
        super().__init__(config, info)
        self.window = info.kv_cache.groups[1].window
        self.table_len = -(-info.max_model_len // self.size)

    def attend(self, slot: int, position: int) -> None:
        tables, size = self.tables[slot], self.size
        for at in range(position, max(-1, position - self.window), -1):
            place = tables[self.table_len + at // size], at % size
            prefix = int(self.memory[tables[at // size], at % size])  # the hash of all tokens up to `at`
            if at == position:
                self.memory[place] = mix(prefix, 1)
            assert self.memory[place] == mix(prefix, 1), "what is still read was freed, or never written"

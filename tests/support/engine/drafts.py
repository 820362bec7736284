"""A draft's core, and the clock of its tests."""

import numpy as np

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from tests.support.engine.fake_runner import EOS, VOCAB, FakeRunner, check_integrity
from tests.support.engine.whole import whole_draft

STEP_US = ((1, 10.0), (64, 20.0))


class WrongAtTimes(FakeRunner):
    """A draft that samples another token in a share of its positions, and continues from there."""

    share = 0.0
    rng = np.random.default_rng(0)

    def sample(self, state):
        return (super().sample(state) + (self.rng.random() < self.share)) % VOCAB


def info(**kw):
    return ModelInfo("f", VOCAB, kw.get("max_len", 64), (EOS,), kw.get("blocks", 40), 4, "none", "none")


def draft_core(share=0.0, ahead=1, **kw):
    config = EngineConfig(block_size=4, max_num_seqs=kw.pop("seqs", 6), max_num_batched_tokens=kw.pop("budget", 16))
    runner = WrongAtTimes(config, info(**kw))
    runner.share = share
    return whole_draft(config, info(**kw), runner, ahead)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def check_core(core):
    assert len(core._streams) == len(core.scheduler.requests)
    check_integrity(core)

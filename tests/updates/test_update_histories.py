"""Any history of updates and restarts leaves the tensors of a plain dict."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import integers, sampled_from, sets

from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart
from runtime.kernels.collectives.communicator import OneRank
from runtime.updates.in_place import tensors_of
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.examples import examples
from tests.support.models.quantized_tensors import Tensors
from tests.support.models.runner_driver import open_runner
from tests.support.models.weight_updates import changed, pull_part, tensors_in, write_tiny

FOLDER = write_tiny(Path(tempfile.mkdtemp()) / "model", num_hidden_layers=2, vocab_size=264)
TENSORS = tensors_in(FOLDER)
NAMES = sorted(TENSORS)


def parts_of(decoder) -> list[torch.Tensor]:
    return list(tensors_of([decoder.layers, decoder.embed, decoder.final_norm, decoder.head_norm, decoder.head]))


class Updates(RuleBasedStateMachine):
    """A runner with a store, beside dicts of the tensors that it must have."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.served, self.stored, self.staged = dict(TENSORS), dict(TENSORS), dict[str, torch.Tensor]()
        self.count, self.is_new = 0, False
        self.runner = self.fresh()

    def fresh(self) -> ModelRunner:
        store = str(self.folder / "store")
        return open_runner(
            FOLDER, weight_updates=True, weight_store=store, kernel_backend="torch", packed_weights=False,
            max_model_len=32,
        )  # fmt: skip

    @rule(names=sets(sampled_from(NAMES), min_size=1), seed=integers(0, 99), pulls=sampled_from([False, True]))
    def receive(self, names: set[str], seed: int, pulls: bool) -> None:
        part = changed({name: TENSORS[name] for name in sorted(names)}, seed)
        self.runner.updates.receive(pull_part(part) if pulls else ArraysPart(part))
        self.staged |= part

    @rule(seed=integers(0, 99))
    def receive_all(self, seed: int) -> None:
        self.receive(set(NAMES), seed, pulls=False)

    @rule(name=sampled_from(NAMES), seed=integers(0, 99))
    def receive_a_faulty_part(self, name: str, seed: int) -> None:
        part = changed({name: TENSORS[name]}, seed) | {"model.norm.weight.scale": torch.ones(1)}
        with pytest.raises(CallboardError, match="no tensor"):
            self.runner.updates.receive(ArraysPart(part))

    @rule()
    def discard(self) -> None:
        self.runner.updates.discard()
        self.staged = {}

    @precondition(lambda self: self.staged)
    @rule()
    def finish(self) -> None:
        updates = self.runner.updates
        is_complete = updates.check()
        assert is_complete == (self.staged.keys() == TENSORS.keys())
        self.count += 1
        version = updates.version.after(f"{self.folder}/{self.count}", None, is_complete)
        fingerprint = self.runner.update_weights(version)
        assert fingerprint == self.runner.info.fingerprint
        self.served, self.staged, self.is_new = self.served | self.staged, {}, True

    @rule()
    def keep(self) -> None:
        self.runner.updates.store()
        if self.is_new:
            self.stored, self.is_new = self.served, False

    @rule()
    def restart(self) -> None:
        before = self.runner.info
        self.runner = self.fresh()
        if self.stored is self.served:
            assert self.runner.info == before
        self.served, self.staged, self.is_new = self.stored, {}, False

    @rule()
    def lose_the_store(self) -> None:
        """The next version is stored whole."""
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        self.stored = dict(TENSORS)

    @invariant()
    def tensors_are_equal(self) -> None:
        runner = self.runner
        source = CheckpointSource(FOLDER).with_tensors(Tensors(self.served))
        want = source.load(runner.spec, runner.numerics, runner.memory.max_model_len, OneRank())
        pairs = list(zip(parts_of(runner.decoder), parts_of(want), strict=True))
        assert len(pairs) > 10
        assert all(torch.equal(a, b) for a, b in pairs)


def test_any_history_leaves_the_tensors_of_a_dict():
    run_state_machine_as_test(
        Updates, settings=settings(max_examples=examples(80), stateful_step_count=16, deadline=None)
    )

"""The state machine of an engine's adapters, in a world that loses runners at any event."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.engine.adapter_machine import AdapterMachine, End, Hold, Load, Read, Rebuild, Restore
from actors.wire.adapter_entry import FORGET_AFTER_S, AdapterEntry
from runtime.base.types import CallboardError
from runtime.features.adapter_table import AdapterTable

NAMES, PATHS, FRONTS = ("x", "y"), ("p", "q", "r"), (1, 2)
MAX_LORAS = 2


class World(RuleBasedStateMachine):
    """An engine's step thread and its runners, the thread that loads, the files and the fronts."""

    def __init__(self):
        super().__init__()
        self.table = AdapterTable(MAX_LORAS)
        self.machine = AdapterMachine(self.table, lambda index: self.requests[index] > 0, {"x"})
        self.files = {path: f"digest of {path}" for path in PATHS}
        self.refused = set()  # digests that runners do not accept
        self.runners = {}  # digests by index of the live runners
        self.is_alive, self.is_asleep, self.rebuild_due = True, False, False
        self.jobs, self.answers, self.holds = [], [], []
        self.requests = Counter()  # running requests by index
        self.entries = {}  # by name: the newest
        self.version = self.now = 0

    def run(self, actions):
        for action in actions:
            if isinstance(action, Read | Load):
                self.jobs.append(action)
            elif isinstance(action, Hold):
                self.holds.append(action.entry)
            elif isinstance(action, Rebuild):
                assert not self.is_asleep, "an engine that sleeps is not woken up for an adapter"
                assert not self.is_alive, "runners are not replaced in vain"
                self.rebuild_due = True
            elif isinstance(action, End):
                self.requests[self.ended] = 0

    @initialize(is_used=st.booleans())
    def begin(self, is_used):
        """Most events happen to an adapter that is loaded."""
        self.say("x", "p", False)
        for _ in range(2):
            self.work()
            self.answer()
        if is_used:
            self.request("p", False)

    # ---- fronts and requests ----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name):
        self.say(name, "", False)

    @rule(name=st.sampled_from(NAMES), path=st.sampled_from(PATHS), is_late=st.booleans())
    def say(self, name, path, is_late):
        self.version += 1
        self.now += 1
        entry = AdapterEntry(name, path, 1 if is_late else self.version)
        if name not in self.entries or entry.version > self.entries[name].version:
            self.entries[name] = entry
        self.run(self.machine.received([entry], self.now))

    @rule(front=st.sampled_from(FRONTS), paths=st.sets(st.sampled_from(PATHS), max_size=2))
    def need(self, front, paths):
        self.run(self.machine.needed(front, {f"digest of {path}": path for path in paths}))

    @rule(path=st.sampled_from(PATHS), resumed=st.booleans())
    def request(self, path, resumed):
        digest = f"digest of {path}"
        if self.machine.is_awaited(digest):
            return
        try:
            self.machine.check(digest, resumed)
        except CallboardError:
            return
        self.requests[self.table.index_of(digest)] += 1

    @rule(data=st.data())
    @precondition(lambda self: +self.requests)
    def end_request(self, data):
        self.requests[data.draw(st.sampled_from(sorted(+self.requests)))] -= 1

    @rule()
    def look_for_unused(self):
        self.run(self.machine.unused())

    @rule(data=st.data())
    @precondition(lambda self: self.holds)
    def hold_ended(self, data):
        self.run(self.machine.hold_ended(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))))

    @rule(path=st.sampled_from(PATHS), text=st.sampled_from(("digest of p", "digest of q", "changed", "")))
    def change_files(self, path, text):
        self.files[path] = text

    @rule(path=st.sampled_from(PATHS))
    def refuse(self, path):
        self.refused ^= {f"digest of {path}"}

    # ---- runners ----------------------------------------------------------------------------------------------------

    @rule()
    def kill(self):
        self.is_alive, self.runners = False, {}

    @rule()
    def step(self):
        """A step, or the loop's check for losses: it finds dead runners if there is work."""
        if not self.is_asleep and (self.rebuild_due or (not self.is_alive and +self.requests)):
            self.rebuild()

    def rebuild(self):
        self.is_alive, self.is_asleep, self.rebuild_due, self.runners = True, False, False, {}
        actions = self.machine.started()
        for place in [a for a in actions if isinstance(a, Restore)]:
            if error := self.load(place.at, place.path, place.digest):
                self.ended = place.at
                actions += self.machine.restored(place.digest, error)
        self.run(actions)

    @rule(level=st.sampled_from((1, 2)))
    def sleep(self, level):
        if self.rebuild_due:  # the loop looks at that first
            self.rebuild()
        self.is_asleep = True
        self.run(self.machine.fell_asleep())
        if level == 2:
            self.kill()

    @rule()
    @precondition(lambda self: self.is_asleep)
    def wake(self):
        if self.is_alive:
            self.is_asleep = False
            self.run(self.machine.woke_up())
        else:
            self.rebuild()

    def load(self, index, path, digest):
        """The answer of runners after they have read the files again."""
        if self.files[path] != digest or digest in self.refused:
            return f"{path} is refused."
        self.runners[index] = digest
        return ""

    # ---- the thread that loads --------------------------------------------------------------------------------------

    @rule(dies=st.booleans())
    @precondition(lambda self: self.jobs)
    def work(self, dies=False):
        job = self.jobs.pop(0)
        if isinstance(job, Read):
            digest = self.files[job.path]
            self.answers.append(lambda: self.machine.read(job, digest, "" if digest else "There are no files."))
        elif job.generation != self.machine.generation:
            self.answers.append(lambda: self.machine.skipped(job))
        elif not self.is_alive or dies:
            self.kill()
            self.answers.append(lambda: self.machine.lost(job, "Rank 0 is gone."))
        else:
            error = self.load(job.at, job.path, job.digest)
            self.answers.append(lambda: self.machine.loaded(job, error))

    @rule()
    @precondition(lambda self: self.answers)
    def answer(self):
        self.run(self.answers.pop(0)())

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def an_index_that_requests_may_have_holds_exactly_its_adapter(self):
        if self.is_alive and not self.rebuild_due:
            for digest, index in self.table.loaded.items():
                if digest in self.machine.kept:
                    assert self.runners[index] == digest

    @invariant()
    def indexes_in_use_stay_taken(self):
        kept = {self.table.loaded[digest] for digest in self.machine.kept}
        assert all(index in kept for index in +self.requests)

    @invariant()
    def new_requests_get_the_files_of_their_name(self):
        named = frozenset().union(*(state.digests for state in self.machine.states.values()))
        for digest in self.machine.kept:
            assert self.table.is_open(digest) == (digest in named)
        for name, entry in self.entries.items():
            assert self.machine.states[name].entry == entry

    @invariant()
    def at_most_max_loras_indexes_are_taken(self):
        assert len(self.table.loaded) <= MAX_LORAS

    def teardown(self):
        """Everything that was started ends, in every history."""
        if not hasattr(self, "table"):
            return
        for _ in range(200):
            if self.is_asleep:
                self.wake()
            elif self.rebuild_due:
                self.rebuild()
            elif self.answers:
                self.answer()
            elif self.jobs:
                self.work()
            else:
                break
        assert (self.jobs, self.answers, self.rebuild_due) == ([], [], False), "it never ends"
        self.look_for_unused()  # as the step thread does after requests may have ended
        for state in self.machine.states.values():
            assert state.is_settled or (not state.entry.path and +self.requests) or self.machine.retaining()
        assert not any(self.machine.is_awaited(f"digest of {path}") for path in PATHS)
        self.an_index_that_requests_may_have_holds_exactly_its_adapter()
        self.requests.clear()
        for front in FRONTS:
            self.run(self.machine.needed(front, {}))
        while self.holds:
            self.run(self.machine.hold_ended(self.holds.pop()))
        for name in NAMES:
            self.version += 1
            self.run(self.machine.received([AdapterEntry(name, "", self.version)], self.now))
        assert not self.table.loaded, "a place is lost for good"
        late = self.now + (FORGET_AFTER_S + 1) * 10**9
        self.run(self.machine.received([], late))
        assert self.machine.states.keys() == {"x"}, "only settings are kept for ever"


World.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestWorld = World.TestCase


def test_an_unload_ends_with_the_last_request():
    """Found by the machine above: the last request of an unloaded adapter ends, and no other event follows."""
    world = World()
    world.begin(is_used=True)
    world.unload("x")
    (index,) = +world.requests
    world.requests[index] -= 1
    assert world.machine.is_leaving
    assert not world.machine.states["x"].is_settled
    world.teardown()


def test_loads_that_never_began_are_no_losses():
    machine = AdapterMachine(AdapterTable(1), lambda index: False)
    (read,) = (job for job in machine.received([AdapterEntry("a", "p", 1)], 1) if isinstance(job, Read))
    actions = machine.read(read, "digest")
    for _ in range(5):
        (load,) = (job for job in actions if isinstance(job, Load))
        machine.started()
        actions = machine.skipped(load)
    (load,) = (job for job in actions if isinstance(job, Load))
    machine.loaded(load)
    assert machine.states["a"].digest == "digest"

"""One engine's adapters (LoRA), as a state machine: events in, actions out; no thread, no clock, no I/O.

A *name* means the adapter in a folder until a front sends a newer entry. A *place* is an index on the devices that
holds one adapter, identified by the digest of its files. A place is wanted while a name means it, a front has its
streams on any engine, or a request here uses it.

    state of a place   the runners     requests for it            next state
    -----------------  --------------  -------------------------  ------------------------------------------------------
    WAITING            do not have it  wait                       LOADING when runners are there; none if not wanted
    LOADING            may have parts  wait                       READY by `loaded`; WAITING by `lost`; none by an error
    READY, open        have it         are served                 closed when no name means it
    READY, closed      have it         resumed ones are served    open when a name means it; none if not wanted

    event              cause                                      effect
    -----------------  -----------------------------------------  ------------------------------------------------------
    received               a front sent entries                       Read each newer folder
    needed             a front sent the adapters of its streams   Read each one without a place
    read               the files were read                        the name gets a place, or an error
    loaded             the runners loaded it, or refused it       READY, an error, or WAITING if runners are fresh
    lost               runners were lost during a load            WAITING and Rebuild; the third loss is an error
    skipped            its runners were replaced before the load  WAITING
    started            fresh runners were started                 Restore each READY place; Load each WAITING one
    restored           the fresh runners refused a place          End its requests; its names get an error
    fell_asleep        the engine sleeps                          places stay; new ones stay WAITING; never Rebuild
    woke_up            the same runners are awake                 Load each WAITING place
    hold_ended         fronts know a name's successor             the name no longer wants its former adapter
    unused             requests may have ended                    free the unwanted places

Each Load carries the runners' generation, the number of their starts. A load counts only if its generation is
still current. So the living runners have the adapter of every open place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from actors.wire.adapter_entry import AdapterEntry, AdapterState
from runtime.base.types import CallboardError
from runtime.features.adapter_table import AdapterTable, not_loaded

MAX_LOSSES = 3  # runner losses during an adapter's load; it may be the cause


class Read(NamedTuple):
    """Read the files in a folder; the answer is `read`."""

    path: str
    digest: str = ""  # the files' required digest; empty for an entry
    entry: AdapterEntry | None = None  # None if only fronts need the adapter


class Load(NamedTuple):
    """Load an adapter while steps go on; the answer is `loaded`, `lost` or `skipped`."""

    digest: str
    at: int  # its index
    path: str
    generation: int


class Restore(NamedTuple):
    """Load an adapter before the next step; the answer is `restored` if the runners refuse it."""

    digest: str
    at: int  # its index
    path: str


class End(NamedTuple):
    """End the requests of an adapter."""

    digest: str
    error: str


class Hold(NamedTuple):
    """Call `hold_ended` when the fronts have received the state of this entry."""

    entry: AdapterEntry


class Rebuild(NamedTuple):
    """Start fresh runners."""

    why: str


class Report(NamedTuple):
    """Send `states` and `kept` to the fronts, and retry the requests that wait for an adapter."""


Action = Read | Load | Restore | End | Hold | Rebuild | Report


class _State(Enum):
    WAITING = auto()
    LOADING = auto()
    READY = auto()


@dataclass(slots=True)
class _Place:
    index: int
    path: str
    state: _State = _State.WAITING
    is_announced: bool = False  # fronts may send requests for it: it is ready, or will be after the wake-up
    num_losses: int = 0  # runner losses while it was loaded
    used_ns: int = 0  # wall clock of its last request; before, the version of its entry


@dataclass(slots=True)
class _Name:
    entry: AdapterEntry
    digest: str = ""  # its adapter's digest; the former one's after an unload; empty until the files are read
    error: str = ""
    held: str = ""  # digest of its previous adapter; see AdapterState
    is_held_back: bool = False  # Hold was sent
    idle: dict[str, int] | None = None  # see AdapterState

    @property
    def digests(self) -> set[str]:
        """Digests of the adapters that the name wants."""
        return {self.digest, self.held} - {""} if self.entry.path else set()


class AdapterMachine:
    """Names and places. The step thread calls everything but `generation`."""

    def __init__(self, table: AdapterTable, uses: Callable[[int], bool], settings: Collection[str] = ()) -> None:
        """Args:
        uses: returns whether requests or steps in flight have an index.
        settings: names of the command line; their entries are never dropped."""
        self._table, self._uses, self._settings = table, uses, frozenset(settings)
        self._names: dict[str, _Name] = {}
        self._places: dict[str, _Place] = {}  # places by digest
        self._needs: dict[Hashable, dict[str, str]] = {}  # each front's folders by digest
        self._errors: dict[str, str] = {}  # errors of needed adapters that failed to load, by digest
        self._reading: set[Read] = set()
        self._leaving: list[int] = []  # indices that only running requests use
        self._has_runners, self._is_asleep = True, False
        self.generation = 1
        self.states: dict[str, AdapterState] = {}  # states by name; a state that did not change remains the same object
        self.kept: dict[str, str] = {}  # folders of READY places, by digest: resumed streams may use them

    # ---- events -----------------------------------------------------------------------------------------------------

    def received(self, entries: Iterable[AdapterEntry], now_ns: int) -> list[Action]:
        for name in [n for n, state in self.states.items() if self._is_forgotten(state, now_ns)]:
            del self._names[name]
        out: list[Action] = []
        for entry in entries:
            known = self._names.get(entry.name)
            is_late = known is None and not entry.path and entry.version and entry.is_older(now_ns)
            if is_late or (known is not None and entry.version <= known.entry.version):
                continue
            before = self._current(known) if known is not None else ""
            if entry.path:
                held = before if known is not None and known.entry.path else ""
                self._names[entry.name] = _Name(entry, held=held)
                out.append(self._read(Read(entry.path, entry=entry)))
            else:
                self._names[entry.name] = _Name(entry, before)
        return self._settle(out)

    def needed(self, front: Hashable, paths: Mapping[str, str]) -> list[Action]:
        self._needs[front] = dict(paths)
        if not paths:
            del self._needs[front]
        return self._settle([])

    def read(self, job: Read, digest: str, error: str = "") -> list[Action]:
        self._reading.discard(job)
        name = self._names.get(job.entry.name) if job.entry is not None else None
        if name is not None and name.entry == job.entry:
            name.digest, name.error = self._placed(digest, job.path, error, name.entry.version)
            if name.error and not error:
                ready = {d: place for d, place in self._places.items() if place.state is _State.READY}
                name.idle = {d: place.used_ns for d, place in ready.items() if not self._uses(place.index)}
        elif job.entry is None:
            if not error and digest != job.digest:
                error = f"The files of the adapter {job.digest} have changed since it was loaded."
            if error := self._placed(digest, job.path, error)[1]:
                self._errors[job.digest] = error
        return self._settle([Report()])

    def loaded(self, job: Load, error: str = "") -> list[Action]:
        place = self._places[job.digest]
        if not error and job.generation != self.generation:
            return self.lost(job, "others were started while it was loaded.")
        if error:
            self._drop(job.digest, error)
        else:
            place.state, place.is_announced = _State.READY, True
        return self._settle([Report()])

    def lost(self, job: Load, why: str) -> list[Action]:
        place, out = self._places[job.digest], list[Action]()
        place.state = _State.WAITING
        if not self._is_asleep:
            if job.generation == self.generation and self._has_runners:
                self._has_runners = False
                out.append(Rebuild(why))
            place.num_losses += 1
            if place.num_losses >= MAX_LOSSES:
                self._drop(job.digest, f"The model runners were lost {MAX_LOSSES} times while they loaded it: {why}")
                out.append(Report())
        return self._settle(out)

    def skipped(self, job: Load) -> list[Action]:
        self._places[job.digest].state = _State.WAITING
        return self._settle([])

    def started(self) -> list[Action]:
        self.generation += 1
        self._has_runners, self._is_asleep = True, False
        out = self._settle([])
        ready = [(digest, place) for digest, place in self._places.items() if place.state is _State.READY]
        return [*(Restore(digest, place.index, place.path) for digest, place in ready), *out]

    def restored(self, digest: str, error: str) -> list[Action]:
        self._drop(digest, error)
        return self._settle([End(digest, error), Report()])

    def fell_asleep(self) -> list[Action]:
        self._has_runners, self._is_asleep = False, True
        return self._settle([])

    def woke_up(self) -> list[Action]:
        self._has_runners, self._is_asleep = True, False
        return self._settle([])

    def hold_ended(self, entry: AdapterEntry) -> list[Action]:
        name = self._names.get(entry.name)
        if name is not None and name.entry == entry:
            name.held = ""
        return self._settle([])

    def unused(self) -> list[Action]:
        return [] if all(map(self._uses, self._leaving)) else self._settle([])

    # ---- questions of the step thread -------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """True if `unused` may free something."""
        return bool(self._leaving)

    def retaining(self) -> list[Hashable]:
        """Return the fronts with streams that keep a place without a name."""
        named = self._named()
        return [front for front, paths in self._needs.items() if any(d in self.kept and d not in named for d in paths)]

    def is_awaited(self, digest: str) -> bool:
        """True if requests for an adapter must wait: its place is not READY, or its files may be being read."""
        if (place := self._places.get(digest)) is not None:
            return place.state is not _State.READY
        return bool(digest and self._reading)

    def check(self, digest: str, resumed: bool, now_ns: int = 0) -> None:
        """Note the use of an adapter. A resumed request may use a closed place. Raises CallboardError if it may not."""
        if digest and not self._table.is_open(digest) and not (resumed and digest in self.kept):
            error = self._errors.get(digest)
            raise CallboardError(error) if error else not_loaded(digest)
        if digest:
            self._places[digest].used_ns = now_ns

    # ---- consequences of an event -----------------------------------------------------------------------------------

    def _current(self, name: _Name) -> str:
        """Return the digest that requests for a name get now."""
        place = self._places.get(name.digest)
        return name.digest if place is not None and place.is_announced else name.held

    def _is_forgotten(self, state: AdapterState, now_ns: int) -> bool:
        return not (state.entry.path or state.digest or state.is_setting) and state.entry.is_older(now_ns)

    def _named(self) -> set[str]:
        return set[str]().union(*(name.digests for name in self._names.values()))

    def _read(self, job: Read) -> Read:
        self._reading.add(job)
        return job

    def _placed(self, digest: str, path: str, error: str, used_ns: int = 0) -> tuple[str, str]:
        """Reserve a place for files that were read. Returns the digest or an error; the other is empty."""
        if not error and digest not in self._places:
            try:
                self._places[digest] = _Place(self._table.reserve(digest), path, used_ns=used_ns)
            except CallboardError as e:
                error = str(e)
        return ("", error) if error else (digest, "")

    def _drop(self, digest: str, error: str) -> None:
        """Free a place after its adapter failed to load."""
        self._free(digest)
        self._errors[digest] = error
        for name in self._names.values():
            if name.digest == digest:
                name.digest, name.error = "", error if name.entry.path else ""
            if name.held == digest:
                name.held = ""

    def _free(self, digest: str) -> None:
        del self._places[digest]
        self._table.release(digest)

    def _settle(self, out: list[Action]) -> list[Action]:
        """Bring all places to the state that names, needs and runners imply. Returns `out` with the actions."""
        needs = {digest: path for paths in self._needs.values() for digest, path in paths.items()}
        named = self._named()
        self._errors = {digest: error for digest, error in self._errors.items() if digest in needs}
        self._leaving = []
        for digest, place in list(self._places.items()):
            is_wanted = digest in named or digest in needs
            if place.state is _State.LOADING:
                continue
            if not is_wanted and not (place.state is _State.READY and self._uses(place.index)):
                self._free(digest)
            elif place.state is _State.READY:
                (self._table.open if digest in named else self._table.close)(digest)
                if not is_wanted:
                    self._leaving.append(place.index)
            elif self._has_runners:
                place.state = _State.LOADING
                out.append(Load(digest, place.index, place.path, self.generation))
            else:
                place.is_announced = place.is_announced or self._is_asleep
        busy = {job.path for job in self._reading}
        for digest, path in needs.items():
            if digest not in self._places and digest not in self._errors and path not in busy:
                out.append(self._read(Read(path, digest)))
        self._hold(out)
        self._note_states(out)
        return out

    def _hold(self, out: list[Action]) -> None:
        """Serve the previous adapter of a name until the fronts know its successor."""
        for name in self._names.values():
            place = self._places.get(name.digest)
            if name.held and place is not None and place.state is _State.READY:
                if name.held == name.digest:
                    name.held = ""
                elif not name.is_held_back:
                    name.is_held_back = True
                    out.append(Hold(name.entry))

    def _note_states(self, out: list[Action]) -> None:
        """Update `states` and `kept`; add a Report if they changed."""
        kept = {digest: place.path for digest, place in self._places.items() if place.state is _State.READY}
        named, states = self._named(), dict[str, AdapterState]()
        for text, name in self._names.items():
            place = self._places.get(name.digest)
            is_shown = place is not None and place.is_announced and (name.entry.path or name.digest not in named)
            digest = name.digest if is_shown else ""
            if not name.entry.path:
                name.digest = digest
            state = AdapterState(name.entry, digest, name.error, name.held, text in self._settings, name.idle)
            states[text] = old if (old := self.states.get(text)) == state else state
        has_changed = (kept, states) != (self.kept, self.states)
        self.kept, self.states = kept, states
        if has_changed and Report() not in out:
            out.append(Report())

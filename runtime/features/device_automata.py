"""Eager automata on the device: outputs that follow them do not use the host between steps."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from runtime.kernels.sampling.automata import advance_states_triton, mask_states_triton
from runtime.structured.matching.automaton import Automaton, EagerMatcher

_POOL_BYTES = 64 << 20  # some 50 automata for small schemas, with a vocabulary of 128k tokens


class DeviceAutomata:
    """A pool of automata, uploaded once each, and each slot's state (kernels/sampling/automata.py).

    The first automaton allocates the pool. Without room in it, or memory for it, later outputs stay with the host."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.places = torch.zeros((num_slots, 4), dtype=torch.int32, device=device)
        self.states = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.pool = torch.zeros(0, dtype=torch.int32, device=device)
        self._used = 0
        self._places: WeakKeyDictionary[Automaton, list[int]] = WeakKeyDictionary()

    def enter(self, slot: int, matcher: EagerMatcher) -> bool:
        """Set a slot's state from the matcher of its output; return False without room for the automaton."""
        place = self._places.get(matcher.automaton) or self._add(matcher.automaton)
        if place:
            self._write(self.places[slot], np.array(place, np.int32))
            self.states[slot : slot + 1].fill_(matcher.state)  # an assignment would wait for the step in flight
        return bool(place)

    def mask(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Mask rows' logits, in the form that kernels/sampling/automata.py has, on the device."""
        mask_states_triton(logits, rows, self.places, self.states, self.pool)

    def advance(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        advance_states_triton(token_ids, rows, self.places, self.states, self.pool)

    def _add(self, automaton: Automaton) -> list[int]:
        """Upload an automaton; return its place, or an empty list without room.

        On the device, EOS has a class of its own, and each EOS token that the grammar names has one, too. Where the
        output may end, they lead to one more state, the end, which allows only EOS."""
        num_states, num_classes = automaton.next_state.shape
        eos_ids = list(automaton.eos_ids)
        named = [i for i in eos_ids if automaton.token_class[i]]
        token_class = automaton.token_class.copy()
        token_class[eos_ids] = num_classes
        next_state = np.full((num_states + 1, num_classes + 1 + len(named)), -1, np.int32)
        next_state[:num_states, :num_classes] = automaton.next_state
        for at, token in enumerate(named, start=num_classes + 1):
            next_state[:num_states, at] = automaton.next_state[:, automaton.token_class[token]]
            token_class[token] = at
        may_end = np.append(automaton.accepting, True)
        next_state[may_end, num_classes:] = num_states
        only_eos = np.zeros(automaton.masks.shape[1] * 32, np.bool_)
        only_eos[eos_ids] = True
        end = np.packbits(only_eos, bitorder="little").view(np.int32)
        parts = [automaton.masks.reshape(-1), end, token_class, next_state.reshape(-1)]
        values = np.concatenate(parts)
        if not len(self.pool):
            try:
                self.pool = torch.empty(_POOL_BYTES // 4, dtype=torch.int32, device=self.device)
            except torch.OutOfMemoryError:
                return []
        if self._used + len(values) > len(self.pool):
            return []
        self._write(self.pool[self._used : self._used + len(values)], values)
        classes = self._used + automaton.masks.size + len(end)
        place = [self._used, classes, classes + len(token_class), next_state.shape[1]]
        self._used += len(values)
        self._places[automaton] = place
        return place

    def _write(self, target: torch.Tensor, values: np.ndarray) -> None:
        """Copy to the device without a wait of the host."""
        host = torch.from_numpy(values)
        target.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)

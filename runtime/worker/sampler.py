"""The sampler: owns the slots' sampling parameters, turns logits into tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from runtime.core.plan import Int32s, NewSlot
from runtime.kernels.bitmask import apply_bitmask_torch
from runtime.kernels.gumbel import gumbel_noise, noise_keys
from runtime.kernels.sampling import apply_penalties, token_logprobs
from runtime.kernels.top_k_top_p import top_k_top_p_bounds_torch
from runtime.worker.grammar_state import Masks
from runtime.worker.slots import Slots

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_INTS = ("top_k", "min_tokens")
MASKED_LOGIT = -1e9  # the logit of what min_tokens holds back, but of a token that a grammar allows nothing beside


@dataclass(slots=True)
class Logprobs:
    """Of the rows that asked for them, and of prompt tokens; see StepResult."""

    rows: Int32s
    ranks: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        """With `move` applied to each tensor."""
        return Logprobs(self.rows, *(move(x) for x in (self.ranks, self.logprobs, self.top_ids, self.top_logprobs)))

    def then(self, prompts: Logprobs) -> Logprobs:
        """With those of prompt tokens after these. Nobody reads what fills up the side with fewer alternatives."""
        missing = prompts.top_ids.shape[1] - self.top_ids.shape[1]
        filled = [
            (F.pad(a, (0, max(0, missing))), F.pad(b, (0, max(0, -missing))))
            for a, b in ((self.top_ids, prompts.top_ids), (self.top_logprobs, prompts.top_logprobs))
        ]
        pairs = ((self.ranks, prompts.ranks), (self.logprobs, prompts.logprobs), *filled)
        return Logprobs(self.rows, *(torch.cat(pair) for pair in pairs))


class Sampler:
    """Gumbel-max sampling with noise by position (C4). Rows that only want the best token skip everything else.

    In order, on a copy of the raw logits: logit bias, min_tokens, grammar, penalties, temperature, top-k/top-p/min-p,
    noise."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.device = device
        self.eos_token_ids = eos_token_ids
        self.floats = {name: np.zeros(num_slots, np.float32) for name in _FLOATS}
        self.ints = {name: np.zeros(num_slots, np.int64) for name in _INTS}
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.seed = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.plain = np.ones(num_slots, bool)  # argmax of the raw logits is the answer
        self.penalised = np.zeros(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slot -> ids, values
        self.stops: dict[int, torch.Tensor] = {}  # slot -> ids kept back until min_tokens
        self.vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def add(self, new: NewSlot) -> None:
        """A request's parameters enter its slot."""
        slot, params = new.slot, new.params
        self.remove(slot)
        for name, values in (*self.floats.items(), *self.ints.items()):
            values[slot] = getattr(params, name)
        self.prompt_len[slot] = new.prompt_len
        self.seed[slot] = new.seed
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.penalised[slot] = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self.filtered[slot] = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        # Ids that the model does not have are ignored: they must not fail the step of others (C9).
        vocab = range(len(self.vocab_ids))
        if bias := [(i, value) for i, value in params.logit_bias if i in vocab]:
            ids, values = zip(*bias, strict=True)
            self.bias[slot] = (torch.tensor(ids, device=self.device), torch.tensor(values, device=self.device))
        stops = params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)
        if params.min_tokens and (stops := [i for i in stops if i in vocab]):
            self.stops[slot] = torch.tensor(stops, device=self.device)
        self.plain[slot] = not (
            params.temperature > 0.0
            or self.penalised[slot]
            or slot in self.bias
            or slot in self.stops
            or params.grammar is not None
        )

    def remove(self, slot: int) -> None:
        """Forget what does not get overwritten by the next `add`."""
        self.bias.pop(slot, None)
        self.stops.pop(slot, None)

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] the model's own
        slots: Int32s,  # [n]
        positions: Int32s,  # [n] of the tokens to be sampled
        state: Slots,
        masks: Masks | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Token ids [n] int64, -1 where the logits are not finite (C9), and the log-probabilities asked for."""
        logits = logits.float()  # at once: a CPU's reductions over bfloat16 are several times slower
        finite = logits.sum(-1).isfinite()
        token_ids = logits.argmax(-1)
        rows = np.flatnonzero(~self.plain[slots])
        if len(rows):
            index = self._tensor(rows)
            chosen = logits.index_select(0, index)
            self._apply_bias_and_stops(chosen, slots[rows], positions[rows])
            if masks is not None:
                at = np.searchsorted(rows, masks.numbers)
                apply_bitmask_torch(chosen, self._tensor(at), self._tensor(masks.words))
                finite[self._tensor(masks.failed).long()] = False
            token_ids[index] = self._choose(chosen, slots[rows], positions[rows], state)
        logprobs = self._logprobs(logits, token_ids, slots)
        return token_ids.masked_fill_(~finite, -1), logprobs

    def _choose(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots) -> torch.Tensor:
        """Of the rows that want more than the best token; `logits` is theirs to change."""
        rows = np.flatnonzero(self.penalised[slots])
        if len(rows):
            index, subset = self._tensor(rows), slots[rows]
            chosen = logits.index_select(0, index)
            tokens = state.tokens[self._tensor(subset), : int(positions[rows].max())]
            lengths = self._tensor(positions[rows]), self._tensor(self.prompt_len[subset])
            penalties = (self._float(f"{name}_penalty", subset) for name in ("repetition", "frequency", "presence"))
            apply_penalties(chosen, tokens, *lengths, *penalties)
            logits.index_copy_(0, index, chosen)
        rows = np.flatnonzero(self.floats["temperature"][slots] > 0)
        if len(rows) == len(slots):
            return self._draw(logits, slots, positions)
        token_ids = logits.argmax(-1)
        if len(rows):
            index = self._tensor(rows)
            token_ids[index] = self._draw(logits.index_select(0, index), slots[rows], positions[rows])
        return token_ids

    def _apply_bias_and_stops(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> None:
        if self.bias:
            for row, slot in enumerate(slots.tolist()):
                if slot in self.bias:
                    ids, values = self.bias[slot]
                    logits[row].index_add_(0, ids, values)
        if self.stops:
            waiting = positions - self.prompt_len[slots] < self.ints["min_tokens"][slots]
            for row, slot in enumerate(slots.tolist()):
                if waiting[row] and slot in self.stops:
                    logits[row].index_fill_(0, self.stops[slot], MASKED_LOGIT)

    def _draw(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> torch.Tensor:
        logits.div_(self._float("temperature", slots)[:, None])
        rows = np.flatnonzero(self.filtered[slots])
        if len(rows):
            index, subset = self._tensor(rows), slots[rows]
            chosen = logits.index_select(0, index)
            top_k = self._tensor(self.ints["top_k"][subset])
            bounds = top_k_top_p_bounds_torch(chosen, top_k, self._float("top_p", subset), self._float("min_p", subset))
            logits.index_copy_(0, index, chosen.masked_fill_(chosen < bounds[:, None], -torch.inf))
        keys = noise_keys(self._tensor(self.seed[slots]), self._tensor(positions))
        return logits.add_(gumbel_noise(keys[:, :, None], self.vocab_ids)).argmax(-1)

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, slots: Int32s) -> Logprobs | None:
        wanted = self.num_logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return None
        index = self._tensor(rows)
        own, ranks, top_ids, top = token_logprobs(logits.index_select(0, index), token_ids[index], int(wanted.max()))
        return Logprobs(rows.astype(np.int32), ranks, own, top_ids, top)

    def _float(self, name: str, slots: Int32s) -> torch.Tensor:
        return self._tensor(self.floats[name][slots])

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

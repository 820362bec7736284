"""StepPlan and StepResult: all that an engine and a runner say to each other, and their binary form.

Order is the contract: a runner applies plans in the order of `step_id`, each as
free slots -> open slots -> write block tables -> run rows -> sample; results come back in the same order. A plan may
therefore reuse a slot or a block that an earlier plan still reads (C2), and a row may start at a token that the step
before it samples: sampled tokens stay in the slot, and a plan only brings those that no step has sampled, guesses:

    a row that verifies 3 guesses     position  p   p+1  p+2  p+3          4 tokens, 3 of a draft, 4 samples
                                      token     t   g1   g2   g3           t is in the slot, g1..g3 come with the plan
                                      samples      s1   s2   s3   s4       s2 counts if g1 == s1, s3 if g2 == s2 too ...

What is computed beyond the first wrong guess is overwritten by the rows that follow.

The wire form is a header of int32 counts and then the arrays, back to back, little-endian, no pickle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.sampling_fields import SamplingTable, table_of
from runtime.core.types import CallboardError, Grammar, PromptLogprobs, SamplingParams, TokenLogprobs

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

MAX_STEPS = 64  # steps of a plan: a chain is one plan, and what is guessed ahead of it another

EMPTY: Int32s = np.zeros(0, np.int32)
EMPTY_TABLE: Int32s = np.zeros((3, 0), np.int32)


def _empty() -> Int32s:
    return EMPTY


@dataclass(slots=True)
class NewSlot:
    """A request enters `slot`: everything that the runner needs to compute and to sample it."""

    slot: int
    token_ids: Int32s  # [num_known] prompt, and output so far after a preemption or a restart
    prompt_len: int
    seed: int
    params: SamplingParams


@dataclass(slots=True)
class StepPlan:
    """One step, made by the scheduler and owned by it until encoded; the runner only reads it."""

    step_id: int
    freed: Int32s = field(default_factory=_empty)  # [num_freed] slots whose request is gone
    new: list[NewSlot] = field(default_factory=list)
    block_table_writes: Int32s = field(default_factory=lambda: EMPTY_TABLE)  # [3, n] slot, index in its table, block
    slots: Int32s = field(default_factory=_empty)  # [num_rows]
    num_computed: Int32s = field(default_factory=_empty)  # [num_rows] position of the row's first token
    num_tokens: Int32s = field(default_factory=_empty)  # [num_rows] tokens of the row
    num_samples: Int32s = field(default_factory=_empty)  # [num_rows] sample after so many of the row's last tokens
    draft_lens: Int32s = field(default_factory=_empty)  # [num_rows] so many of the last are draft tokens; or []
    draft_token_ids: Int32s = field(default_factory=_empty)  # [sum of draft_lens] row after row
    # Rows of one token each that are all sampled run so often, each time a position on: the plan of a draft, which has
    # nobody to ask in between. Samples are row after row, [num_rows * num_steps]; none has log-probabilities.
    num_steps: int = 1

    @property
    def ends(self) -> Int32s:
        """[num_rows] position after the row's last token."""
        return self.num_computed + self.num_tokens

    def expanded(self) -> list[StepPlan]:
        """The plans of one step each that do the same."""
        rows = [(self.slots, self.num_computed + i, self.num_tokens, self.num_samples) for i in range(self.num_steps)]
        rest = [StepPlan(self.step_id, EMPTY, [], EMPTY_TABLE, *columns) for columns in rows[1:]]
        return [replace(self, num_steps=1), *rest]


@dataclass(slots=True)
class StepResult:
    """The samples of one plan's rows, in the order of the rows and of the positions in them; and the
    log-probabilities of prompt tokens."""

    step_id: int
    token_ids: Int32s  # [num_sampled]; -1: no finite logits, or a grammar at a limit; the request alone fails (C9)
    # Of m tokens: those of the sampling rows that asked for it, which `logprob_rows` finds in token_ids; then, for each
    # row of a slot with prompt_logprobs, the prompt's own token after each of the row's tokens (num_targets).
    logprob_rows: Int32s = field(default_factory=_empty)
    ranks: Int32s = field(default_factory=_empty)  # [m] of the token, from 1
    logprobs: Float32s = field(default_factory=lambda: np.zeros(0, np.float32))  # [m] of the token
    # Best first, as many as the most demanding row asked for.
    top_ids: Int32s = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # [m, n]
    top_logprobs: Float32s = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [m, n]
    begun: tuple[int, int] = 0, 0  # outputs whose grammar was taken up, by the engine that serves it: lazy, eager
    failures: dict[int, str] = field(default_factory=dict)  # why a grammar cannot go on, by the number of the token

    def sampled_logprobs(self, at: int, num_top: int) -> TokenLogprobs:
        """Of the token that `logprob_rows[at]` sampled."""
        top = zip(self.top_ids[at, :num_top].tolist(), self.top_logprobs[at, :num_top].tolist(), strict=True)
        token_id = int(self.token_ids[self.logprob_rows[at]])
        return TokenLogprobs(token_id, float(self.logprobs[at]), int(self.ranks[at]), tuple(top))

    def prompt_logprobs(self, at: int, count: int, num_top: int) -> PromptLogprobs:
        """Of `count` prompt tokens from the `at`-th on."""
        rows = slice(len(self.logprob_rows) + at, len(self.logprob_rows) + at + count)
        own, top = (self.ranks, self.logprobs), (self.top_ids[:, :num_top], self.top_logprobs[:, :num_top])
        return PromptLogprobs(*(a[rows].tobytes() for a in (*own, *top)))


def joined(results: list[StepResult]) -> StepResult:
    """The result of a plan from those of its unrolled steps."""
    token_ids = np.stack([result.token_ids for result in results], axis=1).reshape(-1)
    return StepResult(results[0].step_id, token_ids)


def num_targets(start: int, count: int, prompt_len: int) -> int:
    """Prompt tokens whose log-probabilities a row gives: those that follow its own, up to the prompt's last."""
    return max(0, min(start + count, prompt_len - 1) - start)


def last_tokens(plan: StepPlan, sizes: Int32s) -> tuple[NDArray[np.int64], Int32s]:
    """The last sizes[i] tokens of each row i, one after another: row numbers and positions, each [sum of sizes]."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    begins = np.cumsum(sizes) - sizes
    within = np.arange(len(rows)) - begins[rows]
    return rows, ((plan.ends - sizes)[rows] + within).astype(np.int32)


_PLAN = struct.Struct(
    "<4sq7i"
)  # magic, step_id, num_freed, num_new, num_writes, num_rows, num_lens, num_ids, num_steps
_RESULT = struct.Struct("<4sq7i")


def slot_layout(table: SamplingTable) -> struct.Struct:
    """Slot, prompt length, known tokens, seed; the numbers of the table; counts of stop ids, biases, grammar bytes."""
    return struct.Struct(f"<3iq{table.format}5i")


_PARAMS = table_of(SamplingParams)
_SLOT = slot_layout(_PARAMS)


def _ints(values: list[int] | tuple[int, ...]) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def _encode_slot(new: NewSlot) -> list[bytes]:
    p = new.params
    grammar = [] if p.grammar is None else [s.encode() for s in (p.grammar.key, p.grammar.lark, p.grammar.expression)]
    sizes = len(p.stop_token_ids), len(p.logit_bias), *([len(text) for text in grammar] or (-1, 0, 0))
    numbers = _PARAMS.numbers(p)
    head = _SLOT.pack(new.slot, new.prompt_len, len(new.token_ids), new.seed, *numbers, *sizes)
    bias_ids = _ints([i for i, _ in p.logit_bias])
    bias = np.asarray([b for _, b in p.logit_bias], np.float32).tobytes()
    filler = bytes(-sum(map(len, grammar)) % 4)  # arrays stay aligned
    return [head, new.token_ids.tobytes(), _ints(p.stop_token_ids), bias_ids, bias, *grammar, filler]


class _Reader:
    """Cuts arrays off a received frame; refuses a frame whose counts do not add up to its length."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self.data, self.at, self.what = data, 0, what

    def _take(self, size: int) -> int:
        at = self.at
        if size < 0 or at + size > len(self.data):
            raise CallboardError(f"A {self.what} frame of {len(self.data)} bytes is cut off at byte {at}.")
        self.at = at + size
        return at

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self.data, self._take(layout.size))

    def ints(self, count: int) -> Int32s:
        return np.frombuffer(self.data, np.int32, count, self._take(4 * count)) if count else EMPTY

    def floats(self, count: int) -> Float32s:
        return np.frombuffer(self.data, np.float32, count, self._take(4 * count)) if count else EMPTY.view(np.float32)

    def text(self, size: int) -> str:
        at = self._take(size)
        return str(self.data[at : at + size], "utf-8")

    def end(self) -> None:
        if self.at != len(self.data):
            raise CallboardError(f"A {self.what} frame has {len(self.data) - self.at} bytes too many.")


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as one frame."""
    rows = (plan.slots, plan.num_computed, plan.num_tokens, plan.num_samples, plan.draft_lens, plan.draft_token_ids)
    sizes = len(plan.freed), len(plan.new), plan.block_table_writes.shape[1], *(len(a) for a in (rows[0], *rows[4:]))
    head = _PLAN.pack(b"CBP1", plan.step_id, *sizes, plan.num_steps)
    parts = [head, *(a.tobytes() for a in (plan.freed, plan.block_table_writes, *rows))]
    for new in plan.new:
        parts += _encode_slot(new)
    return b"".join(parts)


def decode_plan(data: bytes | memoryview) -> StepPlan:
    """The plan of a frame; its arrays are read-only views of `data`.

    Raises CallboardError if the frame is not a plan or is cut off."""
    r = _Reader(data, "plan")
    magic, step_id, num_freed, num_new, num_writes, num_rows, num_lens, num_draft_ids, num_steps = r.unpack(_PLAN)
    if magic != b"CBP1":
        raise CallboardError(f"A frame that starts with {magic!r} is not a step plan.")
    freed = r.ints(num_freed)
    writes = r.ints(3 * num_writes).reshape(3, num_writes)
    slots, num_computed, num_tokens, num_samples = (r.ints(num_rows) for _ in range(4))
    lens, ids = r.ints(num_lens), r.ints(num_draft_ids)
    new = [_decode_slot(r) for _ in range(num_new)]
    r.end()
    return StepPlan(step_id, freed, new, writes, slots, num_computed, num_tokens, num_samples, lens, ids, num_steps)


def _decode_slot(r: _Reader) -> NewSlot:
    slot, prompt_len, num_known, seed, *numbers, num_stop, num_bias, key_len, lark_len, expression_len = r.unpack(_SLOT)
    token_ids = r.ints(num_known)
    stop = tuple(r.ints(num_stop).tolist())
    bias = tuple(zip(r.ints(num_bias).tolist(), r.floats(num_bias).tolist(), strict=True))
    grammar = None
    if key_len >= 0:
        grammar = Grammar(r.text(key_len), r.text(lark_len), r.text(expression_len))
        r.text(-(key_len + lark_len + expression_len) % 4)
    params = _PARAMS.make(numbers, stop_token_ids=stop, logit_bias=bias, grammar=grammar)
    return NewSlot(slot, token_ids, prompt_len, seed, params)


def encode_result(result: StepResult) -> bytes:
    """The result as one frame."""
    m, n = result.top_ids.shape
    failures = "\n".join(f"{row} {why}" for row, why in result.failures.items()).encode()
    sizes = len(result.token_ids), len(result.logprob_rows), m, n, *result.begun, len(failures)
    head = _RESULT.pack(b"CBR1", result.step_id, *sizes)
    arrays = (result.token_ids, result.logprob_rows, result.ranks, result.logprobs, result.top_ids, result.top_logprobs)
    return b"".join([head, *(a.tobytes() for a in arrays), failures])


def decode_result(data: bytes | memoryview) -> StepResult:
    """The result of a frame; raises CallboardError if the frame is not a result or is cut off."""
    r = _Reader(data, "result")
    magic, step_id, num_sampled, num_rows, m, n, lazy, eager, num_failures = r.unpack(_RESULT)
    if magic != b"CBR1":
        raise CallboardError(f"A frame that starts with {magic!r} is not a step result.")
    token_ids, rows, ranks, logprobs = r.ints(num_sampled), r.ints(num_rows), r.ints(m), r.floats(m)
    top_ids, top_logprobs = r.ints(m * n).reshape(m, n), r.floats(m * n).reshape(m, n)
    lines = [line.split(" ", 1) for line in r.text(num_failures).split("\n") if line]
    failures = {int(row): why for row, why in lines}
    result = StepResult(step_id, token_ids, rows, ranks, logprobs, top_ids, top_logprobs, (lazy, eager), failures)
    r.end()
    return result

"""StepPlan and StepResult: all that an engine and a runner say to each other, and their binary form.

Order is the contract: a runner applies plans in the order of `step_id`, each as
free slots -> open slots -> write block tables -> run rows -> sample; results come back in the same order. A plan may
therefore reuse a slot or a block that an earlier plan still reads (C2), and a row may start at a token that the step
before it samples: sampled tokens stay in the slot, and a plan only brings those that no step has sampled, guesses:

    a row that verifies 3 guesses     position  p   p+1  p+2  p+3          4 tokens, 3 of a draft, 4 samples
                                      token     t   g1   g2   g3           t is in the slot, g1..g3 come with the plan
                                      samples      s1   s2   s3   s4       s2 counts if g1 == s1, s3 if g2 == s2 too ...

What is computed beyond the first wrong guess is overwritten by the rows that follow.

The wire form is msgpack, with the bytes of the arrays in it; nothing is pickled.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.spec.types import CallboardError, GrammarUpdate, PromptLogprobs, SamplingParams, TokenLogprobs

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

MAX_DRAFT_TOKENS = 8  # of a row
MAX_STEPS = 64  # steps of a plan: a chain is one plan, and what is guessed ahead of it another
MAX_NEW_BYTES = 16 << 20  # of the new slots of a plan that has several: a frame stays far below its limit

EMPTY: Int32s = np.zeros(0, np.int32)
EMPTY_TABLE: Int32s = np.zeros((3, 0), np.int32)


class NewSlot(msgspec.Struct, array_like=True):
    """A request enters `slot`: everything that the runner needs to compute and to sample it."""

    slot: int
    token_ids: Int32s  # [num_known] prompt, and output so far after a preemption or a restart
    prompt_len: int
    seed: int
    params: SamplingParams
    adapter: int = 0  # the index of its adapter on the device (adapters.py); 0: none


class StepPlan(msgspec.Struct, tag="plan", omit_defaults=True):
    """One step, made by the scheduler and owned by it until encoded; the runner only reads it."""

    step_id: int
    freed: Int32s = EMPTY  # [num_freed] slots whose request is gone
    new: list[NewSlot] = []
    block_table_writes: Int32s = EMPTY_TABLE  # [3, n] slot, index in its table, block
    slots: Int32s = EMPTY  # [num_rows]
    num_computed: Int32s = EMPTY  # [num_rows] position of the row's first token
    num_tokens: Int32s = EMPTY  # [num_rows] tokens of the row
    num_samples: Int32s = EMPTY  # [num_rows] sample after so many of the row's last tokens
    draft_lens: Int32s = EMPTY  # [num_rows] so many of the last are draft tokens; or []
    draft_token_ids: Int32s = EMPTY  # [sum of draft_lens] row after row
    # Rows of one token each that are all sampled run so often, each time a position on: the plan of a draft, which has
    # nobody to ask in between. Samples are row after row, [num_rows * num_steps]; none has log-probabilities.
    num_steps: int = 1
    grammars: GrammarUpdate | None = None  # on a connection, before the new slots are read (plan_wire.py)

    @property
    def ends(self) -> Int32s:
        """[num_rows] position after the row's last token."""
        return self.num_computed + self.num_tokens

    def expanded(self) -> list[StepPlan]:
        """The plans of one step each that do the same."""
        rows = [(self.slots, self.num_computed + i, self.num_tokens, self.num_samples) for i in range(self.num_steps)]
        rest = [StepPlan(self.step_id, EMPTY, [], EMPTY_TABLE, *columns) for columns in rows[1:]]
        return [msgspec.structs.replace(self, num_steps=1), *rest]


class StepResult(msgspec.Struct, tag="result", omit_defaults=True):
    """The samples of one plan's rows, in the order of the rows and of the positions in them; and the
    log-probabilities of prompt tokens."""

    step_id: int
    # [num_sampled]; -1: no finite logits, or a grammar at a limit, so that the request alone fails (C9); or `deferred`
    token_ids: Int32s
    # Of m tokens: those of the sampling rows that asked for it, which `logprob_rows` finds in token_ids; then, for each
    # row of a slot with prompt_logprobs, the prompt's own token after each of the row's tokens (num_targets).
    logprob_rows: Int32s = EMPTY
    ranks: Int32s = EMPTY  # [m] of the token, from 1
    logprobs: Float32s = np.zeros(0, np.float32)  # [m] of the token
    # Best first, as many as the most demanding row asked for; after `num_best` of them those asked for by id.
    top_ids: Int32s = np.zeros((0, 0), np.int32)  # [m, n]
    top_logprobs: Float32s = np.zeros((0, 0), np.float32)  # [m, n]
    begun: tuple[int, int] = 0, 0  # outputs whose grammar was taken up, by the engine that serves it: lazy, eager
    failures: dict[int, str] = {}  # why a grammar cannot go on, by the number of the token
    pooled_rows: Int32s = EMPTY  # [k] which of token_ids are in place of a vector
    pooled: Float32s = np.zeros((0, 0), np.float32)  # [k, width] these vectors
    num_best: int = 0
    # Which of token_ids, -1 here, were not sampled, since their grammar's matcher is being made: plan that row again.
    deferred: Int32s = EMPTY

    def sampled_logprobs(self, at: int, params: SamplingParams) -> TokenLogprobs:
        """Return the log-probabilities of token `logprob_rows[at]`, as its request's `params` want them."""
        num_top, num_by_id = params.logprobs or 0, len(params.logprob_token_ids)
        best, by_id = slice(min(num_top, self.num_best)), slice(self.num_best, self.num_best + num_by_id)
        ids = [i for columns in (best, by_id) for i in self.top_ids[at, columns].tolist()]
        values = [value for columns in (best, by_id) for value in self.top_logprobs[at, columns].tolist()]
        top = dict(zip(ids, values, strict=True))  # one that is both stands where the best are
        token_id = int(self.token_ids[self.logprob_rows[at]])
        return TokenLogprobs(token_id, float(self.logprobs[at]), int(self.ranks[at]), tuple(top.items()))

    def prompt_logprobs(self, at: int, count: int, num_top: int) -> PromptLogprobs:
        """Of `count` prompt tokens from the `at`-th on."""
        rows = slice(len(self.logprob_rows) + at, len(self.logprob_rows) + at + count)
        own, top = (self.ranks, self.logprobs), (self.top_ids[:, :num_top], self.top_logprobs[:, :num_top])
        return PromptLogprobs(*(a[rows].tobytes() for a in (*own, *top)))


def joined(results: list[StepResult]) -> StepResult:
    """The result of a plan from those of its unrolled steps."""
    token_ids = np.stack([result.token_ids for result in results], axis=1).reshape(-1)
    deferred = [at * len(results) + step for step, result in enumerate(results) for at in result.deferred.tolist()]
    return StepResult(results[0].step_id, token_ids, deferred=np.array(deferred, np.int32))


def num_targets(start: int, count: int, prompt_len: int) -> int:
    """Prompt tokens whose log-probabilities a row gives: those that follow its own, up to the prompt's last."""
    return max(0, min(start + count, prompt_len - 1) - start)


def last_tokens(plan: StepPlan, sizes: Int32s) -> tuple[NDArray[np.int64], Int32s]:
    """The last sizes[i] tokens of each row i, one after another: row numbers and positions, each [sum of sizes]."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    begins = np.cumsum(sizes) - sizes
    within = np.arange(len(rows)) - begins[rows]
    return rows, ((plan.ends - sizes)[rows] + within).astype(np.int32)


_T = TypeVar("_T")
_INT32 = np.dtype(np.int32)


def _value_of(array: NDArray[Any]) -> Any:
    """A list of int32 as its bytes, which most arrays are; any other with its type and shape."""
    is_list = array.ndim == 1 and array.dtype == _INT32
    return array.tobytes() if is_list else (array.dtype.char, array.shape, array.tobytes())


def _array_of(kind: Any, value: Any) -> NDArray[Any]:
    """The array, read-only, that `_value_of` has made a value of."""
    if isinstance(value, bytes):
        return np.frombuffer(value, _INT32)
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


def decoder_of(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    """Reads plans, or results, of this class."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_array_of)


_encoder = msgspec.msgpack.Encoder(enc_hook=_value_of)
_plans, _results = decoder_of(StepPlan), decoder_of(StepResult)
encode_plan = encode_result = _encoder.encode


def _decoded(decoder: msgspec.msgpack.Decoder[_T], frame: bytes | bytearray, what: str) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, CallboardError) as e:
        raise CallboardError(f"A frame of {len(frame)} bytes is not a step {what}: {e}.") from None


def decode_plan(frame: bytes | bytearray) -> StepPlan:
    """The plan of a frame; raises CallboardError if the frame is not a whole plan."""
    return _decoded(_plans, frame, "plan")


def decode_result(frame: bytes | bytearray) -> StepResult:
    """The result of a frame; raises CallboardError if the frame is not a whole result."""
    return _decoded(_results, frame, "result")

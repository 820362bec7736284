"""StepPlan and StepResult: the messages between an engine and a runner, and their binary form.

Order is the contract. A runner applies plans in `step_id` order, and returns results in the same order. It applies
each plan as free slots -> open slots -> write block tables -> start transfers -> encode images -> run rows -> sample.
Opening a slot copies the snapshot that its request continues; rows store the snapshots that the plan takes. A plan may
therefore reuse a slot or a block that an earlier plan still reads (C2). A plan may have transfers alone: its result
waits until one of them ends, but not for long. A row may also start at a token that the step before it samples, because
sampled tokens stay in the slot. A plan contains only tokens that no step has sampled, such as draft tokens:

    a row that verifies 3 drafts      position  p   p+1  p+2  p+3          4 tokens, 3 of a draft, 4 samples
                                      token     t   g1   g2   g3           t is in the slot, g1..g3 are in the plan
                                      samples      s1   s2   s3   s4       s2 counts if g1 == s1, s3 if g2 == s2 too ...

Later rows overwrite the K/V after the first rejected draft token.

A head's draft tokens stay on the device: the plan has DEVICE_DRAFT in their place, and the result names them. The
step's samples leave before the head runs.

The wire form is msgpack, with the bytes of the arrays in it; nothing is pickled.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.base.arrays import Float32s, Int32s
from runtime.base.images import Image
from runtime.base.reports import Report, TokenLogprobs
from runtime.base.types import CallboardError, SamplingParams

MAX_STEPS = 64  # steps in a plan: a draft's chain is one plan, and its further guesses are another
MAX_NEW_BYTES = 16 << 20  # new slots' bytes in a plan with several: a frame stays far below its limit

DEVICE_DRAFT = -1  # stands for a draft token that the runner's head has made
EMPTY: Int32s = np.zeros(0, np.int32)
EMPTY_TABLE: Int32s = np.zeros((3, 0), np.int32)
NO_SPANS: Int32s = np.zeros((0, 5), np.int32)


class NewSlot(msgspec.Struct, array_like=True):
    """A request enters `slot`: everything that the runner needs to compute and to sample it."""

    slot: int
    token_ids: Int32s  # [num_known] prompt, and output so far after a preemption or a restart
    prompt_len: int
    seed: int
    params: SamplingParams
    adapter: int = 0  # index of its adapter on the device; 0 for none
    state: int = 0  # its row in the state cache; 0 for a model without states
    snapshot: int = 0  # state cache row that is copied to its own first; 0 for none
    spans: Int32s = NO_SPANS  # [num_images, 5] begin, number of tokens, and grid (ImageSpan)


class Encoding(msgspec.Struct, array_like=True):
    """An image that the runner encodes in this step."""

    image: Image
    row: int  # the first of its embeddings in the pool
    num_rows: int


class Transfers(msgspec.Struct, array_like=True):
    """Copies between the cache and the tier, one an index. Keys find their slots in the tier (runtime/tier)."""

    numbers: Int32s  # [n] by which results name them
    groups: Int32s  # [n] KV group of the block; -1 for a state
    blocks: Int32s  # [n] the block; a state's row in the state cache
    parts: Int32s  # [n] the state's part that fills one slot; 0 for a block
    keys: bytes  # 16 bytes each


class StepPlan(msgspec.Struct, tag="plan", omit_defaults=True):
    """One step, made by the scheduler and owned by it until encoded; the runner only reads it."""

    step_id: int
    freed: Int32s = EMPTY  # [num_freed] slots without a request from now on
    new: list[NewSlot] = []
    block_table_writes: Int32s = EMPTY_TABLE  # [3, n] slot, index in its table, block
    slots: Int32s = EMPTY  # [num_rows]
    num_computed: Int32s = EMPTY  # [num_rows] position of the row's first token
    num_tokens: Int32s = EMPTY  # [num_rows] tokens in the row
    num_samples: Int32s = EMPTY  # [num_rows] how many last tokens of the row are sampled after
    draft_lens: Int32s = EMPTY  # [num_rows] how many last tokens of the row are draft tokens; [] for none
    draft_token_ids: Int32s = EMPTY  # [sum of draft_lens] row after row

    # Times that the rows run, each time one position further. Above 1, all rows have one token and sample after it:
    # a draft's plan. Samples are row after row, [num_rows * num_steps], without log-probabilities.
    num_steps: int = 1
    snapshots: Int32s = EMPTY_TABLE  # [3, n] slot, position in its row, state cache row for the state there
    encodings: list[Encoding] = []
    embeds: Int32s = EMPTY_TABLE  # [3, n] first token's index in the step, its row in the pool, number of tokens
    stores: Transfers | None = None  # read as earlier plans have left the cache
    next_drafts: int = 0  # draft tokens that the head makes after each row that samples, for the next step
    loads: Transfers | None = None  # no row reads these blocks before a result names them

    @property
    def has_images(self) -> bool:
        """True if the step encodes images, or reads their embeddings."""
        return bool(self.encodings) or self.embeds.size > 0

    @property
    def ends(self) -> Int32s:
        """[num_rows] position after the row's last token."""
        return self.num_computed + self.num_tokens

    def expanded(self) -> list[StepPlan]:
        """Return equivalent plans of one step each."""
        rows = [(self.slots, self.num_computed + i, self.num_tokens, self.num_samples) for i in range(self.num_steps)]
        rest = [StepPlan(self.step_id, EMPTY, [], EMPTY_TABLE, *columns) for columns in rows[1:]]
        return [msgspec.structs.replace(self, num_steps=1), *rest]


class StepResult(msgspec.Struct, tag="result", omit_defaults=True):
    """The samples of one plan's rows, in the order of rows and positions, and reports."""

    step_id: int
    # [num_sampled], -1 for a failed or deferred sample. With non-finite logits the request alone fails (C9).
    token_ids: Int32s
    # Log-probabilities of m sampled tokens, of the rows that request them.
    logprob_rows: Int32s = EMPTY  # [m] index in token_ids
    ranks: Int32s = EMPTY  # [m] the token's rank, from 1
    logprobs: Float32s = np.zeros(0, np.float32)  # [m] the token's log-probability
    # The `num_best` best first, for the row that requests the most; then the tokens requested by id.
    top_ids: Int32s = np.zeros((0, 0), np.int32)  # [m, n]
    top_logprobs: Float32s = np.zeros((0, 0), np.float32)  # [m, n]
    num_best: int = 0
    # For `logprob_rows`, under the distribution that each token was drawn from; [] if no row reports it.
    sampling_logprobs: Float32s = np.zeros(0, np.float32)
    # (number, report): the number of the row that it is about. A number below 0 leaves it to `Extra.on_result`.
    reports: list[tuple[int, Report]] = []
    # Numbers of transfers that have ended since the last result; damaged ones found no slot, or other bytes.
    stored: Int32s = EMPTY
    loaded: Int32s = EMPTY
    damaged: Int32s = EMPTY
    draft_token_ids: Int32s = EMPTY  # the plan's, with the head's tokens; [] without DEVICE_DRAFT in the plan

    def sampled_logprobs(self, at: int, params: SamplingParams) -> TokenLogprobs:
        """Return the log-probabilities of token `logprob_rows[at]` that its request's `params` request."""
        num_top, num_by_id = params.logprobs or 0, len(params.logprob_token_ids)
        best, by_id = slice(min(num_top, self.num_best)), slice(self.num_best, self.num_best + num_by_id)
        ids = [i for columns in (best, by_id) for i in self.top_ids[at, columns].tolist()]
        values = [value for columns in (best, by_id) for value in self.top_logprobs[at, columns].tolist()]
        top = dict(zip(ids, values, strict=True))  # a token in both stays among the best
        token_id = int(self.token_ids[self.logprob_rows[at]])
        drawn = float(self.sampling_logprobs[at]) if params.sampling_logprobs else None
        return TokenLogprobs(token_id, float(self.logprobs[at]), int(self.ranks[at]), tuple(top.items()), drawn)


def joined(results: list[StepResult]) -> StepResult:
    """Return a plan's result from its steps' results (`StepPlan.expanded`)."""
    token_ids = np.stack([result.token_ids for result in results], axis=1).reshape(-1)
    whole = StepResult(results[0].step_id, token_ids)
    for step, result in enumerate(results):
        whole.reports += [(number, report.in_plan(step, len(results))) for number, report in result.reports]
    return whole


def last_tokens(plan: StepPlan, sizes: Int32s) -> tuple[NDArray[np.int64], Int32s]:
    """Return row numbers and positions of the last sizes[i] tokens in each row i, each [sum of sizes]."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    begins = np.cumsum(sizes) - sizes
    within = np.arange(len(rows)) - begins[rows]
    return rows, ((plan.ends - sizes)[rows] + within).astype(np.int32)


_T = TypeVar("_T")
_INT32 = np.dtype(np.int32)


def _value_of(array: NDArray[Any]) -> Any:
    """Return a list of int32, the usual array, as its bytes; any other array with its type and shape."""
    is_list = array.ndim == 1 and array.dtype == _INT32
    return array.tobytes() if is_list else (array.dtype.char, array.shape, array.tobytes())


def _array_of(kind: Any, value: Any) -> NDArray[Any]:
    """Return the array in a value from `_value_of`, read-only."""
    if isinstance(value, bytes):
        return np.frombuffer(value, _INT32)
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


def decoder_of(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    """Return a decoder for plans, or results, of this class."""
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
    """Return the plan of a frame. Raises CallboardError if the frame is not a whole plan."""
    return _decoded(_plans, frame, "plan")


def decode_result(frame: bytes | bytearray) -> StepResult:
    """Return the result of a frame. Raises CallboardError if the frame is not a whole result."""
    return _decoded(_results, frame, "result")

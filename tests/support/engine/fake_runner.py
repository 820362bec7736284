"""A runner that checks every block it reads, and the sequence that it must produce.

It keeps paged memory. At each position it stores a hash of two inputs: the hash that it *reads* one position earlier,
and the token there. It samples from the last hash. A wrong block, a stale table, a lost or repeated token changes every
later token, and the log-probabilities of every later token of a prompt.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from zlib import crc32

import numpy as np

from actors.runners.plan_wire import PlanReader, PlanWriter
from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.model_info import ModelInfo
from runtime.base.reports import Experts, PromptScores, TokenLogprobs, Vector
from runtime.base.types import FinishReason, Request, StepOutput
from runtime.core.engine import EngineCore
from runtime.core.executor import Executor
from runtime.core.extra import Extra
from runtime.core.plan import StepPlan, StepResult, decode_result, encode_result
from runtime.policy.output_length import OutputLengthEstimator
from runtime.policy.step_pacing import StepPacing
from runtime.speculation.choose_k import Drafter
from tests.support.engine.whole import with_extras

EOS = 0
VOCAB = 29
IMAGE = 27  # the token that stands for an embedding, within an image's span


def mix(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


def sample(state: int) -> int:
    return (state >> 17) % VOCAB


def embedding(digest: bytes, index: int) -> int:
    """Stands for one embedding of the image with this digest, in place of its token."""
    return crc32(digest + index.to_bytes(4)) + VOCAB


def embedded(request: Request, token_ids: Sequence[int]) -> list[int]:
    """The first tokens of a request, with the embeddings of its images."""
    found = list(token_ids)
    for span in request.images if found else ():
        at = [i for i in range(span.begin, span.end) if found[i] == IMAGE]
        for index, position in enumerate(at):
            found[position] = embedding(span.image.digest, index)
    return found


def before_all(adapter: str, weights: int = 0) -> int:
    """The hash before the first token of a request with the adapter of this digest, by the version of the weights."""
    return crc32(adapter.encode()) + 7919 * weights


def sequential(request: Request, max_len: int) -> tuple[list[int], FinishReason]:
    """The tokens that the request must produce, computed alone and in order."""
    state, out, params = before_all(request.adapter), [], request.params
    for token in embedded(request, request.token_ids):
        state = mix(state, token)
    limit = min(request.prompt_len + params.max_tokens, max_len)
    if not params.max_tokens or params.pooled:
        return [], FinishReason.LENGTH
    while True:
        token = sample(state)
        out.append(token)
        state = mix(state, token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return out, FinishReason.STOP
        if len(request.token_ids) + len(out) >= limit:
            return out, FinishReason.LENGTH


def of_versions(request: Request, tokens: list[int], versions: list[tuple[int, str]]) -> list[int]:
    """The tokens that the weights of each span must give after the ones before them, if all are computed again."""
    expected = list[int]()
    for at in range(len(tokens)):
        serial = int([name for start, name in versions if start <= at][-1].replace("default", "0"))
        state = before_all(request.adapter, serial)
        for token in [*request.token_ids, *tokens[:at]]:
            state = mix(state, token)
        expected.append(sample(state))
    return expected


class Oracle(Drafter):
    """A Drafter that knows the sequence, and is wrong in a share of its guesses."""

    def __init__(self, share_right: float) -> None:
        self.share_right, self.rng, self.num_right = share_right, np.random.default_rng(0), 0

    def guess(self, state, most: int) -> list[int]:
        known, guesses = 0, []
        for token in embedded(state.request, state.tokens):
            known = mix(known, token)
        for _ in range(self.rng.integers(1, most + 1)):
            right = self.rng.random() < self.share_right
            guesses.append(sample(known) if right else int(self.rng.integers(VOCAB)))
            known = mix(known, guesses[-1])
        return guesses

    def forget(self, state) -> None:
        pass


class Recorded(Drafter):
    """A Drafter that has the answers by request id, and is wrong in a share of its guesses."""

    def __init__(self, answers: dict[str, list[int]], share_right: float, vocab_size: int) -> None:
        self.answers, self.share_right, self.vocab_size = answers, share_right, vocab_size
        self.rng = np.random.default_rng(1)

    def guess(self, state, most: int) -> list[int]:
        at = len(state.tokens) - state.prompt_len
        right = self.answers[state.request.request_id][at : at + most]
        return [t if self.rng.random() < self.share_right else int(self.rng.integers(self.vocab_size)) for t in right]

    def forget(self, state) -> None:
        pass


class FixedShare(OutputLengthEstimator):
    """Expects that all answers get the same share of their max_tokens. With a share that is too small, an engine admits
    too many requests and preempts some."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def expect(self, max_tokens: int, length: int) -> tuple[float, int]:
        return max(0.0, self.share * max_tokens - length), 1 << 62


def sequential_scores(request: Request) -> list[TokenLogprobs]:
    """The prompt log-probabilities that the request must get."""
    state, scores, num_top = 0, [], request.params.prompt_logprobs
    tokens = request.token_ids if num_top is not None else []
    for token, following in zip(embedded(request, tokens), tokens[1:], strict=False):
        state = mix(state, token)
        scores.append(TokenLogprobs(following, *score(state, num_top)))
    return scores


def sequential_experts(request: Request, output: list[int]) -> np.ndarray:
    """[tokens of prompt and output but the last, 1, 2]: the experts that the request must report."""
    states = accumulate([*request.token_ids, *output][:-1], mix, initial=before_all(request.adapter))
    return np.array([experts(state) for state in list(states)[1:]], np.int16).reshape(-1, 1, 2)


def experts(state: int) -> tuple[int, int]:
    return state % 7, 7 + state % 5


def sequential_vector(request: Request) -> bytes | None:
    """The vector that the request must get."""
    state = 0
    for token in embedded(request, request.token_ids[: request.prompt_len]):
        state = mix(state, token)
    return vector(state).tobytes() if request.params.pooled else None


def vector(state: int) -> np.ndarray:
    return np.array([state % 8191, state % 127], np.float32)


def score(state: int, num_top: int) -> tuple[float, int, tuple[tuple[int, float], ...]]:
    """The hash as log-probability, rank and alternatives of the token that follows."""
    return -float(state % 8191), state % 127, tuple((state % 8191 + k, -float(k)) for k in range(num_top))


def check_integrity(core: EngineCore) -> None:
    """C1: every block is owned, reference counts match, and a slot is in at most one live request."""
    s = core.scheduler
    assert s.find_faults() == []
    held = Counter(b for state in s.running for table in state.tables for b in table)
    held.update(s.kv_cache.lent)
    if all(group.window is None for group in (s.info.kv_cache or KVCacheSpec(())).groups):
        assert 0 not in held
    del held[0]  # in place of a block that a window has freed
    for block in range(1, s.pool.num_blocks):
        assert s.pool.refs(block) == held[block]
    assert s.pool.num_available == s.pool.num_blocks - 1 - len(held)
    slots = [state.slot for state in s.running]
    assert len(set(slots)) == len(slots)
    assert sorted(slots + s.slots._free) == list(range(s.max_num_seqs))
    assert len(s.waiting) == sum(state.slot is None for state in s.requests.values())
    assert s.waiting.num_tokens == sum(len(state.tokens) for state in s.requests.values() if state.slot is None)
    assert len(s.running) + len(s.waiting) == len(s.requests)


class CheckedCore(EngineCore):
    """A whole engine that checks its blocks and slots after every commit."""

    def __init__(self, config: EngineConfig, info: ModelInfo, executor: Executor, *more: Extra) -> None:
        super().__init__(config, info, executor, with_extras(config, info, *more))

    def collect(self) -> StepOutput | None:
        output = super().collect()
        assert self.scheduler.find_faults() == []
        return output


class FixedPacing(StepPacing):
    """A fixed number of prompt tokens beside decode rows; unlimited if None."""

    def __init__(self, most: int | None) -> None:
        super().__init__(None, lambda: 0.0)
        self.most = most

    def prompt_tokens_beside(
        self, num_decoding: int, num_prompts: int, num_queued: int, context: int = 0
    ) -> int | None:
        assert num_queued > 0
        return self.most if num_decoding else None


def prompt_scores(scores: list[tuple[float, int, list[tuple[int, float]]]], num_top: int) -> PromptScores:
    """The report of these log-probabilities, ranks and best alternatives."""
    best = np.array([top[:num_top] for _, _, top in scores]).reshape(len(scores), num_top, 2)
    columns = [rank for _, rank, _ in scores], [own for own, _, _ in scores], best[:, :, 0], best[:, :, 1]
    kinds = np.int32, np.float32, np.int32, np.float32
    return PromptScores(*(np.array(c, kind).tobytes() for c, kind in zip(columns, kinds, strict=True)))


class FakeRunner:
    """An Executor that computes in order when collected, through the wire codec."""

    has_guards = False  # the null block may follow a request's last block

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self.size = info.block_size
        self.memory = np.zeros((info.num_kv_blocks, self.size), np.int64)
        self.tokens: dict[int, dict[int, int]] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.prompts: dict[int, tuple[int, int]] = {}  # slot -> prompt length, alternatives
        self.pooled: dict[int, bool] = {}  # slot -> whether its prompt becomes a vector
        self.routed: dict[int, bool] = {}  # slot -> whether its tokens report experts
        self.adapters = {0: ""}  # digests by index
        self.adapter_of: dict[int, int] = {}  # slot -> index
        self.budget = (
            (config.max_num_batched_tokens or info.max_num_batched_tokens) if config.chunked_prefill else 1 << 30
        )
        self.queue: list[list[bytes]] = []  # each plan's frames
        self.writer, self.reader = PlanWriter(), PlanReader()
        self.rows = Counter()
        self.weights = 0  # the version that computes
        self.fails: int | None = None  # a sample of the next step that is not finite

    def forget(self) -> None:
        """Lose the state that sleep discards: requests and their memory."""
        self.memory[:] = -1
        for of_slots in (self.tokens, self.tables, self.prompts, self.pooled, self.routed, self.adapter_of):
            of_slots.clear()

    def submit(self, plan) -> None:
        self.queue.append(self.writer.frames(plan))

    def close(self) -> None:
        self.queue.clear()

    def has_result(self) -> bool:
        return False

    def sample(self, state: int) -> int:
        return sample(state)

    def attend(self, slot: int, position: int) -> None:
        """The stores and reads of other groups of the KV cache at a position."""

    def begin(self, plan) -> None:
        """New requests have their slots, and rows follow."""

    def begin_row(self, slot: int, start: int, count: int) -> None:
        """A row of a request follows."""

    def token(self, slot: int, position: int) -> int:
        """What a position contributes: its token, or an embedding in its place."""
        return self.tokens[slot][position]

    def hidden(self, slot: int, position: int, state: int) -> int:
        """What a sample after a position depends on."""
        return state

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.freed.tolist():
            del self.tokens[slot], self.tables[slot]
            self.prompts.pop(slot, None)
        for new in plan.new:
            assert new.slot not in self.tokens, "a slot is in at most one live request"
            self.tokens[new.slot] = dict(enumerate(new.token_ids.tolist()))
            self.tables[new.slot] = {}
            self.pooled[new.slot], self.routed[new.slot] = new.params.pooled, new.params.routed_experts
            self.adapter_of[new.slot] = new.adapter
            if new.params.prompt_logprobs is not None:
                self.prompts[new.slot] = len(new.token_ids), new.params.prompt_logprobs
        for slot, index, block in plan.block_table_writes.T.tolist():
            assert block != 0 or self.has_guards
            self.tables[slot][index] = block

    def collect(self) -> StepResult:
        *updates, plan = map(self.reader.decode, self.queue.pop(0))
        assert updates == [None] * len(updates)
        self._change_slots(plan)
        self.begin(plan)
        out, vectors, reports = [], {}, []
        assert plan.num_tokens.sum() <= self.budget
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        given, given_ids = plan.draft_lens.tolist() or [0] * len(plan.slots), iter(plan.draft_token_ids.tolist())
        assert len(plan.draft_token_ids) == sum(given)
        for row, (slot, start, count, samples, guesses) in enumerate(
            zip(
                *(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens, plan.num_samples)),
                given,
                strict=True,
            )
        ):
            tokens, table = self.tokens[slot], self.tables[slot]
            for position in range(start + count - guesses, start + count):
                tokens[position] = next(given_ids)
            sampled, scores, chosen, (num_given, num_top) = {}, [], [], self.prompts.get(slot, (0, 0))
            assert plan.num_steps == 1 or count == samples == 1
            self.begin_row(slot, start, count)
            for position in range(start, start + count + plan.num_steps - 1):
                before = position - 1
                state = before_all(self.adapters[self.adapter_of[slot]], self.weights)
                if before >= 0:
                    state = int(self.memory[table[before // self.size], before % self.size])
                state = mix(state, self.token(slot, position))
                self.memory[table[position // self.size], position % self.size] = state
                self.attend(slot, position)
                if self.routed[slot]:
                    chosen.append(experts(state))
                if position + 1 < num_given:
                    scores.append(score(state, num_top))
                if position >= start + count - samples:
                    sampled[position + 1] = self.sample(self.hidden(slot, position, state))
                if plan.num_steps > 1:
                    tokens |= sampled
            tokens |= sampled
            if start < num_given:
                reports.append((row, prompt_scores(scores, num_top)))
            if chosen:
                reports.append((row, Experts(np.array(chosen, np.int16).tobytes())))
            if self.pooled[slot] and sampled:
                assert (samples, plan.num_steps) == (1, 1)
                vectors[len(out)] = row, vector(state)
            out += sampled.values()
        self.rows[len(plan.slots)] += 1
        if self.fails is not None and out:
            at = self.fails % len(out)
            out[at], self.fails = -1, None
            if at in vectors:
                vectors[at] = vectors[at][0], vectors[at][1] * np.float32(np.nan)
        reports += [(row, Vector(np.array(numbers, np.float32).tobytes())) for row, numbers in vectors.values()]
        result = StepResult(plan.step_id, np.array(out, np.int32), reports=reports)
        return decode_result(encode_result(result))

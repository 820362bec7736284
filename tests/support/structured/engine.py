"""Requests that are bound to grammars through the engine core, on a random model with the small vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import FinishReason, Grammar, Request, SamplingParams, TokenLogprobs
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.models.heads.mtp import mtp_spec
from runtime.speculation.choose_k import Drafter, Speculation
from runtime.text.vocabulary import Vocabulary
from runtime.worker.gpu.step_rows import MixedShape
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.grammar.test_structured_walks import SMALL
from tests.support.engine.fake_runner import Recorded
from tests.support.kernels import triton_engine
from tests.support.models.runner_driver import TINY

SPEC = replace(TINY, vocab_size=len(SMALL.tokens))
# Closing characters are likely, because random answers would otherwise never end.
CLOSING = tuple(
    (i, 2.0 + 2.0 * (i in SMALL.eos_ids))
    for i, token in enumerate(SMALL.tokens)
    if i in SMALL.eos_ids or token in (b'"', b"}", b"]", b"}]", b"]]")
)


def runner_of(vocabulary: Vocabulary | None = SMALL, is_draft: bool = False, **config: Any) -> ModelRunner:
    """In deterministic mode, so that answers can be compared."""
    sizes = {"num_kv_blocks": 400, "max_num_seqs": 32, "max_model_len": 176}
    defaults = {"device": "cpu", "num_threads": 1, "deterministic": True} | sizes
    return build_runner(
        EngineConfig(**defaults | config),
        DummySource(SPEC, eos_token_ids=SMALL.eos_ids, vocabulary=vocabulary),
        is_draft=is_draft,
    )


def small_runner(backend: str, graphs: tuple[int, ...] = (), has_head: bool = False) -> ModelRunner:
    """With a backend, Triton's under its interpreter, and graphs for rows of `graphs` tokens (triton_engine.py)."""
    spec = replace(triton_engine.SHALLOW, vocab_size=len(SMALL.tokens))
    config = EngineConfig(
        device="cpu",
        kernel_backend=backend,
        num_kv_blocks=40,
        max_num_seqs=4,
        max_model_len=96,
        num_threads=1,
        deterministic=True,
        draft="mtp" if has_head else None,
    )
    head = mtp_spec(spec) if has_head else None
    source = DummySource(spec, eos_token_ids=SMALL.eos_ids, vocabulary=SMALL, draft_head=head)
    with mock.patch.object(ModelRunner, "_time_steps"):
        runner = build_runner(config, source)
    if graphs:
        prefill = MixedShape(64, 4, 5, 12, 64, runner.info.max_model_len)
        triton_engine.replayed_graphs(
            runner.steps, *((row_len, size) for row_len in graphs for size in (1, 4)), prefill
        )
    return runner


def hot(grammar: Grammar | None, **fields: Any) -> SamplingParams:
    defaults = {"max_tokens": 120, "temperature": 1.5, "logit_bias": CLOSING}
    return SamplingParams(**defaults | fields, grammar=grammar)


Answers = dict[str, tuple[list[int], FinishReason, list[TokenLogprobs]]]


def answers(
    runner: ModelRunner,
    params: Sequence[SamplingParams],
    drafter: Drafter | None = None,
    guesses: int = 3,
    between: Callable[[EngineCore, int], None] = lambda core, step: None,
) -> Answers:
    """Tokens, reason and log-probabilities by number of the request; `between` is called after each step."""
    runner.reset()
    speculation = None if drafter is None else Speculation(drafter, guesses, (), 0.0)
    core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
    got: Answers = {}
    for i, each in enumerate(params):
        prompt = [1 + (7 * i + k) % 200 for k in range(3 + i % 5)]
        core.add(Request(str(i), prompt, len(prompt), each, seed=i))
    step = 0
    while core.has_work:
        if (output := core.step()) is None:
            continue
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            tokens, _, logprobs = got.setdefault(state.request.request_id, ([], FinishReason.NONE, []))
            tokens.append(token)
            if i in output.logprobs:
                logprobs.append(output.logprobs[i])
        for state, reason in output.finished:
            tokens, _, logprobs = got.setdefault(state.request.request_id, ([], FinishReason.NONE, []))
            got[state.request.request_id] = tokens, reason, logprobs
        step += 1
        between(core, step)
    return got


def recorded(found: Answers, share_right: float) -> Recorded:
    """A drafter that repeats recorded answers."""
    return Recorded({name: tokens for name, (tokens, _, _) in found.items()}, share_right, SPEC.vocab_size)


def text_of(tokens: Sequence[int]) -> str:
    """Of an answer that ended by EOS."""
    *body, eos = tokens
    assert eos in SMALL.eos_ids
    return b"".join(SMALL.tokens[i] for i in body).decode()

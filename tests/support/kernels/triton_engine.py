"""Small requests of every kind of sampling through the engine core, on a backend of choice."""

from functools import partial
from unittest import mock

import numpy as np
import torch

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.reports import Verified
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.speculation.choose_k import Speculation
from runtime.speculation.draft import CommitTokens, DraftRequests, OpenStream
from runtime.worker.gpu.graph_runner import CapturedGraph, DecodeShape
from runtime.worker.gpu.step_rows import MixedShape
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.support.engine.fake_runner import Recorded
from tests.support.engine.whole import whole_draft
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import changed, dense_spec

SPEC = dense_spec(
    num_layers=2,
    hidden_size=96,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    ffn_size=160,
    vocab_size=131,
    max_positions=256,
    norm_eps=1e-5,
    qk_norm="head",
)
SHALLOW = changed(SPEC, num_layers=1)  # for tests of plans, not of models
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=3),
    SamplingParams(max_tokens=4, temperature=0.8, ignore_eos=True),
    SamplingParams(  # all by the captured pass
        max_tokens=5,
        temperature=1.2,
        top_k=9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        ignore_eos=True,
    ),
    SamplingParams(  # a second pass, with the penalties
        max_tokens=6,
        temperature=0.0,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        min_tokens=3,
        stop_token_ids=(5, 6, 7),
        logit_bias=((3, 2.5),),
    ),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
]


GARBAGE = 1 << 30  # as an index it faults


class Replay:
    """In a CUDA graph's place: computes the captured work on the current values of the buffers."""

    def __init__(self, steps, shape, has_adapters):
        self.steps, self.shape, self.step = steps, shape, partial(steps.kernels.step, has_adapters=has_adapters)
        self.token_ids = torch.zeros(shape.num_samples, dtype=torch.int32)
        self.count = 0

    def replay(self):
        self.token_ids.copy_(self.steps.graph_runner.run(self.shape, self.step))
        self.count += 1


def replayed_graphs(steps, *buckets, has_adapters=False):
    """Graphs of these buckets (tokens of a row and number of rows, or the shape of a step with prompts); their replays,
    which count. Garbage is written into their buffers before and between replays, because old values must not
    matter."""
    shapes = [bucket if isinstance(bucket, MixedShape) else DecodeShape(*bucket) for bucket in buckets]
    replays = [Replay(steps, shape, has_adapters) for shape in shapes]
    most = max(shape.num_samples for shape in shapes)
    steps.kernels.graph_logits = torch.full((most, len(steps.sampler.split.own_ids)), torch.nan)
    steps.kernels.graph_hidden = torch.full(
        (most, steps.decoder.spec.hidden_size), torch.nan, dtype=steps.decoder.numerics.dtype
    )
    for replay in replays:
        graph_runner = steps.adapter_graphs if has_adapters else steps.graph_runner
        graph_runner.add(CapturedGraph(replay.shape, replay, replay.token_ids))
    graph_runner, write_input = steps.graph_runner, steps.graph_runner.graph_io.write_input

    def write_on_garbage(*args):
        graph_runner.graph_io.input_ring.fill_(GARBAGE)
        graph_runner.rows.fill_(GARBAGE)
        steps.kernels.graph_logits.fill_(torch.nan)
        steps.kernels.graph_hidden.fill_(torch.nan)
        for replay in replays:
            replay.token_ids.fill_(GARBAGE)
        return write_input(*args)

    graph_runner.graph_io.write_input = write_on_garbage
    return replays


def run(backend, graphs=False, answers=None, guesses=0, share_right=0.8, repeats=0, spec=SPEC, num_shared=20, **config):
    """Tokens, ranks and rounded alternatives by request, and the prompt tokens that came from the cache. Rows verify up
    to `guesses` tokens of `answers`; `share_right` of them are right. With `repeats` a plan decodes up to `repeats`
    tokens, and requests are without log-probabilities."""
    settings = {
        "device": "cpu",
        "kernel_backend": backend,
        "num_kv_blocks": 24,
        "max_num_seqs": 3,
        "num_threads": 1,
        "max_model_len": 96,
        "max_num_batched_tokens": 24,
        "dtype": "float32",
    } | config
    runner = build_runner(EngineConfig(**settings), DummySource(SHALLOW if repeats else spec))
    replays = []
    if graphs and backend == "triton":
        row_lens = (1, guesses + 1) if guesses else (1,)
        # Of 4 rows: a batch of 2 or 3 is padded.
        buckets = [(row_len, size) for row_len in row_lens for size in (1, 4)]
        most = settings["max_model_len"]
        prefills = [MixedShape(size, 4, 5, 12, size, most) for size in (24, most + 4)]
        replays = replayed_graphs(runner.steps, *prefills, *buckets)[-2:]
    speculation = None
    if guesses:
        drafter = Recorded(
            {name: [token for token, *_ in rows] for name, rows in answers.items()}, share_right, spec.vocab_size
        )
        speculation = Speculation(drafter, guesses, (), 0.0)
    core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
    core.scheduler.schedule = partial(core.scheduler.schedule, max(1, repeats))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 131, num_shared).tolist()
    got, scores, values = {}, {}, []
    for i, params in enumerate(PARAMS[1:4] if repeats else PARAMS):
        prompt = shared * (i % 2) + rng.integers(0, 131, 3 + 7 * i).tolist()
        core.add(Request(str(i), prompt, len(prompt), params, seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                found = output.logprobs.get(i)
                top = found and [(token_id, round(value, 3)) for token_id, value in found.top]
                got.setdefault(state.request.request_id, []).append((token, found and found.rank, top))
            for state, found in output.reports:
                if isinstance(found, Verified):
                    continue
                entries = found.of(state.request.token_ids[1:])
                scores[state.request.request_id] = [(e.token_id, e.rank, [i for i, _ in e.top]) for e in entries]
                values += [value for e in entries for value in (e.logprob, *dict(e.top).values())]
    replayed = any if guesses or repeats else all
    assert not replays or replayed(r.count for r in replays), "a graph was never replayed"
    assert not replays or any(g.graph.count for g in runner.steps.graph_runner.prefill_graphs), "nor one of prompts"
    return got, core.scheduler.stats.prompt_tokens_cached, scores, values


def check_tokens(guesses, **config):
    """With the prefix cache, log-probabilities and guesses of `run`, both backends give the same results."""
    *want, want_values = run("torch", **config)
    *got, values = run("triton", answers=want[0], guesses=guesses, **config)
    assert got == want, (want, got)
    assert [len(scores) for scores in got[2].values()] == [2, 30]
    assert max(abs(a - b) for a, b in zip(values, want_values, strict=True)) < 1e-4
    assert got[1] > 0, "the prefix cache took no part"


def chains(backend):
    """A draft's replies to commits of right and wrong tokens, on graphs in the Triton path."""
    settings = {"device": "cpu", "kernel_backend": backend, "num_kv_blocks": 24, "max_num_seqs": 4, "num_threads": 1}
    config = EngineConfig(**settings, max_model_len=96, dtype="float32")
    with mock.patch.object(ModelRunner, "_time_steps"):  # minutes under the interpreter
        runner = build_runner(config, DummySource(SHALLOW), is_draft=True)
    replays = []
    if backend == "triton":
        replays = replayed_graphs(runner.steps, (1, 2), (2, 2))
    core, answers = whole_draft(runner.config, runner.info, InProcess(runner), 0), []

    def tell(**told):
        core.take(0, DraftRequests(**told))
        while core.step():
            pass
        answers.append({chain.stream: chain for chain in core.outbox.pop(0)})
        return answers[-1]

    rng, params = np.random.default_rng(0), SamplingParams(temperature=0.9, max_tokens=60, repetition_penalty=1.2)
    known = {i: rng.integers(0, 131, 1 + i).tolist() for i in (1, 2)}
    plain = {1: params, 2: SamplingParams(temperature=1.0, max_tokens=60)}
    said = tell(opened=[OpenStream(i, Request("", known[i], len(known[i]), plain[i], i), 2) for i in known])
    for right in (2, 1):
        commits = []
        for i, chain in said.items():
            new = [*chain.token_ids[:right], int(rng.integers(131))]
            commits.append(CommitTokens(i, len(known[i]), new, 2))
            known[i] += new
        said = tell(committed=commits)
        assert all(chain.length == len(known[i]) for i, chain in said.items())
    assert all(r.count for r in replays), "a graph was never replayed"
    return answers


def logits_after_chunks(backend):
    """Logits of a prompt of 12 tokens in chunks that fit the Triton path's graphs; the last chunk is sampled."""
    config = {"kernel_backend": backend, "num_kv_blocks": 24, "max_num_seqs": 4, "max_model_len": 96}
    runner = tiny_runner(SHALLOW, dtype="float32", **config)
    replays = []
    if backend == "triton":
        replays = replayed_graphs(runner.steps, (1, 1), (3, 1))
    driver, prompt = Driver(runner), np.random.default_rng(0).integers(0, SPEC.vocab_size, 12).tolist()
    driver.open(0, prompt)
    logits = driver.prefill(0, prompt, cuts=(5, 6, 8, 11))
    assert all(r.count for r in replays), "a graph was never replayed"
    return logits

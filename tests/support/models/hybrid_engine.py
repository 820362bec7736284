"""Engines of small models with recurrent states or windows, in deterministic mode. Any history must give the answers of
a request that runs alone."""

from functools import cache

import torch
from hypothesis import strategies as st

from runtime.assembly.engine import build_engine
from runtime.base.model.mixer_spec import DeltaRuleSpec, ShortConvSpec
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from tests.support.engine.fake_runner import FixedShare, Recorded
from tests.support.models.runner_driver import tiny_runner
from tests.support.models.specs import changed, dense_spec

WINDOWS = dense_spec(
    num_layers=4, hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=80, vocab_size=131,
    max_positions=512, norm_eps=1e-6, window=(40, 40, 0, 40), tied_head=True,
)  # fmt: skip
_HYBRID = changed(WINDOWS, num_layers=3, window=0, qk_norm="head")
_DELTA_RULE = DeltaRuleSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=24, width=4)
_CONV = ShortConvSpec(channels=48, width=3)
DELTA = changed(_HYBRID, output_gate=True, mixer=(_DELTA_RULE, _DELTA_RULE, None))
CONV = changed(_HYBRID, mixer=(_CONV, None, _CONV))
_WIDE = DeltaRuleSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128, width=4)
# As published: heads of 128, of attention of 256.
WIDE = changed(DELTA, hidden_size=256, head_dim=256, ffn_size=512, vocab_size=4099, mixer=(_WIDE, _WIDE, None))
# As gpt-oss: windows of 128 in every other layer, and eight heads of 64 that share keys.
SINKS = changed(WINDOWS, num_heads=16, head_dim=64, window=(128, 0), sinks=True)
# Groups of two shapes; the last two layers read the keys and values of layers 2 and 3.
SHAPES = changed(
    WINDOWS, num_layers=6, window=(40, 40, 0, 40, 0, 40), num_kv_heads=(2, 2, 1, 2, 1, 2), qk_norm="head", v_norm=True,
    head_dim=(16, 16, 48, 16, 48, 16), keys_as_values=(False, False, True, False, True, False),
    kv_source=(None, None, None, None, 2, 3), embed_size=8, has_factor=True,
)  # fmt: skip
SPECS = {"delta": DELTA, "conv": CONV, "wide": WIDE, "windows": WINDOWS, "sinks": SINKS, "shapes": SHAPES}
SEQS, MAX_LEN, MAX_TOKENS = 4, 400, 16
Answer = list[tuple[int, float]]  # tokens and their log-probabilities
Kind = tuple[tuple[str, object], ...]  # the settings that decide about bits


def hybrid_runner(model: str, **config):
    limits = {"max_num_seqs": SEQS, "max_model_len": MAX_LEN, "num_threads": 1, "num_kv_blocks": 400}
    return tiny_runner(SPECS[model], deterministic=True, **limits | config)


class Engine:
    """An engine core with a real runner. It keeps what each request has got."""

    def __init__(self, model: str, drafter=None, **config) -> None:
        self.make = lambda: hybrid_runner(model, **config)
        runner = self.make()
        speculation = None if drafter is None else Speculation(drafter, 5, (), 0.0)
        self.core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
        self.answers: dict[str, Answer] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = MAX_TOKENS) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=1)
        self.core.add(Request(name, prompt, len(prompt), params, seed=len(prompt)))
        self.answers[name] = []

    def step(self) -> None:
        if (output := self.core.step()) is not None:
            for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                self.answers[state.request.request_id].append((token, output.logprobs[at].logprob))

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
            assert self.core.scheduler.find_faults() == []

    def lose(self) -> None:
        self.core.lose()
        self.core.recover(InProcess(self.make()))

    @property
    def cached(self) -> int:
        return self.core.scheduler.stats.prompt_tokens_cached


def prompt_of(kind: int, length: int) -> list[int]:
    """Prompts of a kind are prefixes of one text."""
    return torch.randint(0, 131, (MAX_LEN,), generator=torch.Generator().manual_seed(kind)).tolist()[:length]


@cache
def alone(model: str, kind: Kind, prompt: tuple[int, ...]) -> Answer:
    """The answer to a prompt without cache, mates, chunks and drafts."""
    engine = _plain(model, kind)
    name = f"r{len(engine.answers)}"
    engine.add(name, list(prompt))
    engine.finish()
    return engine.answers[name]


@cache
def _plain(model: str, kind: Kind) -> Engine:
    return Engine(model, prefix_cache=False, cuda_graphs=False, max_num_batched_tokens=512, **dict(kind))


lengths = st.sampled_from([1, 2, 63, 64, 65, 66, 100, 128, 129, 130, 192, 200, 257])
adds = st.tuples(st.just("add"), st.integers(0, 1), lengths)
turns = st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, 70))
steps = st.tuples(st.just("step"), st.integers(1, 30), st.none())
losses = st.tuples(st.just("lose"), st.none(), st.none())
rounds = st.tuples(st.lists(st.one_of(adds, adds, turns), min_size=1, max_size=4), st.one_of(steps, steps, losses))
histories = st.lists(rounds, min_size=2, max_size=4).map(
    lambda pairs: [e for some, last in pairs for e in [*some, last]]
)


def check(model: str, kind: Kind, history, share_right: float | None, seen: dict[str, int], **config) -> None:
    """Play a history, compare all answers, and count what happened."""
    known: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    drafter = None if share_right is None else Recorded(known, share_right, 131)
    engine = Engine(model, drafter, **dict(kind), **config)
    engine.core.extras[Admission].lengths = FixedShare(0.0)  # it admits too many

    def add(prompt: list[int]) -> None:
        name = f"r{len(prompts)}"
        prompts[name] = prompt[: MAX_LEN - MAX_TOKENS - 1]
        known[name] = [token for token, _ in alone(model, kind, tuple(prompts[name]))]
        engine.add(name, prompts[name])

    for event, value, more in history:
        if event == "add":
            add(prompt_of(value, more))
        elif event == "turn" and prompts:
            name = f"r{value % len(prompts)}"
            add([*prompts[name], *[t for t, _ in engine.answers[name]], *prompt_of(9, more)])
        elif event == "step":
            for _ in range(value):
                engine.step()
        elif event == "lose":
            engine.lose()
    engine.finish()
    for name, prompt in prompts.items():
        assert engine.answers[name] == alone(model, kind, tuple(prompt)), (name, len(prompt))
    stats = engine.core.scheduler.stats
    seen["hits"] += engine.cached
    seen["preemptions"] += stats.preemptions
    seen["accepted"] += stats.accepted_draft_tokens
    seen["rejected"] += stats.draft_tokens - stats.accepted_draft_tokens

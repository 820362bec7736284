"""Runners with a head that drafts tokens, and rounds of hand-made plans for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import numpy as np
import torch

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.core.plan import DEVICE_DRAFT, StepResult
from runtime.models import weights
from runtime.models.heads.assistant import POST, PRE, TABLE
from runtime.models.heads.assistant_files import assistant_spec
from runtime.models.heads.mtp import mtp_spec
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from runtime.worker.warmup import WarmUp
from tests.support.models.runner_driver import Driver
from tests.support.models.specs import TINY, changed

NUM_TOKENS = 64
BIGRAMS = changed(TINY, hidden_size=NUM_TOKENS, vocab_size=NUM_TOKENS)
SLIDING = changed(BIGRAMS, num_layers=4, window=(24, 0), qk_norm="head", v_norm=True)  # which assistants read


def headed_runner(
    spec: DecoderSpec = TINY, head_of: Callable[[DecoderSpec], HeadSpec] = mtp_spec, **config
) -> ModelRunner:
    """A random model with a random head, by default of one layer."""
    own = {"device": "cpu", "num_kv_blocks": 160, "max_num_seqs": 8, "max_model_len": 192, "num_threads": 1}
    own |= {"draft": "mtp", "dtype": "float32"}
    with mock.patch.object(WarmUp, "build_kernels"), mock.patch.object(ModelRunner, "_time_steps"):
        return build_runner(EngineConfig(**own | config), DummySource(spec, draft_head=head_of(spec)))


def assistant_of(target: DecoderSpec, centroids: int = 0, best: int = 1) -> HeadSpec:
    """An assistant with two layers for a target with a window in some layers and none in others."""
    mixers = {bool(mixer.window): mixer for mixer in target.attentions.values()}
    text = {
        "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "intermediate_size": 64,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": mixers[False].num_heads, "num_key_value_heads": mixers[False].num_kv_heads,
        "head_dim": mixers[True].head_dim,
        "global_head_dim": mixers[False].head_dim, "sliding_window": mixers[True].window,
    }  # fmt: skip
    config = {"text_config": text, "backbone_hidden_size": target.hidden_size}
    if centroids:
        config["use_ordered_embeddings"] = True
        config |= {"num_centroids": centroids, "centroid_intermediate_top_k": best}
    return assistant_spec(config, target)


def bigram_head() -> torch.Tensor:
    """[tokens, tokens] an output head. Column t prefers one token after t."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn((NUM_TOKENS, NUM_TOKENS), generator=generator).mul_(0.1)
    noise[torch.randperm(NUM_TOKENS, generator=generator), torch.arange(NUM_TOKENS)] += 0.3
    return noise


def perfect_runner(reads: str, kind: str = "mtp", **config) -> ModelRunner:
    """A model in which each token depends on the one before alone, with a head that drafts its tokens.

    The head reads one half of its input: the `token`, or the `feature`, which yields the best token after the best."""
    head, one = bigram_head(), torch.eye(NUM_TOKENS)
    after = torch.zeros_like(one)
    after[head.argmax(0), torch.arange(NUM_TOKENS)] = 1.0
    parts = (one, torch.zeros_like(one)) if reads == "token" else (torch.zeros_like(one), after)
    known = {"embed": one, "head": head, "fc.weight": torch.cat(parts, 1)}
    known |= {PRE: known["fc.weight"], POST: one, TABLE: head}
    draw = weights.random_parameter

    def parameter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if name in known:
            return known[name].clone()
        if name.endswith(("out.weight", "down.weight")):
            return torch.zeros(shape)
        return torch.ones(shape) if name.endswith(("norm", "factor")) else draw(name, shape, generator)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(weights, "random_parameter", parameter))
        if kind == "assistant":
            return headed_runner(SLIDING, partial(assistant_of, centroids=8, best=8), **config)
        return headed_runner(BIGRAMS, **config)


class Rounds:
    """Runs rounds of requests in their slots, as an engine would, and keeps their tokens and drafts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.driver = Driver(runner)
        self.runner = runner
        self.known: dict[int, list[int]] = {}  # each slot's tokens
        self.accepted: list[list[bool]] = []  # which draft tokens agree with the samples, by row

    def open(self, slot: int, tokens: list[int], **options) -> None:
        self.known[slot] = list(tokens)
        self.driver.open(slot, tokens, **options)

    def prefill(
        self, slot: int, tokens: list[int], *, drafts: int = 0, cuts: tuple[int, ...] = (), start: int = 0, **options
    ) -> None:
        """Compute tokens[start:] in chunks that end at `cuts`."""
        self.open(slot, tokens, **options)
        for end in (*cuts, len(tokens)):
            self.step((slot, start, end - start, int(end == len(tokens)), 0), drafts=drafts)
            start = end

    def step(self, *rows: tuple[int, int, int, int, int], drafts: int = 0) -> StepResult:
        """Rows (slot, start, count, samples, draft tokens among `count`); their results are committed."""
        plan = self.driver.plan
        plan.next_drafts, plan.draft_lens = drafts, np.array([row[4] for row in rows], np.int32)
        plan.draft_token_ids = np.full(plan.draft_lens.sum(), DEVICE_DRAFT, np.int32)
        result = self.driver.step(*[row[:4] for row in rows])
        ids, given = result.token_ids.tolist(), result.draft_token_ids.tolist()
        for slot, _, _, num_samples, own in rows:
            sampled, ids = ids[:num_samples], ids[num_samples:]
            guesses, given = given[:own], given[own:]
            agrees = [guess == token for guess, token in zip(guesses, sampled, strict=False)]
            if own:
                self.accepted.append(agrees)
            if num_samples:
                self.known[slot] += sampled[: [*agrees, False].index(False) + 1]
        return result

    def verify(self, *slots: int, given: int, drafts: int) -> StepResult:
        """A step with one row a slot: its last token and `given` draft tokens."""
        return self.step(*((s, len(self.known[s]) - 1, given + 1, given + 1, given) for s in slots), drafts=drafts)

    def drafts(self, slot: int, count: int) -> list[int]:
        """The slot's draft tokens."""
        return self.runner.steps.head.drafts[slot, :count].tolist()

    def entries(self, slot: int) -> torch.Tensor:
        """The head's keys and values of the slot's tokens, from position 1 on."""
        values = self.runner.steps.cache.layers[-1].values[:, :, torch.tensor(self.driver.tables[slot])].flatten(2, 3)
        return values[:, :, 1 : len(self.known[slot])].clone()

"""A draft model as its engine's settings want it: a ModelRunner with mirrors of the engine's requests on top."""

from __future__ import annotations

from dataclasses import replace

from runtime.assembly.engine import extras_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.core.executor import InProcess
from runtime.loading.resolve import resolve
from runtime.speculation.draft import DraftCore
from runtime.text.tokenizer import Tokenizer
from runtime.worker.sources import CheckpointSource

_AHEAD_ON_ITS_OWN = 8


def load_draft(config: EngineConfig) -> DraftCore:
    """Load the draft model of an engine with `config`, in this process.

    Raises CallboardError like ModelRunner, and if its vocabulary is not that of the engine's model."""
    path = resolve(config.draft or "", None, progress=False)
    _check_vocabulary(config, Tokenizer.load(path))
    source = CheckpointSource(path)
    own = config.draft_config()
    if own.max_model_len is not None:
        own = replace(own, max_model_len=min(own.max_model_len, source.spec.max_positions))
    runner = build_runner(own, source, is_draft=True)
    ahead = config.draft_ahead
    if ahead is None:
        ahead = _AHEAD_ON_ITS_OWN if config.draft_device == "own" else 0
    extras = extras_of(runner.config, runner.info)
    return DraftCore(runner.config, runner.info, InProcess(runner), ahead, not runner.asynchronous, extras)


def _check_vocabulary(config: EngineConfig, draft: Tokenizer) -> None:
    """Ids beyond the tokenizer, which pad a model's vocabulary, may differ: they are never guessed (draft_client)."""
    target = Tokenizer.load(resolve(config.model, config.revision, progress=False))
    if draft.ids() != target.ids():
        raise CallboardError(
            f"The draft {config.draft} has another vocabulary ({draft.vocab_size} tokens) than the model "
            f"{config.model} ({target.vocab_size} tokens); choose a draft with the model's tokenizer."
        )

"""LLM as trainers use it: scores of outputs, log-probabilities of sampling, ids without text, choices by seed."""

from dataclasses import replace

import numpy as np
import pytest

from runtime.assembly.engine import build_engine
from runtime.base.types import CallboardError, FinishReason, SamplingParams
from runtime.core.executor import InProcess
from runtime.llm import LLM
from tests.support.models.scored_engine import family_runner

SMALL = {"deterministic": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 400}
SAMPLED = SamplingParams(max_tokens=12, logprobs=0, sampling_logprobs=True, top_p=0.9, seed=3, detokenize=False)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
PROMPTS = [[1, 5, 9], [7] * 20]


@pytest.fixture
def llm(write_tiny_gguf) -> LLM:
    return LLM(str(write_tiny_gguf()), **SMALL)


def test_an_output_is_scored_behind_its_prompt(llm):
    outputs = llm.generate(PROMPTS, SAMPLED)
    given = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    lengths = list(map(len, PROMPTS))
    for prompt, output, score in zip(PROMPTS, outputs, llm.generate(given, SCORED, prompt_len=lengths), strict=True):
        assert (score.token_ids, score.finish_reason) == ([], FinishReason.LENGTH)
        found = score.prompt_logprobs[len(prompt) - 1 :]
        assert [(s.token_id, s.logprob, s.rank) for s in found] == [
            (s.token_id, s.logprob, s.rank) for s in output.logprobs
        ]
        assert all(s.sampling_logprob >= s.logprob for s in output.logprobs), "top-p leaves fewer tokens"
    more = replace(SAMPLED, max_tokens=5, prompt_logprobs=0)
    cut = llm.generate(
        [ids[: length + 7] for ids, length in zip(given, lengths, strict=True)], more, prompt_len=lengths
    )
    assert [c.token_ids for c in cut] == [output.token_ids[7:] for output in outputs]


@pytest.mark.parametrize("prompt_len", [0, 4, [1, 1]])
def test_a_faulty_prompt_len_is_refused(llm, prompt_len):
    with pytest.raises(CallboardError, match="prompt_len"):
        llm.generate([[1, 5, 9]], SCORED, prompt_len=prompt_len)


def test_an_output_without_text_has_ids(llm):
    plain, ids = llm.generate(PROMPTS[:1], replace(SAMPLED, detokenize=True)), llm.generate(PROMPTS[:1], SAMPLED)
    assert ids[0].token_ids == plain[0].token_ids
    assert ids[0].logprobs == plain[0].logprobs
    assert (ids[0].text, plain[0].text != "") == ("", True)


def test_each_choice_is_repeated_by_its_own_seed(llm):
    choices = llm.generate(PROMPTS[:1], SAMPLED, n=4)
    assert len({choice.seed for choice in choices}) == len({tuple(choice.token_ids) for choice in choices}) == 4
    for choice in choices:
        (again,) = llm.generate(PROMPTS[:1], replace(SAMPLED, seed=choice.seed))
        assert (again.token_ids, again.logprobs) == (choice.token_ids, choice.logprobs)


def test_experts_are_bytes(llm):
    llm.runner = family_runner("mixtral", routed_experts=True)
    llm.engine = build_engine(llm.runner.config, llm.runner.info, InProcess(llm.runner))
    (plain, found) = llm.generate(PROMPTS, [SAMPLED, replace(SAMPLED, routed_experts=True)])
    shape = llm.runner.info.routed_experts
    assert plain.routed_experts is None
    assert np.frombuffer(found.routed_experts, "<i2").reshape(-1, *shape).shape == (20 + len(found.token_ids) - 1, 3, 2)

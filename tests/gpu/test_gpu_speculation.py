"""A draft model beside its target on a GPU: in deterministic mode no token changes, for any number of guesses."""

import pytest
import torch

from runtime.speculation.choose_k import Speculation
from tests.models.test_speculation import SAMPLING, answers, model_draft
from tests.support.kernels.triton_engine import SPEC

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

CONFIG = {"spec": SPEC, "device": "cuda", "num_threads": None}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize(("batch", "count"), [(1, 3), (32, 40)])
def test_guesses_change_no_token(name, batch, count):
    """With graphs of verifying steps in the target, and of chains and of catching up in the draft."""
    params, config = SAMPLING[name], CONFIG | {"max_num_seqs": batch}
    want, logprobs, _ = answers(params, count, **config)
    for most, noise, ahead in ((1, 0.0, 1), (3, 0.3, 9), (5, 2.0, 1), (8, 0.3, 9), (None, 0.3, 1)):
        draft = model_draft(noise, ahead, **config)
        speculation = Speculation(draft, most, ((1, 1e3), (64, 2e3)), 0.0)
        got, close, accepted = answers(params, count, speculation, draft="ngram", **config)
        assert got == want, (most, noise, ahead)
        assert close == pytest.approx(logprobs, abs=1e-4)
        assert accepted > 0 or noise == 2.0

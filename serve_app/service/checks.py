"""Checks of a request: its model, its token ids, and its work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.output.fields import invalid, shortened
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import ServedModel
from serve_app.protocol.sampling import SamplingFields

MAX_PROMPT_TOKENS = 4_000_000  # one request's prompts and predictions, once for each choice
_MAX_NAMES = 16  # model names in an error
_MAX_SCORES = 1 << 18  # prompts' log-probabilities in one request; each takes 80 JSON bytes


def check_token_ids(where: str, ids: Iterable[int], model: ServedModel) -> None:
    largest, size = max(ids, default=0), min(model.tokenizer.vocab_size, model.info.vocab_size)
    if largest >= size:
        raise invalid(where, f"holds the token id {largest}, but the ids of this model end at {size - 1}")


def check_work(request: SamplingFields, num_tokens: int, num_predicted: int, where: str) -> None:
    """Raise the 400 if the choices or scores of these prompts are too much work for one request."""
    n, top = request.n or 1, request.num_prompt_logprobs()
    if (num_tokens + num_predicted) * n > MAX_PROMPT_TOKENS:
        what = f"{num_tokens} tokens of prompt" + (f" and {num_predicted} of prediction" if num_predicted else "")
        what += f" for {n} choices each" if n > 1 else ""
        raise invalid("n" if n > 1 else where, f"needs {what}; at most {MAX_PROMPT_TOKENS} in all are allowed")
    if top is not None and num_tokens * n * (top + 1) > _MAX_SCORES:
        raise invalid(
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            f"needs {top + 1} log-probabilities at each of {num_tokens * n} tokens of prompt; at most "
            f"{_MAX_SCORES} in all are allowed",
        )


def unknown_model(name: str, names: Sequence[str], param: str = "model") -> ApiError:
    """Return the 404 for a name that is not among `names`."""
    known = ", ".join(map(repr, names[:_MAX_NAMES]))
    text = f"There is no model {shortened(name)!r} here; this server has {known}."
    return ApiError(404, text, param=param, code="model_not_found")

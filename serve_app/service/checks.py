"""Checks of a prepared request against its model and the work of one request."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.output.fields import invalid
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import R, ServedModel
from serve_app.protocol.sampling import SamplingFields
from serve_app.service.endpoint import Endpoint

MAX_PROMPT_TOKENS = 4_000_000  # of one request: its prompts and predictions, once for each choice
_MAX_SCORES = 1 << 18  # log-probabilities of prompts in one request; each takes 80 bytes of JSON


def check_token_ids(where: str, ids: Iterable[int], model: ServedModel) -> None:
    largest, size = max(ids, default=0), min(model.tokenizer.vocab_size, model.info.vocab_size)
    if largest >= size:
        raise invalid(where, f"holds the token id {largest}, but the ids of this model end at {size - 1}")


def max_tokens(endpoint: Endpoint[R], request: R, prompt_len: int, model: ServedModel, where: str) -> int:
    """Return the tokens of output within the context, from the request or the endpoint's default."""
    asked, default, limit = request.max_output(), endpoint.default_max_tokens, model.info.max_model_len
    room = limit - prompt_len
    if (1 if asked is None else asked) > room:
        wanted = f"{asked} tokens of output" if asked else "at least one token of output"
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens, but {where} has {prompt_len} tokens "
            f"and {wanted} must fit too; shorten {where}{f' or lower {endpoint.max_tokens_field}' if asked else ''}.",
            param=where,
            code="context_length_exceeded",
        )
    return min(room if default is None else default, room) if asked is None else asked


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

"""POST /completion and POST /infill: completions in the form of llama.cpp's clients, such as editors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from runtime.base.types import TokenLogprobs
from runtime.output.processor import Delta
from runtime.text.tokenizer import Tokenizer
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.completions.fill_in_middle import between, end_ids, of_other_files
from serve_app.apis.llama_cpp.answers import LlamaOperation, LlamaText
from serve_app.apis.llama_cpp.line_limits import LineLimits
from serve_app.apis.llama_cpp.request import Gap, LlamaCompletion, LlamaCompletionRequest, LlamaInfillRequest
from serve_app.protocol.answers import encode_json, listed, logprob_entry
from serve_app.protocol.dialects import DRAWING, LLAMA_CPP
from serve_app.protocol.errors import ApiError, llama_cpp_body
from serve_app.protocol.operation import WHOLE_ANSWERS
from serve_app.protocol.parsing import parse
from serve_app.protocol.prepared_request import PreparedRequest, Prompts, ServedModel
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.sse import EventStream
from serve_app.protocol.timed_choice import TimedChoice
from serve_app.service.endpoint import Endpoint

_LEAST_OUTPUT = 256  # tokens kept free for an output without a number
_Prepared = PreparedRequest[LlamaCompletion]


class LlamaEndpoint(Endpoint[LlamaCompletion]):
    """A prompt in, a text out."""

    path, id_prefix, default_max_tokens, max_tokens_field = "/completion", "llama-", None, "n_predict"
    body_type: ClassVar[type[LlamaCompletionRequest]] = LlamaCompletionRequest
    _about = "Complete texts, in llama.cpp's form", LlamaText, (LlamaCompletionRequest,), WHOLE_ANSWERS
    operation = LlamaOperation(*_about, streams=True, others=(list[LlamaText],))

    def read(self, body: bytes) -> LlamaCompletion:
        return parse(self.body_type, body).as_request()

    def prompts(self, request: LlamaCompletion, model: ServedModel) -> Prompts:
        cut = LineLimits(request.t_max_predict_ms, request.n_indent)
        if request.gap is None:
            return replace(COMPLETIONS.prompts(request, model), cut=cut)
        prompt = _around_gap(request, request.gap, model)
        stops = () if request.ignore_eos else end_ids(model.tokenizer)
        return Prompts([prompt], "input_prefix", request.requested_grammar(), stop_token_ids=stops, cut=cut)

    def choices(self, prepared: _Prepared) -> list[Delta]:
        return [TimedChoice(i) for i in range(len(prepared.requests))]

    def answer(self, prepared: _Prepared, choices: list[Delta]) -> bytes:
        answers = [_whole(prepared, choice) for choice in choices if isinstance(choice, TimedChoice)]
        return encode_json(answers[0] if len(answers) == 1 else answers)

    def stream(self, prepared: _Prepared, include_usage: bool) -> EventStream:
        return LlamaStream(prepared)


class LlamaInfillEndpoint(LlamaEndpoint):
    """Texts around a gap in, the text in it out."""

    path, body_type = "/infill", LlamaInfillRequest
    operation = replace(
        LlamaEndpoint.operation, summary="Fill in code, in llama.cpp's form", requests=(LlamaInfillRequest,)
    )


class LlamaAliasEndpoint(LlamaEndpoint):
    """The older name of the same route."""

    path = "/completions"
    operation = replace(LlamaEndpoint.operation, summary="The same as /completion")


LLAMA_CPP_ENDPOINTS = LlamaEndpoint(), LlamaInfillEndpoint(), LlamaAliasEndpoint()


class LlamaStream(EventStream):
    """An event for each delta, and one with all facts at the end of each choice."""

    def __init__(self, prepared: _Prepared) -> None:
        self._prepared = prepared
        self._sums = [TimedChoice(i) for i in range(len(prepared.requests))]

    def events(self, deltas: list[Delta]) -> bytes:
        events = []
        for delta in deltas:
            so_far = self._sums[delta.index]
            so_far.add(delta)
            if (delta.text or delta.logprobs) and not self._prepared.request.computes_prompt_only:
                events.append(self._piece(delta, so_far))
            if delta.finish_reason is not None:
                events.append(_whole(self._prepared, so_far) | {"content": "", "tokens": [], "stop": True})
        return b"".join(b"data: " + encode_json(event) + b"\n\n" for event in events)

    def last(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + encode_json(llama_cpp_body(error.in_words_of(LLAMA_CPP))) + b"\n\n"

    def _piece(self, delta: Delta, so_far: TimedChoice) -> dict[str, Any]:
        return {
            "index": delta.index,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": so_far.usage.num_output,
            "tokens_evaluated": self._prepared.requests[delta.index].prompt_len,
            **_scores(self._prepared, delta),
        }


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _around_gap(request: LlamaCompletion, gap: Gap, model: ServedModel) -> list[int]:
    """Return the prompt for a text between two texts. A full context leaves out the text farthest from the gap."""
    tokenizer, context = model.tokenizer, model.info.max_model_len
    most = request.max_output()
    start = tokenizer.encode("")
    room = context - len(start) - (min(_LEAST_OUTPUT, context // 4) if most is None else most)

    def encoded(text: str, where: str, part: Any) -> list[int]:
        return prompt_ids(tokenizer.encode, text, False, context, where, part)

    before = encoded(gap.before, "input_prefix", "end")
    after = encoded(gap.after, "input_suffix", "start")
    begun = encoded(str(request.prompt), "prompt", None)
    local = between(tokenizer, before, after, "input_suffix")
    if (over := len(local) + len(begun) - room) > 0:
        num_after = max(len(after) - over, min(len(after), room // 4))
        num_before = max(len(before) - (over - (len(after) - num_after)), 0)
        local = between(tokenizer, before[len(before) - num_before :], after[:num_after])
    files = [(file.filename, file.text) for file in gap.other_files]
    others = of_other_files(tokenizer, files, room - len(local) - len(begun))
    return [*start, *others, *local, *begun]


# ---- answers ---------------------------------------------------------------------------------------------------------


def _whole(prepared: _Prepared, choice: TimedChoice) -> dict[str, Any]:
    """Return one choice's answer, or its fields that the request names."""
    request, model = prepared.request, prepared.model
    sent, shows = prepared.requests[choice.index], not request.computes_prompt_only
    is_word = isinstance(choice.stop_reason, str)
    num_output, params = choice.usage.num_output if shows else 0, sent.params
    found: dict[str, Any] = {
        "index": choice.index,
        "content": choice.text if shows else "",
        "tokens": choice.token_ids if shows and request.return_tokens else [],
        "id_slot": -1,
        "stop": True,
        "model": model.name,
        "tokens_predicted": num_output,
        "tokens_evaluated": sent.prompt_len,
        "generation_settings": {
            "n_ctx": model.info.max_model_len,
            "n_predict": params.max_tokens if shows else 0,
            "seed": sent.seed,
            **{name: getattr(params, name) for name in (*DRAWING, "stop")},
        },
        "prompt": model.tokenizer.decode(sent.token_ids, skip_special_tokens=False),
        "has_new_line": shows and "\n" in choice.text,
        "truncated": False,
        "stop_type": "word" if is_word else "eos" if choice.finish_reason == "stop" else "limit",
        "stopping_word": choice.stop_reason if is_word else "",
        "tokens_cached": choice.num_cached,
        "timings": _timings(choice, sent.prompt_len, num_output),
        "id": prepared.id,
        "seed": sent.seed,
        "system_fingerprint": model.fingerprint,
        **(_scores(prepared, choice) if shows else {}),
    }
    return found if request.response_fields is None else _selected(found, request.response_fields)


def _selected(found: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the named fields; a name with a slash is a field of an object."""
    selected = {}
    for name in names:
        head, _, rest = name.partition("/")
        value = found.get(head)
        if not rest and head in found:
            selected[name] = value
        elif isinstance(value, dict) and rest in value:
            selected[name] = value[rest]
    return selected


def _timings(choice: TimedChoice, num_prompt: int, num_output: int) -> dict[str, float]:
    found: dict[str, float] = {"cache_n": choice.num_cached}
    for name, num, span in zip(
        ("prompt", "predicted"), (num_prompt - choice.num_cached, num_output), choice.times.spans(), strict=True
    ):
        found |= {
            f"{name}_n": num,
            f"{name}_ms": span / 1e6,
            f"{name}_per_token_ms": span / 1e6 / max(num, 1),
            f"{name}_per_second": num * 1e9 / max(span, 1),
        }
    return found


def _scores(prepared: _Prepared, delta: Delta) -> dict[str, Any]:
    """Return the log-probabilities that the request wants."""
    entry = partial(_score, prepared.model.tokenizer)
    return {"completion_probabilities": listed(delta.logprobs, entry)} if delta.logprobs else {}


def _score(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> dict[str, Any]:
    entry = logprob_entry(tokenizer, None, logprobs)
    for (token_id, _), top in zip(logprobs.top, entry["top_logprobs"], strict=True):
        top["id"] = token_id
    return {"id": logprobs.token_id, **entry}

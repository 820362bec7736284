"""Answers of a random model in channels, each read by a strict reader and compared with the runtime's parser.

    python -m benchmarks.serving.channel_answers --answers 2000

With the package openai-harmony and its vocabulary (TIKTOKEN_ENCODINGS_BASE), its parser reads every answer too. Each
answer is also parsed token by token, as a stream is.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.library.channel_model import MARKS, Turn, problem_of, read_turn, write_harmony_model
from benchmarks.library.measure import Results, new_parser
from runtime.base.types import FinishReason, SamplingParams
from runtime.llm import LLM, Completion
from runtime.output.fields import read_options
from runtime.output.message_parser import MessageFormat, MessageParser
from runtime.output.options import ChatOptions
from runtime.text.stream import TextStream

_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}, "days": {"type": "integer"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": _CITY}},
    {"type": "function", "function": {"name": "weather_all", "parameters": _CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "free-form", "parameters": {"type": "object"}}},
]
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "no reasoning": {"reasoning_effort": "none"},
    "tools": {"tools": TOOLS},
    "one call": {"tools": TOOLS, "parallel_tool_calls": False},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "tools, none chosen": {"tools": TOOLS, "tool_choice": "none"},
    "JSON": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _CITY}}},
    "tools and JSON": {"tools": TOOLS, "response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[a-f]{2,9}|<\\|end\\|>"}},
}
LIMITS = (12, 60, 300, 300)  # the answers' max_tokens, in turns


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--temperature", type=float, default=1.5)
    args = parser.parse_args()
    results = Results("channel_answers", args.out)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_harmony_model(Path(folder))), device="cpu", kv_cache_memory=0.2, max_num_seqs=64)
        faults = 0
        for kind, options in KINDS.items():
            found = check(llm, options, args.answers // len(KINDS), args.temperature)
            faults += len(found["faults"])
            results.add(kind=kind, **found)
        results.add(kind="all", faults=faults, by_openai_harmony=foreign_reader() is not None)
    sys.exit(bool(faults))


def check(llm: LLM, options: dict[str, Any], number: int, temperature: float) -> dict[str, Any]:
    """Make answers of one kind and read them; return counts, and the faults as sentences."""
    started, foreign = time.perf_counter(), foreign_reader()
    bias = tuple((llm.tokenizer.token_to_id(text), 2.5) for text in ("<|end|>", "<|return|>", "<|call|>", '"', "}"))
    params = [
        SamplingParams(max_tokens=LIMITS[i % len(LIMITS)], temperature=temperature, seed=i, logit_bias=bias)
        for i in range(number)
    ]
    messages: list[Any] = [[{"role": "user", "content": "hi"}]] * number
    answers = llm.chat(messages, params, progress=False, **options)
    seconds = time.perf_counter() - started
    asked = read_options(ChatOptions, options)
    assert llm._chats is not None
    form = llm._chats.prompt(messages[0], asked).message_format
    assert form is not None
    faults, turns = [], list[Turn]()
    for i, answer in enumerate(answers):
        try:
            turns.append(read_turn(answer.token_ids, llm.tokenizer))
            if problem := _problem(llm, turns[-1], answer, asked, form, foreign):
                faults.append(f"answer {i}: {problem}")
        except ValueError as e:
            faults.append(f"answer {i}: {e}")
    return {
        "answers": len(answers),
        "faults": faults,
        "ended": sum(answer.finish_reason is FinishReason.STOP for answer in answers),
        "cut": sum(answer.finish_reason is FinishReason.LENGTH for answer in answers),
        "calls": sum(len(turn.calls) for turn in turns),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "seconds": round(seconds, 1),
    }


def _problem(
    llm: LLM,
    turn: Turn,
    answer: Completion,
    asked: ChatOptions,
    form: MessageFormat,
    foreign: Callable[[Completion, LLM], list[tuple[str, str, str]]] | None,
) -> str:
    if answer.error:
        return answer.error
    if problem := problem_of(turn, asked.forced_call() is not None, {t.function.name for t in asked.offered_tools()}):
        return problem
    expected = (turn.texts("final", "commentary"), turn.texts("analysis"), turn.calls)
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    if (answer.text, answer.reasoning, calls) != expected:
        return f"it is parsed as {(answer.text, answer.reasoning, calls)}, not {expected}"
    if _streamed(llm, answer, form) != expected:
        return "its stream is parsed in another way"
    if foreign is not None:
        theirs = [(channel, to, text) for channel, to, text in foreign(answer, llm)]
        ours = [(m.channel, m.recipient, m.content.decode(errors="replace")) for m in turn.messages if m.end]
        if theirs != ours:
            return f"openai-harmony reads {theirs}, not {ours}"
    return ""


def _streamed(llm: LLM, answer: Completion, form: MessageFormat) -> tuple[str, str, list[tuple[str, str]]]:
    """Parse an answer token by token."""
    stream = TextStream(llm.tokenizer, kept_special_ids=form.kept_special_ids, before_special=form.before_special)
    parser, content, reasoning, calls = MessageParser(form), "", "", list[tuple[str, str]]()
    is_ended = answer.token_ids[-1] in llm.tokenizer.eos_token_ids
    shown = answer.token_ids[:-1] if is_ended else answer.token_ids
    pieces = [(stream.push([token])[0], False) for token in shown]
    for text, is_last in [*pieces, (stream.finish(), True)]:
        new = parser.push(text, is_last)
        content, reasoning = content + new.content, reasoning + new.reasoning
        for call in new.calls:
            if call.name:
                calls.append((call.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, reasoning, calls


def foreign_reader() -> Callable[[Completion, LLM], list[tuple[str, str, str]]] | None:
    """Return the parser of openai-harmony; None without the package or its vocabulary."""
    base = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if base is None or importlib.util.find_spec("openai_harmony") is None:
        return None
    import openai_harmony

    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    lines = (Path(base) / "o200k_base.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(text): int(rank) for text, rank in (line.split() for line in lines)}
    marks = {mark: encoding.encode(mark, allowed_special="all")[0] for mark in MARKS}

    def read(answer: Completion, llm: LLM) -> list[tuple[str, str, str]]:
        parser = openai_harmony.StreamableParser(encoding, role=openai_harmony.Role.ASSISTANT)
        try:
            for token in answer.token_ids:
                special = marks.get(llm.tokenizer.id_to_token(token) or "")
                bytes_of = (ranks[bytes((byte,))] for byte in llm.tokenizer.token_bytes(token))
                for each in [special] if special is not None else bytes_of:
                    parser.process(each)
        except openai_harmony.HarmonyError as e:
            raise ValueError(f"openai-harmony refuses it: {e}") from e
        return [
            (m.channel, (m.recipient or "").removeprefix("functions."), "".join(part.text for part in m.content))
            for m in parser.messages
        ]

    return read


if __name__ == "__main__":
    main()

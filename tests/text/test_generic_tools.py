"""The generic format of tool calls: the description that a template without tools gets, and the calls read from the
output."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.chat import ChatTemplate
from runtime.text.tool_calls import FORMATS, GENERIC
from runtime.text.tool_calls.generic import with_tools_as_text
from runtime.text.tool_calls.parser import SPECIAL as SPECIAL_MARK
from tests.support.http.fake_engine import byte_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
STRICT_TURNS = (  # as Mistral's and Gemma's templates: no system role, and turns alternate
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": content}


ASKED = [{"role": "user", "content": "How is it in Zürich?"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"city": "Zürich"})]}]
ANSWERED = [*CALLED, result("sunny"), {"role": "assistant", "content": "It is sunny."}]
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def read(text: str, at: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of an answer that arrives in pieces, cut at these characters."""
    parser, content, calls = GENERIC.parser(GENERIC, None), "", list[list[str]]()
    cuts = [0, *sorted(at or []), len(text)]
    for start, stop in pairwise(cuts):
        new, deltas = parser.push(text[start:stop], is_last=stop == len(text) and start == cuts[-2])
        content += new
        for delta in deltas:
            if delta.name:
                calls.append([delta.name, ""])
            calls[-1][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_tools_begin_the_system_message():
    template = ChatTemplate(PLAIN, {})
    assert template.tool_format is GENERIC
    alone = template.render(ASKED, tools=[WEATHER])
    assert alone.startswith("<|system|># Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in alone
    assert alone.endswith("</tool_call><|user|>How is it in Zürich?<|a|>")
    tools_text = alone.partition("<|user|>")[0]
    beside = template.render([{"role": "system", "content": "Be brief."}, *ASKED], tools=[WEATHER])
    assert beside == f"{tools_text}\n\nBe brief.<|user|>How is it in Zürich?<|a|>"
    late = [*ASKED, {"role": "system", "content": "Be brief."}]
    assert template.render(late, tools=[WEATHER]).startswith(f"{tools_text}<|user|>How")


def test_without_a_system_role_tools_precede_the_user():
    template = ChatTemplate(STRICT_TURNS, {})
    prompt = template.render(ASKED, tools=[WEATHER])
    assert prompt.startswith("[user]# Tools\n")
    assert prompt.endswith("</tool_call>\n\nHow is it in Zürich?")


def test_calls_and_results_of_earlier_turns_are_text():
    prompt = ChatTemplate(PLAIN, {}).render(ANSWERED, add_generation_prompt=False)
    assert prompt == (
        f"<|user|>How is it in Zürich?<|assistant|>{WRITTEN}"
        "<|user|><tool_response>\nsunny\n</tool_response><|assistant|>It is sunny."
    )
    content = [{"role": "assistant", "content": "Let me see.", "tool_calls": [call("f", {}), call("g", "no JSON")]}]
    assert ChatTemplate(PLAIN, {}).render(content, add_generation_prompt=False) == (
        '<|assistant|>Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": "no JSON"}\n</tool_call>'
    )


def test_results_share_one_turn_with_the_users_text():
    parts = [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}]
    messages = [*CALLED, result("sunny"), result(parts), {"role": "user", "content": "And now?"}]
    assert (
        ChatTemplate(STRICT_TURNS, {})
        .render(messages)
        .endswith(
            "[user]<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\nwind\n</tool_response>\nAnd now?"
        )
    )
    messages[-1] = {"role": "user", "content": [{"type": "text", "text": "And now?"}]}
    last = with_tools_as_text(messages, None, True)[-1]["content"]
    assert "".join(part["text"] for part in last).endswith("</tool_response>\nAnd now?")


def test_two_user_turns_stay_two():
    messages = [*ASKED, {"role": "user", "content": "Please."}]
    assert ChatTemplate(PLAIN, {}).render(messages, tools=[WEATHER]).count("<|user|>") == 2


def test_a_message_with_calls_can_be_continued():
    messages = [*CALLED[:1], {**CALLED[1], "content": "Let me see."}]
    prompt = ChatTemplate(PLAIN, {}).render(messages, tools=[WEATHER], continue_final_message=True)
    assert prompt.endswith(f"<|assistant|>Let me see.\n{WRITTEN}")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir()))
def test_each_turn_begins_with_the_turn_before(name: str):
    tokenizer = byte_tokenizer((FOLDER / f"{name}.jinja").read_text())
    tokenizer.special_tokens, tokenizer.tool_call_parser = SPECIAL, "generic"
    template = ChatTemplate.of(tokenizer)
    before, after = (
        template.render(messages, generation, [WEATHER]) for messages, generation in ((ASKED, False), (ANSWERED, False))
    )
    # Some end a conversation that waits for an answer otherwise; its tools and the question are the same.
    shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    assert "How is it in Zürich?" in before[:shared]
    assert before.count(json.dumps(WEATHER)) == after.count(json.dumps(WEATHER)) == 1
    assert after.index("# Tools") < after.index("How is it") < after.index(WRITTEN) < after.index("sunny")


def test_the_setting_replaces_a_format_of_the_template():
    tokenizer = byte_tokenizer((FOLDER / "qwen2.5.jinja").read_text())
    assert ChatTemplate.of(tokenizer).tool_format is FORMATS["hermes"]
    tokenizer.tool_call_parser = "generic"
    prompt = ChatTemplate.of(tokenizer).render(CALLED, tools=[WEATHER])
    assert prompt.count("<tools></tools>") == 1
    assert f"assistant\n{WRITTEN}" in prompt


# ---- calls -----------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"\A[a-zA-Z0-9_-]{1,64}\Z")
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPECIAL_MARK))  # no stream's text has it
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=4)), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.lists(st.integers(0, 1000), max_size=6), st.sampled_from(["", "Let me see."]))
def test_calls_of_earlier_turns_are_read_unchanged(calls: list, at: list[int], content: str):
    message = {"role": "assistant", "content": content, "tool_calls": [call(name, value) for name, value in calls]}
    (shown,) = with_tools_as_text([message], None, True)
    text = shown["content"]
    got, found = read(text, [each for each in at if each < len(text)])
    assert got == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls

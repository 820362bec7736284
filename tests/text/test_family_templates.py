"""The chat templates that the families' models are published with: conversations as `transformers` renders them."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from runtime.base.types import CallboardError
from runtime.text.chat import ChatTemplate
from runtime.text.tool_calls import GENERIC, HERMES, LLAMA3
from runtime.text.tool_calls.generic import with_tools_as_text, with_tools_of_system, with_written_calls
from runtime.text.tool_calls.json_lists import PHI4
from runtime.text.tool_calls.mistral import MISTRAL
from tests.support.http.fake_engine import byte_tokenizer

TEMPLATES = {
    path.stem: path.read_text("utf-8") for path in Path(__file__).parents[1].glob("data/chat_templates/*.jinja")
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

USER, SYSTEM = {"role": "user", "content": "What is 2 + 2?"}, {"role": "system", "content": " Be brief.\n"}
ANSWER, MORE = {"role": "assistant", "content": "Four."}, {"role": "user", "content": "And 3 + 3?"}
ODD = {"role": "user", "content": '\n {{ bos_token }} {% x %} <|im_end|> [INST] <b>&amp;</b> "é" 日本 \U0001f600\t\n'}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwei ü"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "4"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Adds "numbers" & more.',
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([USER, ANSWER, MORE], {}),
    "system and turns": ([SYSTEM, USER, ANSWER, MORE], {}),
    "odd text": ([ODD], {}),
    "two questions at once": ([USER, MORE], {}),  # refused by some
    "a whole conversation": ([USER, ANSWER], {"add_generation_prompt": False}),
    "to be continued": ([USER, {"role": "assistant", "content": "The answer is "}], {"continue_final_message": True}),
    "tools": ([SYSTEM, USER], {"tools": [ADD]}),
    "tool call and result": ([USER, CALLING, RESULT], {"tools": [ADD]}),
    "thinking": (
        [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."}, MORE],
        {"enable_thinking": False},
    ),
}
NO_SYSTEM, ALTERNATING = {"system", "system and turns", "tools"}, {"two questions at once"}
REFUSED = {
    "gemma2": NO_SYSTEM | ALTERNATING,
    "gemma3": ALTERNATING,
    "llama2": ALTERNATING,
    "mistral-v0.1": NO_SYSTEM | ALTERNATING,
    "mistral-v0.3": ALTERNATING,
}


def test_every_chat_family_is_tested():
    assert sorted(TEMPLATES) == [
        "gemma2", "gemma3", "llama2", "llama3", "llama3.2", "mistral-v0.1", "mistral-v0.3", "phi3", "phi4-mini",
        "qwen2.5", "qwen3", "smollm2",
    ]  # fmt: skip


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_transformers(name: str, conversation: str):
    messages, options = CONVERSATIONS[conversation]
    options = {
        "add_generation_prompt": not options.get("continue_final_message"),
        "date_string": "1 Nov 2026",
    } | options
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()._backend, **SPECIAL)
    theirs.chat_template = TEMPLATES[name]
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    if template.tool_format is GENERIC and "tools" in options:  # then transformers gets the conversation as text
        shown = with_tools_as_text(messages, options["tools"], name not in ("gemma2", "mistral-v0.1"))
        their_options = {key: value for key, value in options.items() if key != "tools"}
    elif name == "phi4-mini" and "tools" in options:  # transformers shows no tools and calls there
        shown = with_tools_of_system(with_written_calls(messages, PHI4, template.roles), options["tools"])
        their_options = {key: value for key, value in options.items() if key != "tools"}
    else:
        shown, their_options = messages, options
    if conversation in REFUSED.get(name, ()):
        with pytest.raises(jinja2.TemplateError):
            theirs.apply_chat_template(shown, tokenize=False, **their_options)
        with pytest.raises(CallboardError, match=r"The model's chat template cannot use these messages: .*"):
            template.render(messages, **options)
    else:
        want = theirs.apply_chat_template(shown, tokenize=False, **their_options)
        assert template.render(messages, **options) == want


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen2.5", HERMES),
        ("qwen3", HERMES),
        ("llama3.2", LLAMA3),
        ("mistral-v0.3", MISTRAL),
        ("gemma3", GENERIC),
        ("phi3", GENERIC),
    ],
)
def test_the_tool_call_format_is_read_from_the_template(name: str, form: object):
    assert ChatTemplate(TEMPLATES[name], SPECIAL).tool_format is form
    assert ChatTemplate(TEMPLATES[name], SPECIAL).thinks is (name == "qwen3")

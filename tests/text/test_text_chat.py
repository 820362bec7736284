"""Chat templates: their variables, their permissions, and the texts of their refusals."""

import re

import pytest

from runtime.base.types import CallboardError
from runtime.text import chat
from runtime.text.chat import ChatTemplate
from runtime.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def _render(source: str, messages: list[dict] = HELLO, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_chatml():
    prompt = "<|im_start|>user\nHello<|im_end|>\n"
    assert _render(CHATML) == prompt + "<|im_start|>assistant\n"
    assert _render(CHATML, add_generation_prompt=False) == prompt


def test_templates_see_the_documented_values():
    assert _render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hello</s>"
    assert _render("{{ thinking }}{{ tools is none }}", thinking=False) == "FalseTrue"
    assert _render("{{ documents | tojson }}", documents=[{"name": "é<b>"}]) == '[{"name": "é<b>"}]'
    assert _render("{{ documents | tojson(indent=1) }}", documents=[1]) == "[\n 1\n]"
    assert re.fullmatch(r"\d{4}", _render("{{ strftime_now('%Y') }}"))


def test_blocks_are_trimmed_and_loops_can_break():
    source = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\n"
    )
    assert _render(source, HELLO * 3) == "Hello\n"


def test_generation_marks_add_nothing():
    assert _render("{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}") == "Hello!"


TURNS = [*HELLO, {"role": "assistant", "content": "The answer "}]


def test_continuing_the_final_message():
    start = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nThe answer"
    assert _render(CHATML, TURNS, continue_final_message=True) == start + " "
    trimming = CHATML.replace("message.content", "message.content | trim")
    assert _render(trimming, TURNS, continue_final_message=True) == start
    assert TURNS[-1]["content"] == "The answer "


def test_continuing_a_message_in_parts():
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    source = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    assert _render(source, parts, continue_final_message=True) == "[a][b"


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": []}]])
def test_nothing_to_continue(messages):
    with pytest.raises(CallboardError, match="last message has no text to continue"):
        _render(CHATML, messages, continue_final_message=True)


def test_a_template_that_drops_the_message_to_continue():
    with pytest.raises(CallboardError, match="leaves out the last message"):
        _render("{{ messages[0].content }}", TURNS, continue_final_message=True)


def test_refusals_carry_the_message_of_the_template():
    source = "{{ raise_exception('Roles must alternate.') }}"
    with pytest.raises(CallboardError, match=r"cannot use these messages: Roles must alternate\.$"):
        _render(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.clear() }}", "not safely callable|unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_errors_within_a_template(source, reason):
    with pytest.raises(CallboardError, match=f"cannot use these messages: .*({reason})") as caught:
        _render(source)
    assert "\n" not in str(caught.value)


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARS", 1000)
    assert len(_render("{% for i in range(1000) %}x{% endfor %}")) == 1000
    with pytest.raises(CallboardError, match="over 1000 characters"):
        _render("{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}")


def test_a_template_with_a_syntax_error():
    with pytest.raises(CallboardError, match=r"chat template has an error in line 2: "):
        ChatTemplate("a\n{% if %}", {})


def test_the_template_of_a_tokenizer(write_tiny_gguf):
    tokenizer = Tokenizer.load(write_tiny_gguf())
    prompt = ChatTemplate.of(tokenizer).render(HELLO)
    assert prompt == "<|start|>Hello<|end|>"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert (ids[0], ids[-1], len(ids)) == (1, 0, 6)  # H e ll o
    without = Tokenizer.load(write_tiny_gguf(tokenizer__chat_template=None))
    with pytest.raises(CallboardError, match="no chat template; use /v1/completions"):
        ChatTemplate.of(without)


def test_smollm2(smollm2_path):
    tokenizer = Tokenizer.load(smollm2_path)
    question = "What is the capital of France? Answer in one sentence."
    prompt = ChatTemplate.of(tokenizer).render([{"role": "user", "content": question}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    # As transformers' own template and tokenizer have it.
    assert ids == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
        *(198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 19842, 281, 582, 6330, 30, 2, 198, 1, 520, 9531, 198),
    ]

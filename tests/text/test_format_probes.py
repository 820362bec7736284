"""Which format a template shows, where it also writes other marks or shows the format elsewhere."""

import pytest

from runtime.text.chat import ChatTemplate
from runtime.text.tool_calls import FORMATS
from tests.text.test_tool_call_formats import TEMPLATE, WRITTEN, template_of


@pytest.mark.parametrize(("begin", "end"), [("<my:call>", "</my:call>"), ("<my:call>\n", ""), ("", "<end><turn>")])
def test_a_format_that_leaves_marks_behind_is_unknown(begin: str, end: str):
    """Such marks would reach the reader as content."""
    known = template_of("qwen3_coder")
    call = WRITTEN["qwen3_coder"]
    inner = call.replace("<tool_call>", "").replace("</tool_call>", "")
    for text in (inner, call):
        template = known.replace(call, f"{begin}{text}{end}")
        assert template != known
        assert ChatTemplate(template, {}).tool_format is FORMATS["generic"]


def test_a_format_shown_in_the_instructions_is_found():
    """A false mark before the call, and a history that does not continue its prompt."""
    shown = "{% if tools %}Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME.{% endif %}"
    template = shown + template_of("deepseek_v3") + "{% if add_generation_prompt %}\n{% endif %}"
    assert ChatTemplate(template, {}).tool_format is FORMATS["deepseek_v3"]


def test_a_turn_that_begins_with_reasoning_hides_no_format():
    """GLM-4.7: a turn begins with <think>, and an answer without reasoning with </think>. The tools' text has a call
    without arguments."""
    begin = "<|start|>assistant<think>{% endif %}"
    template = TEMPLATE.replace("CALL", WRITTEN["glm47"]).replace("<|start|>assistant{% endif %}", begin)
    template = "{% if tools %}<tool_call>{name}<arg_key>{key}</arg_key></tool_call>{% endif %}" + template
    found = ChatTemplate(template.replace("<|start|>", "<|assistant|>"), {})
    assert found.tool_format is FORMATS["glm47"]
    assert found.thinks

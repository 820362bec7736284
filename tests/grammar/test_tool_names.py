"""Any name of a tool is bound by the grammar and read back in every format of calls, or refused by name."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.output.call_grammar import with_calls
from runtime.output.tools import Tool
from runtime.structured.grammar import compiled
from runtime.text.tool_calls import FORMATS, HERMES, LLAMA3, ForcedCall, ToolFormat
from tests.grammar.test_structured_walks import matchers_of, walk
from tests.serve.test_dialects import HI, OLLAMA
from tests.support.http.chats import LLAMA, QWEN
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, client_of

WRITTEN = ["time.get-current", "mcp/server tool", 'say "hi"', "back\\slash", "größe", "a.b|c*(d)[e]", "<x>", "日本"]
# What each other format cannot write, of these.
_WITHOUT_TAGS = (
    *("qwen3_coder", "glm45", "glm47", "deepseek_v3", "deepseek_v31", "gemma4"),
    *("kimi_k2", "seed_oss", "functionary_v31"),
)
_ODD = {"mcp/server tool", 'say "hi"', "back\\slash", "a.b|c*(d)[e]", "<x>"}
REFUSED = {
    **dict.fromkeys(("pythonic", "lfm2", "olmo3"), _ODD),
    **{key: _ODD | {"time.get-current"} for key in ("glm4", "functionary_v32")},
    **{key: {"<x>", 'say "hi"', "back\\slash"} for key in ("deepseek_v32", "deepseek_v4", "minimax_m2", "minicpm5")},
    "apertus": {'say "hi"', "back\\slash"},
    "mistral_v11": {"a.b|c*(d)[e]"},
    "harmony": {"mcp/server tool", 'say "hi"', "<x>"},
    **{key: {"<x>"} for key in _WITHOUT_TAGS},
}


def names_read(form: ToolFormat, text: str, names: list[str], forced: ForcedCall | None, step: int) -> list[str]:
    """Return the functions that the parser finds in a text that arrives in pieces."""
    parser, found = form.parser(form, {key: {} for key in names}, None, forced), list[str]()
    for start, stop in pairwise([*range(0, len(text), step), len(text)]):
        found += [call.name for call in parser.push(text[start:stop])[1] if call.name]
    return found + [call.name for call in parser.push("", is_last=True)[1] if call.name]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_write_these_names(name: str):
    form = FORMATS[name]
    assert {each for each in WRITTEN if not form.can_name(each)} == REFUSED.get(name, set())
    for each in WRITTEN:
        if form.can_name(each):
            arguments = "{}" if form.arguments is None else ""
            call = form.opening(each) + arguments + form.end + form.close
            assert names_read(form, call, [each, "other"], None, 1) == [each]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3, unique=True), st.booleans(), st.integers(0, 99)
)
@example(['a"b', "a\\b", "a.b"], False, 1)
@example(["</tool_call>", '","arguments":{}'], False, 2)
def test_forced_calls_of_any_names_are_read_back(name: str, names: list[str], is_named: bool, seed: int):
    form = FORMATS[name]
    names = [each for each in names if each.isprintable() and form.can_name(each)]
    if not names:
        return
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    made = [{"type": "function", "function": {"name": each, "parameters": parameters}} for each in names]
    tools = [Tool.model_validate(each) for each in made]
    forced = ForcedCall(names[-1] if is_named else None)
    asked = with_calls(None, tools, form, forced, 1, {}, thinks=False)
    assert asked is not None
    text = walk(matchers_of(compiled(asked.spec)), seed)
    if text is None:  # the walk was cut off
        return
    (found,) = names_read(form, text, names, forced, 1 + seed % 5)
    assert found in names
    assert not is_named or found == names[-1]


@pytest.mark.parametrize("template", [QWEN, LLAMA])
async def test_a_forced_name_is_escaped_in_the_prompt(template: str):
    name, engine = 'say "hi"\\', FakeEngine(" {}}", max_model_len=1 << 16)
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    body = {"model": "fake", "messages": HI, "stream": False, "tools": tools, "tool_choice": "required"}
    async with client_of(engine, byte_tokenizer(template)) as client:
        answer = await client.post(OLLAMA, json=body)
    assert [call["function"]["name"] for call in answer.json()["message"]["tool_calls"]] == [name]
    form = HERMES if template == QWEN else LLAMA3
    assert bytes(engine.requests[0].token_ids).decode().endswith(form.opening(name))


async def test_a_name_that_a_format_cannot_write_is_named():
    tokenizer = byte_tokenizer(QWEN)
    tokenizer.tool_call_parser = "pythonic"
    body = {"model": "fake", "messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}
    async with client_of(FakeEngine("x", max_model_len=1 << 16), tokenizer) as client:
        answer = await client.post(OLLAMA, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(
        'tools.0.function.name is "a b", which this model\'s format of calls cannot'
    )

"""The formats of tool calls as models write them, whole and cut anywhere, and the format that a template determines."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.output.message_parser import MessageFormat, MessageParser
from runtime.text.chat import ChatTemplate
from runtime.text.tool_calls import FORMATS, ForcedCall
from tests.support import native_calls
from tests.support.http.fake_engine import byte_tokenizer

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "state": {"type": "string"}}}
AREA = {
    "type": "object",
    "properties": {
        "shape": {"type": "string"},
        "dimensions": {"type": "object"},
        "precision": {"type": "integer"},
        "ratio": {"type": ["number", "null"]},
        "is_open": {"type": "boolean"},
        "unit": {"enum": ["5", "cm"]},
        "size": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
}
FUNCTIONS = {"get_weather": WEATHER, "get-area_2": AREA, "now": {}}
DALLAS = {"city": "Dallas", "state": "TX"}
ORLANDO = {"city": "Orlando", "state": "FL"}

CODER_DALLAS = "<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>\n"
GLM_DALLAS = (
    "<arg_key>city</arg_key>\n<arg_value>Dallas</arg_value>\n<arg_key>state</arg_key>\n<arg_value>TX</arg_value>\n"
)
V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
OUTPUTS = {
    "mistral": [
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Dallas", "state": "TX"}}]', "", [DALLAS]),
        (
            'Sure.[TOOL_CALLS][{"name":"get_weather" , "arguments" : {"city": "Dallas", "state": "TX"} } ]',
            "Sure.",
            [DALLAS],
        ),
        ('[TOOL_CALLS] [{"arguments": {"city": "Dallas", "state": "TX"}, "name": "get_weather"}]', "", [DALLAS]),
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Dallas", "state": "TX"}, "id": "abcdefghi"}, '
            '{"name": "get_weather", "arguments": {"city": "Orlando", "state": "FL"}}]\n',
            "",
            [DALLAS, ORLANDO],
        ),
        ("[TOOL_CALLS] [] none", "[TOOL_CALLS] [] none", []),
    ],
    "mistral_v11": [
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Dallas", "state": "TX"}', "", [DALLAS]),
        ('[TOOL_CALLS]get_weather{"city": "Dallas", "state": "TX"}', "", [DALLAS]),
        (
            'Two.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Dallas", "state": "TX"}'
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Orlando", "state": "FL"}',
            "Two.",
            [DALLAS, ORLANDO],
        ),
        ("[TOOL_CALLS]put_weather[ARGS]{}", "[TOOL_CALLS]put_weather[ARGS]{}", []),
    ],
    "deepseek_v3": [
        (
            "Let me see.\n<｜tool▁calls▁begin｜>"
            f'{V3_CALL}get_weather\n```json\n{{"city": "Dallas", "state": "TX"}}\n```'
            f'<｜tool▁call▁end｜>\n{V3_CALL}get_weather\n```json\n{{"city": "Orlando", "state": "FL"}}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Let me see.",
            [DALLAS, ORLANDO],
        ),
        (
            f"<｜tool▁calls▁begin｜>{V3_CALL}put\n```json\n{{}}",
            f"<｜tool▁calls▁begin｜>{V3_CALL}put\n```json\n{{}}",
            [],
        ),
    ],
    "deepseek_v31": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Dallas", "state": "TX"}'
            '<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Orlando", "state": "FL"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [DALLAS, ORLANDO],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>So.",
            "So.",
            [{}],
        ),
    ],
    "qwen3_coder": [
        (f"<tool_call>\n<function=get_weather>\n{CODER_DALLAS}</function>\n</tool_call>", "", [DALLAS]),
        (
            f"Sure! Let me check.<tool_call>\n<function=get_weather>\n{CODER_DALLAS}</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "Sure! Let me check.",
            [DALLAS, {}],
        ),
        (
            '<tool_call>\n<function=get-area_2>\n<parameter=shape>\na "b"\n\n <p>\n</parameter>\n'
            "<parameter=dimensions>\n"
            '{"width": 10,\n "height": 20}\n</parameter>\n<parameter=precision>\n2\n</parameter>\n<parameter=ratio>\n'
            "None\n</parameter>\n<parameter=is_open>\nTrue\n</parameter>\n<parameter=unit>\n5\n</parameter>\n"
            "<parameter=size>\n7\n</parameter>\n<parameter=other>\n[1]\n</parameter>\n</function>\n</tool_call>",
            "",
            [
                {
                    "shape": 'a "b"\n\n <p>',
                    "dimensions": {"width": 10, "height": 20},
                    "precision": 2,
                    "ratio": None,
                    "is_open": True,
                    "unit": "5",
                    "size": 7,
                    "other": [1],
                }
            ],
        ),
        # end marks forgotten; a value of another type than the schema's
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</function>\n</tool_call>",
            "",
            [DALLAS],
        ),
        ("<tool_call><function=get-area_2><parameter=precision>two</parameter></function>", "", [{"precision": "two"}]),
        (f"Yes.\n<function=get_weather>\n{CODER_DALLAS}</function>\n</tool_call>", "Yes.", [DALLAS]),
        ("<tool_call>\n<function=put>\n</function>", "<tool_call>\n<function=put>\n</function>", []),
    ],
    "glm45": [
        (f"<tool_call>get_weather\n{GLM_DALLAS}</tool_call>", "", [DALLAS]),
        (
            f"I will.\n<tool_call>get_weather\n{GLM_DALLAS}</tool_call>\n<tool_call>now\n</tool_call>",
            "I will.",
            [DALLAS, {}],
        ),
        # GLM 4.7 omits the line ends.
        (
            "<tool_call>get-area_2<arg_key>ratio</arg_key><arg_value>1.5</arg_value><arg_key>shape</arg_key>"
            '<arg_value>[1, "é"]\n</arg_value></tool_call>',
            "",
            [{"ratio": 1.5, "shape": '[1, "é"]\n'}],
        ),
        ("<tool_call>put\n</tool_call>", "<tool_call>put\n</tool_call>", []),
    ],
    "pythonic": [
        ("[get_weather(city='Dallas', state='TX')]", "", [DALLAS]),
        (
            "[get_weather(city='Dallas',state=\"TX\"), now(),get_weather(city='Orlando', state='FL')]",
            "",
            [DALLAS, {}, ORLANDO],
        ),
        ("Sure. <|python_start|>[get_weather(city='Dallas', state='TX')]<|python_end|>", "Sure.", [DALLAS]),
        (
            r"""[get_weather(city='Martha\'s (Vineyard, "MA")', state={'a': [1, (2, -3.5)], "b": None}, x=True, y=[],"""
            r""" z=f(1), w={"a": true})]""",
            "",
            [
                {
                    "city": 'Martha\'s (Vineyard, "MA")',
                    "state": {"a": [1, [2, -3.5]], "b": None},
                    "x": True,
                    "y": [],
                    "z": "f(1)",
                    "w": {"a": True},
                }
            ],
        ),
        ("[get-area_2(precision='2', unit='5', ratio='None')]", "", [{"precision": 2, "unit": "5", "ratio": None}]),
        (r"[get_weather(city='\ud800é')]", "", [{"city": "\ud800é"}]),
        ("[1] says so. [get_weather(city='Dallas')]", "[1] says so. [get_weather(city='Dallas')]", []),
        ("[get_weather('Dallas')]", "[get_weather('Dallas')]", []),
        ("[put(a=1)]", "[put(a=1)]", []),
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
            '<|constrain|>json<|message|>{"city": "Dallas", "state": "TX"}<|call|>',
            "",
            [DALLAS],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_weather"
            "<|channel|>commentary json"
            '<|message|>{"city": "Dallas", "state": "TX"}<|call|><|start|>assistant'
            "<|channel|>commentary to=functions.now "
            "<|constrain|>json<|message|><|call|><|start|>assistant<|channel|>final<|message|>Warm <b>.<|return|>",
            "Warm <b>.",
            [DALLAS, {}],
        ),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", []),
        ("Who needs channels? <|not", "Who needs channels? <|not", []),
    ],
}
OUTPUTS["gemma4"] = [
    ('<|tool_call>call:get_weather{city:<|"|>Dallas<|"|>,state:<|"|>TX<|"|>}<tool_call|>', "", [DALLAS]),
    (
        'Two.<|tool_call>call:get_weather{city:<|"|>Dallas<|"|>,state:<|"|>TX<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "Two.",
        [DALLAS, {}],
    ),
    (
        '<|tool_call>call:get-area_2{dimensions:{h:[1,2.5,<|"|>a, }b<|"|>],<|"|>w<|"|>:{}},is_open:true,'
        'shape:<|"|>a "b"\n{é<|"|>,ratio:null,size:wide}<tool_call|>',
        "",
        [
            {
                "dimensions": {"h": [1, 2.5, "a, }b"], "w": {}},
                "is_open": True,
                "shape": 'a "b"\n{é',
                "ratio": None,
                "size": "wide",
            }
        ],
    ),
    ('<|tool_call>call:get_weather{"city": "Dal\\"las", "state": "TX"}', "", [DALLAS | {"city": 'Dal"las'}]),
    ("<|tool_call>call:put{a:1}<tool_call|>", "<|tool_call>call:put{a:1}<tool_call|>", []),
    ("<|tool_call>get_weather{}", "<|tool_call>get_weather{}", []),
]
OUTPUTS |= native_calls.OUTPUTS
OUTPUTS["gemma4"].append(("<|tool_call>:now{}<tool_call|>", "", [{}]))
OUTPUTS["harmony"].append(
    (
        "<|channel|>commentary to=assistant<|channel|>final<|message|>Hi",
        "Hi",
        [],
    )
)
CASES = [(name, *case) for name, cases in OUTPUTS.items() for case in cases]


def read(name: str, parts: list[str], forced: ForcedCall | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and names and arguments of the calls."""
    form = MessageFormat(False, False, True, FORMATS[name], FUNCTIONS, None, forced, frozenset())
    parser = MessageParser(form)
    content, thoughts, calls = "", "", []
    for i, part in enumerate([*parts, ""]):
        message = parser.push(part, i == len(parts))
        content, thoughts = content + message.content, thoughts + message.reasoning
        for piece in message.calls:
            if piece.name:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            else:
                assert piece.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return content, thoughts, calls


@pytest.mark.parametrize(("name", "text", "content", "arguments"), CASES)
def test_formats_that_models_write(name: str, text: str, content: str, arguments: list[dict]):
    whole = read(name, [text])
    assert whole[0] == content
    assert whole[1] == ("Hm." if "Hm." in text else "")
    assert [json.loads(written) for _, written in whole[2]] == arguments
    assert [called for called, _ in whole[2]] == [
        "now" if not each else "get_weather" if "city" in each else "get-area_2" for each in arguments
    ]
    assert read(name, list(text)) == whole
    for at in range(1, len(text)):
        assert read(name, [text[:at], text[at:]]) == whole


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(CASES),
    st.sampled_from(CASES),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.lists(st.integers(0, 10_000), max_size=8),
)
def test_any_cut_of_any_text_gives_the_same_result(one: tuple, other: tuple, kept: list[int], cuts: list[int]):
    """Pieces that models write, put together wrongly."""
    text = one[1] + other[1]
    bounds = sorted({0, *(i % (len(text) + 1) for i in kept), len(text)})
    text = "".join(text[a:b] for i, (a, b) in enumerate(pairwise(bounds)) if i % 3 != 1)
    ends = sorted({0, *(i % (len(text) + 1) for i in cuts), len(text)})
    whole = read(one[0], [text])
    assert read(one[0], [text[a:b] for a, b in pairwise(ends)]) == whole
    assert read(one[0], list(text)) == whole


def test_arguments_arrive_as_they_are_written():
    def pieces(name: str, *parts: str) -> list[str]:
        parser = FORMATS[name].parser(FORMATS[name], FUNCTIONS)
        return ["".join(piece.arguments for piece in parser.push(part)[1]) for part in parts]

    begin = "<tool_call>\n<function=get-area_2>\n<parameter=shape>\n"
    assert pieces("qwen3_coder", begin, "a \n", '"b"', "\n</para") == ['{"shape": "', "a ", '\\n\\"b\\"', ""]
    assert pieces("qwen3_coder", begin.replace("shape", "precision"), "1", "2", "\n</parameter>\n") == [
        *('{"precision": ', "", "", "12"),
    ]
    assert pieces("gemma4", "<|tool_call>call:now{a:", '<|"|>x', '"<|"', "|>,b:[1", "]}") == [
        *("", '{"a": "x', '\\"', '", "b": ', "[1]}"),
    ]
    assert pieces("pythonic", "[now(a='x", "', b=", "1)") == ['{"a": ', '"x", "b": ', "1}"]
    assert pieces("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>", '{"a"', ": 1}") == [
        *("", '{"a"', ": 1}"),
    ]


def test_a_truncated_call_keeps_its_text():
    assert read("qwen3_coder", ["<tool_call><function=get_weather><parameter=city>\nDal"])[2] == [
        ("get_weather", '{"city": "Dal')
    ]
    for key in ("<param", "\n<parameter=st"):
        text = f"<tool_call><function=get_weather><parameter=city>Dallas</parameter>{key}"
        assert read("qwen3_coder", [text]) == ("", "", [("get_weather", '{"city": "Dallas"')])
    assert read("pythonic", ["[get_weather(city='Dallas', st"]) == ("", "", [("get_weather", '{"city": "Dallas"')])
    assert read("pythonic", ["[get_weather(city='Dal"])[2] == [("get_weather", '{"city": \'Dal')]
    assert read("harmony", ["<|channel|>analysis<|message|>Hm. <|en"])[1] == "Hm. <|en"
    assert read("harmony", ["<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"])[2] == [
        ("now", "{")
    ]


# How the published templates write a call; {A} is `arguments | tojson`, {T} the arguments as a text.
WRITTEN = {
    "mistral": '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {A}, "id": "{{ c.id }}"}]</s>',
    "mistral_v11": "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{A}</s>",
    "pythonic": "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %})]<|eot|>",
    "qwen3_coder": (
        "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments|items %}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm45": (
        "\n<think></think>\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "glm47": (
        "</think><tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{T}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{T}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gemma4": (
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:"
        "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v }}{% endif %}{% endfor %}{{ '}' }}<tool_call|>"
    ),
    "harmony": " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{A}<|call|>",
}
WRITTEN |= native_calls.WRITTEN
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>assistant{{ m.content }}{{ m.thinking }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def template_of(name: str) -> str:
    call = WRITTEN[name].replace("{A}", "{{ f.arguments | tojson }}").replace("{T}", "{{ '' + f.arguments }}")
    template = TEMPLATE.replace("CALL", call)
    return template if name == "harmony" else template.replace("<|start|>", "<|im_start|>")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_determines_its_format(name: str):
    template = ChatTemplate(template_of(name), {})
    assert template.tool_format is FORMATS[name]
    assert template.has_channels is (name == "harmony")
    without_tools = ChatTemplate(template_of(name).replace("tools or []", "[]"), {})
    # DeepSeek V3.1's published template has calls and no tools.
    assert without_tools.tool_format is {"harmony": None, "deepseek_v31": FORMATS["deepseek_v31"]}.get(
        name, FORMATS["generic"]
    )
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": DALLAS}}
    called = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."}
    text = template.render([{"role": "user", "content": "Go."}, called])
    assert "Dallas" in text
    assert ("assistantHm." in text) is (name == "harmony")
    if "{T}" in WRITTEN[name]:  # such a template accepts arguments only as text
        assert json.dumps(DALLAS) in text


def test_a_setting_determines_the_format():
    with pytest.raises(CallboardError, match="tool_call_parser is 'x'; it must be one of auto, hermes, "):
        EngineConfig(tool_call_parser="x")
    tokenizer = byte_tokenizer(template_of("mistral"))
    assert ChatTemplate.of(tokenizer).tool_format is FORMATS["mistral"]
    tokenizer.tool_call_parser = "pythonic"
    assert ChatTemplate.of(tokenizer).tool_format is FORMATS["pythonic"]


# Outputs that failed in other servers, with the content, the reasoning and the names of the calls here.
REPORTED = {
    # vllm 46464: <|return|> where a message should begin.
    "vllm 46464": (["<|channel|>analysis<|message|>Hm.<|end|><|return|><|return|>"], "", "Hm.", []),
    # vllm 23567: an unknown type or text in a header.
    "vllm 23567": (
        ["<|channel|>commentary to=functions.now––commentary <|constrain|>json<|message|>{}<|call|>"],
        *("", "", ["now"]),
    ),
    "vllm 51977": (["<|channel|>analysis to=functions.get-area_2 code<|message|>{}<|call|>"], "", "", ["get-area_2"]),
    # vllm 22403: more messages than one of reasoning and one of the answer.
    "vllm 22403": (
        [
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I see. <|end|>"
            "<|start|>assistant<|channel|>analysis<|message|> So.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        ],
        *("I see. Hi", "Hm. So.", []),
    ),
    # ollama 12187: a recipient without its namespace, and arguments that are not JSON.
    "ollama 12187": (
        [
            "<|channel|>commentary to=now <|constrain|>json<|message|>{}<|call|><|start|>assistant"
            "<|channel|>commentary to=functions.get_weather code<|message|>print('a')<|call|>"
        ],
        *("", "", ["now", "get_weather"]),
    ),
    "ollama 11704": (["<|channel|>commentary to=python code<|message|>1 + 1<|call|>"], "", "1 + 1", []),
}


@pytest.mark.parametrize("name", REPORTED)
def test_outputs_that_other_servers_refuse(name: str):
    parts, content, thoughts, called = REPORTED[name]
    for cut in (parts, list(parts[0])):
        found = read("harmony", cut)
        assert (found[0], found[1], [call for call, _ in found[2]]) == (content, thoughts, called)


def test_results_join_the_message_of_their_calls():
    responses = "{% for r in m.tool_responses or [] %}|{{ r.name }}={{ r.response }}{% endfor %}{% endif %}{% endfor %}"
    template = ChatTemplate(
        template_of("gemma4").replace("{% endif %}{% endfor %}{% if add", responses + "{% if add"), {}
    )
    functions = [{"name": name, "arguments": {}} for name in ("one", "two")]
    calls = [{"id": each["name"][0], "type": "function", "function": each} for each in functions]
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t", "content": '{"a": 1}'},
        {"role": "tool", "tool_call_id": "o", "content": "4"},
        {"role": "assistant", "content": "Done."},
    ]
    text = template.render(messages, add_generation_prompt=False)
    assert text.endswith("<tool_call|>|two={'a': 1}|one=4<|im_start|>assistantDone.")

"""Templates with tools: the prompt equals that of `transformers`, and the template determines the format of its model's
answers.

The templates are short ones of our own. Each has the structure of a family's template: the places of tools and calls,
the fields it reads, and the messages it refuses."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.base.types import CallboardError
from runtime.output.tools import Tool
from runtime.text.chat import ChatTemplate
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import FORMATS, GENERIC, HERMES, LLAMA3
from serve_app.apis.chat.messages import ChatMessage

QWEN25 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0]['content'] if messages[0]['role'] == 'system' else 'You are Qwen.' }}
    {{- "\n\n# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each call, return a json object within <tool_call></tool_call> XML tags:\n" }}
    {{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA31 = r"""
{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" ~ system_message ~ "<|eot_id|>" }}
{%- if not tools is none %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with a JSON for a function call.\n' -}}
    {{- 'The format is {"name": function name, "parameters": dictionary of argument name and its value}.\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' -}}
        {{- tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
HERMES3 = r"""
{%- macro python_type(spec) %}
    {%- if spec.type == "array" %}
        {{- "list[" + python_type(spec['items']) + "]" }}
    {%- else %}
        {{- {"string": "str", "integer": "int"}[spec.type] }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\nYou are a function calling AI model. Here are the tools: <tools> ' }}
{%- endif %}
{%- for tool in tools or [] %}
    {%- set tool = tool.function %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for name, fields in tool.parameters.properties|items %}
        {{- name + ": " + python_type(fields) + (", " if not loop.last else "") }}
    {%- endfor %}
    {{- ") - " + tool.description + '", "parameters": ' + (tool.parameters|tojson) + "}\n" }}
{%- endfor %}
{%- if tools %}
    {{- ' </tools>\n<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n{ "arguments": ' ~ (tool_call.function.arguments|tojson) }}
            {{- ', "name": "' ~ tool_call.function.name ~ '"}\n</tool_call> ' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if not message.name is defined %}
            {{- raise_exception("Tool response dicts require a 'name' key!") }}
        {%- endif %}
        {{- '<|im_start|>tool\n<tool_response>\n{"name": "' ~ message.name ~ '", "content": ' }}
        {{- message.content|tojson + '}\n</tool_response> <|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
MISTRAL = r"""
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + (val|tojson) + (", " if not loop.last else "") }}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id is not defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' + (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"qwen2.5": QWEN25, "llama3.1": LLAMA31, "hermes3": HERMES3, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather in a city, in "plain" <words>.',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": [1, 2]}'},
}
CONVERSATION = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "21 °C"},
    {"role": "assistant", "content": "Warm."},
    {"role": "user", "content": "And tomorrow?"},
]


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("num_messages", [1, 3, 5])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_transformers(name: str, num_messages: int, with_tools: bool):
    sent = CONVERSATION[:num_messages]
    messages = [ChatMessage.model_validate(m).as_template_sees_it() for m in sent]
    tools = [Tool.model_validate(WEATHER).as_template_sees_it()] if with_tools else None
    # As its documentation requires: arguments as objects, and no null, which some templates cannot read.
    theirs = [m | {"content": m["content"] or ""} for m in json.loads(json.dumps(sent))]
    for message in theirs:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    options = {"enable_thinking": False}
    rendered, _ = render_jinja_template(
        [theirs],
        tools=[WEATHER] if with_tools else None,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **SPECIAL,
        **options,
    )
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, tools=tools, **options) == rendered[0]


def test_the_call_format_is_the_one_of_the_template():
    forms = {name: ChatTemplate(source, SPECIAL).tool_format for name, source in TEMPLATES.items()}
    assert forms == {"qwen2.5": HERMES, "llama3.1": LLAMA3, "hermes3": HERMES, "mistral": FORMATS["mistral"]}
    # An unknown mixture, and templates without tools.
    xml = QWEN25.replace('{"name": "\' ~ tool_call.name ~ \'", "arguments": ', "<function=' ~ tool_call.name ~ '>")
    assert xml != QWEN25
    for source in (xml, "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "{{ messages[9].role.x }}"):
        assert ChatTemplate(source, SPECIAL).tool_format is GENERIC


def test_a_separate_template_for_tools():
    template = ChatTemplate("plain", SPECIAL, QWEN25)
    assert template.render(CONVERSATION[:1]) == "plain"
    assert "# Tools" in template.render(CONVERSATION[:1], tools=[WEATHER])
    assert template.tool_format is HERMES


def test_a_folder_with_a_template_for_tools(tmp_path):
    from tests.support.http.fake_engine import byte_tokenizer

    byte_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("a", "b")
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("d")
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("c", "d")


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_cannot_link_out_of_its_folder(tmp_path, name: str):
    from tests.support.http.fake_engine import byte_tokenizer

    folder, secret = tmp_path / "model", tmp_path / "secret"
    (folder / name).parent.mkdir(parents=True)
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    secret.write_text("words")
    (folder / name).symlink_to(secret)
    with pytest.raises(CallboardError, match=f"{name} is a link to .*secret, outside the model's folder"):
        Tokenizer.load(folder)
    (folder / name).unlink()
    (folder / "own").write_text("words")
    (folder / name).symlink_to(folder / "own")
    tokenizer = Tokenizer.load(folder)
    assert "words" in (tokenizer.chat_template, tokenizer.tool_template)


def test_links_within_a_hub_cache_are_followed(tmp_path):
    from tests.support.http.fake_engine import byte_tokenizer

    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    byte_tokenizer()._backend.save(str(blobs / "1"))
    (blobs / "2").write_text("words")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/2")
    (tmp_path / "model").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "model"):
        assert Tokenizer.load(folder).chat_template == "words"
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("/etc/passwd")
    with pytest.raises(CallboardError, match="outside the model's folder"):
        Tokenizer.load(snapshot)


def test_whether_the_model_thinks():
    assert ChatTemplate(QWEN25, SPECIAL).thinks
    assert not ChatTemplate(LLAMA31, SPECIAL).thinks


ITERATING = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT_OF_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}" + (
    "{{ m.content + '!' }}{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "content", "want"),
    [
        (ITERATING, PARTS, "<user>[a][b]"),
        (ITERATING, "ab", "<user>[ab]"),
        (BOTH, PARTS, "<user>[a][b]"),
        (BOTH, "ab", "<user>ab"),
        ("{{ messages[0].content }}", PARTS, "a\nb"),
        ("{{ messages[0].content | tojson }}", PARTS, '"a\\nb"'),
        ("{{ messages[0].content }}", [*PARTS, {"type": "image"}], str([*PARTS, {"type": "image"}])),
    ],
)
def test_contents_have_the_form_that_a_template_reads(source: str, content: object, want: str):
    assert ChatTemplate(source, {}).render([{"role": "user", "content": content}]) == want


def test_each_role_has_its_own_form_of_content():
    template = ChatTemplate(TEXT_OF_SYSTEM, {})
    contents = ("system", PARTS), ("user", "x"), ("user", PARTS)
    assert template.render([{"role": role, "content": content} for role, content in contents]) == "a\nb![x][a][b]"


LOOPING = "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for d in documents %}{{ d }}{% endfor %}" + (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}(call){% endfor %}{% endfor %}"
)


def test_a_template_that_needs_tools_is_rendered_with_them():
    template = ChatTemplate(LOOPING, {})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert template.render([{"role": "user", "content": "hi"}], tools=tools) == "add;hi"
    assert template.tool_format is GENERIC
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"  # transformers fails here


def test_a_refusal_of_a_template_is_not_tried_again():
    template = ChatTemplate("{{ raise_exception('no ' ~ (tools is none)) }}", {})
    with pytest.raises(CallboardError, match="no True"):
        template.render([{"role": "user", "content": "hi"}])

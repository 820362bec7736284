"""Calls of Qwen2.5-Coder-1.5B-Instruct, which has the marks of Hermes and writes code blocks instead.

CALLBOARD_CODER_MODEL names the model: a GGUF file, or another source that `callboard serve` takes."""

import os

import pytest

from runtime.base.types import SamplingParams
from runtime.llm import LLM

pytestmark = [pytest.mark.model, pytest.mark.thorough]
MODEL = "CALLBOARD_CODER_MODEL"


def tool(name, description, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required or properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text(description):
    return {"type": "string", "description": description}


INTEGER = {"type": "integer"}
SETS = {
    "weather": [
        tool(
            "get_weather",
            "Get the current weather in a city.",
            ["city"],
            city=text("the city"),
            unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        ),
        tool("add", "Add two integers.", a=INTEGER, b=INTEGER),
    ],
    "files": [
        tool("read_file", "Read a file.", path=text("path of the file")),
        tool("write_file", "Write a text to a file.", path=text("path"), content=text("the text")),
        tool("run_command", "Run a shell command.", command=text("the command")),
    ],
    "home": [
        tool(
            "set_light",
            "Switch a light on or off.",
            ["room", "on"],
            room=text("the room"),
            on={"type": "boolean"},
            brightness={"type": "integer", "minimum": 0, "maximum": 100},
        ),
        tool("set_temperature", "Set the heating of a room.", room=text("the room"), degrees={"type": "number"}),
        tool("get_time", "Get the current time."),
    ],
    "mail": [
        tool(
            "send_mail",
            "Send an e-mail.",
            ["to", "subject", "body"],
            to={"type": "array", "items": {"type": "string"}},
            subject=text("the subject"),
            body=text("the text"),
        ),
        tool("search_mail", "Search in all e-mails.", query=text("words to find")),
    ],
}
QUESTIONS = [
    ("weather", "What is the weather in Paris?", "get_weather"),
    ("weather", "What is the weather in Paris in celsius?", "get_weather"),
    ("weather", "Is it raining in Oslo?", "get_weather"),
    ("weather", "How warm is it in Zürich, in fahrenheit?", "get_weather"),
    ("weather", "Add 5 and 3 with the tool.", "add"),
    ("weather", "What is 1234 plus 4321? Use the tool.", "add"),
    ("files", "Read the file /etc/hostname.", "read_file"),
    ("files", "Show me what is in README.md.", "read_file"),
    ("files", "Create a file hello.txt with the text Hello World.", "write_file"),
    ("files", "Write print('hi') into the file hi.py.", "write_file"),
    ("files", "Run ls -la.", "run_command"),
    ("files", "Which Python version is installed? Run the command that tells it.", "run_command"),
    ("home", "Switch on the light in the kitchen.", "set_light"),
    ("home", "Turn off the bedroom light.", "set_light"),
    ("home", "Dim the light in the living room to 30 percent.", "set_light"),
    ("home", "Heat the bathroom to 22.5 degrees.", "set_temperature"),
    ("home", "What time is it?", "get_time"),
    ("mail", "Find my e-mails about the invoice.", "search_mail"),
    ("mail", "Send bob@example.com an e-mail with the subject Lunch that asks him for lunch at noon.", "send_mail"),
    ("mail", "Search my mail for flight tickets.", "search_mail"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    if MODEL not in os.environ:
        pytest.skip(f"set {MODEL} to a GGUF file of Qwen2.5-Coder-1.5B-Instruct")
    return LLM(os.environ[MODEL], device="cpu", kv_cache_memory=0.4, max_num_seqs=8, max_model_len=2048)


def answers(llm, **options):
    params = SamplingParams(temperature=0, max_tokens=120)
    for group, offered in SETS.items():
        asked = [(question, name) for of, question, name in QUESTIONS if of == group]
        chats = [[{"role": "user", "content": question}] for question, _ in asked]
        given = llm.chat(chats, params, progress=False, tools=offered, **options)
        yield from ((question, name, answer) for (question, name), answer in zip(asked, given, strict=True))


def test_every_call_that_it_writes_is_read(llm):
    written = read = 0
    for question, name, answer in answers(llm):
        names = [call.name for call in answer.tool_calls]
        shows = bool(names) or f'"{name}"' in answer.text
        written, read = written + shows, read + bool(names)
        assert bool(names) == shows, (question, answer.text)
        assert names[:1] in ([], [name]), question
    assert read == written >= 15


def test_no_required_call_has_another_behind_it(llm):
    for question, name, answer in answers(llm, tool_choice="required"):
        names = [call.name for call in answer.tool_calls]
        assert names == [name], question
        assert not answer.text

"""A pytest plugin: a package `vllm` for vLLM's own parser tests, with Callboard's parsers behind its names.

vllm.py loads it beside the tests. A module of `vllm` that is not written here is made of mocks.
"""

import importlib.abc
import importlib.machinery
import json
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from runtime.text.tool_calls import FORMATS

_END = "\uffff"  # behind the last token of a text: the stream ends
_TOKEN = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_]+\]|\s?\w+|\s|.", re.DOTALL)
# The formats with other names than vLLM's, by the beginning of its name.
_NAMES = {
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4",
    "deepseekv3": "deepseek_v3", "functionary": "functionary_v31", "gemma4": "gemma4", "gigachat3": "gigachat31",
    "glm4": "glm45", "glm47": "glm47", "granite4": "hermes", "granite": "granite", "hermes": "hermes",
    "hunyuan": "tool_calls", "kimik2": "kimi_k2", "lfm2": "lfm2", "llama4": "pythonic", "llama": "llama3_json",
    "minicpm5": "minicpm5", "minimaxm2": "minimax_m2", "olmo3": "olmo3", "phi4mini": "phi4_mini",
    "pythonic": "pythonic", "qwen3": "qwen3_coder", "step3p5": "qwen3_coder", "xlam": "xlam",
    "apertus": "apertus", "seedoss": "seed_oss",
}  # fmt: skip


class _Fields(SimpleNamespace):
    """A message of vLLM's protocol. A field that was not given is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return [] if name in ("tool_calls", "tools") else "function" if name == "type" else None


class FunctionCall(_Fields):
    pass


class ToolCall(_Fields):
    pass


class _Tokenizer:
    """Tokens are words and marks."""

    eos_token_id, add_tokens = 0, staticmethod(lambda *_, **__: 0)
    all_special_tokens: list[str] = []  # noqa: RUF012

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids.setdefault(token, len(self._ids)) for token in [*_TOKEN.findall(text), _END]]

    def decode(self, ids: list[int], **_: Any) -> str:
        texts = {i: text for text, i in self._ids.items()}
        return "".join(texts[i] for i in ids)

    def tokenize(self, text: str) -> list[str]:
        return _TOKEN.findall(text)

    def get_vocab(self) -> Any:
        return MagicMock(__contains__=lambda _, token: True, get=lambda token, *_: hash(token))


class ToolParser:
    """A parser of Callboard with vLLM's methods."""

    form = FORMATS["hermes"]

    def __init__(self, tokenizer: Any = None, tools: Any = None, **_: Any) -> None:
        self.model_tokenizer, self.vocab = tokenizer or _Tokenizer(), _Tokenizer().get_vocab()
        self._tools, self._parser = tools, None

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        content, pieces = self._new(request).push(model_output, True)
        calls: list[Any] = []
        for piece in pieces:
            if piece.name:
                function = FunctionCall(name=piece.name, arguments="")
                calls.append(ToolCall(id=piece.id, type="function", function=function))
            else:
                calls[-1].function.arguments += piece.arguments
        return _Fields(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Any, request: Any = None, **more_ids: Any
    ) -> Any:
        if self._parser is None or not previous_text:
            self._parser = self._new(ids[-1] if request is None and ids else request)
        content, pieces = self._parser.push(delta_text.removesuffix(_END), delta_text.endswith(_END))
        merged: dict[int, Any] = {}
        for piece in pieces:
            call = merged.setdefault(
                piece.index, _Fields(index=piece.index, id=None, function=FunctionCall(name=None, arguments=""))
            )
            call.id, call.function.name = call.id or piece.id or None, call.function.name or piece.name or None
            call.function.arguments += piece.arguments
        if not content and not merged:
            return None
        return _Fields(content=content or None, tool_calls=[*merged.values()])

    def _new(self, request: Any) -> Any:
        tools = self._tools or getattr(request, "tools", None) or []
        functions = {}
        for tool in tools:
            function = tool["function"] if isinstance(tool, dict) else tool.function
            of = function if isinstance(function, dict) else vars(function)
            functions[of["name"]] = of.get("parameters") or {}
        return self.form.parser(self.form, functions or None)


def _parser_of(name: str) -> type[ToolParser] | None:
    plain = name.lower().replace("_", "").replace("-", "")
    found = [begin for begin in sorted(_NAMES, key=len, reverse=True) if plain.startswith(begin)]
    return type(name, (ToolParser,), {"form": FORMATS[_NAMES[found[0]]]}) if found else None


def _module(name: str) -> ModuleType:
    module: Any = ModuleType(name)
    module.__path__ = []
    plain = name.rpartition(".")[2]

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        if wanted.endswith("ToolParser") and wanted != "ToolParser" and name.startswith("vllm.tool_parsers"):
            if (parser := _parser_of(plain if "_tool_parser" in plain else wanted)) is None:
                pytest.skip(f"Callboard has no format for {wanted}", allow_module_level=True)
            return parser
        known = {
            "ToolParser": ToolParser,
            "FunctionCall": FunctionCall,
            "ToolCall": ToolCall,
            "ToolParserManager": SimpleNamespace(get_tool_parser=lambda name: _parser_of(name) or pytest.skip(name)),
            "get_tokenizer": lambda *_, **__: _Tokenizer(),
        }
        if wanted in known:
            return known[wanted]
        return type(wanted, (_Fields,), {}) if ".protocol" in name or plain == "protocol" else MagicMock()

    module.__getattr__ = attribute
    return module


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] == "vllm" else None

    def create_module(self, spec: Any) -> ModuleType:
        return _module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
_transformers: Any = ModuleType("transformers")  # its tokenizers would come from the network
_transformers.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: _Tokenizer())
_transformers.PreTrainedTokenizerBase = _Tokenizer
sys.modules["transformers"] = _transformers


@pytest.fixture(scope="module")
def default_tokenizer() -> _Tokenizer:
    return _Tokenizer()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: dict[str, list[int]] = {}
    for place, outcomes in enumerate((("passed", "xpassed"), ("failed", "error"))):
        for report in (each for outcome in outcomes for each in terminalreporter.stats.get(outcome, [])):
            counts.setdefault(report.nodeid.partition("::")[0], [0, 0])[place] += 1
    terminalreporter.write_line(json.dumps({"files": counts}))

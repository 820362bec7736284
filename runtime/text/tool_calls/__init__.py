"""The formats in which models write tool calls, by the names that `--tool-call-parser` takes."""

from runtime.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from runtime.text.tool_calls.gemma4 import GEMMA4
from runtime.text.tool_calls.generic import GENERIC
from runtime.text.tool_calls.glm import GLM45, GLM47
from runtime.text.tool_calls.harmony import HARMONY
from runtime.text.tool_calls.json_objects import HERMES, LLAMA3
from runtime.text.tool_calls.mistral import MISTRAL, MISTRAL_V11
from runtime.text.tool_calls.parser import CallDelta, ForcedCall, ToolCallParser, ToolFormat
from runtime.text.tool_calls.pythonic import PYTHONIC
from runtime.text.tool_calls.qwen3_coder import QWEN3_CODER

FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "glm47": GLM47,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "harmony": HARMONY,
    "gemma4": GEMMA4,
    "generic": GENERIC,
}


def name_of(form: ToolFormat | None) -> str | None:
    """The name of a format; None if there is none."""
    return next((name for name, each in FORMATS.items() if each is form), None)


__all__ = [
    "FORMATS",
    "GENERIC",
    "HERMES",
    "LLAMA3",
    "CallDelta",
    "ForcedCall",
    "ToolCallParser",
    "ToolFormat",
    "name_of",
]

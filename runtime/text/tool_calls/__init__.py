"""The formats in which models write tool calls, by the names that `--tool-call-parser` takes."""

from runtime.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from runtime.text.tool_calls.gemma4 import GEMMA4
from runtime.text.tool_calls.generic import GENERIC
from runtime.text.tool_calls.glm import GLM45, GLM47
from runtime.text.tool_calls.harmony import HARMONY
from runtime.text.tool_calls.invocations import DSML, DSML_V4, MINICPM5, MINIMAX_M2
from runtime.text.tool_calls.json_lists import (
    COHERE,
    GIGACHAT,
    GIGACHAT31,
    GRANITE,
    MINIMAX_M1,
    NEMOTRON,
    PHI4,
    TOOL_CALLS,
    XLAM,
)
from runtime.text.tool_calls.json_objects import HERMES, LLAMA3
from runtime.text.tool_calls.mistral import MISTRAL, MISTRAL_V11
from runtime.text.tool_calls.named_objects import APERTUS, FUNCTIONARY, GLM4, KIMI_K2, RECIPIENTS
from runtime.text.tool_calls.parser import CallDelta, ForcedCall, ToolCallParser, ToolFormat
from runtime.text.tool_calls.pythonic import LFM2, OLMO3, PYTHONIC
from runtime.text.tool_calls.qwen3_coder import QWEN3_CODER, SEED_OSS

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
    "lfm2": LFM2,
    "olmo3": OLMO3,
    "granite": GRANITE,
    "phi4_mini": PHI4,
    "kimi_k2": KIMI_K2,
    "seed_oss": SEED_OSS,
    "deepseek_v32": DSML,
    "deepseek_v4": DSML_V4,
    "minimax_m1": MINIMAX_M1,
    "minimax_m2": MINIMAX_M2,
    "minicpm5": MINICPM5,
    "cohere": COHERE,
    "apertus": APERTUS,
    "tool_calls": TOOL_CALLS,
    "nemotron": NEMOTRON,
    "gigachat3": GIGACHAT,
    "gigachat31": GIGACHAT31,
    "functionary_v31": FUNCTIONARY,
    "functionary_v32": RECIPIENTS,
    "glm4": GLM4,
    "xlam": XLAM,
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

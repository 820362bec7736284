"""Chat templates of our own with the structure of published ones, and tokenizers with their marks."""

from pathlib import Path

from tokenizers import AddedToken

from benchmarks.library.channel_model import TEMPLATE as GPT_OSS
from runtime.text.tokenizer import Tokenizer
from tests.support.http.fake_engine import EOS, byte_tokenizer

_FILES = Path(__file__).parents[2].glob("data/own_chat_templates/*.jinja")
OWN_TEMPLATES = {path.stem: path.read_text("utf-8") for path in _FILES} | {"gpt-oss": GPT_OSS}
_SPECIAL = {
    "glm": ["<|user|>", "<|assistant|>", "<|observation|>"],
    "gpt": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
    "gem": [
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        *("<|tool_response>", "<tool_response|>"),
    ],
    "dee": ["<｜User｜>", "<｜Assistant｜>"],
    "lfm": ["<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"],
    "kim": [
        *("<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "see": ["<seed:bos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"],
    "gra": ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
    "coh": ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>"],
}
_PLAIN = {  # ordinary tokens
    "glm": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"],
    "dee": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
}


def own_tokenizer(name: str) -> Tokenizer:
    backend = byte_tokenizer()._backend
    backend.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in _SPECIAL.get(name[:3], ())]
    )
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _PLAIN.get(name[:3], ())])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        backend, bos_token_id=None, eos_token_ids=(EOS,), special_tokens=special, chat_template=OWN_TEMPLATES[name]
    )


# Short templates with the calls and the reasoning of published ones, for the table of model families.
_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} HOW<|im_end|>\n{% endif %}"
_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
_JSON_CALL = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
_XML_CALL = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_MARKED_CALL = "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"


def _calling(call: str, thinks: bool = False) -> str:
    opens = (
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}" if thinks else ""
    )
    turns = _TURNS.replace("{{ m.content }}", opens + "{{ m.content }}")
    return (_TOOLS + turns).replace("CALLS", _EACH.replace("CALL", call)).replace("HOW", "")


_MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}CALLS{{ eos_token }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}"
).replace("CALLS", _EACH.replace("CALL", _MARKED_CALL))


def _with_parts(template: str, image: str) -> str:
    """The template for contents that are texts or parts, with a mark for each image."""
    parts = "{% for p in m.content %}{{ 'IMAGE' if p.type == 'image' else p.text }}{% endfor %}".replace("IMAGE", image)
    either = "{% if m.content is string %}{{ m.content }}{% else %}PARTS{% endif %}".replace("PARTS", parts)
    return template.replace("{{ m.content }}", either)


_QWEN3_VL = "<|vision_start|><|image_pad|><|vision_end|>"
SHORT_TEMPLATES = {
    "granite-4": _calling(_JSON_CALL),
    "internvl-3": _with_parts(_TURNS.replace("CALLS", ""), "<IMG_CONTEXT>\\n"),
    "ministral-3": "[SYSTEM_PROMPT]Think within [THINK] and [/THINK].[/SYSTEM_PROMPT]" + _MISTRAL,
    "mistral-v11": _MISTRAL,
    "olmo-2": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}<|assistant|>\n",
    "qwen2": _TURNS.replace("CALLS", ""),
    "qwen3-coder": _calling(_XML_CALL),
    "qwen3-vl": _with_parts(_calling(_JSON_CALL), _QWEN3_VL),
    "qwen3-vl-thinking": _with_parts(_calling(_JSON_CALL, thinks=True), _QWEN3_VL),
    "qwen3.5": _calling(_XML_CALL, thinks=True),
    "smollm3": _calling(_JSON_CALL, thinks=True),
    "smolvlm": (  # each content is a list
        "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}: {% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}

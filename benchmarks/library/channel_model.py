"""A random model that writes in channels, and a strict reader of its tokens.

The template has the structure of gpt-oss's. The reader follows the format's published description and does not
share code with the runtime's parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from benchmarks.library.make_random_model import write_folder
from runtime.models import load_spec
from runtime.models.weights import random_parameter
from runtime.text.pieces import BYTE_OF_CHAR
from runtime.text.tokenizer import Tokenizer

TEMPLATE = """
{%- set effort = reasoning_effort if reasoning_effort is defined else "medium" -%}
<|start|>system<|message|>Reasoning: {{ effort }}

# Valid channels: analysis, commentary, final.<|end|>
{%- set first = messages[0].content if messages[0].role in ("system", "developer") else "" -%}
{%- set rest = messages[1:] if first else messages -%}
{%- if first or tools -%}
<|start|>developer<|message|>{{ first }}{% for tool in tools or [] %}
{{- "// " + tool.function.description }}
{{- tool.function | tojson }}
{%- endfor %}<|end|>
{%- endif -%}
{%- set called = namespace(name="") -%}
{%- for message in rest -%}
{%- if message.role == "assistant" and "tool_calls" in message -%}
{%- set answered = namespace(yes=false) -%}
{%- for later in rest[loop.index:] if later.role == "assistant" and "tool_calls" not in later -%}
{%- set answered.yes = true -%}
{%- endfor -%}
{%- if message.content and message.thinking -%}{{ raise_exception("content and thinking beside a call") }}{%- endif -%}
{%- set thoughts = message.thinking or message.content -%}
{%- if thoughts and not answered.yes -%}
<|start|>assistant<|channel|>analysis<|message|>{{ thoughts }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}{%- set called.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == "assistant" and loop.last and not add_generation_prompt -%}
{%- if message.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
{%- elif message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == "tool" -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_OTHERS = ("<|startoftext|>", "<|endoftext|>", "<|reserved_1|>", "<|reserved_2|>")
_WORDS = """assistant analysis commentary final json Ġjson Ġto=functions. to= functions. add add_all end call return
 <| |> <|end |>{ {" "} ":Ġ Ġthe Ġ<| start message channel Ã© ðŁĺ"""
_SIZE = 320


def backend() -> Backend:
    """A tokenizer with all bytes, words that spell marks and headers, and the marks."""
    vocab = dict(BYTE_OF_CHAR)
    for word in _WORDS.split():
        vocab.setdefault(word, len(vocab))
    tokenizer = Backend(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (*_OTHERS, *MARKS)])
    assert tokenizer.get_vocab_size() <= _SIZE
    return tokenizer


def harmony_tokenizer() -> Tokenizer:
    tokenizer = backend()
    ends = tuple(tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|endoftext|>", "<|call|>"))
    return Tokenizer(tokenizer, bos_token_id=None, eos_token_ids=ends, special_tokens={}, chat_template=TEMPLATE)


def write_harmony_model(folder: Path, seed: int = 0) -> Path:
    """Write one layer of random weights with this tokenizer; return the folder."""
    tokenizer = harmony_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": _SIZE,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id("<|startoftext|>"), "eos_token_id": list(tokenizer.eos_token_ids),
        "torch_dtype": "float32",
    }  # fmt: skip
    shapes, generator = load_spec(config)[0].shapes(), torch.Generator().manual_seed(seed)
    write_folder(folder, config, lambda name: random_parameter(name, shapes[name], generator))
    tokenizer.save(folder, 8192)
    return folder


# ---- the reader ------------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """A message, read from its tokens."""

    channel: str = ""
    recipient: str = ""
    content: bytes = b""
    end: str = ""  # its last mark; empty if the output stops within it


@dataclass
class Turn:
    """The messages of an output."""

    messages: list[Written] = field(default_factory=list)
    is_complete: bool = False

    def texts(self, *channels: str) -> str:
        """Return the contents of the messages without a recipient."""
        found = (m.content for m in self.messages if m.channel in channels and not m.recipient)
        return b"".join(found).decode(errors="replace")

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(m.recipient, m.content.decode(errors="replace").rstrip()) for m in self.messages if m.recipient]


_ENDS = {"analysis": ("<|end|>",), "commentary": ("<|end|>",), "final": ("<|return|>",), "": ("<|call|>", "<|end|>")}
_ROLE = re.compile(r"(?:assistant)?(?: to=functions\.([\w-]+))?")
_CHANNEL = re.compile(r"(analysis|commentary|final)(?: to=functions\.([\w-]+))?( json| <constrain>json)?")


def read_turn(token_ids: Sequence[int], tokenizer: Tokenizer) -> Turn:
    """Read the output after `<|start|>assistant`. Raises ValueError where it leaves the format.

    An output may stop within a message."""
    marks = {tokenizer.token_to_id(mark): mark for mark in MARKS}
    turn, header, current = Turn(), [""], None
    for at, token in enumerate(token_ids):
        mark = marks.get(token, "")
        if turn.is_complete:
            raise ValueError(f"token {at} follows the end of the turn")
        if not mark and token in tokenizer.special_ids:
            raise ValueError(f"token {at} is special, and no mark of the format")
        if current is None:
            current = _read_header(header, mark, tokenizer.token_bytes(token), at)
            if current is not None:
                turn.messages.append(current)
        elif not mark:
            current.content += tokenizer.token_bytes(token)
        else:
            if mark not in _ENDS["" if current.recipient else current.channel]:
                raise ValueError(f"{mark} at {at} cannot end a message of {current.channel}")
            current.content.decode()
            current.end, turn.is_complete = mark, mark != "<|end|>"
            header, current = ["expects start"], None
    return turn


def _read_header(header: list[str], mark: str, text: bytes, at: int) -> Written | None:
    """Add a token to a header: the text before each mark, and the last text. Return its message once it is whole."""
    if header == ["expects start"]:
        if mark != "<|start|>":
            raise ValueError(f"a message at {at} begins without <|start|>")
        header[:] = ["<|start|>"]
    elif mark in ("<|channel|>", "<|constrain|>"):
        header.append("" if mark == "<|channel|>" else header.pop() + "<constrain>")
    elif mark == "<|message|>":
        return _message_of(header, at)
    elif mark:
        raise ValueError(f"{mark} at {at} is within a header")
    else:
        header[-1] += text.decode()
    return None


def _message_of(header: list[str], at: int) -> Written:
    started = header[0].startswith("<|start|>")
    role = _ROLE.fullmatch(header[0].removeprefix("<|start|>"))
    channel = _CHANNEL.fullmatch(header[1]) if len(header) == 2 else None
    if role is None or channel is None or started != header[0].startswith("<|start|>assistant"):
        raise ValueError(f"the header {header} before {at} is not of the format")
    recipient = role[1] or channel[2] or ""
    if bool(recipient) != bool(channel[3]) or (role[1] and channel[2]) or (recipient and channel[1] != "commentary"):
        raise ValueError(f"the header {header} before {at} has a wrong recipient, channel or type")
    return Written(channel[1], recipient)


def problem_of(turn: Turn, required: bool, names: set[str]) -> str:
    """Return the fault of a turn beyond its format; empty without one."""
    for message in turn.messages:
        text = message.content.decode(errors="replace")
        if message.recipient and message.recipient not in names:
            return f"a call of {message.recipient}"
        if message.recipient and message.end and not isinstance(json.loads(text), dict):
            return f"the arguments {text}"
        if message.channel in ("analysis", "commentary") and not message.recipient and any(m in text for m in MARKS):
            return f"a mark that {text} spells out"
    if turn.is_complete and required and not turn.messages[-1].recipient:
        return "no call, though one is required"
    return ""

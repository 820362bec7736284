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

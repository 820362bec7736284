"""Text to token ids and back, from a folder's tokenizer.json or from a GGUF file's metadata.

The work is done by the `tokenizers` package; what is ours is reading a vocabulary out of a GGUF file, and the exact
bytes of each token, on which incremental detokenisation, logprobs and grammars stand.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from runtime.core.types import CallboardError
from runtime.loading.folder import folder_eos_token_ids, read_json
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import gguf_eos_token_ids
from runtime.text.pieces import Pieces, pieces_of

# Token types of a GGUF vocabulary (llama.h: llama_token_type); all others are plain pieces.
_CONTROL, _USER_DEFINED = 3, 4

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Threads may share it.

    `special_tokens` maps names such as "bos_token" to their text, as chat templates want them."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        special_tokens: dict[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.tool_template = tool_template  # of conversations with tools, where it is another one
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.pieces: Pieces = pieces_of(backend)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a model folder or of a .gguf file; raises CallboardError if there is none that is known."""
        return _from_folder(path) if path.is_dir() else _from_gguf(GgufFile(path))

    def ids(self) -> dict[str, int]:
        """The id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def save(self, path: Path) -> None:
        """As a tokenizer.json; the chat template and the names of special tokens are not part of one."""
        self._backend.save(str(path))

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `add_special_tokens` adds what the model wants around a text (often a BOS); leave it off for a rendered chat,
        which has them already. With `parse_special`, special tokens that are spelled out in the text become their ids;
        without it they are taken as ordinary text."""
        backend = self._backend if parse_special else self._plain_backend
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The index of the character of `text` at which each token of `encode(text)` begins. Tokens that share a
        character begin at it; a token that stands for no text begins where the one before it ends."""
        starts, end = [], 0
        for start, stop in self._backend.encode(text, add_special_tokens=add_special_tokens).offsets:
            starts.append(min(start, end) if stop > start else end)  # some leave a space out, which is the token's too
            end = max(stop, end)
        return starts

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return self.pieces.join(i for i in ids if i not in skipped).decode("utf-8", errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None if the id has none (padding rows of the output head)."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text; empty if the id has no token."""
        return self.pieces[token_id]

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # The switch is a property of the whole object, so the rare other setting gets a copy of its own.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CallboardError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the package raises nothing more specific
        raise CallboardError(f"{path} is not a tokenizer that can be read: {e}.") from e
    # Settings for batches of training data that some files carry.
    backend.no_truncation()
    backend.no_padding()
    settings = _optional_json(folder / "tokenizer_config.json")
    config = _optional_json(folder / "config.json")
    special_tokens = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special_tokens[name] = token
    bos_token_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    # Where the settings ask for a BOS and tokenizer.json forgets it (DeepSeek's do), the model was trained with one.
    wants_bos = settings.get("add_bos_token") is True and bos_token_id is not None
    if wants_bos and bos_token_id not in backend.encode("").ids:
        _prepend(backend, special_tokens["bos_token"])
    eos_token_ids = folder_eos_token_ids(folder, config)
    if not eos_token_ids and (eos := backend.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        eos_token_ids = (eos,)
    return Tokenizer(
        backend,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        special_tokens=special_tokens,
        chat_template=_folder_chat_template(folder, settings, "default"),
        tool_template=_folder_chat_template(folder, settings, "tool_use"),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _folder_chat_template(folder: Path, settings: dict[str, Any], name: str) -> str | None:
    """The template called `name`: a file of its own, or one of tokenizer_config.json's; a single one is the default."""
    file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
    if (path := folder / file).exists():
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {t.get("name"): t.get("template") for t in template}.get(name)
    return template if name == "default" else None


def _from_gguf(file: GgufFile) -> Tokenizer:
    model, pre = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "")
    if model != "gpt2":
        raise CallboardError(
            f"{file.path} has a {model!r} tokenizer; of GGUF files only 'gpt2' (byte-level BPE) is read."
        )
    if pre not in _PRE_TOKENIZERS:
        raise CallboardError(
            f"{file.path} splits text by the rules of {pre!r}, which are not known here; "
            f"known are {', '.join(_PRE_TOKENIZERS)}."
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    merges = [m.partition(" ")[::2] for m in _strings(file, "tokenizer.ggml.merges")]
    types = file.value("tokenizer.ggml.token_type", list, [])
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) not in (0, len(tokens)):
        raise CallboardError(f"{file.path}: tokenizer.ggml.tokens has repeated tokens or tokens without a type.")
    try:
        # Llama 3 was trained with words that are tokens kept whole, whatever the merges say.
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as e:  # the package raises nothing more specific
        raise CallboardError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens: {e}.") from e
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [tokens[i] for i, t in enumerate(types) if t == kind]
        backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])

    special_tokens = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = file.value(f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= token_id < len(tokens):
            special_tokens[name] = tokens[token_id]
    bos = special_tokens.get("bos_token")
    if bos is not None and file.value("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe"):
        _prepend(backend, bos)
    return Tokenizer(
        backend,
        bos_token_id=None if bos is None else vocab[bos],
        eos_token_ids=gguf_eos_token_ids(file),
        special_tokens=special_tokens,
        chat_template=file.value("tokenizer.chat_template", str, "") or None,
        tool_template=file.value("tokenizer.chat_template.tool_use", str, "") or None,
    )


def _prepend(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Makes every encoded text begin with `bos`."""
    special_tokens = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=special_tokens)


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.value(key, list)
    if values and not isinstance(values[0], str):
        raise CallboardError(f"{file.path}: {key} is an array of {type(values[0]).__name__}; strings are needed.")
    return values


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """A pattern of its own, then the byte alphabet without GPT-2's pattern."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# How text is cut into words before merging, by `tokenizer.ggml.pre`; the patterns are those of the models' own
# tokenizer.json files. In smollm's the digits come first: a run of spaces before a number depends on it.
_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "llama-bpe": _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

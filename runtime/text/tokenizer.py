"""Text to token ids and back, from a folder's tokenizer.json or from a GGUF file's metadata.

The `tokenizers` package does the work. Two parts are our own: reading a vocabulary from a GGUF file
(gguf_vocabulary.py), and the exact bytes of each token (pieces.py). Incremental detokenization, logprobs and grammars
use these bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from runtime.base.types import CallboardError
from runtime.loading.folder import folder_eos_token_ids, own_file, read_json
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_configs import gguf_eos_token_ids
from runtime.text.control_tokens import ControlTokens
from runtime.text.gguf_vocabulary import put_around, tokenizer_of
from runtime.text.pieces import Pieces, pieces_of

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Threads may share it.

    `special_tokens` maps names such as "bos_token" to their text, for chat templates."""

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
        self.tool_template = tool_template  # template for conversations with tools; None if it is the same
        self.tool_call_parser = "auto"  # or a tool-call format's name
        self.channel_grammar = True  # a grammar keeps chats to their format if the model has channels
        self.plain_tool_calls = True  # calls in JSON without marks are calls
        self.special_tokens_in_contents = False  # clients' texts may become special tokens
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.pieces: Pieces = pieces_of(backend)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a model folder or a .gguf file. Raises CallboardError if it is missing or unknown."""
        return _from_folder(path) if path.is_dir() else _from_gguf(GgufFile(path))

    def ids(self) -> dict[str, int]:
        """Return the id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def settings(self, max_model_len: int) -> dict[str, Any]:
        """Return the chat template and the special tokens in the form of a tokenizer_config.json."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self.chat_template,
            "model_max_length": max_model_len,
            **self.special_tokens,
        }

    def save(self, folder: Path, max_model_len: int) -> None:
        """Write tokenizer.json and tokenizer_config.json for transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.settings(max_model_len), indent=1) + "\n")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Special tokens that it spells out become their ids.

        `add_special_tokens` adds the model's tokens around a text, often a BOS. A rendered chat already has them."""
        # Encoding a batch, even of one text, releases the GIL for other threads.
        ids: list[int] = _encoded(self._backend.encode_batch_fast, text, add_special_tokens).ids
        return ids

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that a template may write and a client's text may not."""
        sources = self.chat_template, self.tool_template, *self.special_tokens.values()
        return ControlTokens(self._backend, "\n".join(filter(None, sources)))

    def encode_contents(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a client's text, in which no special token counts."""
        if self.special_tokens_in_contents or not self.control_tokens.are_in(text):
            return self.encode(text, add_special_tokens)
        return self.encode_named(text, add_special_tokens)

    def encode_named(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text in which names stand for the control tokens, and all other text is plain."""
        control = self.control_tokens
        return control.ids(_encoded(control.encoder.encode_batch, text, add_special_tokens))

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the character index in `text` at which each token from `encode(text)` begins.

        Tokens that share a character begin at it. A token without text begins where the previous one ends."""
        starts, end = [], 0
        for start, stop in _encoded(self._backend.encode_batch, text, add_special_tokens).offsets:
            # some offsets omit a space that belongs to the token
            starts.append(min(start, end) if stop > start else end)
            end = max(stop, end)
        return starts

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD; ids without a token are skipped."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return self.pieces.join(i for i in ids if i not in skipped).decode("utf-8", errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None for ids without one (padding rows of the output head)."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that a token adds to a text; empty for ids without a token."""
        return self.pieces[token_id]


def _encoded(encode: Callable[..., Any], text: str, add_special_tokens: bool) -> Any:
    """Encode one text. Raises CallboardError if the package fails, for example on damaged tables of a normalizer."""
    try:
        return encode([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as e:
        if not _is_of_package(e):
            raise
        raise CallboardError(f"The model's tokenizer cannot encode this text: {_sentence(e)}.") from e


def _is_of_package(error: BaseException) -> bool:
    """True for the package's errors: exceptions, and Rust panics, which do not derive from Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _sentence(error: BaseException) -> str:
    return str(error).replace("\n", "\\n").rstrip(".")


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CallboardError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as e:
        if not _is_of_package(e):
            raise
        raise CallboardError(f"{path} is not a tokenizer that can be read: {_sentence(e)}.") from e
    # Some files carry settings for training batches.
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
    # If the settings require a BOS but tokenizer.json omits it (DeepSeek's do), the model was trained with one.
    wants_bos = settings.get("add_bos_token") is True and bos_token_id is not None
    if wants_bos and bos_token_id not in _encoded(backend.encode_batch, "", True).ids:
        put_around(backend, special_tokens["bos_token"])
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
    """Return the template `name`, from its own file or tokenizer_config.json. A single template is the default."""
    file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
    if (path := own_file(folder, file)) is not None:
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise CallboardError(f"The chat template {path} cannot be read: {e}.") from e
    template = settings.get("chat_template")
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found = [t.get("template") for t in named if isinstance(t, dict) and t.get("name") == name]
    if found and not isinstance(found[-1], str | None):
        kind = type(found[-1]).__name__
        raise CallboardError(f"{folder / 'tokenizer_config.json'} has a chat template that is a {kind}, not a text.")
    return found[-1] if found else None


def _from_gguf(file: GgufFile) -> Tokenizer:
    backend = tokenizer_of(file)
    special_tokens = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = file.value(f"tokenizer.ggml.{key}_token_id", int, -1)
        if token_id >= 0 and (token := backend.id_to_token(token_id)) is not None:
            special_tokens[name] = token
    return Tokenizer(
        backend,
        bos_token_id=backend.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None,
        eos_token_ids=gguf_eos_token_ids(file),
        special_tokens=special_tokens,
        chat_template=file.value("tokenizer.chat_template", str, "") or None,
        tool_template=file.value("tokenizer.chat_template.tool_use", str, "") or None,
    )

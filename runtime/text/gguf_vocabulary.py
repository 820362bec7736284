"""A tokenizer of the `tokenizers` package, built from the vocabulary in a GGUF file's metadata.

    tokenizer.ggml.model   kind                    notes
    "gpt2"                 byte-level BPE          needs the model's rules for cutting text into words
    "llama"                sentencepiece's BPE     Llama 2, Mistral, Gemma, Phi-3; scores of pieces imply the merges
    "gemma4"               sentencepiece's BPE     with merges in the file
    "t5"                   sentencepiece's unigram

Defaults for missing metadata are llama.cpp's (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from runtime.base.types import CallboardError
from runtime.loading.gguf import GgufFile

_T = TypeVar("_T")

# Token types (llama.h: llama_token_type); 2 is the unknown token, 6 a byte.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_SPACE = "▁"  # a space in sentencepiece's vocabularies
_SPACES_OF_PIECES = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
_NEVER = -1e9  # the score of a piece that encoding must not produce
_MAX_PIECE_CHARS = 1024  # sentencepiece's BPE tries all splits of each piece; real pieces are far shorter


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The metadata's lists, all equally long; `types` and `scores` are empty if there are none."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    ids: dict[str, int]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, t in zip(self.tokens, self.types, strict=False) if t == kind]


def tokenizer_of(file: GgufFile) -> tokenizers.Tokenizer:
    """Build the tokenizer. Encoding adds the model's BOS and EOS; only control tokens are special.

    Raises CallboardError if the vocabulary is damaged, or if its kind or its rules are unknown."""
    model, pre = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "")
    vocabulary = _read(file)
    match model:
        case "gpt2":
            backend = _byte_level_bpe(file, vocabulary, pre)
        case "llama":
            backend = _sentencepiece_bpe(file, vocabulary)
        case "gemma4":
            backend = _sentencepiece_bpe(file, vocabulary, are_stored=True)
        case "t5":
            backend = _unigram(file, vocabulary)
        case _:
            raise CallboardError(
                f"{file.path} has a {model!r} tokenizer; of GGUF files gpt2 (byte-level BPE), llama and gemma4 "
                "(sentencepiece BPE) and t5 (unigram) are read."
            )
    # Phi-3 was trained with templates that drop white space after special tokens.
    strips = model == "llama" and file.value("general.architecture", str, "") == "phi3"
    special = [
        AddedToken(t, special=True, normalized=False, rstrip=strips and t not in ("<s>", "<unk>", "<|endoftext|>"))
        for t in vocabulary.of_type(_CONTROL)
    ]
    backend.add_tokens(special)
    backend.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.of_type(_USER_DEFINED)])
    adds_bos = model in ("llama", "gemma4") or (model == "gpt2" and pre in _WHOLE_WORDS)
    _frame(file, backend, vocabulary, adds_bos, adds_eos=model == "t5")
    return backend


def _read(file: GgufFile) -> _Vocabulary:
    tokens = _strings(file, "tokenizer.ggml.tokens")
    types = file.value("tokenizer.ggml.token_type", list, [])
    scores = file.value("tokenizer.ggml.scores", list, [])
    # Some vocabularies are filled up to the embedding's size; those ids mean nothing.
    end = len(tokens)
    while len(types) == len(tokens) and end and types[end - 1] == _UNUSED:
        end -= 1
    ids = {token: i for i, token in enumerate(tokens[:end])}
    if len(ids) != end or len(types) not in (0, len(tokens)):
        raise CallboardError(f"{file.path}: tokenizer.ggml.tokens has repeated tokens or tokens without a type.")
    if len(scores) not in (0, len(tokens)) or not all(type(s) is float for s in scores[:1]):
        raise CallboardError(f"{file.path}: tokenizer.ggml.scores must be one number for each token.")
    return _Vocabulary(tokens[:end], types[:end], scores[:end], ids)


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.value(key, list)
    if values and not isinstance(values[0], str):
        raise CallboardError(f"{file.path}: {key} is an array of {type(values[0]).__name__}; strings are needed.")
    return values


def _made(file: GgufFile, part: Callable[..., _T], *values: Any, **options: Any) -> _T:
    """Build a part of a tokenizer. Raises CallboardError if the values do not fit together."""
    try:
        return part(*values, **options)
    except Exception as e:  # the package raises only this class
        reason = str(e).replace("\n", "\\n")  # a token in the message may contain one
        raise CallboardError(f"{file.path}: the lists of its vocabulary do not fit together: {reason}.") from e


def _frame(
    file: GgufFile, backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, adds_bos: bool, adds_eos: bool
) -> None:
    """Set the tokens that encoding puts around every text."""
    frame = {}
    for name, default in (("bos", adds_bos), ("eos", adds_eos)):
        token_id = file.value(f"tokenizer.ggml.{name}_token_id", int, -1)
        known = 0 <= token_id < len(vocabulary.tokens)
        frame[name] = vocabulary.tokens[token_id] if known else None
        if not file.value(f"tokenizer.ggml.add_{name}_token", bool, default):
            frame[name] = None
    put_around(backend, frame["bos"], frame["eos"])


def put_around(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None = None) -> None:
    """Make every encoded text begin with `bos` and end with `eos`, given by their texts."""
    around = [token for token in (bos, eos) if token is not None]
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[*around[: bos is not None], "$A", *around[bos is not None :]],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)],
        )


# ---- byte-level BPE -------------------------------------------------------------------------------------------------


def _byte_level_bpe(file: GgufFile, vocabulary: _Vocabulary, pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise CallboardError(
            f"{file.path} splits text by the rules of {pre!r}, which are not known here; "
            f"known are {', '.join(_PRE_TOKENIZERS)}."
        )
    merges = _stored_merges(file)
    backend = tokenizers.Tokenizer(_made(file, models.BPE, vocabulary.ids, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in ("qwen2", "qwen35", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _stored_merges(file: GgufFile) -> list[tuple[str, str]]:
    return [(first, second) for first, _, second in (m.partition(" ") for m in _strings(file, "tokenizer.ggml.merges"))]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split by this pattern, then map bytes to their alphabet without GPT-2's pattern."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# Digits are split first, which decides how a run of spaces before a number is split.
_SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # white space
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"  # letters that begin, end a word
_LLAMA3, _QWEN2 = (
    _split(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}")
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_QWEN35 = _split(
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
_SEED = _split(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}")
_TEKKEN, _GPT4O = (
    _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )
    for ending, digits in (("", r"\p{N}"), (f"{_ENDINGS}?", r"\p{N}{1,3}"))
)
# Digits and runs of Chinese characters and kana are split first.
_DEEPSEEK_V3 = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
    pre_tokenizers.Split(Regex("[一-龥\u3040-\u309f\u30a0-\u30ff]+"), behavior="isolated"),
    _split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}"
    ),
])  # fmt: skip
# Line breaks, words in cased letters, punctuation, trailing spaces, Chinese characters and digits are split in turn.
# The published letters lack some alphabets, and the punctuation (":-~") contains ASCII letters. An escape stands
# where Unicode's normalization would change a character.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM, _DEEPSEEK_CODER = (
    pre_tokenizers.Sequence([
        *(
            pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in (r"[\r\n]", *words, "[一-龥ࠀ-一가-\ud7ff]+")
        ),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    for words in (
        (rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～\u2018-\u201f\u3000-\u3002]+", r"\s+$"),
        (r"\s?\p{L}+", r"\s?\p{P}+"),
    )
)  # fmt: skip

# The rules that cut text into words before merging, by `tokenizer.ggml.pre`. The patterns are from the models'
# tokenizer.json files.
_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "deepseek-llm": _DEEPSEEK_LLM,  # DeepSeek V2 too
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    **dict.fromkeys(("refact", "starcoder"), _SMOLLM),
    "seed-coder": _SEED,
}
# Models that never split a word that is a token, and that expect a BOS.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")


# ---- sentencepiece --------------------------------------------------------------------------------------------------


def _sentencepiece_bpe(
    file: GgufFile,
    vocabulary: _Vocabulary,
    are_stored: bool = False,  # the file has the merges
) -> tokenizers.Tokenizer:
    unknown = vocabulary.tokens[_unknown_id(file, vocabulary)]
    merges = _stored_merges(file) if are_stored else _merges(file, vocabulary)
    backend = tokenizers.Tokenizer(
        _made(file, models.BPE, vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    _mark_spaces(backend, file.value("tokenizer.ggml.add_space_prefix", bool, True), [])
    return backend


def _unknown_id(file: GgufFile, vocabulary: _Vocabulary) -> int:
    """Return the id of the unknown token. Raises CallboardError if it or a required list is missing."""
    if not vocabulary.scores or not vocabulary.types:
        raise CallboardError(f"{file.path} has no tokenizer.ggml.scores or no token_type, which its tokenizer needs.")
    unknown = file.value("tokenizer.ggml.unknown_token_id", int, 0)
    if unknown >= len(vocabulary.tokens):
        raise CallboardError(f"{file.path}: tokenizer.ggml.unknown_token_id is {unknown}, which is no token.")
    return unknown


def _merges(file: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, highest score first: sentencepiece merges in this order."""
    tokens, ids = vocabulary.tokens, vocabulary.ids
    if (longest := max(map(len, tokens), default=0)) > _MAX_PIECE_CHARS:
        raise CallboardError(
            f"{file.path} has a token of {longest} characters; at most {_MAX_PIECE_CHARS} are read, convert it anew."
        )
    splits = [
        (-score, -at, at - len(piece), i)
        for i, (piece, score, kind) in enumerate(zip(tokens, vocabulary.scores, vocabulary.types, strict=True))
        if kind == _NORMAL
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    splits.sort()
    return [(tokens[i][:-at], tokens[i][-at:]) for _, at, _, i in splits]


def _unigram(file: GgufFile, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    unknown = _unknown_id(file, vocabulary)
    pieces = [
        (token, score if kind == _NORMAL else _NEVER)
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
    ]
    has_bytes = "<0x00>" in vocabulary.ids
    backend = tokenizers.Tokenizer(_made(file, models.Unigram, pieces, unk_id=unknown, byte_fallback=has_bytes))
    steps: list[normalizers.Normalizer] = []
    if charsmap := file.value("tokenizer.ggml.precompiled_charsmap", list, []):
        steps.append(_made(file, lambda: normalizers.Precompiled(bytes(b & 0xFF for b in charsmap))))
    if file.value("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    _mark_spaces(backend, file.value("tokenizer.ggml.add_space_prefix", bool, True), steps)
    return backend


def _mark_spaces(backend: tokenizers.Tokenizer, prefix: bool, before: list[normalizers.Normalizer]) -> None:
    """Replace spaces as in sentencepiece's pieces. `prefix` adds one at the start of a text."""
    prepend = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, *prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([*_SPACES_OF_PIECES, *strip])

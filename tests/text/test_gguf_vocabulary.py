"""Vocabularies of GGUF files: the ids equal the ids of the `sentencepiece` package."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from runtime.base.types import CallboardError
from runtime.text.tokenizer import Tokenizer

CORPUS = (Path(__file__).parents[1] / "data" / "text_corpus.txt").read_text("utf-8").splitlines()
SYMBOLS = {"control_symbols": ["<turn>"], "user_defined_symbols": ["\n", "<b>"]}


def _train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, byte_fallback=True, num_threads=1, minloglevel=2, **options
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _metadata(model: sentencepiece.SentencePieceProcessor, kind: str) -> dict[str, Any]:
    """As llama.cpp's converter writes a sentencepiece model."""
    ids = range(model.vocab_size())
    kinds = {
        i: 2 if model.IsUnknown(i) else 3 if model.IsControl(i) else 6 if model.IsByte(i) else 1 for i in ids
    }  # fmt: skip
    kinds |= {model.PieceToId(symbol): 4 for symbol in SYMBOLS["user_defined_symbols"] if model.PieceToId(symbol)}
    return {
        "tokenizer__ggml__model": kind,
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__tokens": [model.IdToPiece(i) for i in ids],
        "tokenizer__ggml__scores": [model.GetScore(i) for i in ids],
        "tokenizer__ggml__token_type": list(kinds.values()),
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 0,
    }


_FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Words of the corpus, text without a piece, and white space of all sorts.
_TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["the", " engine", "Callboard", "▁", "  ", "<turn>", "</s>", "<unk>", "<0x41>", "aaaa"]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n"), max_size=8),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def prefix(request) -> bool:
    """Whether a space is put before a text."""
    return request.param


@pytest.fixture(scope="module")
def bpe(prefix: bool) -> sentencepiece.SentencePieceProcessor:
    symbols = {"control_symbols": ["<turn>"]} if prefix else SYMBOLS
    rules = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": prefix}
    return _train(model_type="bpe", vocab_size=700, **symbols, **rules)


@pytest.fixture(scope="module")
def unigram() -> sentencepiece.SentencePieceProcessor:
    return _train(model_type="unigram", vocab_size=450, control_symbols=["<turn>"])


@pytest.fixture
def encode_plainly(ours) -> Callable[[str], list[int]]:
    """As sentencepiece encodes: the text of a special token is plain text."""
    backend = tokenizers.Tokenizer.from_str(ours._backend.to_str())
    backend.encode_special_tokens = True
    return lambda text: backend.encode(text, add_special_tokens=False).ids


class TestBpe:
    """The kind of Llama 2 and Mistral puts a space before a text; Gemma's does not."""

    @pytest.fixture
    def ours(self, bpe, prefix: bool, write_tiny_gguf: Callable[..., Path]) -> Tokenizer:
        return Tokenizer.load(write_tiny_gguf(**_metadata(bpe, "llama"), tokenizer__ggml__add_space_prefix=prefix))

    @_FUZZ
    @given(text=_TEXTS)
    def test_ids_and_text(self, ours, encode_plainly, bpe, text):
        ids = encode_plainly(text)
        assert ids == bpe.encode(text)
        assert not ours.special_ids & set(ids)
        assert ours.decode(ids) == text.replace("▁", " ")

    def test_symbols_stay_whole(self, ours, bpe, prefix):
        assert ours.encode("the<turn> engine") == [
            bpe.bos_id(),
            *bpe.encode("the"),
            bpe.PieceToId("<turn>"),
            *bpe.encode(" engine"),
        ]
        if not prefix:
            text = "the\n<b> engine\n"
            assert ours.encode(text, add_special_tokens=False) == bpe.encode(text)
            assert ours.decode(ours.encode(text)) == text
            assert bpe.PieceToId("<b>") not in ours.special_ids


class TestUnigram:
    @pytest.fixture
    def ours(self, unigram, write_tiny_gguf: Callable[..., Path]) -> Tokenizer:
        proto = sentencepiece_model_pb2.ModelProto.FromString(unigram.serialized_model_proto())
        charsmap = {"tokenizer__ggml__precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap)}
        metadata = _metadata(unigram, "t5") | charsmap | {"tokenizer__ggml__remove_extra_whitespaces": True}
        return Tokenizer.load(write_tiny_gguf(**metadata))

    @_FUZZ
    @given(text=_TEXTS)
    @example("ﬁne ½ ＡＢ  x ")  # its normalisation spells it out
    def test_ids(self, ours, encode_plainly, unigram, text):
        # The `tokenizers` package normalizes a cluster such as "¸\u0d3b" by its first character, and loses the mark.
        assume(ours._backend.normalizer.normalize_str(text) == unigram.normalize(text))
        ids = encode_plainly(text)
        assert ids == unigram.encode(text)
        assert not ours.special_ids & set(ids)

    @_FUZZ
    @given(chars=st.lists(st.characters(exclude_categories=["Cs", "M", "Cf"], exclude_characters="\0\n"), max_size=40))
    def test_characters_are_normalized(self, ours, unigram, chars):
        for char in chars:  # alone, because neighbours may form a cluster
            assert ours._backend.normalizer.normalize_str(f"x{char} x") == unigram.normalize(f"x{char} x"), char

    def test_text_and_end(self, ours, unigram):
        assert ours.encode("the engine é") == [*unigram.encode("the engine é"), unigram.eos_id()]
        assert ours.decode(ours.encode("the engine é")) == "the engine é"


def test_merges_of_the_file_equal_those_of_scores(bpe, write_tiny_gguf):
    """Gemma 4's files have the merges of its tokenizer.json, and begin every text with BOS."""
    scored = Tokenizer.load(write_tiny_gguf(**_metadata(bpe, "llama"), tokenizer__ggml__add_space_prefix=False))
    merges = json.loads(scored._backend.to_str())["model"]["merges"]
    own = _metadata(bpe, "gemma4") | {"tokenizer__ggml__merges": [" ".join(pair) for pair in merges]}
    stored = Tokenizer.load(
        write_tiny_gguf(
            **own, tokenizer__ggml__add_space_prefix=False, tokenizer__ggml__add_bos_token=True, name="g.gguf"
        )
    )
    for text in ("the engine", " Callboard\n\n é 日本", "<turn>aaaa"):
        assert stored.encode(text) == scored.encode(text)
        assert stored.decode(stored.encode(text)) == scored.decode(scored.encode(text))


def test_phi3_sees_no_space_after_a_special_token(write_tiny_gguf):
    model = _train(model_type="bpe", vocab_size=700, control_symbols=["<|user|>"])
    phi3 = Tokenizer.load(write_tiny_gguf(**_metadata(model, "llama"), general__architecture="phi3"))
    llama = Tokenizer.load(write_tiny_gguf(**_metadata(model, "llama"), name="llama.gguf"))
    assert phi3.encode("<|user|> \nthe") == phi3.encode("<|user|>the") == llama.encode("<|user|>the")
    assert llama.encode("<|user|> \nthe") != llama.encode("<|user|>the")


def test_vocabulary_padding_decodes_to_nothing(write_tiny_gguf):
    tokens = ["<|end|>", "<|start|>", "a", "b", "ab", "[PAD5]", "[PAD6]"]
    tokenizer = Tokenizer.load(
        write_tiny_gguf(
            tokenizer__ggml__tokens=tokens,
            tokenizer__ggml__token_type=[3, 3, 1, 1, 1, 5, 5],
            tokenizer__ggml__merges=["a b"],
        )
    )
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("aab") == [2, 4]
    assert tokenizer.decode([4, 5, 6, 2]) == "aba"
    assert tokenizer.id_to_token(5) is None


def test_ends_of_turns_end_a_text(write_tiny_gguf):
    tokens = ["<|end|>", "aa", "a", "<end_of_turn>", "<|eot_id|>", "<|im_end|>"]
    types = [3, 1, 1, 3, 1, 3]  # a plain token is a text like any other
    lists = {"tokens": tokens, "token_type": types, "merges": ["a a"]}
    metadata = {f"tokenizer__ggml__{name}": values for name, values in lists.items()}
    path = write_tiny_gguf(**metadata, tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=5)
    assert Tokenizer.load(path).eos_token_ids == (2, 5, 0, 3)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer__ggml__token_type": None}, "no token_type"),
        ({"tokenizer__ggml__unknown_token_id": 9999}, "unknown_token_id is 9999, which is no token"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_sentencepiece_vocabularies_that_are_refused(write_tiny_gguf, kind, metadata, message):
    with pytest.raises(CallboardError, match=message):
        Tokenizer.load(write_tiny_gguf(**_PIECES | {"tokenizer__ggml__model": kind} | metadata))


def test_long_pieces_are_refused_before_they_are_split(write_tiny_gguf):
    pieces = {"tokenizer__ggml__tokens": ["<unk>", "<s>", "a" * 1025], "tokenizer__ggml__model": "llama"}
    with pytest.raises(CallboardError, match="a token of 1025 characters; at most 1024"):
        Tokenizer.load(write_tiny_gguf(**_PIECES | pieces))


@pytest.mark.parametrize("charsmap", [[0, 0, 0], ["x"]])
def test_damaged_charsmap_is_refused(write_tiny_gguf, charsmap):
    metadata = {"tokenizer__ggml__model": "t5", "tokenizer__ggml__precompiled_charsmap": charsmap}
    with pytest.raises(CallboardError, match="do not fit together"):
        Tokenizer.load(write_tiny_gguf(**_PIECES | metadata))


def test_panic_of_a_tokenizer_is_one_sentence(write_tiny_gguf):
    """A normalizer's table that leads out of itself is found only by a text."""
    table = list(b"\x10\0\0\0" + b"\xff" * 16 + b"ab")
    metadata = {"tokenizer__ggml__model": "t5", "tokenizer__ggml__precompiled_charsmap": table}
    tokenizer = Tokenizer.load(write_tiny_gguf(**_PIECES | metadata))
    for encode in (tokenizer.encode, tokenizer.offsets):
        with pytest.raises(CallboardError, match="tokenizer cannot encode this text: index out of bounds"):
            encode("ab")


_PIECES = {
    "tokenizer__ggml__tokens": ["<unk>", "<s>", "a"],
    "tokenizer__ggml__scores": [0.0, 0.0, -1.0],
    "tokenizer__ggml__token_type": [2, 3, 1],
}

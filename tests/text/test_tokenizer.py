"""Tokenizers from folders and GGUF files, and the bytes of tokens."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from runtime.base.types import CallboardError
from runtime.loading.gguf import GgufFile
from runtime.text.tokenizer import Tokenizer


@pytest.fixture
def tiny(write_tiny_gguf) -> Tokenizer:
    return Tokenizer.load(write_tiny_gguf())


def _tokens(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options)]


def test_gguf_members(tiny):
    assert tiny.vocab_size == 262
    assert tiny.bos_token_id == 1
    assert tiny.eos_token_ids == (0,)
    assert tiny.special_ids == {0, 1}
    assert tiny.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert "messages" in tiny.chat_template
    assert tiny.id_to_token(262) is None
    assert (tiny.token_to_id("hell"), tiny.token_to_id("none")) == (260, None)


def test_encode_and_decode(tiny):
    assert _tokens(tiny, "hell hell") == ["hell", "Ġhell"]
    text = "hello é 日\n\t 12<|end|>"
    assert tiny.decode(tiny.encode(text), skip_special_tokens=False) == text
    assert tiny.decode(tiny.encode(text)) == text.removesuffix("<|end|>")
    assert tiny.decode([261, 99999, -1, 260]) == " hellhell"


def test_special_tokens_in_text_are_parsed(tiny):
    assert tiny.encode("<|end|>he") == [0, 258]


def test_bos_is_added_if_the_file_requires_it(write_tiny_gguf):
    tokenizer = Tokenizer.load(write_tiny_gguf(tokenizer__ggml__add_bos_token=True))
    assert tokenizer.encode("he") == [1, 258]
    assert tokenizer.encode("he", add_special_tokens=False) == [258]
    assert Tokenizer.load(write_tiny_gguf(tokenizer__ggml__pre="llama-bpe")).encode("he") == [1, 258]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "hell:\n\n123", ["hell", ":", "Ċ", "Ċ", "123"]),
        ("smollm", "hell:\n\n123", ["hell", ":", "ĊĊ", "1", "2", "3"]),
        ("llama-bpe", "hell:\n\n1234'S", ["hell", ":ĊĊ", "123", "4", "'S"]),
        ("refact", "in 12", ["in", "Ġ", "1", "2"]),
        ("glm4", "it's 1234:\n", ["it", "'s", "Ġ", "123", "4", ":Ċ"]),
        ("seed-coder", "it's 12:\n", ["it", "'s", "Ġ", "1", "2", ":", "Ċ"]),
        ("tekken", "hellO:/\n123'S", ["hell", "O", ":/Ċ", "1", "2", "3", "'S"]),
        ("gpt-4o", "hellO's:/\n1234", ["hell", "O's", ":/Ċ", "123", "4"]),
        ("qwen2", "hell:\n\n123'S", ["hell", ":ĊĊ", "1", "2", "3", "'S"]),
        ("qwen2", "hq\u0308l", ["hq", "ÌĪl"]),  # a mark is apart from its letter
        ("qwen35", "hq\u0308l:\n1'S", ["hqÌĪl", ":Ċ", "1", "'S"]),
        ("deepseek-llm", "he q,12\n\nհե 好!  ", ["he", "Ġq", ",", "1", "2", "Ċ", "Ċ", "Õ°Õ¥Ġ", "å¥½", "!", "ĠĠ"]),
        ("deepseek-llm", "für éa", ["f", "Ã¼", "r", "ĠÃ©", "a"]),  # as the published file
        ("deepseek-coder", "he q=12\n\nհե.", ["he", "Ġq", "=", "1", "2", "Ċ", "Ċ", "Õ°Õ¥", "."]),
        ("deepseek-v3", "hq's.com 1234:\n", ["hq", "'s", ".com", "Ġ", "123", "4", ":Ċ"]),
        ("lfm2", "hell:\n\n1234", ["hell", ":ĊĊ", "123", "4"]),
    ],
)
def test_pre_tokenizers(write_tiny_gguf, pre, text, words):
    tokenizer = Tokenizer.load(write_tiny_gguf(tokenizer__ggml__pre=pre))
    assert [w for w, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer__ggml__pre": "viking"}, "rules of 'viking', .* known are gpt-2, smollm, llama-bpe, .*qwen2"),
        ({"tokenizer__ggml__pre": None}, "rules of ''"),
        ({"tokenizer__ggml__model": "bert"}, r"'bert' tokenizer; .* gpt2 \(byte-level BPE\), llama"),
        ({"tokenizer__ggml__model": "llama"}, r"no tokenizer\.ggml\.scores"),
        ({"tokenizer__ggml__scores": [1.0]}, "one number for each token"),
        ({"tokenizer__ggml__tokens": None}, "no metadata key 'tokenizer.ggml.tokens'"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokens is an array of int"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "repeated tokens"),
        ({"tokenizer__ggml__token_type": [1]}, "tokens without a type"),
        ({"tokenizer__ggml__merges": ["no such"]}, "do not fit together: .*`no` out of vocabulary"),
        ({"tokenizer__ggml__merges": ["h \n"]}, r"do not fit together: .*`\\n` out of vocabulary"),
    ],
)
def test_gguf_vocabularies_that_are_refused(write_tiny_gguf, metadata, message):
    path = write_tiny_gguf(**metadata)
    with pytest.raises(CallboardError, match=message) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)


def _write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: dict | str) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_folder(tmp_path, tiny):
    folder = _write_folder(
        tmp_path,
        tiny._backend,
        tokenizer_config__json={
            "bos_token": {"content": "<|start|>", "__type": "AddedToken"},
            "eos_token": "<|end|>",
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        },
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hell hell é") == tiny.encode("hell hell é")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (0,))
    assert tokenizer.special_tokens == tiny.special_tokens
    assert tokenizer.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template == "J"
    assert tokenizer.eos_token_ids == (0, 1)


def test_bos_of_a_folder_is_added_once(tmp_path, tiny):
    settings = {"bos_token": "<|start|>", "add_bos_token": True}
    folder = _write_folder(tmp_path, tiny._backend, tokenizer_config__json=settings)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("he") == [1, 258]
    assert tokenizer.encode("he", add_special_tokens=False) == [258]
    assert Tokenizer.load(_write_folder(folder, tokenizer._backend)).encode("he") == [1, 258]


def test_bare_folder(tmp_path, tiny):
    tokenizer = Tokenizer.load(_write_folder(tmp_path, tiny._backend))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)


def test_training_settings_of_a_folder_are_dropped(tmp_path, tiny):
    tiny._backend.enable_truncation(2)
    tiny._backend.enable_padding(length=8)
    assert len(Tokenizer.load(_write_folder(tmp_path, tiny._backend)).encode("abcde")) == 5


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(CallboardError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CallboardError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        Tokenizer.load(tmp_path)
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    with pytest.raises(CallboardError, match="has no decoder"):
        Tokenizer.load(_write_folder(tmp_path, backend))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CallboardError, match=r'step \{"type": "WordPiece"'):
        Tokenizer.load(_write_folder(tmp_path, backend))


@pytest.mark.parametrize("replacements", [[("a", "aa")] * 40, [("", "a")]])
def test_decoder_that_makes_tokens_long_is_refused(tmp_path, replacements):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    backend.decoder = decoders.Sequence([decoders.Replace(old, new) for old, new in replacements])
    with pytest.raises(CallboardError, match="times as long; at most 16 times"):
        Tokenizer.load(_write_folder(tmp_path, backend))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config__json": {"chat_template": {"a": 1}}}, "a chat template that is a dict, not a text"),
        ({"tokenizer_config__json": {"chat_template": [1, {"name": "default", "template": 7}]}}, "that is a int"),
        ({"chat_template__jinja": "\udcff"}, r"chat_template\.jinja cannot be read"),
    ],
)
def test_templates_of_a_folder_that_are_refused(tmp_path, tiny, files, message):
    template = files.pop("chat_template__jinja", None)
    folder = _write_folder(tmp_path, tiny._backend, **files)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, errors="surrogateescape")
    with pytest.raises(CallboardError, match=message):
        Tokenizer.load(folder)


def test_token_bytes_of_a_byte_level_vocabulary(tiny):
    assert tiny.token_bytes(tiny.token_to_id("Ġhell")) == b" hell"
    assert {tiny.token_bytes(i) for i in range(2, 258)} == {bytes([b]) for b in range(256)}
    assert tiny.token_bytes(0) == b"<|end|>"
    assert tiny.token_bytes(262) == tiny.token_bytes(-1) == b""


def test_token_bytes_of_a_byte_fallback_vocabulary(tmp_path):
    vocab = {"<unk>": 0, "<0x0A>": 1, "<0xE2>": 2, "▁a▁b": 3, "é": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer = Tokenizer.load(_write_folder(tmp_path, backend))
    assert [tokenizer.token_bytes(i) for i in range(5)] == [b"<unk>", b"\n", b"\xe2", b" a b", "é".encode()]


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.mark.long
class TestSmolLM2:
    def test_members(self, smollm2, smollm2_path):
        assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2, 0))
        assert smollm2.special_ids == set(range(17))
        assert smollm2.special_tokens["pad_token"] == "<|im_end|>"
        assert GgufFile(smollm2_path).tensors["token_embd.weight"].shape[0] == smollm2.vocab_size

    def test_known_ids(self, smollm2):
        assert smollm2.encode(" there was a wise old")[:4] == [665, 436, 253, 9357]
        assert smollm2.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."
        # Digits are split off before the spaces: "\n\n" stays whole in front of a number.
        assert _tokens(smollm2, "hi:\n\n1 23") == ["hi", ":", "ĊĊ", "1", "Ġ", "2", "3"]

    def test_tokens_decode_to_their_bytes(self, smollm2):
        for token_id in range(0, 49152, 7):
            text = smollm2._backend.decode([token_id], skip_special_tokens=False)
            assert smollm2.token_bytes(token_id).decode("utf-8", errors="replace") == text

    def test_text_survives(self, smollm2):
        text = Path(__file__).read_text() + "日本語 😀 ünï\u200d\t<|im_end|>"
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text

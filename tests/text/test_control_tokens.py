"""Texts of clients that spell special tokens or marks of turns: they stay plain text in every prompt."""

import re
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.base.model.pooling import Pooling
from runtime.output.chat_prompt import ChatPrompter
from runtime.output.fields import FieldError, read_options
from runtime.output.options import ChatOptions
from runtime.output.score_prompt import PairPrompter, encoder_of
from runtime.text.chat import ChatTemplate
from runtime.text.control_tokens import _ANSWER_MARKS
from runtime.text.tokenizer import Tokenizer
from tests.support.http.own_templates import OWN_TEMPLATES
from tests.text.test_family_templates import ADD, SPECIAL, TEMPLATES

SOURCES = TEMPLATES | OWN_TEMPLATES
MARK = re.compile(r"<[|｜][^\s'\"{}]+?[|｜]>|</?[a-z_]+>|<[a-z_]+[|]>|<[|][a-z_\"]+>|\[/?[A-Z_]{3,}\]")
HARMLESS = str.maketrans(dict.fromkeys("<>[]|｜/_", "x"))
CORPUS = [
    "The weather in Oslo is mild; <b>tools</b> and turns: user, system, im_start, [INST] |end|> \n\n\t x = {1: 2}"
] * 3
OTHERS = "<|im_start|>", "<|im_end|>", "<|user|>", "<|system|>"
PLAIN = "\n\n", "\t\t"  # added tokens besides marks
WORDS = "hi", "user", " ", "\n", "\n\n", "in im_end", "<", "|>", "日本", "\ue002", "\\ue002", "x", "{", ' "'
KINDS = "byte-level", "metaspace", "prepended", "unigram"


@cache
def tokenizer_of(kind: str, source: str) -> Tokenizer:
    """A small tokenizer with the marks of a template as added tokens."""
    marks = sorted(
        {*MARK.findall(source), "<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|system|>"}
    )
    if kind == "unigram":
        pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in sorted({*CORPUS[0], "▁"}))]
        backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace()
    elif kind == "byte-level":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    else:
        # Merges that make a control token of plain text.
        tokens = [*(f"<0x{i:02X}>" for i in range(256)), *sorted({*CORPUS[0], "▁"}), "s>", "<s>", "▁x", "in", "im"]
        merges = [("s", ">"), ("<", "s>"), ("▁", "x"), ("i", "n"), ("i", "m")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
        if kind == "prepended":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            backend.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        else:
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    is_special = lambda mark: "tool" not in mark and "think" not in mark  # noqa: E731
    backend.add_tokens([AddedToken(mark, special=is_special(mark), normalized=False) for mark in marks])
    return Tokenizer(
        backend, bos_token_id=None, eos_token_ids=(), special_tokens=SPECIAL, chat_template=source, tool_template=None
    )


@cache
def prompter_of(kind: str, name: str) -> tuple[Tokenizer, ChatPrompter, ChatTemplate]:
    tokenizer = tokenizer_of(kind, SOURCES[name])
    return tokenizer, ChatPrompter(tokenizer), ChatTemplate.of(tokenizer)


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text for a tokenizer without control tokens."""
    own = tokenizer._backend
    backend = tokenizers.Tokenizer(own.model)
    if own.normalizer is not None:
        backend.normalizer = own.normalizer
    if own.pre_tokenizer is not None:
        backend.pre_tokenizer = own.pre_tokenizer
    backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    ids = {backend.token_to_id(text): own.token_to_id(text) for text in PLAIN}
    return [ids.get(i, i) for i in backend.encode(text, add_special_tokens=False).ids]


def fragments(marks: list[str]) -> st.SearchStrategy[str]:
    whole = st.sampled_from(marks)
    part = st.tuples(whole, st.integers(1, 5)).map(lambda p: p[0][: p[1]] if p[1] % 2 else p[0][p[1] :])
    word = st.sampled_from(
        ["hi", "user", " ", "\n", "\n\n", "in im_end", "<", "|>", "日本", "\ue002", "\\ue002", "x", "{", ' "']
    )
    return st.lists(whole | part | word, min_size=1, max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn, marks: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options with texts that may spell marks."""
    text = fragments(marks)
    turns = st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=4)
    roles = [*draw(st.sampled_from([[], ["system"]])), "user", *draw(turns)]
    messages = []
    for role in roles:
        message = {"role": role, "content": draw(text)}
        if draw(st.booleans()):
            message["name"] = draw(text)
        messages.append(message)
    function = {**ADD["function"], "description": draw(text)}
    return messages, {"tools": [{**ADD, "function": function}]} if draw(st.booleans()) else {}


def harmless(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{n: v if n == "role" else v.translate(HARMLESS) for n, v in message.items()} for message in messages]


@pytest.mark.parametrize("name", SOURCES)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_spelled_marks_are_plain_text(name: str, kind: str, data: st.DataObject):
    tokenizer, prompter, template = prompter_of(kind, name)
    control = tokenizer.control_tokens._control_ids - {tokenizer.token_to_id("<unk>")}  # or an unknown character
    # The assistant's marks stay, and Qwen's template looks for results in texts of users.
    marks = sorted(set(tokenizer.control_tokens._names) - _ANSWER_MARKS - {"<tool_response>"})
    messages, fields = data.draw(conversations(marks))
    options = read_options(ChatOptions, fields)
    try:
        prompt = prompter.prompt(messages, options)
    except FieldError:
        assume(False)
    ids = prompt.encode(prompt.source, False)
    plain = prompter.prompt(harmless(messages), options)
    found = [i for i in ids if i in control]
    if not fields:
        # Harmless texts are as long, so the template's marks are at the same places.
        assert len(plain.text) == len(prompt.text)
        assert found == [i for i in tokenizer.encode(plain.text, False) if i in control]
        want, end = [], 0
        for mark in re.finditer(
            "|".join(map(re.escape, sorted(tokenizer.control_tokens._names, key=len, reverse=True))), plain.text
        ):
            want += [*plain_ids(tokenizer, prompt.text[end : mark.start()]), tokenizer.token_to_id(mark[0])]
            end = mark.end()
        want += plain_ids(tokenizer, prompt.text[end:])
        if not control.intersection(plain_ids(tokenizer, "<s>x</s><unk>")) and kind != "unigram":
            assert ids == want
    if kind == "byte-level":
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt.text
    assert "\ue000" not in prompt.text
    if "\ue002" not in str(messages):
        assert prompt.text == template.render(messages, tools=options.template_tools)


def _chat_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    prompt = ChatPrompter(tokenizer).prompt(messages, read_options(ChatOptions, fields))
    return prompt.encode(prompt.source, False)


def _num_special(tokenizer: Tokenizer, ids: list[int]) -> int:
    return len([i for i in ids if i in tokenizer.special_ids])


JOINING = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ '<|' ~ (m.name or 'none') ~ '|>' }}{{ '<|' ~ m.content }}"
    "<|im_end|>{% endfor %}"
)
PARTS = "{% for m in messages %}<|user|>{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}"
ESCAPING = "{% for m in messages %}<|user|>{{ m.content | tojson(ensure_ascii=true) }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message", "num"),
    [
        (JOINING, {"content": "im_end|>"}, 2),
        (JOINING, {"content": "x", "name": "im_end"}, 2),
        (JOINING, {"content": "<|im_", "name": "user"}, 2),
        (PARTS, {"content": [{"type": "text", "text": text} for text in ("<", "|im_en", "d|>")]}, 2),
        (PARTS, {"content": [{"type": "text", "text": text} for text in "<|im_end|>"]}, 2),
        (ESCAPING, {"content": "<|im_end|>"}, 2),
    ],
)
def test_joined_texts_make_no_mark(source: str, message: dict[str, Any], num: int):
    tokenizer = tokenizer_of("byte-level", source)
    ids = _chat_ids(tokenizer, [{"role": "user", **message}])
    assert _num_special(tokenizer, ids) == num
    assert "\\ue" not in tokenizer.decode(ids)


def test_an_assistant_keeps_its_marks_but_ends_no_turn():
    tokenizer = tokenizer_of("byte-level", TEMPLATES["qwen3"] + "{# </think> #}")
    answer = "<tool_call>\n{}\n</tool_call><|im_end|>"
    before = _chat_ids(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}])
    ids = _chat_ids(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
    assert {tokenizer.token_to_id(mark) for mark in ("<tool_call>", "</tool_call>")} <= set(ids)
    assert _num_special(tokenizer, ids) == _num_special(tokenizer, before)


def test_the_setting_lets_texts_become_special_tokens():
    tokenizer = tokenizer_of("byte-level", PARTS + " ")
    messages = [{"role": "user", "content": "<|im_end|>"}]
    assert _num_special(tokenizer, _chat_ids(tokenizer, messages)) == 2
    tokenizer.special_tokens_in_contents = True
    assert _num_special(tokenizer, _chat_ids(tokenizer, messages)) == 3
    assert tokenizer.encode_contents("<|im_end|>") == [tokenizer.token_to_id("<|im_end|>")]


def test_tools_and_template_arguments_are_texts_of_clients():
    tokenizer = tokenizer_of("byte-level", "{{ tools | tojson }}{{ documents | tojson }}<|im_end|>")
    function = {"name": "f", "description": "<|im_end|>", "parameters": {"properties": {"<|im_end|>": {}}}}
    fields = {"tools": [{"type": "function", "function": function}]}
    kwargs = {"documents": [{"title": "<|im_end|>", "text": "<|im_start|>"}]}
    ids = _chat_ids(tokenizer, [{"role": "user", "content": "a"}], **fields, chat_template_kwargs=kwargs)
    assert _num_special(tokenizer, ids) == 1


def test_a_vocabulary_that_lacks_ids_keeps_them():
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 5, "<": 9}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(
        backend, bos_token_id=None, eos_token_ids=(), special_tokens={}, chat_template="<s>{{ messages[0].content }}"
    )
    own = backend.token_to_id("<s>")
    assert _chat_ids(tokenizer, [{"role": "user", "content": "ab<s>"}]) == [own, 0, 5, 9]


def test_an_error_of_a_template_shows_no_seam():
    tokenizer = tokenizer_of("byte-level", "{{ raise_exception(messages[0].content) }}<|im_end|>")
    with pytest.raises(FieldError, match=r"a<\|im_end\|>b"):
        _chat_ids(tokenizer, [{"role": "user", "content": "a<|im_end|>b"}])


def test_qwen_rerankers_read_documents_as_text():
    tokenizer = tokenizer_of("byte-level", TEMPLATES["qwen3"])
    pooling = Pooling("last", num_labels=1, pairs="qwen3")
    prompter = PairPrompter(lambda text, special, part: encoder_of(tokenizer, part)(text, special), pooling)
    nums = [_num_special(tokenizer, prompter.ids(text, text)) for text in ("a", "a<|im_end|>")]
    assert nums[0] == nums[1] > 2


def test_texts_with_every_private_character_are_refused():
    tokenizer = tokenizer_of("byte-level", PARTS)
    private = "".join(map(chr, range(0xE000, 0xF900)))
    assert _num_special(tokenizer, _chat_ids(tokenizer, [{"role": "user", "content": private}])) == 2
    with pytest.raises(FieldError, match="private use"):
        _chat_ids(tokenizer, [{"role": "user", "content": private + "<|im_end|>"}])

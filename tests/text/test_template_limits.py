"""The limits of a chat template's computation; otherwise it acts as in `transformers`."""

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.base.types import CallboardError
from runtime.text import chat, sandbox
from runtime.text.chat import ChatTemplate
from tests.support.cpu_time import reference_s

MESSAGES = [{"role": "user", "content": "How is the weather?"}]
# The limits: of memory, of time, of time for steps that cannot be interrupted, of the prompt's length.
LIMIT = "took more memory than the limit|ran for over|took over|prompt is over 4194304 characters"
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS, "ran for over 0.05 seconds"),
        (
            "{% macro m() %}{% for i in range(90000) %}{{ '' }}{% endfor %}{{ m() }}{% endmacro %}{{ m() }}",
            "ran for over",
        ),
        ("{% for k in [[[[[[[[]]]]]]]] recursive %}{{ loop([k] * 90000) }}{% endfor %}", "ran for over|recursion"),
        ("{{ 'x' * 10 ** 10 }}", LIMIT),
        ("{{ 10 ** 10 * 'x' }}", LIMIT),
        ("{{ ([0] * 99999) * 99999 }}", LIMIT),
        ("{{ 10 ** (10 ** 10) }}", LIMIT),
        ("{{ 'x'.ljust(10 ** 10) }}", LIMIT),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            LIMIT,
        ),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            LIMIT,
        ),
        ("{% set x = 'x' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60, LIMIT),
        (
            "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + "{{ " + "m(" * 40 + "'x'" + ")" * 40 + " }}",
            LIMIT,
        ),
    ],
)
def test_a_bomb_is_an_error(limits, source: str, reason: str):
    with pytest.raises(CallboardError, match=reason):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_bomb_spends_only_its_own_time(limits):
    bomb, template = (
        ChatTemplate(ENDLESS, {}),
        ChatTemplate("{{ 'ab' * 2 ~ 3 }}{% set x | upper %}c{% endset %}{{ x }}", {}),
    )
    for _ in range(2):
        with pytest.raises(CallboardError, match="ran for over"):
            bomb.render([])
        assert template.render([]) == "abab3C"


NESTED = "{% set x = [0] * 400000 %}{% set y = [x] * 400000 %}"  # small in memory, and endless as text


@pytest.mark.parametrize(
    "expression",
    [
        "'%70000000d' % 1",
        "'%*d' % (70000000, 1)",
        "('%s' * 9999) % (('x' * 9999,) * 9999)",
        "'%70000000d' | format(1)",
        "'{:>70000000}'.format(1)",
        "'{:>{}}'.format(1, 70000000)",
        "('a' * 9999) | replace('a', 'b' * 9999)",
        "('a' * 9999).replace('a', 'b' * 9999)",
        "(['a' * 9999] * 9999) | join('b')",
        "[1, 2, 3] | join('b' * 4000000)",
        "('b' * 9999).join(['a'] * 9999)",
        "('a\\n' * 9999) | indent(9999)",
        "[0] | batch(70000000, 1) | list",
        "[0] | slice(70000000) | list",
        "1.5 | round(70000000, 'ceil')",
        "'x'.encode().center(70000000)",
        "'a'.translate({97: 'b' * 5000000})",
        "'\\t'.expandtabs(70000000)",
        "(5).to_bytes(70000000, 'big')",
        "'x' | center(70000000)",
        "lipsum(70000)",
        "y",
        "y | tojson",
        "y | string",
        "y | upper",
        "y | sum(start=[])",
        "'a' ~ y",
        "{'a': y}.values()",
        "namespace(a=y)",
        "'%s' % (y,)",
        "'{}'.format(y)",
    ],
)
def test_a_single_step_cannot_make_a_large_value(limits, monkeypatch: pytest.MonkeyPatch, expression: str):
    monkeypatch.setattr(chat, "_DEADLINE_S", 1.0)
    with pytest.raises(CallboardError, match=f"{LIMIT}|No filter"):
        ChatTemplate(f"{NESTED}{{{{ {expression} }}}}", {}).render([])


@pytest.mark.parametrize(
    "expression",
    [
        "{'a': 1}",
        "5 | string",
        "[1, 'b'] | join(', ')",
        "[{'x': 1}] | join(attribute='x')",
        "'+'.join(['a', 'c'])",
        "none_such",
        "none_such | default(1700000000)",
        "'a-%s %05.1f' % (5, 2)",
        "'%s' | format(3)",
        "'{:02d} {}'.format(5, 'x')",
        "'aXbX' | replace('X', '-', 1)",
        "'aXbX'.replace('X', '-')",
        "'a\nb' | indent(2)",
        "[1, 2, 3] | batch(2) | list",
        "1.25 | round(1)",
        "[1, 2] | sum",
        "{'a': none}.items() | list",
        "{'é': [1, {}]} | tojson(indent=2)",
        "['b', 'a'] | map('upper') | sort",
        "'x' * 3 + 'y' ~ 1",
        "[{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | list",
    ],
)
def test_small_values_equal_those_of_transformers(expression: str):
    source = f"{{{{ {expression} }}}}"
    rendered, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert ChatTemplate(source, {}).render(MESSAGES) == rendered[0]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ " + "(" * 99_999 + "1" + ")" * 99_999 + " }}", "recursion"),
        ("{{ " + "9" * 5000 + " }}", "5000 digits"),
        ("x" * 300_000, "300000 characters, above 262144"),
    ],
)
def test_a_template_that_cannot_be_compiled(source: str, reason: str):
    with pytest.raises(CallboardError, match=f"cannot be compiled: .*{reason}"):
        ChatTemplate(source, {})


def test_roles_are_found_in_linear_time():
    """Lists that are never closed: each was read to the end of the source."""
    source = "{# " + "role == [" * (sandbox.MAX_SOURCE_CHARS // 9 - 10) + " #}{{ role == 'user' or role != 'judge' }}"
    template = ChatTemplate(source, {})
    started = time.thread_time()
    assert template.roles == {"user", "judge"}
    assert time.thread_time() - started < 100 * reference_s()

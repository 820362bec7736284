"""The Jinja environment of chat templates: `transformers`' names and filters, a sandbox, and limits.

A template comes with the weights, from anyone. Jinja's immutable sandbox keeps it from what lies outside; here it is
kept from running on and from making large values of small ones:

- Every pass of a loop, every call and every filter looks at the CPU time that the rendering has used.
- What multiplies (`*`, `**`, `%`, `~`, `replace`, `join`, `indent`, `format`, padding, `tojson`) works out the size of
  its result first; all else may return one that is not over a size.
- Filters and methods that no chat template uses are not there, and nothing is computed while a template is compiled.

The checks are put into the template's syntax tree, so they need no other process, no signal and no thread. What they do
not bound is how long Python compares two nested values that share their parts.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

from runtime.text.weight import weight

MAX_SECONDS = 1.0  # of CPU time, for one rendering; a long conversation takes milliseconds
MAX_SIZE = 4 << 20  # characters or elements of a value; bits of a number
MAX_SOURCE_CHARS = 256 << 10
_STEPS_PER_LOOK = 64  # at the clock, which costs a system call

# The filters that are there, in two kinds: these walk through lists, the others make text or a number.
_LIST_FILTERS = """
    attr batch count d default dictsort first groupby items join last length list map max min reject rejectattr reverse
    select selectattr slice sort tojson unique
"""
_TEXT_FILTERS = """
    abs capitalize e escape float forceescape format indent int lower replace round safe string sum title trim truncate
    upper urlencode wordcount
"""
_STRING_METHODS_NOT_THERE = {"translate", "expandtabs", "encode", "format_map"}
_WIDTH = re.compile(r"\d+")
_WIDTH_GIVEN_LATER = re.compile(r"\{[^{}]*\{")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates; `start_clock` comes before each rendering, in the thread that renders."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            optimized=False,
        )
        self._thread = threading.local()
        own: dict[str, Callable[..., Any]] = {
            "tojson": _tojson,
            "replace": _replace,
            "join": _join,
            "indent": _indent,
            "format": lambda text, *args, **kwargs: self.call_binop(None, "%", str(text), kwargs or args),
            "string": _text,
        }
        known = self.filters | own
        self.filters = {name: self._watched(known[name], name in ("batch", "slice")) for name in _LIST_FILTERS.split()}
        for name in _TEXT_FILTERS.split():
            self.filters[name] = self._watched(_of_text(known[name]), name == "round")
        self.filters |= {"callboard_sized": _sized, "callboard_printed": _printed}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)

    def template(self, source: str, names: Mapping[str, Any]) -> jinja2.Template:
        """`source` compiled, with `names` visible to it; raises TemplateSyntaxError, and whatever else Python makes of
        a program that it cannot take."""
        if len(source) > MAX_SOURCE_CHARS:
            raise OverflowError(f"it has {len(source)} characters, above {MAX_SOURCE_CHARS}")
        tree = _Instrumented().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(dict(names)))

    def start_clock(self) -> None:
        self._thread.deadline = time.thread_time() + MAX_SECONDS
        self._thread.num_steps = 0

    def passed(self) -> None:
        """Called in every pass of a loop, so that each pass counts as a call."""

    def joined(self, *parts: Any) -> str:
        """The operator `~`."""
        return "".join(map(_text, parts))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if (isinstance(obj, str) and attr in _STRING_METHODS_NOT_THERE) or isinstance(obj, int | float | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (formatted := super().wrap_str_format(value)) is None:
            return None

        @functools.wraps(formatted)
        def checked(*args: Any, **kwargs: Any) -> str:
            text = value.__self__
            if _WIDTH_GIVEN_LATER.search(text):
                raise OverflowError("it formats with a width that is a value")
            _check_format(text, "{", (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._step()
        if isinstance(text := getattr(__obj, "__self__", None), str):
            match __obj.__name__:
                case "replace":
                    return _replace(text, *args, **kwargs)
                case "join":
                    (parts,) = args
                    return _join(None, parts, text)
            _check_size(max((arg for arg in args if isinstance(arg, int)), default=0))  # "x".ljust(10**9)
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return _sized(left + right)
        match operator, left, right:
            case "**", int(), int():
                _check_size(left.bit_length() * right)
            case "*", int(), int():
                _check_size(left.bit_length() + right.bit_length())
            case "*", str() | list() | tuple(), int():
                _check_size(len(left) * right)
            case "*", int(), str() | list() | tuple():
                _check_size(left * len(right))
            case "%", str(), _:
                if "*" in left:
                    raise OverflowError("it formats with a width that is a value")
                values = right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else (right,)
                _check_format(left, "%", values)
        return _sized(self.binop_table[operator](left, right))

    def _step(self) -> None:
        thread = self._thread
        thread.num_steps += 1
        if thread.num_steps % _STEPS_PER_LOOK == 0 and time.thread_time() > thread.deadline:
            raise TimeoutError(f"it ran for over {MAX_SECONDS:g} seconds")

    def _watched(self, filter_: Callable[..., Any], takes_sizes: bool) -> Callable[..., Any]:
        """A filter that is passed the context, since what is passed it is never computed by the compiler."""
        passed = _PassArg.from_obj(filter_)

        @jinja2.pass_context
        def watched(context: Context, *args: Any, **kwargs: Any) -> Any:
            self._step()
            if takes_sizes:
                _check_size(max((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), default=0))
            match passed:
                case None:
                    return _sized(filter_(*args, **kwargs))
                case _PassArg.context:
                    return _sized(filter_(context, *args, **kwargs))
                case _PassArg.eval_context:
                    return _sized(filter_(context.eval_ctx, *args, **kwargs))
            return _sized(filter_(self, *args, **kwargs))

        return watched


class _Instrumented(NodeTransformer):
    """Puts the checks into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("passed"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [child if _is_text(child) else _filtered(child, "callboard_printed") for child in node.nodes]
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "callboard_sized", lineno=node.lineno)
        return node


def _filtered(node: nodes.Expr | None, name: str, **attributes: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, **attributes)


def _is_text(node: nodes.Node) -> bool:
    """True if an expression is certain to have a text as its value: a literal, or a sum with one."""
    match node:
        case nodes.TemplateData() | nodes.Const(value=str()):
            return True
        case nodes.Add(left=left, right=right):
            return _is_text(left) or _is_text(right)
    return False


def _sized(value: Any) -> Any:
    """`value`, which must not be too large."""
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise OverflowError(f"it makes a value of size {size}, above {MAX_SIZE}")


@jinja2.pass_context
def _printed(context: Context, value: Any) -> Any:
    """The output of `{{ }}`."""
    if not isinstance(value, str):
        weight(value, MAX_SIZE)
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    weight(value, MAX_SIZE)
    return str(value)


def _check_format(text: str, mark: str, values: Iterable[Any]) -> None:
    """That what `text` makes of `values` is not too large: each may stand at each mark, and be padded."""
    largest = max((weight(value, MAX_SIZE) for value in values), default=0)
    widths = sum(int(width[:9]) for width in _WIDTH.findall(text))
    _check_size(len(text) + text.count(mark) * largest + widths)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    most = -1 if count is None else count
    num = text.count(old) if most < 0 else min(most, text.count(old))
    _check_size(len(text) + num * (len(new) - len(old)))
    return text.replace(old, new, most)


def _of_text(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes text of its arguments."""

    @functools.wraps(filter_)  # with Jinja's mark of what it is passed
    def weighed(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if not isinstance(arg, str):
                weight(arg, MAX_SIZE)
        return filter_(*args, **kwargs)

    return weighed


@jinja2.pass_eval_context
def _join(eval_context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(eval_context.environment, attribute), value)
    size, parts = 0, []
    for part in value:
        parts.append(_text(part))
        size += len(parts[-1]) + len(d)
        _check_size(size)
    return d.join(parts)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    num_lines = value.count("\n") + 1
    _check_size(len(value) + num_lines * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(value, width, first, blank)


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}` around the assistant's words, a mark for training; it adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    weight(value, MAX_SIZE, indent=len(indent) if isinstance(indent, str) else indent or 0)
    # Jinja's own filter escapes HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

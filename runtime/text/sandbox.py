"""The Jinja environment of chat templates: `transformers`' names and filters, a sandbox, and limits.

A template comes with the weights, from anyone. Jinja's immutable sandbox keeps it from what lies outside; here it is
kept from running on: every pass of a loop and every call looks at the CPU time that the rendering has used, and what
makes a large value of small ones (`*`, `**`, `+`, `~`, `{% set %}` blocks, methods that pad) refuses to go over a size.
The checks are put into the template's syntax tree, so they need no other process, no signal and no thread. What they
cannot bound is a single step of Python's own, such as a filter, on values of that size.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of CPU time, for one rendering; a long conversation takes milliseconds
MAX_SIZE = 4 << 20  # characters or elements of a value; bits of a number
_CALLS_PER_LOOK = 64  # at the clock, which costs a system call


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates; `start_clock` comes before each rendering, in the thread that renders."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["callboard_sized"] = _sized
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self._thread = threading.local()

    def template(self, source: str, names: Mapping[str, Any]) -> jinja2.Template:
        """`source` compiled, with `names` visible to it; raises TemplateSyntaxError."""
        tree = _Instrumented().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(dict(names)))

    def start_clock(self) -> None:
        self._thread.deadline = time.thread_time() + MAX_SECONDS
        self._thread.num_calls = 0

    def passed(self) -> None:
        """What every pass of a loop calls; that it is a call is all that it is for."""

    def joined(self, *parts: Any) -> str:
        """What `~` does."""
        return "".join(map(str, parts))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        thread = __self._thread
        thread.num_calls += 1
        if thread.num_calls % _CALLS_PER_LOOK == 0 and time.thread_time() > thread.deadline:
            raise TimeoutError(f"it ran for over {MAX_SECONDS:g} seconds")
        if isinstance(getattr(__obj, "__self__", None), str):  # "x".ljust(10**9)
            _check_size(max((arg for arg in args if isinstance(arg, int)), default=0))
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "**", int(), int():
                _check_size(left.bit_length() * right)
            case "*", int(), int():
                _check_size(left.bit_length() + right.bit_length())
            case "*", str() | list() | tuple(), int():
                _check_size(len(left) * right)
            case "*", int(), str() | list() | tuple():
                _check_size(left * len(right))
        return _sized(super().call_binop(context, operator, left, right))


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

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "callboard_sized", [], [], None, None, lineno=node.lineno)
        return node


def _sized(value: Any) -> Any:
    """`value`, which must not be too large."""
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise OverflowError(f"it makes a value of size {size}, above {MAX_SIZE}")


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
    # Jinja's own filter escapes HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

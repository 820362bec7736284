"""The grammar of a request, compiled or refused with its field's name."""

from __future__ import annotations

from urllib.parse import quote

from runtime.base.types import Grammar
from runtime.output.fields import invalid
from runtime.output.response_format import RequestedGrammar
from runtime.structured.compiler import CompilerBusy, GrammarCompiler
from runtime.structured.pattern import GrammarError
from serve_app.protocol.errors import ApiError, api_error

_MAX_IGNORED = 32  # a schema's unenforced keywords in a header


async def compiled(compiler: GrammarCompiler, asked: RequestedGrammar, owner: str) -> Grammar:
    """Return the compiled grammar. Raises ApiError: 400 if it cannot be enforced, 429 if the compiler is full."""
    try:
        return await compiler.compile(asked.spec, owner)
    except GrammarError as e:
        raise api_error(invalid(asked.field, str(e))) from e
    except CompilerBusy as e:
        raise ApiError(429, str(e), code="grammars_busy", retry_after_s=e.retry_after_s) from e


def ignored_paths(grammar: Grammar, asked: RequestedGrammar) -> list[str]:
    """Return the paths of the first unenforced keywords, safe for a header."""
    return [quote(f"{asked.field}{path}", safe="/#$.")[:128] for path in grammar.ignored[:_MAX_IGNORED]]

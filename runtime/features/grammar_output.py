"""The output of one request that is bound to a grammar, and the making of its matcher beside the steps.

A matcher takes microseconds where its grammar is ready, and some 30 ms for the largest new one. The latter is made on a
thread: until then the row of the output is computed but not sampled (StepResult.deferred), and other rows go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from runtime.spec.types import CallboardError, Grammar, ThinkingBudget
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.lazy import SharedLimit
from runtime.structured.matching.matcher import Matcher

logger = logging.getLogger(__name__)

_FEW_TOKENS = 64  # of an output, which a matcher advances by within a step


@dataclass(slots=True)
class GrammarOutput:
    """The output of the request in a slot."""

    grammar: Grammar | None
    thinking: ThinkingBudget | None
    prompt_len: int
    tokens: list[int]  # as far as known
    num_taken: int = 0  # of these that the matcher has advanced by
    matcher: Matcher | None = None  # None until it is made
    failed: bool = False
    failure: str = ""  # why
    host_s: float = 0.0  # spent on its masks
    on_device: bool = False  # it follows an automaton there, and its matcher stays behind
    is_new: bool = True  # no step had a row of it
    alone: bool = False  # the lexer of its grammar came to a limit: it needs its own
    _making: Future[tuple[Matcher, int]] | None = field(default=None)  # the matcher, and its num_taken

    @property
    def end(self) -> int:
        """The position of the token that it samples next."""
        return self.prompt_len + len(self.tokens)

    def fail(self, why: object) -> None:
        """Its request ends, and others go on (C9)."""
        logger.info("a request fails: %s", why)
        self.failed, self.failure = True, " ".join(str(why).split())

    def take(self) -> None:
        """Advance the matcher by the tokens that it has not seen. Raises CallboardError."""
        assert self.matcher is not None
        self.matcher.advance(self.tokens[self.num_taken :])
        self.num_taken = len(self.tokens)

    def rewrite(self, at: int, tokens: list[int]) -> None:
        """From position `at` on it has these tokens."""
        at -= self.prompt_len
        self.cancel()
        self.tokens[at:] = tokens
        if self.matcher is not None and at < self.num_taken:
            try:
                self.matcher.rollback(self.num_taken - at)
                self.num_taken = at
            except CallboardError as e:
                self.stop(e)

    def stop(self, why: CallboardError) -> None:
        """Its matcher cannot go on: another one may if other outputs spent the lexer, else the output fails."""
        if isinstance(why, SharedLimit):
            self.matcher, self.num_taken, self.alone = None, 0, True
        else:
            self.fail(why)

    def cancel(self) -> None:
        """Give up the matcher that is being made."""
        if self._making is not None:
            self._making.cancel()
            self._making = None

    def begin(self, thread: Executor, engines: Future[MatcherFactory]) -> Future[tuple[Matcher, int]] | None:
        """Begin to make its matcher on `thread`; None if that takes microseconds, so that a step may do it."""
        if self._making is None and not self._is_quick(engines):
            self._making = thread.submit(self._made, engines.result, list(self.tokens))
        return self._making

    def adopt(self, engines: Future[MatcherFactory]) -> None:
        """Take the matcher that was made, or that takes microseconds. Raises CallboardError."""
        if self._making is None:
            self.matcher = made_factory(engines.result).matcher(self.grammar, self.thinking)
            return
        making, self._making = self._making, None
        self.matcher, self.num_taken = making.result()

    def _is_quick(self, engines: Future[MatcherFactory]) -> bool:
        if not engines.done() or self.alone or len(self.tokens) > _FEW_TOKENS:
            return False
        return engines.exception() is not None or engines.result().is_ready(self.grammar)

    def _made(self, engines: Callable[[], MatcherFactory], tokens: list[int]) -> tuple[Matcher, int]:
        """On the thread: a matcher that has advanced by `tokens`."""
        try:
            try:
                matcher = made_factory(engines).matcher(self.grammar, self.thinking, self.alone)
                matcher.advance(tokens)
            except SharedLimit:
                matcher = made_factory(engines).matcher(self.grammar, self.thinking, True)
                matcher.advance(tokens)
        except CallboardError:
            raise
        except Exception as e:  # a fault of llguidance ends this request alone
            logger.exception("a matcher could not be made")
            raise CallboardError(f"This request's grammar cannot be served: {type(e).__name__}: {e}.") from e
        return matcher, len(tokens)


def made_factory(engines: Callable[[], MatcherFactory]) -> MatcherFactory:
    """Waits for them. A vocabulary that they cannot be made for fails the outputs that need them, not the step."""
    try:
        return engines()
    except Exception as e:  # whatever llguidance, or the reader of the tokenizer, does not like
        raise CallboardError(f"Structured output does not work with this model's tokenizer: {e}") from e

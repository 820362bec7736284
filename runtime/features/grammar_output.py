"""The output of one request with a grammar, and how its matcher is made while steps continue.

A matcher takes microseconds if its grammar is ready, and up to some 30 ms if it is new. A new one is made on a thread.
Until then, the output's row is computed but not sampled (GrammarSamples.deferred), and other rows go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from runtime.base.types import CallboardError, Grammar, ThinkingBudget
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.lazy import SharedLimit
from runtime.structured.matching.matcher import Matcher

logger = logging.getLogger(__name__)

_FEW_TOKENS = 64  # output tokens that a matcher may take within a step


@dataclass(slots=True)
class GrammarOutput:
    """The output of the request in a slot."""

    grammar: Grammar | None
    thinking: ThinkingBudget | None
    prompt_len: int
    tokens: list[int]  # known tokens
    num_taken: int = 0  # known tokens that the matcher has taken
    matcher: Matcher | None = None  # None until it is made
    failed: bool = False
    failure: str = ""  # reason; "" unless it failed
    host_s: float = 0.0  # seconds that the host spent on its masks
    on_device: bool = False  # True if an automaton on the device follows it; its matcher then does not change
    is_new: bool = True  # True until a step has its row
    alone: bool = False  # True if it needs its own lexer: the shared one reached a limit
    _making: Future[tuple[Matcher, int]] | None = field(default=None)  # the matcher, and its num_taken

    @property
    def end(self) -> int:
        """The position of the token that it samples next."""
        return self.prompt_len + len(self.tokens)

    def fail(self, why: object) -> None:
        """End its request; others go on (C9)."""
        logger.info("a request fails: %s", why)
        self.failed, self.failure = True, " ".join(str(why).split())

    def take(self) -> None:
        """Advance the matcher by the tokens that it has not taken. Raises CallboardError."""
        assert self.matcher is not None
        self.matcher.advance(self.tokens[self.num_taken :])
        self.num_taken = len(self.tokens)

    def rewrite(self, at: int, tokens: list[int]) -> None:
        """Replace the tokens from position `at` on."""
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
        """Drop the matcher after a limit of its shared lexer: another one may go on. After any other error, fail."""
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
        """Begin to make its matcher on `thread`; return None if that takes microseconds and a step may do it."""
        if self._making is None and not self._is_quick(engines):
            self._making = thread.submit(self._made, engines.result, list(self.tokens))
        return self._making

    def adopt(self, engines: Future[MatcherFactory]) -> None:
        """Take the matcher from the thread, or make one that takes microseconds. Raises CallboardError."""
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
        """Return a matcher that has taken `tokens`; called on the thread."""
        try:
            try:
                matcher = made_factory(engines).matcher(self.grammar, self.thinking, self.alone)
                matcher.advance(tokens)
            except SharedLimit:
                matcher = made_factory(engines).matcher(self.grammar, self.thinking, True)
                matcher.advance(tokens)
        except CallboardError:
            raise
        except Exception as e:  # a fault in llguidance ends only this request
            logger.exception("a matcher could not be made")
            raise CallboardError(f"This request's grammar cannot be served: {type(e).__name__}: {e}.") from e
        return matcher, len(tokens)


def made_factory(engines: Callable[[], MatcherFactory]) -> MatcherFactory:
    """Wait for the factory. A vocabulary without one fails the outputs that need it, not the step."""
    try:
        return engines()
    except Exception as e:  # any error from llguidance or the tokenizer's reader
        raise CallboardError(f"Structured output does not work with this model's tokenizer: {e}") from e

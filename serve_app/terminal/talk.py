"""A talk in the terminal: questions, answers, and commands that begin with a slash."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import closing, suppress
from difflib import get_close_matches

from runtime.base.types import CallboardError
from serve_app.terminal.partners import Ending, Partner

_COMMANDS = {
    "help": "list these commands",
    "clear": "forget the conversation; the system message stays",
    "system TEXT": "set the system message; without TEXT, show it",
    "save FILE": "write the conversation to a new JSON file, as messages of a request",
    "exit": "end the chat",
}
_NAMES = [line.split()[0] for line in _COMMANDS]
_HINT = "Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists commands."


class Talk:
    """One conversation and the commands that change it."""

    def __init__(self, partner: Partner, system: str | None, on_terminal: bool) -> None:
        """Commands are read only `on_terminal`: piped lines are all questions."""
        self._partner, self._on_terminal = partner, on_terminal
        self.system, self.turns = system, list[dict[str, str]]()
        self.has_ended = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation, as messages of a request."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def take(self, line: str) -> None:
        """Answer a question or obey a command; an empty line is neither."""
        if self._on_terminal and (match := re.match(r"/(\w*)(?:\s+(.*))?$", line.rstrip())):
            _note(self._obey(match[1], (match[2] or "").strip()))
        elif line.strip():
            self._ask(line)

    def _obey(self, name: str, rest: str) -> str:
        """Run a command; returns what to show."""
        match name:
            case "help":
                lines = [f"  /{command:<12} {what}" for command, what in _COMMANDS.items()]
                return "\n".join([*lines, "A line that begins with a space goes to the model as it is."])
            case "clear":
                self.turns = []
                return "The conversation is forgotten."
            case "system":
                self.system = rest or self.system
                return f"The system message is: {self.system}" if self.system else "There is no system message."
            case "save":
                return self._save(rest)
            case "exit":
                self.has_ended = True
                return ""
        near = get_close_matches(name, _NAMES, 1)
        advice = f"did you mean /{near[0]}?" if near else "/help lists them."
        return f"There is no command /{name}; {advice}"

    def _save(self, path: str) -> str:
        if not path:
            return "/save needs the name of a file, such as /save chat.json."
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=2)
        except OSError as e:
            return f"{path} cannot be written: {e.strerror}; give another name."
        return f"{len(self.messages)} messages are in {path}."

    def _ask(self, text: str) -> None:
        question = {"role": "user", "content": text}
        answer, times = "", []
        ending = Ending()
        try:
            with closing(self._partner.answer([*self.messages, question])) as pieces:
                while True:
                    try:
                        piece = next(pieces)
                    except StopIteration as e:
                        ending = e.value
                        break
                    if piece:
                        times.append(time.monotonic())
                    answer += piece
                    print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print()
        except CallboardError as e:
            if not self._on_terminal:
                raise
            _note(f"callboard: {e}")
            return
        self.turns += [question, {"role": "assistant", "content": answer}]
        _note(" ".join(filter(None, (_speed(ending, times), "(cut; --max-tokens)" if ending.was_cut else ""))))


def _speed(ending: Ending, times: list[float]) -> str:
    """An answer's token rate, for a terminal; "" if there are too few tokens."""
    if not sys.stderr.isatty() or ending.num_tokens < 2 or len(times) < 2 or times[-1] <= times[0]:
        return ""
    return f"({ending.num_tokens} tokens, {(ending.num_tokens - 1) / (times[-1] - times[0]):.0f} tokens/s)"


def _note(text: str) -> None:
    if text:
        print(text, file=sys.stderr)


def talk(partner: Partner, system: str | None) -> None:
    """Read lines from stdin and print an answer to each, until stdin ends."""
    on_terminal = sys.stdin.isatty()
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing
    if on_terminal:
        _note(_HINT)
    conversation = Talk(partner, system, on_terminal)
    while not conversation.has_ended:
        try:
            line = input("> " if on_terminal else "")
        except EOFError:
            return
        conversation.take(line)

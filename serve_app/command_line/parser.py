"""Each command's parser: a short help, more help by subject, and two-line errors with the nearest name."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from runtime.base.types import CallboardError
from serve_app.command_line.config_file import read_words

_WIDTH = 80
_DEFAULT = "(default: "
_COLUMN = 28  # where a flag's text begins in the short help
_PATH = "a model is a name, a folder or a file, which `callboard serve` takes as it is"
_OTHER_NAMES = {  # other programs' commands, with ours for the same thing or a sentence
    "run": "chat or serve", "talk": "chat", "start": "serve", "server": "serve", "complete": "generate",
    "show": "inspect", "info": "inspect", "list": "ls", "check": "doctor", "benchmark": "bench", "download": "pull",
    "remove": "rm", "delete": "rm", "help": "--help", "version": "--version", "kill": "stop",
    "ps": "`callboard serve` runs in a terminal, and GET /api/ps of its server lists the model",
    "create": _PATH, "cp": _PATH, "push": _PATH,
}  # fmt: skip


class UsageError(CallboardError):
    """The command line cannot be carried out: exit code 2."""


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each flag's default once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_shown = action.default in (None, ()) or _DEFAULT in (action.help or "")
        return action.help if is_shown else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """A command's flags.

    `most_used` has the flags in the short help, each with a few words. The name of its value may follow a flag. A
    command without them shows all its flags."""

    def __init__(
        self, *args: Any, most_used: Mapping[str, str] | None = None, examples: Sequence[str] = (), **kwargs: Any
    ) -> None:
        kwargs.setdefault("formatter_class", Formatter)
        super().__init__(*args, **kwargs)
        self._most_used, self._examples = dict(most_used or {}), tuple(examples)
        self._reads_file, self._of_models = False, tuple[str, ...]()
        self._passes_on = ""
        self._source = ""  # where the words stand, in an error

    def add_config_file(self, of_models: Collection[str] = ()) -> None:
        """Add `--config FILE`, which gives values to the other flags.

        `of_models` are the fields that each entry of its list `models` may have."""
        what = "YAML or TOML file with flags by their names, such as `port: 8001`; the command line wins"
        self.add_argument("--config", metavar="FILE", help=what)
        self._reads_file, self._of_models = True, tuple(of_models)

    def pass_on(self, name: str) -> None:
        """Keep the words after `--` as `name`, for another program."""
        self._passes_on = name

    # ---- help --------------------------------------------------------------------------------------------------------

    def format_usage(self) -> str:
        """Return one line for any number of flags."""
        names = [_metavar(action) for action in self._get_positional_actions()]
        return f"usage: {' '.join([self.prog, *names])} [options]\n"

    def format_help(self) -> str:
        """Return the short help, or all of it for a command without one."""
        return self._short_help() if self._most_used else self._full_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Print the help that `--help=TEXT` names, and refuse unknown words with the nearest flag."""
        words = list(sys.argv[1:] if args is None else args)
        flags = words[: words.index("--")] if "--" in words else words
        if not self._subparsers:
            for word in flags:
                if word.startswith("--help="):
                    self._explain(word.removeprefix("--help="))
        found, unknown = super().parse_known_args(flags if self._passes_on else words, namespace)
        if self._passes_on:
            setattr(found, self._passes_on, words[len(flags) + 1 :])
        if self._reads_file and found.config is not None:
            found = self._with_file(found, words)
        if not self._subparsers:
            found.parser = self
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), None)
            if flag is None:
                self.error(f"{unknown[0]!r} is one argument too many")
            self.error(f"there is no {flag.partition('=')[0]}{self._meant(flag.partition('=')[0])}")
        return found, unknown

    def flags(self) -> dict[str, argparse.Action]:
        """Return each flag by its long name without the dashes, such as `max-model-len`."""
        return {
            name.removeprefix("--"): action
            for action in self._get_optional_actions()
            for name in action.option_strings
            if name.startswith("--")
        }

    def with_flags(self, sentence: str) -> str:
        """Return a sentence about settings with flags in place of fields: `--max-model-len` for `max_model_len`."""
        fields = {action.dest for action in self._get_optional_actions()}

        def flag(found: re.Match[str]) -> str:
            return f"--{found['name'].replace('_', '-')}" + (f" {found['value']}" if found["value"] else "")

        if not (names := "|".join(sorted(fields, key=len, reverse=True))):
            return sentence
        # A one-word name is a field only where it has a value.
        name = rf"(?<![\w./'\"-])(?P<name>{names})(?!\w|\.\w)"
        sentence = re.sub(rf"{name}=(?P<value>[\w.]*\w)", flag, sentence)
        sentence = re.sub(rf"^{name}(?P<value>)(?= (?:is|has) )", flag, sentence)
        return re.sub(rf"(?=\w+_){name}(?P<value>)", flag, sentence)

    def _with_file(self, found: argparse.Namespace, words: list[str]) -> argparse.Namespace:
        """Return the values from the command line, then from `--config FILE`, then the defaults."""
        source = f", in {found.config}"
        try:
            common, entries = read_words(found.config, self.flags(), self._of_models)
        except CallboardError as e:
            self.error(str(e))
        from_file, given = vars(self._given(common, source)), vars(self._given(words))
        each = [{**from_file, **vars(self._given(entry, source)), **given} for entry in entries]
        models = [argparse.Namespace(**{**vars(found), **entry}) for entry in each]
        return argparse.Namespace(**{**vars(found), **from_file, **given, "models": models})

    def _given(self, words: list[str], source: str = "") -> argparse.Namespace:
        """Return the values that `words` give, without defaults."""
        defaults = [(action, action.default) for action in self._actions]
        parser_defaults, self._defaults = self._defaults, {}
        self._source = source
        try:
            for action in self._actions:
                action.default = argparse.SUPPRESS
            return super().parse_known_args(words)[0]
        finally:
            for action, default in defaults:
                action.default = default
            self._defaults, self._source = parser_defaults, ""

    def _explain(self, what: str) -> NoReturn:
        """Print the flags of a subject, one flag, or those with `what` in their names."""
        subjects = {str(group.title): group for group in self._action_groups if group.title}
        name = what.lstrip("-").replace("_", "-")
        if name == "all":
            text = self._full_help()
        elif name in subjects:
            text = self._described([subjects[name]])
        else:
            flags = self.flags()
            chosen = [flags[name]] if name in flags else [a for n, a in flags.items() if name and name in n]
            if not chosen:
                near = _nearest(name, [*subjects, *flags])
                meant = f"; did you mean --help={near}?" if near else ""
                self.error(f"there is no flag or subject {what!r}{meant}")
            formatter = self._get_formatter()
            formatter.add_arguments(dict.fromkeys(chosen))
            text = formatter.format_help()
        self._print_message(text, sys.stdout)
        self.exit()

    def _full_help(self) -> str:
        about = f"{self.description}\n" if self.description else ""
        parts = [self.format_usage(), about, self._described(self._action_groups)]
        return "\n".join(part for part in [*parts, self._more()] if part)

    def _described(self, groups: Iterable[argparse._ArgumentGroup]) -> str:
        formatter = self._get_formatter()
        for group in groups:
            if group._group_actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return formatter.format_help()

    def _short_help(self) -> str:
        flags, lines = self.flags(), []
        for action in self._get_positional_actions():
            is_shown = not action.default or _DEFAULT in (action.help or "")
            default = "" if is_shown else f" {_DEFAULT}{action.default})"
            lines += _entry(_metavar(action), f"{action.help}{default}")
        for named, text in self._most_used.items():
            name, _, value = named.partition(" ")
            action = flags[name]
            is_shown = action.default in (None, "auto", False, True) or _DEFAULT in (action.help or "")
            default = "" if is_shown else f" (default: {action.default})"
            short = "".join(f"{s}, " for s in action.option_strings if not s.startswith("--"))
            value = "" if action.nargs == 0 else value or _metavar(action)
            lines += _entry(f"{short}--{name} {value}".rstrip(), text + default)
        about = [self.format_usage(), *([f"{self.description}\n"] if self.description else [])]
        return "\n".join([*about, *lines, "", self._more()])

    def _more(self) -> str:
        """The examples, and how to see more."""
        lines = ["examples:", *(f"  {example}" for example in self._examples), ""] if self._examples else []
        if self._most_used:
            subjects = [str(group.title) for group in self._action_groups if group.title and group._group_actions]
            listed = ", ".join(name for name in subjects if name not in ("positional arguments", "options"))
            lines += ["more:", *_entry("--help=all", f"all {len(self._get_optional_actions())} flags")]
            lines += _entry("--help=SUBJECT", listed)
            lines += _entry("--help=NAME", f"one flag, such as --help={next(iter(self._most_used)).split()[0]}")
        return "\n".join(lines) + "\n" if lines else ""

    # ---- errors ------------------------------------------------------------------------------------------------------

    def error(self, message: str) -> NoReturn:
        """Print two lines, the fault and the help to read, and exit."""
        about, message = "", re.sub(r"^argument (?:-\w/)?", "", message)
        if (flag := re.match(r"--([\w-]+)", message)) and flag[1] in self.flags():
            about = f"={flag[1]}"
        message += self._source
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(2, f"{self.prog}: {message}{end}\nSee {self.prog} --help{about}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown choice with the nearest one."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            near = _OTHER_NAMES.get(str(value))
            if near is not None and "`" in near:
                self.error(f"there is no command {value!r}; {near}")
            near = near or _nearest(str(value), names)
            meant = f"; did you mean {near}?" if near else f"; there are {', '.join(names)}"
            self.error(f"there is no command {value!r}{meant}")
        near = _nearest(str(value), names)
        meant = f"; did you mean {near}? It" if near else "; it"
        raise argparse.ArgumentError(action, f"{value!r} is not a choice{meant} can be {', '.join(names)}")

    def _meant(self, flag: str) -> str:
        near = _nearest(flag.lstrip("-").replace("_", "-"), list(self.flags()))
        return f"; did you mean --{near}?" if near else ""


class PrintVersion(argparse.Action):
    """Print the version, which is read from the metadata of the package only then."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version

        print(f"callboard {version('callboard')}")
        parser.exit()


def _metavar(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return "|".join(map(str, action.choices)) if len(list(action.choices)) <= 3 else action.dest.upper()
    name = str(action.metavar or action.dest.upper())
    if action.nargs == "?":
        return f"[{name}]"
    if action.nargs == "*":
        return f"[{name} ...]"
    return f"{name} ..." if action.nargs == "+" else name


def _entry(name: str, text: str) -> list[str]:
    """`name` with its text next to it, or below if it is long."""
    lines = textwrap.wrap(text, _WIDTH - _COLUMN, break_on_hyphens=False)
    head = f"  {name:<{_COLUMN - 4}}"
    if len(head) > _COLUMN - 2:
        return [head, *(" " * _COLUMN + line for line in lines)]
    return [f"{head}  {lines[0]}", *(" " * _COLUMN + line for line in lines[1:])]


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the name that a word with a typing error may mean."""
    return next(iter(difflib.get_close_matches(name, names, 1)), None)

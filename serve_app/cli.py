"""The `callboard` command: serve a model, talk to one, complete a text, or tell what a model is.

Nothing heavy is imported before a command needs it, so that --help and usage errors are immediate. Exit codes: 0 done,
1 it failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from runtime.core.config import DEFAULT_MODEL, EngineConfig
from runtime.core.types import CallboardError, SamplingParams
from serve_app.settings import HttpSettings, ScalingSettings


class _UsageError(CallboardError):
    """The command line asks for something that cannot be: exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except _UsageError as e:
        print(f"callboard: {e}", file=sys.stderr)
        return 2
    except CallboardError as e:
        print(f"callboard: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("callboard: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `callboard generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:  # of a file or a connection that the user named
        where = "" if e.filename is None else f" ({e.filename})"
        print(f"callboard: {e.strerror or e}{where}; check the path, its permissions and its disk.", file=sys.stderr)
        return 1
    except UnicodeDecodeError as e:
        print(f"callboard: The input is not UTF-8 at byte {e.start}; convert it.", file=sys.stderr)
        return 1


# ---- the command line -----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="callboard", description="An LLM inference runtime made of Ray actors.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over OpenAI-compatible HTTP", formatter_class=_Formatter)
    _add_model(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    serve.add_argument("--port", type=_port, default=8000, help="port to listen on")
    serve.add_argument("--served-model-name", metavar="NAME", help="the name that clients use; default: MODEL")
    fronts = "front replicas that share the engines; default: one per 4 CPUs, at most 4"
    serve.add_argument("--num-fronts", type=_positive, metavar="N", help=fronts)
    _add_flags(serve.add_argument_group("scaling", "how many model replicas there are"), ScalingSettings)
    _add_flags(serve.add_argument_group("http", "what the front door allows"), HttpSettings)
    _add_engine_flags(serve)
    serve.set_defaults(run=_serve)

    doctor = commands.add_parser("doctor", help="check this machine, and tell what to fix", formatter_class=_Formatter)
    doctor.add_argument("--address", metavar="HOST:PORT", help="a Ray cluster that must be reachable")
    doctor.set_defaults(run=_doctor)

    models = commands.add_parser("models", help="list the models that run, and what of them is verified")
    models.set_defaults(run=_models)

    inspect = commands.add_parser(
        "inspect", help="tell what a model is, without loading its weights", formatter_class=_Formatter
    )
    _add_model(inspect)
    _add_engine_flags(inspect)
    inspect.set_defaults(run=_inspect)

    chat = commands.add_parser("chat", help="talk to a model in the terminal", formatter_class=_Formatter)
    _add_model(chat)
    chat.add_argument("--url", help="talk to a server, such as http://127.0.0.1:8000, instead of loading the model")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_sampling_flags(chat, None)
    _add_engine_flags(chat)
    chat.set_defaults(run=_chat)

    chaos = commands.add_parser(
        "chaos", help="kill processes of a running server while it streams, and count", formatter_class=_Formatter
    )
    chaos.add_argument("url", help="of a server of yours on this machine, such as http://127.0.0.1:8000")
    what = "what to kill, one after another, with commas between: engine, runner, draft, supervisor, front"
    chaos.add_argument("--kill", metavar="NAMES", type=_roles, default=(), help=f"{what}; default: keys say so")
    chaos.add_argument("--every", type=_seconds, default=5.0, metavar="SECONDS", help="between two kills")
    chaos.add_argument("--streams", type=_positive, default=100, metavar="N", help="conversations at once")
    chaos.add_argument("--max-tokens", type=_positive, default=200, metavar="N", help="tokens of each answer")
    chaos.add_argument("--application", metavar="NAME", help="which one, if several run on the same Ray")
    chaos.add_argument("--api-key", metavar="KEY", help="of the server, if it has any")
    chaos.set_defaults(run=_chaos)

    again = commands.add_parser(
        "replay", help="send a request again and compare the answers, to the bit", formatter_class=_Formatter
    )
    what = "the id of an answer of this server, or a JSON file that has a `request` and its `answer`"
    again.add_argument("source", metavar="REQUEST_ID_OR_FILE", help=what)
    again.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    again.add_argument("--api-key", metavar="KEY", help="of the server, if it has any")
    again.add_argument("--save", metavar="FILE", help="write the request and its new answer to a file to replay")
    again.set_defaults(run=_replay)

    generate = commands.add_parser("generate", help="complete a text on stdout", formatter_class=_Formatter)
    generate.add_argument("prompt", help="the text to go on with; - reads it from stdin")
    generate.add_argument("--model", default=DEFAULT_MODEL, help=_help("model"))
    _add_sampling_flags(generate, 128)
    _add_engine_flags(generate)
    generate.set_defaults(run=_generate)
    return parser


class _Version(argparse.Action):
    """Asks for the version only when it is wanted: that reads the metadata of installed packages."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version

        print(f"callboard {version('callboard')}")
        parser.exit()


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each flag's default once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _help(name: str) -> str:
    return str(next(f.metadata["help"] for f in fields(EngineConfig) if f.name == name))


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=_help("model"))


def _add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    what = "most tokens of output" + ("" if max_tokens else "; default: as many as fit")
    group.add_argument("--max-tokens", type=_positive, default=max_tokens, metavar="N", help=what)
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: the model's, or 0.7")
    what = "sample from this share of probability; default: the model's, or 1"
    group.add_argument("--top-p", type=float, metavar="X", help=what)
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same output; default: a random one")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of EngineConfig but the model."""
    policies = "each from --device on is a policy: it changes speed or memory, and tokens at most by rounding"
    _add_flags(parser.add_argument_group("engine", policies), EngineConfig)


def _add_flags(group: argparse._ArgumentGroup, config: type) -> None:
    """A flag for every field of a dataclass but the model."""
    types_of = get_type_hints(config)
    for f in fields(config):
        if f.name == "model":
            continue
        flag, kind, text = "--" + f.name.replace("_", "-"), types_of[f.name], f.metadata["help"]
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
            continue
        if kind == tuple[str, ...]:
            group.add_argument(flag, action="append", metavar="TEXT", help=text)
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else None
        if choices:
            kind = type(choices[0])
        elif isinstance(kind, types.UnionType):  # X | None
            kind = get_args(kind)[0]
            kind = _number_or_auto if kind is int else kind
        metavar = None if choices else {int: "N", _number_or_auto: "N|auto", float: "X", str: "NAME"}[kind]
        group.add_argument(flag, type=kind, choices=choices, default=f.default, metavar=metavar, help=text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; it must be between 1 and 65535")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def _roles(text: str) -> tuple[str, ...]:
    known, names = ("engine", "runner", "draft", "supervisor", "front"), tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def _number_or_auto(text: str) -> int | None:
    """auto is the default of a number that has none: the engine finds what suits."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number or auto")
    return None if text == "auto" else int(text)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    config: EngineConfig = _checked(EngineConfig, **_values(args, EngineConfig))
    return config


def _values(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """What is given for the fields of a dataclass of settings."""
    values = {f.name: getattr(args, f.name) for f in fields(settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}


def _http_settings(args: argparse.Namespace) -> HttpSettings:
    """Raises CallboardError if a value is out of range or the file of keys cannot be read."""
    settings: HttpSettings = _checked(HttpSettings, **_values(args, HttpSettings))
    for name in ("api_key_file", "lora_folder", "batch_folder"):
        if (path := getattr(settings, name)) is not None:  # the fronts have another working directory
            settings = replace(settings, **{name: os.path.abspath(path)})
    settings.api_keys()
    return settings


def _checked(make: type, **values: Any) -> Any:
    """`make(**values)`, where a value out of range is the user's."""
    try:
        return make(**values)
    except CallboardError as e:
        raise _UsageError(str(e)) from None


def _sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that are given; wrong ones are told before a model is loaded."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    _checked(SamplingParams, **given)
    return given


# ---- the commands ---------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    from serve_app.server import ServerSettings, serve

    if config.chat_template is not None:  # the fronts have another working directory
        config = replace(config, chat_template=os.path.abspath(config.chat_template))
    config = replace(config, lora=tuple(f"{name}={os.path.abspath(path)}" for name, path in config.adapters.items()))
    http = _http_settings(args).listening_on(args.host)
    http.check_extras()
    if http.lora_folder is not None and not config.max_loras:
        raise _UsageError("--lora-folder is given, but there is no room for adapters; give --max-loras, too.")
    serve(
        ServerSettings(
            config,
            http,
            host=args.host,
            port=args.port,
            served_model_name=args.served_model_name,
            scaling=_checked(ScalingSettings, **{f.name: getattr(args, f.name) for f in fields(ScalingSettings)}),
            num_fronts=args.num_fronts,
        )
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from serve_app.doctor import report

    return report(args.address)


def _models(args: argparse.Namespace) -> int:
    from runtime.inspection import families

    print(families())
    return 0


def _inspect(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    from runtime.inspection import model_report

    print(model_report(config))
    return 0


def _generate(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    given = _sampling_fields(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    from runtime.llm import LLM
    from serve_app.chat import TERMINAL_DEFAULTS

    llm = LLM(**asdict(config))
    params = SamplingParams(**TERMINAL_DEFAULTS | llm.defaults.values | given)
    with closing(llm.stream(prompt, params)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
    return 0


def _chaos(args: argparse.Namespace) -> int:
    from serve_app.chaos import Plan, chaos

    plan = Plan(args.kill, args.every, args.streams, args.max_tokens, args.application, args.api_key)
    return chaos(args.url, plan)


def _replay(args: argparse.Namespace) -> int:
    from serve_app.replay import replay

    return replay(args.source, args.url, args.api_key, args.save)


def _chat(args: argparse.Namespace) -> int:
    given = _sampling_fields(args)
    config = _engine_config(args)
    from serve_app.chat import LocalModel, RemoteModel, talk

    talk(RemoteModel(args.url, given) if args.url else LocalModel(config, given), args.system)
    return 0


if __name__ == "__main__":
    sys.exit(main())

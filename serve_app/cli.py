"""The `callboard` command: serve a model, talk to one, complete a text, or tell what a model is.

Nothing heavy is imported before a command needs it, so that --help and usage errors are immediate. Exit codes: 0 done,
1 it failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout, suppress
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from actors.environment import LOOPBACK_WORKERS, SINGLE_MACHINE, end_haproxy, private_haproxy
from runtime.core.config import DEFAULT_MODEL, EngineConfig
from runtime.core.types import CallboardError, SamplingParams
from serve_app.settings import HttpSettings

APP_NAME = "callboard"
_POLL_S = 0.05
_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest sensible one: no tensor ever goes through it


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


# ---- the command line -----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="callboard", description="An LLM inference runtime made of Ray actors.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over OpenAI-compatible HTTP", formatter_class=_Formatter)
    _add_model(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    serve.add_argument("--port", type=_port, default=8000, help="port to listen on")
    serve.add_argument("--served-model-name", metavar="NAME", help="the name that clients use; default: MODEL")
    serve.add_argument("--num-replicas", type=_positive, default=1, metavar="N", help="model replicas")
    fronts = "front replicas that share them; default: one per 4 CPUs, at most 4"
    serve.add_argument("--num-fronts", type=_positive, metavar="N", help=fronts)
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

    generate = commands.add_parser("generate", help="complete a text on stdout", formatter_class=_Formatter)
    generate.add_argument("prompt", help="the text to go on with; - reads it from stdin")
    generate.add_argument("--model", default=DEFAULT_MODEL, help=_help("model"))
    _add_sampling_flags(generate, 128)
    _add_engine_flags(generate)
    generate.set_defaults(run=_generate)
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each flag's default once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _help(name: str) -> str:
    return next(f.metadata["help"] for f in fields(EngineConfig) if f.name == name)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=_help("model"))


def _add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    what = "most tokens of output" + ("" if max_tokens else "; default: as many as fit")
    group.add_argument("--max-tokens", type=_positive, default=max_tokens, metavar="N", help=what)
    group.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="sample from this share of probability")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same output; default: a random one")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of EngineConfig but the model."""
    _add_flags(
        parser.add_argument_group("engine", "each is a policy: it changes speed or memory, never tokens"), EngineConfig
    )


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


def _number_or_auto(text: str) -> int | None:
    """auto is the default of a number that has none: the engine finds what suits."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number or auto")
    return None if text == "auto" else int(text)


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(args, f.name) for f in fields(EngineConfig)}


def _http_settings(args: argparse.Namespace) -> HttpSettings:
    """Raises CallboardError if a value is out of range or the file of keys cannot be read."""
    values = {f.name: getattr(args, f.name) for f in fields(HttpSettings)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    settings: HttpSettings = _checked(HttpSettings, **{k: v for k, v in values.items() if v is not None})
    if settings.api_key_file is not None:  # the fronts have another working directory
        settings = replace(settings, api_key_file=os.path.abspath(settings.api_key_file))
    settings.api_keys()
    return settings


def _checked(make: type, **values: Any) -> Any:
    """`make(**values)`, where a value out of range is the user's."""
    try:
        return make(**values)
    except CallboardError as e:
        raise _UsageError(str(e)) from None


def _sampling_params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    params: SamplingParams = _checked(
        SamplingParams, max_tokens=max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    return params


# ---- callboard serve ------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    config: EngineConfig = _checked(EngineConfig, **_engine_settings(args))
    settings = _http_settings(args)
    _check_port(args.host, args.port)
    from runtime.loading.resolve import resolve
    from runtime.text.tokenizer import Tokenizer

    Tokenizer.load(resolve(config.model, config.revision))  # what cannot be read is told now, not by actors later
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="callboard-") as folder:
        for name, value in {**SINGLE_MACHINE, **private_haproxy(folder)}.items():
            os.environ.setdefault(name, value)
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            _start(args, config, settings)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
            _announce(args, config)
            stop.wait()
            _drain(args, settings)
        finally:
            _stop()
            end_haproxy(folder)
    return 0


def _check_port(host: str, port: int) -> None:
    """Raises CallboardError if the server could not listen there. This comes before anything that takes time."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as e:
        raise CallboardError(f"{host!r} is no address of this machine ({e.strerror}); pass another --host.") from e
    except OSError as e:
        raise CallboardError(
            f"Port {port} on {host} cannot be used ({e.strerror}); stop what has it or pass another --port."
        ) from e


def _start(args: argparse.Namespace, config: EngineConfig, settings: HttpSettings) -> None:
    """Ray, Serve and the application; returns when the model answers through every front."""
    import logging

    import ray
    from ray import serve

    from serve_app.app import AppArgs, build_app, failure_of

    num_actors = args.num_replicas * (1 + config.tensor_parallel_size) + (args.num_fronts or 0)
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_actors),  # logical: they place actors, they do not limit threads
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
        runtime_env=LOOPBACK_WORKERS,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": args.host, "port": args.port}, logging_config={"enable_access_log": False})
    app = build_app(
        AppArgs(
            **_engine_settings(args),
            **asdict(settings),
            served_model_name=args.served_model_name,
            num_replicas=args.num_replicas,
            num_fronts=args.num_fronts,
        )
    )
    try:
        serve.run(app, name=APP_NAME)
    except RuntimeError as e:
        raise CallboardError(failure_of(APP_NAME) or str(e)) from e
    while not _fronts_are_connected(args):
        if reason := failure_of(APP_NAME):
            raise CallboardError(reason)
        time.sleep(_POLL_S)


def _engines(args: argparse.Namespace) -> list[Any]:
    from actors.supervisor import find_engine
    from serve_app.app import engine_name

    return [find_engine(engine_name(APP_NAME, rank)) for rank in range(args.num_replicas)]


def _fronts_are_connected(args: argparse.Namespace) -> bool:
    """Whether each front has opened its link to each engine, which it does when it has all else."""
    import ray
    from ray import serve

    deployment = serve.status().applications[APP_NAME].deployments["Front"]
    stats = ray.get([engine.stats.remote() for engine in _engines(args)])
    return all(s["connections"] >= sum(deployment.replica_states.values()) for s in stats)


def _drain(args: argparse.Namespace, settings: HttpSettings) -> None:
    """No new requests, and time for those that run; a second signal ends the wait."""
    import ray
    from ray import serve

    from actors.supervisor import DRAINING

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    print(f"Stopping; running requests have {settings.drain_timeout_s:g} s to end.", file=sys.stderr, flush=True)
    end = time.monotonic() + settings.drain_timeout_s
    with suppress(KeyboardInterrupt, CallboardError, ray.exceptions.RayError):  # an engine that is dead has none
        engines = _engines(args)
        ray.get([engine.drain.remote(DRAINING) for engine in engines])
        while any(ray.get([engine.num_live.remote() for engine in engines])) and time.monotonic() < end:
            time.sleep(_POLL_S)
        # The fronts still write what their readers have not taken; HAProxy lives until Serve itself is shut down.
        serve.delete(APP_NAME, _blocking=False)
        while APP_NAME in serve.status().applications and time.monotonic() < end:
            time.sleep(_POLL_S)


def _stop() -> None:
    """Serve first: it is what stops HAProxy. A second Ctrl-C interrupts this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        # Ray prints that the controller's last task was not answered, since that task ends the controller.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            sys.modules["ray.serve"].shutdown()
            ray.shutdown()


def _announce(args: argparse.Namespace, config: EngineConfig) -> None:
    """How the engine started, on stderr, and how to use it."""
    import ray

    from actors.supervisor import find_engine
    from serve_app.app import engine_name

    for line in ray.get(find_engine(engine_name(APP_NAME, 0)).phases.remote()):
        print(line, file=sys.stderr, flush=True)
    host = "127.0.0.1" if args.host in ("0.0.0.0", "::") else args.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{args.port}"
    name = args.served_model_name or config.model
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    draft = f" (draft: {config.draft})" if config.draft else ""
    print(f"Callboard serves {name}{draft} at {url}/v1", flush=True)
    print(f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


def _doctor(args: argparse.Namespace) -> int:
    from serve_app.doctor import report

    return report(args.address)


def _models(args: argparse.Namespace) -> int:
    from runtime.inspection import families

    print(families())
    return 0


def _inspect(args: argparse.Namespace) -> int:
    config: EngineConfig = _checked(EngineConfig, **_engine_settings(args))
    from runtime.inspection import model_report

    print(model_report(config))
    return 0


# ---- callboard chat and callboard generate --------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    config: EngineConfig = _checked(EngineConfig, **_engine_settings(args))
    params = _sampling_params(args, args.max_tokens)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    from runtime.llm import LLM

    llm = LLM(**{f.name: getattr(config, f.name) for f in fields(config)})
    with closing(llm.stream(prompt, params)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
    return 0


def _chat(args: argparse.Namespace) -> int:
    _sampling_params(args, args.max_tokens or 1)  # wrong flags are told before a model is loaded
    partner = _Remote(args) if args.url else _Local(args)
    history = [{"role": "system", "content": args.system}] if args.system else []
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing
    if sys.stdin.isatty():
        print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not text.strip():
            continue
        messages = [*history, {"role": "user", "content": text}]
        answer = ""
        try:
            with closing(partner.answer(messages)) as pieces:
                for piece in pieces:
                    answer += piece
                    print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print()
        except CallboardError as e:
            if not sys.stdin.isatty():
                raise
            print(f"callboard: {e}", file=sys.stderr)
            continue
        history = [*messages, {"role": "assistant", "content": answer}]


class _Local:
    """A model in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        config: EngineConfig = _checked(EngineConfig, **_engine_settings(args))
        from runtime.llm import LLM

        self._llm = LLM(**{f.name: getattr(config, f.name) for f in fields(config)})
        self._args = args

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        prompt = self._llm.chat_prompt(messages)
        room = self._llm.runner.info.max_model_len - len(prompt)
        if room < 1:
            raise CallboardError("The conversation fills the model's context; start a new chat.")
        return self._llm.stream(prompt, _sampling_params(self._args, self._args.max_tokens or room))


class _Remote:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, args: argparse.Namespace) -> None:
        import httpx

        self._base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._args = args
        self._http = httpx.Client(timeout=httpx.Timeout(10, read=None))
        try:
            models = self._http.get(f"{self._base}/models").raise_for_status().json()
            self._model = models["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as e:
            raise CallboardError(f"No OpenAI-compatible server answers at {self._base}: {e}; check --url.") from e

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        import httpx

        args = self._args
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "max_tokens": args.max_tokens,
            "seed": args.seed,
        }
        body = {key: value for key, value in body.items() if value is not None}
        try:
            with self._http.stream("POST", f"{self._base}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise CallboardError(_error_message(response.text))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise CallboardError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPError as e:
            raise CallboardError(f"The connection to {self._base} failed: {e or type(e).__name__}.") from e


def _error_message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered: {body[:200]}"


if __name__ == "__main__":
    sys.exit(main())

"""`callboard bench`: measure the throughput and the latencies of an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError
from serve_app.command_line.flags import above_zero, add_client_key, at_least, client_key, positive, seconds

_CONCURRENCY = 4
_rate, _count = above_zero("requests per second", 1e6), at_least(0)
_SECONDS = 30.0  # default without a number of requests and seconds


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure the throughput and latencies of a running server")
    parser.add_argument("url", metavar="URL", help="of an OpenAI-compatible server, such as http://127.0.0.1:8000")
    load = parser.add_argument_group("load", "several levels run one after another and make a table and a plot")
    level = load.add_mutually_exclusive_group()
    what = "requests that run at the same time"
    level.add_argument("--concurrency", type=positive, nargs="+", metavar="N", help=f"{what}; default: {_CONCURRENCY}")
    what = "requests per second, at times of a Poisson process"
    level.add_argument("--rate", type=_rate, nargs="+", metavar="X", help=what)
    load.add_argument("--requests", type=positive, metavar="N", help="requests of each level")
    what = f"send requests for this long, then wait for the answers; default: {_SECONDS:g} without --requests"
    load.add_argument("--seconds", type=seconds, metavar="S", help=what)
    load.add_argument("--warmup", type=_count, default=1, metavar="N", help="requests before the first level")
    asked = parser.add_argument_group("requests")
    asked.add_argument("--api", choices=("chat", "completions"), default="chat", help="the endpoint")
    asked.add_argument("--model", metavar="NAME", help="default: the first model that the server lists")
    asked.add_argument("--prompt-tokens", type=positive, default=128, metavar="N", help="tokens of each prompt")
    asked.add_argument("--output-tokens", type=positive, default=128, metavar="N", help="tokens of each answer")
    what = "tokens before each prompt that all prompts have in common"
    asked.add_argument("--shared-prefix", type=_count, default=0, metavar="N", help=what)
    what = "N random pictures of this size in each request of a chat; default of N: 1"
    asked.add_argument("--image", type=_image, metavar="WxH[xN]", help=what)
    asked.add_argument("--seed", type=_count, metavar="N", help="same seed, same prompts; default: a random one")
    what = "more fields of each request as an object; null removes one, such as ignore_eos for a strict server"
    asked.add_argument("--fields", type=_fields, metavar="JSON", help=what)
    add_client_key(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--output", type=Path, metavar="FILE.json", help="write all figures and times")
    files.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the latencies over the throughput")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 32)
    if args.image and args.api != "chat":
        raise CallboardError("--image needs --api chat; completions have no pictures.")
    from serve_app.bench.benchmark import LoadPlan, bench
    from serve_app.bench.client import Client

    plan = LoadPlan(
        levels=args.rate or args.concurrency or [_CONCURRENCY],
        is_rate=args.rate is not None,
        num_requests=args.requests,
        seconds=args.seconds if args.seconds or args.requests else _SECONDS,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        shared_prefix=args.shared_prefix,
        seed=args.seed,
        num_warmup=args.warmup,
        chat=args.api == "chat",
        fields=args.fields or {},
        image=args.image,
    )
    client = Client(args.url, plan.fields, chat=plan.chat, model=args.model, api_key=client_key(args))
    return bench(client, plan, args.output, args.plot)


def _image(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if len(sizes) not in (2, 3) or not all(size.isdecimal() and 1 <= int(size) <= 1 << 14 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be a width and a height in pixels, such as 1024x768")
    return (*map(int, sizes), 1)[:3]


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return fields

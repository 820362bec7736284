"""`callboard generate`: complete a text on stdout."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Any

from runtime.core.config import DEFAULT_MODEL
from runtime.core.types import SamplingParams
from serve_app.commands.flags import (
    Formatter,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    help_of,
    sampling_fields,
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete a text on stdout", formatter_class=Formatter)
    parser.add_argument("prompt", help="the text to go on with; - reads it from stdin")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=help_of("model"))
    add_sampling_flags(parser, 128)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    given = sampling_fields(args)
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

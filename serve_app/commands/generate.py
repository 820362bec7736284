"""`callboard generate`: complete a text on stdout."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.base.types import SamplingParams
from serve_app.command_line.flags import (
    DEFAULT_SHOWN,
    add_flags,
    add_sampling_flags,
    engine_config,
    help_of,
    sampling_fields,
)

_MOST_USED = {
    "model": "short name, hub id, folder or .gguf file; default: SmolLM2-135M-Instruct",
    "max-tokens": "most tokens of output",
    "temperature": "0 is greedy",
    "seed": "same seed, same output",
    "quantization FORM": "weights in 8 or 4 bits: fp8, int8, int4 or nf4",
    "device": "where the model runs",
}
_EXAMPLES = ('callboard generate "Once upon a time"', "callboard generate - --model model.gguf --temperature 0 <text")


def add_parser(commands: Any) -> None:
    what = "complete a text on stdout"
    parser = commands.add_parser("generate", help=what, most_used=_MOST_USED, examples=_EXAMPLES)
    parser.add_argument("prompt", help="the text to go on with; - reads it from stdin")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="MODEL", help=f"{help_of('model')} ({DEFAULT_SHOWN})")
    add_sampling_flags(parser, 128)
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    given = sampling_fields(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    from serve_app.terminal.loading import load
    from serve_app.terminal.partners import TERMINAL_DEFAULTS

    llm = load(config)
    params = SamplingParams(**TERMINAL_DEFAULTS | llm.defaults.values | given)
    with closing(llm.stream(prompt, params)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
    return 0

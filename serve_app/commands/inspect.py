"""`callboard inspect`: describe a model without loading its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runtime.base.config import EngineConfig
from serve_app.command_line.flags import add_flags, add_model, engine_config

_MOST_USED = {
    "quantization FORM": "weights in 8 or 4 bits: fp8, int8, int4 or nf4",
    "max-model-len N": "longest prompt + output in tokens",
    "tensor-parallel-size": "GPUs that share the model",
    "device": "where the model would run",
}
_EXAMPLES = ("callboard inspect Qwen/Qwen3-0.6B", "callboard inspect model.gguf --max-model-len 8192")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect", help="describe a model without loading its weights", most_used=_MOST_USED, examples=_EXAMPLES
    )
    add_model(parser)
    what = "write the tokenizer's files there, for clients that read them from a folder"
    parser.add_argument("--save-tokenizer", type=Path, metavar="FOLDER", help=what)
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from runtime.inspection import model_report, save_tokenizer

    print(model_report(config))
    if args.save_tokenizer is not None:
        save_tokenizer(config, args.save_tokenizer)
    return 0

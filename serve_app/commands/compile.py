"""`callboard compile`: compile a model's GPU kernels before its first start, on any machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runtime.base.config import EngineConfig
from serve_app.command_line.flags import add_flags, add_model, engine_config

_MOST_USED = {
    "target SM": "the GPUs' kind, such as sm_90a (H100, H200); several are allowed",
    "cache FOLDER": "the folder to fill",
    "quantization FORM": "weights in 8 or 4 bits: fp8, int8, int4 or nf4",
    "max-model-len N": "longest prompt + output in tokens",
    "tensor-parallel-size": "GPUs that share the model",
}
_EXAMPLES = (
    "callboard compile Qwen/Qwen3-8B",
    "callboard compile Qwen/Qwen3-8B --target sm_90a sm_80 --cache /opt/kernels --quantization fp8",
)


def add_parser(commands: Any) -> None:
    what = "compile a model's GPU kernels before its first start"
    parser = commands.add_parser("compile", help=what, most_used=_MOST_USED, examples=_EXAMPLES)
    add_model(parser)
    what = "kinds of GPUs: sm_80, sm_89, sm_90a or sm_100a, with :N for N multiprocessors; default: sm_90a"
    parser.add_argument("--target", nargs="+", default=["sm_90a"], metavar="SM", help=what)
    what = "the folder to fill, for TRITON_CACHE_DIR of the servers; default: Triton's own"
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help=what)
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from runtime.compilation.fill import fill_cache

    fill_cache(config, args.target, args.cache, print)
    return 0

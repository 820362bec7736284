"""LFM2 on a CPU against transformers: a random model of SmolLM2-135M's size, the same weights and threads, in turns.

    python -m benchmarks.cpu_peers.transformers_lfm2 --output benchmarks/results/cpu_peers_lfm2.jsonl
    python -m benchmarks.cpu_peers.transformers_lfm2 --weights float32 --threads 1

Both sides compute in float32. The checkpoint is in bfloat16, like published ones. Callboard is also measured with
weights that it quantizes as it loads. `benchmarks.cpu_peers` explains cells, rounds and ratios."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_peers.figures import CALLBOARD, Row, rows_of, table
from benchmarks.cpu_peers.machine import cpu, environment_of, versions
from benchmarks.cpu_peers.side import Side, closing_all, in_turns
from benchmarks.library.measure import Results

PEER = "transformers"
CELLS = ("decode", "prompt")
SHAPE: dict[str, Any] = {  # of SmolLM2-135M; two layers of five have attention
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True,
    "layer_types": ["full_attention" if layer % 5 in (2, 4) else "conv" for layer in range(30)],
}  # fmt: skip


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=("bfloat16", "float32"), default="bfloat16", help="of the checkpoint")
    parser.add_argument("--quantization", nargs="*", default=["none", "int8", "int4"], metavar="NAME", help="at load")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, len(os.sched_getaffinity(0))], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each cell")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native", help="instructions of both sides")
    parser.add_argument("--output", "--out", type=Path, metavar="FILE", help="append JSON lines to this file")
    return parser


def write_checkpoint(folder: Path, dtype: str) -> None:
    """A random LFM2 with weights in a dtype, without a tokenizer."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    Lfm2ForCausalLM(Lfm2Config(**SHAPE)).to(getattr(torch, dtype)).save_pretrained(folder)


def measure(args: argparse.Namespace, folder: Path, threads: int, results: Results) -> list[Row]:
    """The rows of all cells with a number of threads."""
    env, rows, common = environment_of(args.isa), list[Row](), {"model": str(folder), "threads": threads}
    sides = dict[str, Side]()
    with closing_all(sides):
        for name in args.quantization:
            given = common | {"set": ["dtype=float32", f"quantization={name}"], "has_text": False}
            sides[name] = Side("callboard", given, env)
        sides[PEER] = Side("transformers_side", common | {"dtype": "float32"}, env)
        for cell in CELLS:
            found = in_turns(sides, cell, args.rounds, args.new_tokens)
            for name in args.quantization:
                pair = {CALLBOARD: found[name], PEER: found[PEER]}
                rows += rows_of(cell, threads, pair, "" if name == "none" else f"{name} ")
        facts = {name: side.facts for name, side in sides.items()}
    name, flags = cpu()
    for row in rows:
        results.add(
            cpu=name, cpu_flags=flags, load=os.getloadavg()[0], packages=versions(), isa=args.isa, weights=args.weights,
            model="random LFM2 of SmolLM2-135M's size", cell=row.cell, figure=row.text, threads=threads,
            rounds=args.rounds, new_tokens=args.new_tokens, sides=facts, medians=row.medians, ranges=row.ranges,
            ratios=row.ratios,
        )  # fmt: skip
    return rows


def main() -> None:
    args = new_parser().parse_args()
    if find_spec("transformers") is None:
        sys.exit("The package transformers is not installed.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit that ends the sides too
    results = Results("cpu_peers_lfm2", args.output, show=False)
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), args.weights)
        threads = dict.fromkeys(args.threads)
        rows = [row for number in threads for row in measure(args, Path(name), number, results)]
    print(f"\nLFM2 with weights in {args.weights}, float32 rows\n\n{table(rows, [CALLBOARD, PEER])}\n")


if __name__ == "__main__":
    main()

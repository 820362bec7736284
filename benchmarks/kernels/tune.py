"""Finds launch configurations of an operation on a GPU, and times it against the bytes' floor.

    python -m benchmarks.kernels.tune linear --rows 1 8 16 --write       # kernels/linear/skinny_gemm_configs.py
    python -m benchmarks.kernels.tune quantized --forms int4 fp8 --rows 1 8 64 --shapes llama-3.1-8b
    python -m benchmarks.kernels.tune experts --shapes gpt-oss-120b --forms mxfp4 --rows 4 64 --rules
    TRITON_INTERPRET=1 python -m benchmarks.kernels.tune digits --shapes tiny --rows 20  # on a CPU, without times

An operation is a row of a table: its shapes, its forms of weights, its candidates and its layers. All candidates are
compiled first, in processes side by side. Then each part of a layer gets each candidate in turn, among its neighbours:
their starts and ends overlap with its own. Layers have data of their own, so that the cache holds none of it, and form
one CUDA graph. `--rules` times the configurations of serving alone.

Prints a JSON line for each candidate, and one for the best of each cell with the library's time. Times are microseconds
a layer. The floor is the time to read a layer's bytes once at the measured memory speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.kernels.timing import DEVICE, HBM_BYTES_S, compile_ahead, compile_only, graph_us
from benchmarks.kernels.tuned_experts import EXPERTS
from benchmarks.kernels.tuned_products import PRODUCTS, write_table
from benchmarks.kernels.tuning import Cell, Choices, Layers, Operation
from benchmarks.library.measure import Results, new_parser
from runtime.kernels.triton_language import INTERPRETED

OPERATIONS: dict[str, Operation] = {**PRODUCTS, "experts": EXPERTS}
_SHARES = 16  # of a cell's candidates, which processes compile side by side
_WORTH = 0.997  # of the best time; smaller differences are noise


def compile_share(job: tuple[str, Cell, bool, int]) -> str:
    """Compile one of `_SHARES` shares of a cell's candidates, without the GPU."""
    name, cell, has_candidates, share = job
    errors = []
    with compile_only():
        layers = OPERATIONS[name].make(cell, "meta")
        for part, config in itertools.islice(_tried(layers, has_candidates), share, None, _SHARES):
            try:
                layers.run({part: config})
            except Exception as error:  # a candidate that does not fit does not stop the others
                errors.append(f"{name} {cell} {part} {config}: {error!r:.200}")
    return "\n".join(errors)


def _tried(layers: Layers, has_candidates: bool) -> Iterator[tuple[str, Any]]:
    """Yield the rule's configuration and then each candidate."""
    yield next(iter(layers.parts)), None
    for part, candidates in layers.parts.items() if has_candidates else ():
        for config in candidates:
            yield part, config


def microseconds(run: Callable[[], object], num_layers: int, warm_up: float) -> float | None:
    """Return the time of a layer; None if it cannot run, and under the interpreter."""
    try:
        if INTERPRETED:
            run()
            return None
        return graph_us(run, warm_up) / num_layers
    except Exception as error:  # a candidate that does not fit does not stop the others
        print(f"{error!r:.200}", flush=True)
        return None


def tune(cell: Cell, layers: Layers, has_candidates: bool) -> Iterator[dict[str, Any]]:
    """Yield a line for each candidate, and one for the best choices of the cell."""
    exact, chosen = layers.exact(), Choices()
    fields = {"shape": cell.shape, "form": cell.form, "rows": cell.rows}

    def timed(choices: Choices, warm_up: float = 0.01) -> float:
        us = microseconds(lambda: layers.run(choices), layers.num_layers, warm_up)
        return math.inf if us is None else us

    def error(choices: Choices) -> float | None:
        try:
            pairs = list(zip(layers.results(choices), exact, strict=True))
        except Exception:  # `timed` has printed it
            return None
        return max(((got.double() - want).norm() / want.norm()).item() for got, want in pairs)

    figures: dict[str, Any]
    rule = best = timed(chosen, 0.4)
    rounds = min(2, len(layers.parts)) if has_candidates else 0  # the best of a part depends on the others
    for part in [*layers.parts] * rounds:
        for config in layers.parts[part]:
            tried = chosen | {part: config}
            us = timed(tried)
            figures = {"us": None if us == math.inf else us, "error": error(tried)}
            yield {"part": part, **fields, "candidate": config, **figures}
            if us < best * _WORTH:
                best, chosen = us, tried
    floor = layers.num_bytes / HBM_BYTES_S * 1e6
    figures = {"error": error(chosen)}
    if best < math.inf:
        figures |= {"us": best, "rule_us": rule, "floor_us": floor, "of_floor": floor / best}
        for name, run in layers.others().items():
            figures[f"{name}_us"] = microseconds(run, layers.num_layers, 0.05)
    yield {"part": "all", **fields, **figures, "configs": {part: config for part, config in chosen.items() if config}}


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--shapes", nargs="+", help="default: those of the table")
    parser.add_argument("--forms", nargs="+", help="forms of weights; default: those of the table")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--rules", action="store_true", help="only the configurations of serving")
    parser.add_argument("--write", action="store_true", help="write the best ones of `linear` into the tree")
    args = parser.parse_args()
    operation, results = OPERATIONS[args.operation], Results(f"tune_{args.operation}", args.out)
    shapes, forms = args.shapes or operation.defaults, args.forms or operation.forms
    for name, known in (*((s, operation.shapes) for s in shapes), *((f, operation.forms) for f in forms)):
        if name not in known:
            parser.error(f"{args.operation} has no {name!r}; it has {', '.join(known)}.")
    rows = [n for n in args.rows or operation.rows if operation.least_rows <= n <= operation.most_rows]
    cells = list(itertools.starmap(Cell, itertools.product(shapes, forms, rows)))
    if not INTERPRETED:
        shares = itertools.product([args.operation], cells, [not args.rules], range(1 if args.rules else _SHARES))
        for failed in compile_ahead(compile_share, shares):
            print(failed, flush=True)
    found = {}
    for cell in cells:
        torch.manual_seed(0)
        for line in tune(cell, operation.make(cell, DEVICE), not args.rules):
            results.add(**line)
        found[cell] = line["configs"]
    if args.write and args.operation == "linear":
        write_table(found)


if __name__ == "__main__":
    main()

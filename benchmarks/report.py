"""JSON lines of the benchmarks -> RESULTS.md with a table per subject, and a plot per table.

    python -m benchmarks.report benchmarks/results/*.jsonl

A later line replaces an earlier one of the same measurement. Plots need matplotlib (`pip install callboard[bench]`) and
are left out without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]

# What was measured of vLLM 0.23.0 with its defaults on the same card type, and the least that Callboard must reach.
DECODE_1 = {  # batch 1, 128 in / 512 out: tok/s at HBM's speed, peer, must, aim
    "llama-3.2-1b": (1793, 815, 1150, 1400),
    "llama-3.2-3b": (689, 370, 480, 560),
    "llama-3.1-8b": (296, 204, 225, 250),
    "qwen3-4b": (550, 279, 370, 450),
}
THROUGHPUT = {  # (model, batch, in, out): output tok/s of the peer
    **{("llama-3.2-1b", n, 128, 256): v for n, v in ((8, 6120), (32, 20390), (64, 34330), (128, 50000), (256, 63830))},
    **{("llama-3.2-3b", n, 128, 256): v for n, v in ((8, 2770), (64, 16690), (256, 32420))},
    **{("llama-3.1-8b", n, 128, 256): v for n, v in ((8, 1570), (32, 5490), (64, 9490), (128, 14650), (256, 18280))},
    ("llama-3.2-1b", 256, 512, 128): 33090,
    ("llama-3.1-8b", 256, 512, 128): 6870,
}
PREFILL = {  # (model, tokens): ms to the first token of the peer
    ("llama-3.2-1b", 512): 6.2, ("llama-3.2-1b", 2048): 11.5, ("llama-3.2-1b", 8192): 41.6,
    ("llama-3.2-3b", 512): 8.8, ("llama-3.2-3b", 2048): 24.4, ("llama-3.2-3b", 8192): 102,
    ("llama-3.1-8b", 512): 15.2, ("llama-3.1-8b", 2048): 53, ("llama-3.1-8b", 8192): 216,
}  # fmt: skip
SERVING = {  # (model, workload): figure -> the peer's
    ("llama-3.2-3b", "sequential"): {"output_tok_s": 367, "ttft_ms.p50": 8.8},
    ("llama-3.2-3b", "steady"): {"ttft_ms.p50": 12.5, "itl_ms.p50": 2.7},
    ("llama-3.2-3b", "burst48"): {"output_tok_s": 9060},
    ("llama-3.2-3b", "long-prompts"): {"ttft_ms.p50": 25, "itl_ms.p99": 10.7},
    ("llama-3.2-3b", "shared-prefix"): {"ttft_ms.p50": 11.4},
    ("llama-3.2-3b", "burst256"): {"output_tok_s": 19180},
    ("llama-3.2-1b", "burst256"): {"output_tok_s": 26500},
    ("llama-3.2-1b", "burst1024"): {"output_tok_s": 26000},
}


@dataclass(slots=True)
class Table:
    """One subject: rows of text cells, and (label, ours, peer's) of its plot."""

    title: str
    head: list[str]
    rows: list[list[str]]
    points: list[tuple[str, float, float | None]]
    unit: str


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(ours: float, must: float, less_is_better: bool = False) -> str:
    reached = ours <= must if less_is_better else ours >= must
    return "met" if reached else "**missed**"


def against(ours: float, peer: float | None, less_is_better: bool = False) -> list[str]:
    """The peer's figure, the ratio, and whether it is reached."""
    if peer is None:
        return ["-", "-", "-"]
    return [number(peer), f"{ours / peer:.2f}", verdict(ours, peer, less_is_better)]


def settings(line: Line) -> str:
    return ", ".join(f"{name}={value}" for name, value in line["config"].items()) or "default"


def latest(lines: Iterable[Line], key: Callable[[Line], Any]) -> list[Line]:
    """The last line of each measurement, in the order of the first ones."""
    return list({key(line): line for line in lines}.values())


def decode_table(lines: list[Line]) -> Table:
    head = [
        "model",
        "tok/s",
        "range",
        "step p50 / p99 ms",
        "floor",
        "peer",
        "must",
        "aim",
        "of floor",
        "must is",
        "config",
    ]
    table = Table("Decode, batch 1, 128 in / 512 out", head, [], [], "tok/s")
    for line in lines:
        bars = DECODE_1.get(line["model"])
        if (line["batch"], line["prompt_len"], line["output_len"]) != (1, 128, 512) or bars is None:
            continue
        ours, (floor, peer, must, aim) = line["decode_tok_s"], bars
        spread, step = line["decode_range"], line["step_ms"]
        table.rows.append([
            line["model"], number(ours), f"{number(spread[0])} - {number(spread[1])}",
            f"{number(step['p50'])} / {number(step['p99'])}", *map(number, (floor, peer, must, aim)),
            f"{ours / floor:.0%}", verdict(ours, must), settings(line),
        ])  # fmt: skip
        table.points.append((line["model"], ours, peer))
    return table


def throughput_table(lines: list[Line]) -> Table:
    head = ["model", "requests", "output tok/s", "range", "all first tokens, ms", "peer", "ratio", "must is", "config"]
    table = Table("Throughput, engine in process, prefill included", head, [], [], "tok/s")
    for line in lines:
        batch, inputs, outputs = line["batch"], line["prompt_len"], line["output_len"]
        if batch == 1:
            continue
        ours, spread = line["output_tok_s"], line["output_range"]
        peer = THROUGHPUT.get((line["model"], batch, inputs, outputs))
        cell = f"{batch} x ({inputs}, {outputs})"
        table.rows.append([
            line["model"], cell, number(ours), f"{number(spread[0])} - {number(spread[1])}",
            number(line["first_token_ms"]), *against(ours, peer), settings(line),
        ])  # fmt: skip
        table.points.append((f"{line['model']} {cell}", ours, peer))
    return table


def prefill_table(lines: list[Line]) -> Table:
    head = ["model", "tokens", "first token, ms", "range", "tok/s", "peer, ms", "ratio", "must is", "config"]
    table = Table("Prefill to the first token, one request", head, [], [], "ms")
    for line in lines:
        ours, spread, peer = line["first_token_ms"], line["range"], PREFILL.get((line["model"], line["prompt_len"]))
        table.rows.append([
            line["model"], number(line["prompt_len"]), number(ours), f"{number(spread[0])} - {number(spread[1])}",
            number(line["tok_s"]), *against(ours, peer, less_is_better=True), settings(line),
        ])  # fmt: skip
        table.points.append((f"{line['model']} {line['prompt_len']}", ours, peer))
    return table


def serving_table(lines: list[Line]) -> Table:
    """Medians over a workload's repeats; the peer's figures are of its own server over HTTP."""
    head = ["model", "workload", "through", "output tok/s", "TTFT p50 / p99 ms", "ITL p50 / p99 ms", "peer", "must is"]
    table = Table("Serving: named workloads, over HTTP and on the bare engine", head, [], [], "tok/s")
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["workload"], line["through"]), []).append(line)
    for (model, workload, through), runs in sorted(groups.items()):
        found = {
            name: median(run[name.split(".")[0]] if "." not in name else run[name[:-4]][name[-3:]] for run in runs)
            for name in ("output_tok_s", "ttft_ms.p50", "ttft_ms.p99", "itl_ms.p50", "itl_ms.p99")
        }
        peer = SERVING.get((model, workload), {}) if through == "http" else {}
        met = [verdict(found[name], value, name != "output_tok_s") for name, value in peer.items()]
        table.rows.append([
            model, workload, through, number(found["output_tok_s"]),
            *(f"{number(found[f'{name}.p50'])} / {number(found[f'{name}.p99'])}" for name in ("ttft_ms", "itl_ms")),
            ", ".join(f"{name} {number(value)}" for name, value in peer.items()) or "-", ", ".join(met) or "-",
        ])  # fmt: skip
        table.points.append((f"{model} {workload} {through}", found["output_tok_s"], peer.get("output_tok_s")))
    return table


def profile_table(lines: list[Line]) -> Table:
    head = ["model", "batch", "step, ms", "traced step, ms", "GPU busy, ms", "busy, traced", "busy of plain step"]
    table = Table("The GPU's busy share in steady decoding (must: 97 %)", head, [], [], "busy share")
    for line in lines:
        times = (number(line[name]) for name in ("step_ms", "traced_step_ms", "busy_ms"))
        shares = (f"{line[name]:.1%}" for name in ("busy_share_traced", "busy_share"))
        table.rows.append([line["model"], str(line["batch"]), *times, *shares])
        table.points.append((f"{line['model']} {line['batch']}", line["busy_share"], None))
    return table


def agreement_table(lines: list[Line]) -> Table:
    head = ["model", "setting", "equal texts", "first difference, token", "largest gap there, nats"]
    table = Table("Settings that must not change tokens: greedy texts against the default's", head, [], [], "equal")
    for line in lines:
        earliest = min((at for _, at, _ in line["first_differences"]), default=None)
        equal = f"{line['equal']} of {line['prompts']}"
        table.rows.append([line["model"], line["variant"], equal, number(earliest), number(line["largest_gap"])])
        table.points.append((f"{line['model']} {line['variant']}", line["equal"] / line["prompts"], None))
    return table


def start_table(lines: list[Line]) -> Table:
    head = ["model", "ready, s", "seconds of each phase", "must, s", "must is"]
    table = Table("From a process's start to a ready engine, warm page cache and compile cache", head, [], [], "s")
    for line in lines:
        named = [(seconds, text.partition(":")[0]) for seconds, text in line["phases"]]
        phases = "; ".join(f"{number(seconds)} {name}" for seconds, name in named)
        must = 15.0 if "8b" in line["model"] else None
        met = "-" if must is None else verdict(line["ready_s"], must, less_is_better=True)
        table.rows.append([line["model"], number(line["ready_s"]), phases, number(must), met])
        table.points.append((line["model"], line["ready_s"], None))
    return table


def kernel_table(lines: list[Line]) -> Table:
    head = ["kernel", "shape", "cell", "us", "TB/s", "TFLOP/s", "of the ceiling", "library, us"]
    table = Table("Kernels against the card's ceilings", head, [], [], "of the ceiling")
    for line in lines:
        shape = str(line.get("model") or line.get("heads"))
        table.rows.append([
            line["kernel"], shape, str(line["cell"]), number(line["us"]), number(line.get("tb_s")),
            number(line.get("tflop_s")), f"{line['of_ceiling']:.0%}",
            number(line.get("library_us") or line.get("sdpa_us")),
        ])  # fmt: skip
        table.points.append((f"{line['kernel']} {shape} {line['cell']}", line["of_ceiling"], None))
    return table


def _fields(*names: str) -> Callable[[Line], Any]:
    return lambda line: tuple(str(line.get(name)) for name in names)


# Subject -> (its benchmarks, what tells its measurements apart, its table).
SUBJECTS: dict[str, tuple[tuple[str, ...], Callable[[Line], Any], Callable[[list[Line]], Table]]] = {
    "decode": (("decode",), _fields("model", "batch", "prompt_len", "output_len", "config"), decode_table),
    "throughput": (("decode",), _fields("model", "batch", "prompt_len", "output_len", "config"), throughput_table),
    "prefill": (("prefill",), _fields("model", "prompt_len", "config"), prefill_table),
    "serving": (("serving",), _fields("model", "workload", "through", "repeat", "config"), serving_table),
    "profile": (("profile_step",), _fields("model", "batch", "config"), profile_table),
    "agreement": (("agreement",), _fields("model", "variant", "config"), agreement_table),
    "start": (("start",), _fields("model", "config"), start_table),
    "kernels": (
        ("kernels", "kernels_attention"),
        _fields("kernel", "model", "heads", "cell", "block_size", "deterministic"),
        kernel_table,
    ),
}


def as_markdown(table: Table, lines: list[Line], plot: Path | None) -> str:
    rows = ["| " + " | ".join(row) + " |" for row in (table.head, ["---"] * len(table.head), *table.rows)]
    sources = sorted({(li["machine"], li["versions"]["torch"], li["versions"].get("triton", "-"),
                       li["versions"]["commit"], li["time"][:10], li["command"]) for li in lines})  # fmt: skip
    notes = [
        f"- `{command}` on {day}, commit {commit}: {machine}, torch {torch}, Triton {triton}"
        for machine, torch, triton, commit, day, command in sources
    ]
    image = [f"![{table.title}](plots/{plot.name})", ""] if plot else []
    return "\n".join([f"## {table.title}", "", *rows, "", *image, "Measured with:", "", *notes, ""])


def draw(table: Table, path: Path) -> None:
    """A horizontal bar for each row, the peer's as a mark across it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.28 * len(table.points)), layout="constrained")
    places = range(len(table.points))[::-1]
    axes.barh(places, [ours for _, ours, _ in table.points], color="#3b6ea5", label="Callboard")
    peers = [(peer, place) for place, (_, _, peer) in zip(places, table.points, strict=True) if peer is not None]
    if peers:
        axes.plot(*zip(*peers, strict=True), "|", color="#d1495b", markersize=12, markeredgewidth=2.5, label="peer")
        axes.legend()
    axes.set_yticks(places, [label for label, _, _ in table.points], fontsize=8)
    axes.set_xlabel(table.unit)
    axes.set_title(table.title, fontsize=10)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="folder of RESULTS.md and plots")
    parser.add_argument("--commit", default="unknown", help="of lines that were measured outside of a git checkout")
    args = parser.parse_args()
    lines = [json.loads(text) for file in args.files for text in file.read_text().splitlines()]
    for line in lines:
        if line["versions"]["commit"] == "unknown":
            line["versions"]["commit"] = args.commit
    has_plots = importlib.util.find_spec("matplotlib") is not None
    parts = [
        "# Results",
        "",
        "Made by `python -m benchmarks.report` from JSON lines; nothing here is written by hand. Random weights of the "
        "published shapes, greedy, EOS ignored. The peer is vLLM 0.23.0 with its defaults on the same card type.",
        "",
    ]
    for name, (benchmarks, key, tabulate) in SUBJECTS.items():
        own = latest((line for line in lines if line["benchmark"] in benchmarks), key)
        table = tabulate(own)
        if not table.rows:
            continue
        plot = args.into / "plots" / f"{name}.png" if has_plots else None
        if plot is not None:
            draw(table, plot)
        parts.append(as_markdown(table, own, plot))
    (args.into / "RESULTS.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()

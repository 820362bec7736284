"""JSON lines of the benchmarks -> RESULTS.md with a table per subject, and a plot per table.

    python -m benchmarks.library.report benchmarks/results/*.jsonl

A later line replaces an earlier one of the same measurement. Plots need matplotlib (`pip install callboard[bench]`);
without it the report links the plots that exist.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

BENCHMARKS = Path(__file__).parents[1]


def _peer(benchmark: str, keys: tuple[str, ...], values: tuple[str, ...]) -> dict[Any, tuple[Any, ...]]:
    """Figures of the peer by key; None if a line lacks the figure."""
    lines = map(json.loads, (BENCHMARKS / "results" / "peer.jsonl").read_text().splitlines())
    found = [line for line in lines if line["benchmark"] == f"peer {benchmark}"]
    return {tuple(line.get(key) for key in keys): tuple(line.get(name) for name in values) for line in found}


DECODE_1 = _peer("decode", ("model", "quantization"), ("memory_tok_s", "tok_s"))  # batch 1, 128 in, 512 out
THROUGHPUT = _peer("throughput", ("model", "quantization", "batch", "input", "output"), ("tok_s",))
PREFILL = _peer("prefill", ("model", "quantization", "tokens"), ("ms",))
SERVING = _peer("serving", ("model", "workload"), ("tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"))
RANKS = _peer("ranks", ("model", "gpus", "batch"), ("tok_s",))
PUBLISHED = _peer("published", ("model", "quantization", "batch"), ("first_ms", "token_ms", "tok_s", "by"))
ALL_REDUCE = _peer("all-reduce", ("kernel", "gpus"), ("us",))
_LONG = 8192  # prompt tokens in the cells that others publish
_MOST_BARS = 64  # bars in a plot; longer tables lack one


class Row(NamedTuple):
    """A table row's cells, and for its plot the label, the value, and the peer's."""

    cells: list[str]
    label: str
    value: float | None  # None if the plot leaves it out
    peer: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """One table: the lines that it shows, and the fields that identify a measurement."""

    title: str
    benchmarks: tuple[str, ...]
    keys: tuple[str, ...]
    head: str
    unit: str
    row: Callable[[Line], Row | None]  # None for other tables' lines
    note: str = ""  # after the table


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def span(pair: list[float]) -> str:
    return f"{number(pair[0])} - {number(pair[1])}"


def twice(figures: dict[str, float]) -> str:
    return f"{number(figures['p50'])} / {number(figures['p99'])}"


def settings(line: Line) -> str:
    return ", ".join(f"{name}={value}" for name, value in line["config"].items()) or "default"


def of_weights(line: Line) -> tuple[str, str | None]:
    """The model, and the form of its weights if the settings name one."""
    form = line["config"].get("quantization")
    return line["model"], None if form == "none" else form


def named(*parts: str | None) -> str:
    return " ".join(filter(None, parts))


def num_gpus(line: Line) -> int:
    return int(line["config"].get("tensor_parallel_size", 1))


def is_divided(line: Line) -> bool:
    return num_gpus(line) > 1 or "rank_invariant" in line["config"]


def is_greedy(line: Line) -> bool:
    return line.get("sampling", "temperature=0") == "temperature=0"


def decode(line: Line) -> Row | None:
    model, ours, bars = line["model"], line["decode_tok_s"], DECODE_1.get(of_weights(line))
    is_cell = (line["batch"], line["prompt_len"], line["output_len"]) == (1, 128, 512)
    if not is_cell or bars is None or is_divided(line) or not is_greedy(line):
        return None
    cells = [model, number(ours), span(line["decode_range"]), twice(line["step_ms"]), *map(number, bars)]
    return Row([*cells, f"{ours / bars[0]:.0%}", settings(line)], named(*of_weights(line)), ours, bars[1])


def throughput(line: Line) -> Row | None:
    model, batch, inputs, outputs = (line[name] for name in ("model", "batch", "prompt_len", "output_len"))
    if batch == 1 or is_divided(line) or not is_greedy(line):
        return None
    ours, peer = line["output_tok_s"], THROUGHPUT.get((*of_weights(line), batch, inputs, outputs), (None,))[0]
    cell = f"{batch} x ({inputs}, {outputs})"
    cells = [model, cell, number(ours), span(line["output_range"]), number(line["decode_tok_s"]), number(peer)]
    label = f"{model} {cell}" + (f" {settings(line)}" if line["config"] else "")
    return Row([*cells, number(peer and ours / peer), settings(line)], label, ours, peer)


def long_prompts(line: Line) -> Row | None:
    batch, inputs, outputs = (line[name] for name in ("batch", "prompt_len", "output_len"))
    if inputs < _LONG or is_divided(line) or not is_greedy(line):
        return None
    *figures, by = PUBLISHED.get((*of_weights(line), batch), (None,) * 4) if inputs == _LONG else (None,) * 4
    first = line["first_token_ms"] if batch == 1 else None  # of several requests, all have theirs by then
    ours = first, line["step_ms"]["p50"], line["output_tok_s"] if batch > 1 else None
    head = line["config"].get("head_quantization")
    label, cell = named(*of_weights(line), head and f"(head {head})"), f"{batch} x ({inputs}, {outputs})"
    cells = [label, cell, *map(number, ours), number(line["decode_tok_s"]), *map(number, figures), by or "-"]
    return Row(cells, f"{label} {cell}", line["decode_tok_s"])


def ranks(line: Line) -> Row | None:
    model, gpus, batch = line["model"], num_gpus(line), line["batch"]
    if not is_divided(line):
        return None
    ours = line["decode_tok_s"]
    peer = None if "rank_invariant" in line["config"] else RANKS.get((model, gpus, batch), (None,))[0]
    cell = f"{batch} x ({line['prompt_len']}, {line['output_len']})"
    cells = [model, str(gpus), cell, *map(number, (line["decode_tok_s"], line["output_tok_s"], line["first_token_ms"]))]
    mode = "rank_invariant" if "rank_invariant" in line["config"] else "default"
    return Row([*cells, number(peer), mode], f"{model} {gpus} GPUs {batch} {mode}", ours, peer)


def all_reduce(line: Line) -> Row | None:
    kernel, gpus, ours = line["kernel"], line["cell"], line["us"]
    if not kernel.startswith("all-reduce, "):
        return None
    published = ALL_REDUCE.get((kernel, gpus), (None,))[0]
    cells = [kernel, str(gpus), *map(number, (ours, line["library_us"], published))]
    return Row(cells, f"{kernel} {gpus} GPUs", ours, line["library_us"])


def sampled(line: Line) -> Row | None:
    if is_greedy(line):
        return None
    model, batch, sampling, ours = line["model"], line["batch"], line["sampling"], line["decode_tok_s"]
    cells = [model, str(batch), f"`{sampling}`", number(ours), span(line["decode_range"]), twice(line["step_ms"])]
    return Row([*cells, f"{line['of_greedy']:.1%}", settings(line)], f"{model} {batch} {sampling}", ours)


def prefill(line: Line) -> Row:
    model, tokens, ours = line["model"], line["prompt_len"], line["first_token_ms"]
    peer = PREFILL.get((*of_weights(line), tokens), (None,))[0]
    cells = [model, number(tokens), number(ours), span(line["range"]), number(line["tok_s"]), number(peer)]
    last = [number(peer and ours / peer), settings(line)]
    return Row([*cells, *last], named(*of_weights(line), str(tokens)), ours, peer)


def serving(line: Line) -> Row:
    model, workload, through = line["model"], line["workload"], line["through"]
    rate, ttft, itl = line["output_tok_s"], line["ttft_ms"], line["itl_ms"]
    peer = SERVING.get((model, workload), (None,) * 4) if through == "http" else (None,) * 4
    is_mixed = workload.startswith("chats-beside")
    shown = f"{workload} (first token of long prompts: {twice(line['long_ttft_ms'])})" if is_mixed else workload
    if workload.startswith("sharegpt"):
        shown += f" (input and output: {number(line['total_tok_s'])} tok/s)"
    label = named(*of_weights(line))
    cells = [label, shown, through, number(rate), twice(ttft), twice(itl), " / ".join(map(number, peer))]
    ratio = None if peer[0] is None else rate / peer[0]
    return Row([*cells, number(ratio)], f"{label} {workload}", ratio, 1.0)


def replicas(line: Line) -> Row:
    model, policy, rate, in_time = line["model"], line["policy"], line["rate"], line["output_tok_s_in_time"]
    ttft = " / ".join(number(line["ttft_ms"][name]) for name in ("p50", "p90", "p99"))
    cells = [model, str(line["replicas"]), line["workload"], policy, number(rate), number(line["output_tok_s"])]
    return Row([*cells, number(in_time), f"{1 - line['late']:.0%}", ttft], f"{policy} {rate:g}/s", in_time)


def profile(line: Line) -> Row:
    times = [number(line[name]) for name in ("step_ms", "traced_step_ms", "busy_ms")]
    share = line["busy_share"]
    cells = [line["model"], str(line["batch"]), *times, f"{line['busy_share_traced']:.1%}", f"{share:.1%}"]
    config = settings(line)
    return Row([*cells, config], f"{line['model']} {line['batch']} {config}", share)


def agreement(line: Line) -> Row:
    earliest = min((at for _, at, _ in line["first_differences"]), default=None)
    equal, label = f"{line['equal']} of {line['prompts']}", f"{line['model']} {line['variant']}"
    cells = [line["model"], line["variant"], equal, number(earliest), number(line["largest_gap"])]
    return Row(cells, label, line["equal"] / line["prompts"])


def start(line: Line) -> Row:
    label = named(*of_weights(line), line.get("cache", ""))
    return Row([label, number(line["imports_s"]), number(line["ready_s"])], label, line["ready_s"])


def soak(line: Line) -> Row:
    gib = [f"{line[when][kind] / 2**30:.2f}" for when in ("early", "late") for kind in ("reserved", "allocated")]
    cells = [line["model"], number(line["minutes"]), number(line["requests"]), *gib, settings(line)]
    return Row(cells, line["model"], line["late"]["reserved"] / line["early"]["reserved"], 1.0)


def kernels(line: Line) -> Row:
    shape, share = str(line.get("model") or line.get("heads")), line["of_ceiling"]
    rates = [number(line.get(name)) for name in ("us", "tb_s", "tflop_s")]
    library = number(line.get("library_us") or line.get("sdpa_us"))
    label = f"{line['kernel']} {shape} {line['cell']}"
    return Row([line["kernel"], shape, str(line["cell"]), *rates, f"{share:.0%}", library], label, share)


def weight_updates(line: Line) -> Row:
    way = named(line["way"], line["dtype"], "paused" if line["pauses"] else "", f"kv={line['kv']}")
    figures = [line[key] * 1e3 for key in ("send_s", "finish_s", "total_s", "longest_gap_s")]
    cells = [line["model"], way, f"{line['gb']:.2f}", str(line["streams"]), *map(number, figures), line["machine"]]
    return Row(cells, way, line["total_s"] * 1e3)


SUBJECTS = {
    "decode": Subject(
        "Decode, batch 1, 128 in / 512 out", ("decode",),
        ("model", "batch", "prompt_len", "output_len", "sampling", "config"),
        "model | tok/s | range | step p50 / p99 ms | floor | peer | of floor | config", "tok/s",
        decode,
    ),
    "throughput": Subject(
        "Throughput, engine in process, prefill included", ("decode",),
        ("model", "batch", "prompt_len", "output_len", "sampling", "config"),
        "model | requests (in, out) | output tok/s | range | decode tok/s | peer | ratio | config", "tok/s",
        throughput,
    ),
    "long_prompts": Subject(
        "Long prompts, beside figures that others publish", ("decode",),
        ("model", "batch", "prompt_len", "output_len", "sampling", "config"),
        "model | requests (in, out) | first token, ms | ms a token | output tok/s | decode tok/s | "
        "published: first token, ms | ms a token | output tok/s | by", "decode tok/s", long_prompts,
        "Callboard drafts no tokens here, and runs without HTTP. Published figures are medians over HTTP from SGLang's "
        "cookbook, one H200: `python3 -m sglang.bench_serving --backend sglang --dataset-name random "
        "--random-input-len 8192 "
        "--random-output-len 1024 --random-range-ratio 1.0 --num-prompts N --max-concurrency 1, 16 or 1024 "
        "--warmup-requests 64 --flush-cache`. It counts input and output tokens; the table has the output's share.",
    ),
    "ranks": Subject(
        "Tensor parallel: several GPUs as one engine", ("decode",),
        ("model", "batch", "prompt_len", "output_len", "sampling", "config"),
        "model | GPUs | requests (in, out) | decode tok/s | output tok/s | first token, ms | "
        "peer by measured tables of its kernels, decode tok/s | mode", "decode tok/s", ranks,
    ),
    "all_reduce": Subject(
        "All-reduce in a graph, bfloat16, into a residual; beside it NCCL's in the same run", ("ranks",),
        ("kernel", "cell"),
        "operand | GPUs | us | NCCL, us | best published, us", "us", all_reduce,
    ),
    "weight_updates": Subject(
        "New weights while streams run, from the first call to the end of the last", ("weight_updates_served",),
        ("model", "machine", "way", "dtype", "pauses", "kv", "streams"),
        "model | way | GB | streams | send, ms | finish, ms | total, ms | longest gap of a stream, ms | machine", "ms",
        weight_updates,
    ),
    "sampled": Subject(
        "Decode, sampled: share of the greedy rate in the same run", ("decode",),
        ("model", "batch", "sampling", "config"),
        "model | batch | sampling | tok/s | range | step p50 / p99 ms | of greedy | config", "tok/s", sampled,
    ),
    "prefill": Subject(
        "Prefill to the first token, one request", ("prefill",), ("model", "prompt_len", "config"),
        "model | tokens | first token, ms | range | tok/s | peer, ms | ratio | config", "ms", prefill,
    ),
    "serving": Subject(
        "Serving: named workloads over HTTP, and on the bare engine", ("serving",),
        ("model", "workload", "through", "config"),
        "model | workload | through | output tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | "
        "peer: tok/s / TTFT p50 / ITL p50 / ITL p99 | ratio", "output tok/s, times the peer's", serving,
    ),
    "replicas": Subject(
        "Routing: several engines behind one endpoint, first tokens in time within a second", ("replicas",),
        ("model", "policy", "workload", "replicas", "rate", "config"),
        "model | engines | workload | policy | conversations a second | output tok/s | of requests in time | "
        "requests in time | TTFT p50 / p90 / p99 ms", "output tok/s in time", replicas,
    ),
    "profile": Subject(
        "The GPU's busy share in steady decoding", ("profile_step",), ("model", "batch", "config"),
        "model | batch | step, ms | traced step, ms | GPU busy, ms | of a traced step | of a step | config",
        "share", profile,
    ),
    "agreement": Subject(
        "Settings that keep the tokens: greedy texts compared with the default's", ("agreement",),
        ("model", "variant", "config"),
        "model | setting | equal texts | first difference, token | largest gap there, nats", "share of equal texts",
        agreement,
    ),
    "start": Subject(
        "From a process's start to a ready engine, page cache warm; compile cache warm unless named", ("start",),
        ("model", "config", "cache"),
        "model | imported, s | ready, s", "s", start,
    ),
    "soak": Subject(
        "GPU memory under random requests, GiB: after the first minute, and at the end", ("soak",), ("model", "config"),
        "model | minutes | requests | reserved | allocated | reserved at the end | allocated at the end | config",
        "reserved at the end / after a minute", soak,
    ),
    "kernels": Subject(
        "Kernels against the card's ceilings", ("kernels", "kernels_attention"),
        ("kernel", "model", "heads", "cell", "block_size", "deterministic"),
        "kernel | shape | cell | us | TB/s | TFLOP/s | of the ceiling | library, us", "of the ceiling", kernels,
    ),
}  # fmt: skip


def markdown(subject: Subject, rows: list[Row], lines: list[Line], plot: Path | None) -> str:
    head = subject.head.split(" | ")
    table = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *(row.cells for row in rows))]
    sources = {
        f"| `{command_today(line['command'])}` | {line['time'][:10]}, {line['versions']['commit']} | "
        f"{line['machine']}, torch {line['versions']['torch']}, Triton {line['versions'].get('triton', '-')} |"
        for line in lines
    }
    image = [f"![{subject.title}](plots/{plot.name})", ""] if plot else []
    source_head = ["| command | date, commit | machine |", "| --- | --- | --- |"]
    note = [subject.note, ""] if subject.note else []
    return "\n".join([f"## {subject.title}", "", *table, "", *note, *image, *source_head, *sorted(sources), ""])


def command_today(command: str) -> str:
    """A recorded command with the present names of its module and folders."""
    for name in re.findall(r"python -m benchmarks\.(\w+)", command):
        module = BENCHMARKS / name
        if not module.with_suffix(".py").exists() and not module.is_dir():
            folders = [path.parent.name for path in BENCHMARKS.glob(f"*/{name}.py")]
            command = command.replace(f"benchmarks.{name}", f"benchmarks.{folders[0]}.{name}") if folders else command
    return command


def draw(subject: Subject, rows: list[Row], path: Path) -> None:
    """Draw a horizontal bar for each row with a value, the peer's as a mark across it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row.value is not None]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes.barh(range(len(rows)), [row.value or 0.0 for row in rows], color="#3b6ea5", label="Callboard")
    if peers := [(row.peer, place) for place, row in enumerate(rows) if row.peer is not None]:
        axes.plot(*zip(*peers, strict=True), "|", color="#d1495b", markersize=12, markeredgewidth=2.5, label="peer")
        axes.legend()
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(subject.unit)
    axes.set_title(subject.title, fontsize=10)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=BENCHMARKS, help="folder of RESULTS.md and plots")
    parser.add_argument("--commit", default="unknown", help="of lines that were measured outside of a git checkout")
    args = parser.parse_args()
    texts = [text for file in args.files if file.name != "peer.jsonl" for text in file.read_text().splitlines()]
    lines = [line for text in texts if "benchmark" in (line := json.loads(text))]  # others describe single kernels
    for line in lines:
        if line["versions"]["commit"] == "unknown":
            line["versions"]["commit"] = args.commit
    parts = [
        "# Results\n\n`python -m benchmarks.library.report` writes this page from JSON lines. Models have random "
        "weights of the published shapes, ignore EOS and decode greedily unless a table states otherwise. The peer is "
        "vLLM 0.23.0 with its defaults on the same card type. The floor is the rate at which the card's memory could "
        "deliver the weights.\n"
    ]
    for name, subject in SUBJECTS.items():
        subject_lines = [line for line in lines if line["benchmark"] in subject.benchmarks]
        latest = {tuple(str(line.get(key)) for key in subject.keys): line for line in subject_lines}
        groups = list(dict.fromkeys(key[:2] for key in latest))  # equal subjects are next to each other
        ordered = sorted(latest, key=lambda key: groups.index(key[:2]))
        shown = [(row, latest[key]) for key in ordered if (row := subject.row(latest[key])) is not None]
        if not shown:
            continue
        rows, own = (list(column) for column in zip(*shown, strict=True))
        plot = args.into / "plots" / f"{name}.png"
        if len(rows) <= _MOST_BARS and importlib.util.find_spec("matplotlib") is not None:
            draw(subject, rows, plot)
        parts.append(markdown(subject, rows, own, plot if plot.exists() else None))
    (args.into / "RESULTS.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()

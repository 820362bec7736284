"""The comparison with other runtimes on a CPU: its options, prompts and tables. No other runtime runs here."""

import json
import os

import pytest

from benchmarks.cpu_peers.__main__ import absent_peers, new_parser
from benchmarks.cpu_peers.figures import number, rows_of, table
from benchmarks.cpu_peers.jobs import Job
from benchmarks.cpu_peers.machine import cpu_of, environment_of
from benchmarks.cpu_peers.servers import flags_of, memory_of
from benchmarks.cpu_peers.side import Side, SideError
from tests.benchmarks.test_benchmarks import run

ROUNDS = {
    "callboard": [{"tok_s": 10.0, "cpu_ms": 100.0}, {"tok_s": 30.0, "cpu_ms": 40.0}, {"tok_s": 20.0, "cpu_ms": 50.0}],
    "llama.cpp": [{"tok_s": 20.0, "cpu_ms": 50.0}, {"tok_s": 15.0, "cpu_ms": 80.0}, {"tok_s": 40.0, "cpu_ms": 25.0}],
}


def test_all_cells_run_unless_some_are_named():
    args = new_parser().parse_args([])
    assert args.cells == ["decode", "batch8", "prompt", "http", "load", "memory", "deterministic"]
    args = new_parser().parse_args(["--cells", "--threads", "1", "2", "--out", "lines.jsonl"])
    assert (args.cells, args.threads, args.output.name) == ([], [1, 2], "lines.jsonl")
    with pytest.raises(SystemExit):
        new_parser().parse_args(["--cells", "decoding"])


def test_ratios_are_of_rounds_and_above_one_if_better():
    speed, cpu = rows_of("decode", 2, ROUNDS)
    assert speed.medians == {"callboard": 20, "llama.cpp": 20}
    assert speed.ratios == {"llama.cpp": 0.5}  # of 0.5, 2 and 0.5
    assert speed.ranges["llama.cpp"] == (15, 40)
    assert cpu.ratios == {"llama.cpp": 0.5}  # lower is better


def test_a_table_has_dashes_for_missing_sides():
    lines = table(rows_of("decode", 2, ROUNDS), ["callboard", "llama.cpp", "transformers"]).splitlines()
    assert lines[0] == "| cell | threads | Callboard | llama.cpp | ratio | transformers | ratio |"
    assert lines[2] == "| decode, tok/s | 2 | 20 | 20 | 0.50 | - | - |"
    assert {line.count("|") for line in lines} == {8}


@pytest.mark.parametrize(("value", "text"), [(0.8225, "0.823"), (25.4, "25.4"), (1300.2, "1,300"), (100.0, "100")])
def test_numbers_have_three_digits_or_more(value: float, text: str):
    assert number(value) == text


def test_sides_get_equal_prompts_and_rounds_get_others():
    first = Job("decode", 1, 64).prompts(2, 16)
    assert first == Job("decode", 1, 8).prompts(2, 16)
    assert [len(prompt) for prompt in first] == [16, 16]
    assert not {first[0][0]} & {prompt[0] for prompt in [*Job("decode", 2, 64).prompts(2, 16), first[1]]}


def test_settings_become_flags():
    settings = ["num_threads=2", "deterministic=true", "prefix_cache=false", "dtype=bfloat16"]
    flags = ["--num-threads", "2", "--deterministic", "--no-prefix-cache", "--dtype", "bfloat16"]
    assert flags_of(settings) == flags


def test_llama_cpp_is_absent_for_a_folder(tmp_path):
    assert "llama.cpp" in absent_peers(new_parser().parse_args([]), tmp_path)
    assert absent_peers(new_parser().parse_args(["--peers"]), tmp_path) == {}


def test_the_cpu_is_read_from_its_description():
    info = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 sse2 avx_vnni\n"
    assert cpu_of(info) == ("Some CPU", ["avx2", "avx_vnni"])
    assert cpu_of("") == ("unknown", [])


def test_isa_limits_all_kernels_of_callboard():
    assert environment_of("native") == {}
    assert environment_of("avx2")["CALLBOARD_CPU_ISA"] == environment_of("avx2")["ATEN_CPU_CAPABILITY"] == "avx2"


def test_memory_of_this_process_is_found():
    found = memory_of(os.getpid())
    assert found["model_mib"] > 10
    assert found["all_mib"] > 10


def test_a_side_that_fails_shows_its_last_lines():
    with pytest.raises(SideError, match=r"No module named benchmarks\.cpu_peers\.missing"):
        Side("missing", {}, {})


@pytest.mark.rotated
@pytest.mark.long
def test_callboard_alone_gives_a_table(tmp_path):
    model, out = str(tmp_path / "tiny"), tmp_path / "lines.jsonl"
    options = [
        "--model",
        model,
        "--peers",
        "--threads",
        "1",
        "--rounds",
        "1",
        "--new-tokens",
        "4",
        "--output",
        str(out),
    ]
    printed = run(
        ["library.make_random_model", "tiny", model],
        ["cpu_peers", "--cells", "decode", "batch8", "prompt", *options, "--set", "kv_cache_memory=0.1"],
    )
    assert "| cell | threads | Callboard |" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    figures = ["tok/s", "CPU ms a token", "tok/s", "prompt tok/s"]
    assert [line["figure"] for line in lines] == figures
    assert all(line["medians"]["callboard"] > 0 for line in lines)

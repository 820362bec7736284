"""The reports that operators read: the doctor's, spans, Grafana's board, and Ray's own dashboard."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from actors.wire.metrics import METRICS
from serve_app.application import build_http_app
from serve_app.observability.tracing import Tracing
from serve_app.server import ray_start
from serve_app.server.console import Console
from serve_app.service.service import Service
from serve_app.tools import doctor
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, client_of

ROOT = Path(__file__).parents[2]
_SUFFIXES = r"(?:_total|_bucket|_sum|_count)?"


# ---- Grafana --------------------------------------------------------------------------------------------------------


async def test_every_metric_on_our_board_is_exposed():
    async with client_of(FakeEngine()) as client:
        await client.get("/v1/models")  # a route is counted from its first request on
        text = (await client.get("/metrics")).text
    samples = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    named = {name for query in queries for name in re.findall(r"\b(?:vllm:|callboard:|process_|http_)\w+", query)}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "http_requests_total"} <= named
    assert len(queries) > 30
    assert named <= samples
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_rays_shipped_dashboard_finds_its_metrics():
    from ray.dashboard.modules.metrics.dashboards import serve_llm_dashboard_panels as shipped

    asked = set(re.findall(r"\bray_(vllm_\w+?)" + _SUFFIXES + r"\b", Path(shipped.__file__).read_text()))
    published = {name.replace(":", "_") for name in METRICS}
    # packages that we lack
    elsewhere = re.compile("vllm_(nixl|kv_offload|external)_|vllm_num_requests_swapped|vllm_e$")
    missing = {name for name in asked if not elsewhere.match(name)} - published
    assert not missing
    assert len(asked & published) >= 15


# ---- spans ----------------------------------------------------------------------------------------------------------


async def test_request_phases_are_spans_below_the_clients_span():
    exporter = InMemorySpanExporter()
    service = Service(FakeEngine(), byte_tokenizer(), "m")
    tracing = Tracing("m", exporter)
    service.metrics.add_sink(tracing)
    transport = httpx.ASGITransport(build_http_app(service))
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
        await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3}, headers=headers)
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert f"{whole.context.trace_id:032x}" == trace_id
    assert f"{whole.parent.span_id:016x}" == span_id
    assert whole.attributes["gen_ai.usage.prompt_tokens"] == 5
    assert whole.attributes["gen_ai.usage.completion_tokens"] == 3
    for name, after in (("queue", "prefill"), ("prefill", "decode"), ("decode", "llm_request")):
        assert spans[name].parent.span_id == whole.context.span_id
        assert spans[name].start_time <= spans[name].end_time <= spans[after].end_time


def test_nothing_of_opentelemetry_is_imported_when_it_is_off():
    code = "import sys, serve_app.application; assert not any(m.startswith('opentelemetry') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ---- callboard doctor -----------------------------------------------------------------------------------------------


@pytest.mark.rotated
@pytest.mark.long
def test_the_doctor_reports_every_check_and_fix():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    command = [sys.executable, "-m", "serve_app.cli", "doctor"]
    good = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for name in ("python", "callboard", "torch", "triton", "ray", "GPU", "quantization", "cores", "memory",
                 "shared memory", "open files", "HAProxy", "model cache", "Ray cluster", "CPU", "hub cache", "hub",
                 "package index", "port", "otel", "KV tier"):  # fmt: skip
        assert name in good.stdout, name
    assert good.returncode == ("fail" in good.stdout)
    bad = subprocess.run([*command, "--address", f"127.0.0.1:{port}"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 1
    assert f"fail  Ray cluster      127.0.0.1:{port} does not answer" in bad.stdout


def test_the_doctors_limits():
    assert doctor.python_version((3, 10, 1)).level == "fail"
    assert doctor.package_version("no-such-package").fix == "pip install no-such-package"
    assert doctor.ray_version(doctor.Finding("ok", "ray", "2.60.0")).level == "ok"
    assert "lacks max_surge_percent" in doctor.ray_version(doctor.Finding("ok", "ray", "2.56.1")).value
    assert doctor.shared_memory(64 << 20).level == "fail"
    assert "--shm-size" in doctor.shared_memory(64 << 20).fix
    small = doctor.kv_tier("cpu", Path("/dev/shm/no-tiers"), 100 << 20)
    assert (small.level, "off by default" in small.value, "--shm-size" in small.fix) == ("warn", True, True)
    assert doctor.open_files(1024, 1 << 20).fix.endswith("ulimit -n 65536")
    assert doctor.open_files(65536, 65536).level == "ok"
    assert doctor.memory(1 << 30).level == "warn"


def test_the_doctor_on_quantization():
    assert doctor.gpu_links(1, lambda: None) == doctor.Finding("ok", "GPU links", "none: there are no two GPUs")
    assert doctor.gpu_links(4, lambda: '{"cut": [], "rates": [340.2, 355.0]}').value.endswith("at 340 to 355 GB/s")
    assert doctor.gpu_links(2, lambda: '{"cut": [[1, 0]], "rates": [20.0, 19.0]}').value == "1 does not reach 0"
    compile(doctor._PEERS_PROBE, "probe", "exec")
    assert doctor.gpu_links(2, lambda: None).level == "warn"


@pytest.mark.parametrize(
    ("forms", "stay", "dtype", "bits", "level", "value", "fix"),
    [
        (["fp8", "int4"], True, "bfloat16", 16, "ok", "fp8, int4", ""),
        ([], False, "float32", 32, "warn", "none: 4-bit weights of a file are read as float32, 7 times", "llvmlite"),
    ],
)
def test_the_doctor_warns_of_widened_weights(forms, stay, dtype, bits, level, value, fix):
    found = doctor.quantization(json.dumps({"forms": forms, "stay": stay, "dtype": dtype, "bits": bits}))
    assert found.level == level
    assert found.value.startswith(value)
    assert fix in found.fix


def test_the_doctor_finds_the_formats_of_this_machine():
    answer = subprocess.run([sys.executable, "-c", doctor._FORMS_PROBE], capture_output=True, text=True, check=True)
    assert doctor.quantization(answer.stdout).level == "ok"


def test_the_doctor_on_a_torch_that_fails():
    assert doctor.quantization(None).level == "warn"


def test_the_doctor_names_instruction_sets():
    text = "processor: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512f avx_vnni amx_tile\n"
    assert doctor.instruction_sets(text).value == "A CPU: AVX2, AVX-512, VNNI, AMX"
    assert "none of AVX2" in doctor.instruction_sets("Features: asimd\n").value


def test_the_doctor_names_both_caches(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "wheels"))
    own, hub = doctor.model_caches()
    assert (own.name, hub.name) == ("model cache", "hub cache")
    assert own.value.startswith(f"{tmp_path / 'wheels'} (the default model), ")


def test_the_doctor_on_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert doctor.free_port(port).level == "warn"
    assert doctor.free_port(port) == doctor.Finding("ok", "port", f"{port} is free")


def test_the_doctor_goes_on_without_a_network(monkeypatch):
    """One host refuses connections, and the other's name is never resolved."""
    monkeypatch.setattr(doctor, "NETWORK_S", 0.2)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid")
    never = threading.Event()
    why = {"https://huggingface.co": "refused"}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(doctor, "unreachable", lambda url: why.get(url) or str(never.wait()))
    hub, index = doctor.network()
    assert (hub.level, hub.value) == ("warn", "https://huggingface.co: refused")
    assert (index.level, index.value) == ("warn", "http://index.invalid: no answer within 0.2 s")
    never.set()
    monkeypatch.setattr(doctor, "unreachable", lambda url: None)
    assert [found.level for found in doctor.network()] == ["ok", "ok"]


def test_any_http_answer_means_that_a_host_is_reached():
    def answer(status: int, listener: socket.socket) -> None:
        connection = listener.accept()[0]
        connection.recv(1 << 16)
        connection.sendall(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode())
        connection.close()

    for status, says in ((404, None), (502, "it answers 502")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=answer, args=(status, listener))
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert doctor.unreachable(url) == says
            thread.join()
    assert doctor.unreachable(url) is not None


@pytest.mark.parametrize(
    ("rows", "torch", "level", "words"),
    [
        (None, {}, "ok", "models run on the CPU"),
        ("NVIDIA H200, 143771 MiB, 570.1", {"cuda": None}, "fail", "without CUDA"),
        ("NVIDIA H200, 143771 MiB, 470.1", {"cuda": "13.0", "usable": False, "gpus": []}, "fail", "cannot use them"),
        (
            "NVIDIA H200, 143771 MiB, 570.1",
            {"cuda": "13.0", "usable": True, "gpus": [["NVIDIA H200", 150 << 30, "9.0"]]},
            "ok",
            "NVIDIA H200, 150 GiB, capability 9.0, CUDA 13.0",
        ),
    ],
)
def test_the_doctor_on_gpus(rows, torch, level, words):
    last = list(doctor.gpus(rows, lambda: torch))[-1]
    assert last.level == level
    assert words in last.value


def test_ray_has_time_to_register_its_node(monkeypatch):
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), "node"])

    def get_node(address: str) -> str:
        if isinstance(answer := next(answers), RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr("serve_app.server.ray_start.time.sleep", lambda seconds: None)
    assert ray_start._patient(get_node)("address") == "node"
    answers = iter([RuntimeError("never")])
    monkeypatch.setattr("serve_app.server.ray_start._RAYLET_START_S", -1.0)
    with pytest.raises(RuntimeError, match="never"):
        ray_start._patient(get_node)("address")


def test_an_ended_raylet_is_reported_at_once(monkeypatch):
    def get_node(address: str) -> str:
        raise RuntimeError("not yet")

    monkeypatch.setattr("serve_app.server.ray_start._has_ended", lambda name: name == "raylet")
    with pytest.raises(ChildProcessError, match="its raylet ended"):
        ray_start._patient(get_node)("address")


def test_a_silent_start_names_what_it_awaits(capfd):
    phases: list[str] = []
    console = Console(phases.append, silent_s=0.01)
    with console.waiting_for("Ray's daemons"):
        while not (text := capfd.readouterr().err):
            time.sleep(0.01)
    text += capfd.readouterr().err  # another line may have come before the end
    assert re.fullmatch(r"( +[\d.]+ s  still waiting for Ray's daemons; the load is \d+ on \d+ cores\n)+", text)
    assert phases == []
    console = Console(phases.append, silent_s=600.0)
    with console.waiting_for("the engine"):
        console.phase("weights read")
    assert "waiting" not in capfd.readouterr().err
    assert phases == ["weights read"]

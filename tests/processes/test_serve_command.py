"""`callboard serve` and `serve run` as their user sees them: the first with the model that is served by default."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from actors.ray.environment import quiet_port

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_serve_run_with_a_yaml_file(tiny_path: Path, tmp_path: Path, private_ray: dict[str, str]):
    port = quiet_port()
    config = yaml.safe_load((ROOT / "docs/serve.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["name"] = "default"  # as `serve run callboard.app:build_app` has it
    config["applications"][0]["args"] |= {"model": str(tiny_path), "deterministic": True, "kv_cache_memory": 0.1}
    config["applications"][0]["args"]["kv_tier_memory"] = 0
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(tmp_path / "serve.yaml")]
    env = {name: value for name, value in private_ray.items() if "RAY_AUTH" not in name}  # Ray makes a token itself
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'serve_app/public'}"  # as an install has both
    env["RAY_worker_niceness"] = "0"  # or its workers would wait for tests that compute beside this one
    (tmp_path / "runtime.py").write_text("x = 1")  # Ray's workers search the current folder first
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=tmp_path)
    try:
        deadline, answer = time.monotonic() + 200, None
        while answer is None and time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.TransportError):
                response = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60)
                answer = response.json() if response.status_code == 200 else None
            time.sleep(0.2)
        assert answer is not None, (tmp_path / "log").read_text()[-3000:]
        assert answer["data"][0]["id"] == "smollm2"
        assert "For full speed set RAY_SERVE_ENABLE_HA_PROXY=1" in (tmp_path / "log").read_text()
        (gcs_port,) = Path(private_ray["RAY_TMPDIR"]).glob("ray/session_latest/gcs_server_port_*")
        question = "What is the capital of France?"
        caller = subprocess.run(
            [sys.executable, "docs/handle_call.py", question], capture_output=True, timeout=600, cwd=ROOT,
            env={**env, "RAY_ADDRESS": f"127.0.0.1:{gcs_port.read_text()}"},
        )  # fmt: skip
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
        (choice,) = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()["choices"]
        assert caller.stdout.decode() == choice["message"]["content"] + "\n", caller.stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def _check_rollouts(port: int, env: dict[str, str]) -> None:
    """A job with RolloutClient, which knows nothing of the server's settings, gets the tokens that HTTP gives."""
    code = (
        "import json, ray\nfrom callboard import RolloutClient, SamplingParams\n"
        "with RolloutClient.connect() as client:\n"
        "    found = client.generate_list([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=12, ignore_eos=True), n=2)\n"
        "    print(json.dumps([[r.prompt_token_ids, r.seed, r.token_ids] for r in found]))"
    )
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env, cwd="/")
    assert job.returncode == 0, job.stderr
    for prompt, seed, token_ids in json.loads(job.stdout.splitlines()[-1]):
        body = {"prompt": prompt, "seed": seed, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == token_ids


def test_serve_end_to_end(smollm2_path: Path, tmp_path: Path, private_ray: dict[str, str]):
    """The command as a user runs it: three lines on stdout, the curl line works, Ctrl-C ends it.

    The current folder has modules with names of Callboard's packages and of others that it imports."""
    for name in ("runtime", "actors", "serve_app", "random", "gguf"):
        (tmp_path / f"{name}.py").write_text("x = 1")
    private_ray["PYTHONPATH"] = str(ROOT)
    port = str(quiet_port())
    flags = ["--port", port, "--served-model-name", "smol", "--num-threads", "2", "--kv-cache-memory", "0.1"]
    flags += ["--kv-tier-memory", "0"]
    command = [sys.executable, "-P", "-m", "serve_app.cli", "serve", str(smollm2_path), *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=private_ray, cwd=tmp_path
    )
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0] == f"Callboard serves smol at http://127.0.0.1:{port}/v1\n", process.stderr.read()
        assert lines[1] == f"Chat: http://127.0.0.1:{port}/   API: http://127.0.0.1:{port}/v1   Ctrl-C stops\n"
        # without it the answer has any length
        curl = lines[2].replace('"stream": true', '"stream": true, "max_tokens": 60')
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=600)
        *events, done, _ = answer.stdout.split("\n\n")
        assert done == "data: [DONE]"
        assert all(json.loads(event.removeprefix("data: "))["model"] == "smol" for event in events)
        assert httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok"}
        # Ray's address "auto" takes any cluster of the machine, and other tests have theirs: RAY_ADDRESS names ours.
        (gcs_port,) = Path(private_ray["RAY_TMPDIR"]).glob("ray/session_latest/gcs_server_port_*")
        caller = subprocess.run(
            [sys.executable, "docs/handle_call.py", "What is the capital of France? Answer in one sentence."],
            capture_output=True, text=True, timeout=600, cwd=ROOT,
            env={**private_ray, "RAY_ADDRESS": f"127.0.0.1:{gcs_port.read_text()}"},
        )  # fmt: skip
        assert caller.stdout == "The capital of France is Paris.\n", caller.stderr
        env = {**private_ray, "RAY_ADDRESS": f"127.0.0.1:{gcs_port.read_text()}"}
        _check_rollouts(int(port), {**env, "PYTHONPATH": f"{ROOT}:{ROOT / 'serve_app/public'}"})
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
        assert process.stdout.read() == ""
        told = process.stderr.read()
        assert "Traceback" not in told
        assert told.count("Tools: the chat template has no known format of tool calls") == 1
        times = [float(t) for t in re.findall(r"^ +([\d.]+) s  ", told, re.MULTILINE)]
        assert times == sorted(times)
        assert len(times) >= 3
        assert re.search(r"^ +[\d.]+ s  memory plan: .*\n( .*\n)* +[\d.]+ s  ready$", told, re.MULTILINE), told
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)

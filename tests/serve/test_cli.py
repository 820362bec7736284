"""The command line and the application's arguments."""

import os
import socket
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner
from ray.exceptions import RayError

from actors.ray.process import reported_fault
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from serve_app import cli
from serve_app.command_line.flags import engine_config, http_settings
from serve_app.server.port import reserved_port
from serve_app.settings import HttpSettings, ScalingSettings

ROOT = Path(__file__).parents[2]


def callboard(*args: str, stdin: str = "", timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve_app.cli", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=timeout)


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "inspect"])
def test_help_explains_every_engine_field(command: str, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help=all"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for f in fields(EngineConfig):
        if f.name != "model":
            assert "--" + f.name.replace("_", "-") in text
        assert f.metadata["help"] in text


def test_every_flag_reaches_its_field():
    values = {
        "revision": "main", "generation_config": "none", "chat_template": "t.jinja", "device": "cpu",
        "dtype": "bfloat16", "kv_cache_dtype": "fp8", "kernel_backend": "torch", "deterministic": True,
        "max_model_len": 1024, "max_num_seqs": 5, "max_num_batched_tokens": 2048, "block_size": 32, "num_kv_blocks": 99,
        "kv_cache_memory": 0.5, "snapshot_memory": 0.5, "gpu_memory_utilization": 0.5, "batching": "static",
        "kv_layout": "contiguous",
        "chunked_prefill": False, "prefix_cache": False, "policy": "sjf", "pipeline_depth": 1, "packed_weights": False,
        "cuda_graphs": False, "prefill_graph_tokens": 512, "max_itl_ms": 20.5, "late_planning": False,
        "tensor_parallel_size": 2, "num_threads": 1, "max_queued_requests": 7, "max_loras": 3, "max_lora_rank": 8,
        "step_timeout_s": 9.5, "draft": "ngram", "num_draft_tokens": 3, "pinned_acceptance": 2.5,
        "draft_device": "cpu", "draft_ahead": 4, "draft_layers": "2,4,7",
        "draft_kv_cache_memory": 0.5, "draft_shared": True, "max_queued_tokens": 70, "queue_timeout_s": 2.5,
        "max_queued_bytes": 90, "cpu_activations": "int8",
        "quantization": "fp8", "head_quantization": "int8", "draft_quantization": "int4", "rank_invariant": True,
        "lora": ("a=/x", "b=/y=z"), "pooling": "mean", "tool_call_parser": "hermes", "channel_grammar": False,
        "plain_tool_calls": False,
            "special_tokens_in_contents": True,
        "sleep_mode": True, "weight_updates": True, "weight_store": "/weights", "routed_experts": True,
        "trainer_timeout_s": 99.5, "images": "off", "image_pool_tokens": 900, "max_image_tokens": 800,
        "kv_tier_memory": 2.5, "kv_tier_folder": "/tier", "kv_tier_name": "mine",
    }  # fmt: skip
    assert set(values) | {"model"} >= {f.name for f in fields(EngineConfig)}, "a new field needs a value here"
    argv = ["serve", "some/model"]
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        for one in value if isinstance(value, tuple) else (value,):
            argv += [f"--{flag}", str(one)]
    config = engine_config(cli.parser().parse_args(argv))
    assert config == EngineConfig("some/model", **values)
    assert config.adapters == {"a": "/x", "b": "/y=z"}
    for argv in ([], ["--num-draft-tokens", "auto", "--max-model-len", "auto"]):
        assert engine_config(cli.parser().parse_args(["serve", *argv])) == EngineConfig()


def test_every_flag_of_the_front_door_reaches_its_field(tmp_path: Path):
    (tmp_path / "keys").write_text("# ours\nk2\n\n k3 \n")
    values = {
        "api_key": ("k0", "k1"), "api_key_file": str(tmp_path / "keys"), "cors_origin": ("https://a.example",),
        "max_body_bytes": 1000, "max_header_bytes": 2000, "max_n": 3, "max_stop": 2, "max_prompts": 5,
        "image_urls": ("a.example", "b"), "max_images": 6, "max_image_bytes": 3000,
        "client_priority": True, "routing_policy": "least-load", "lora_folder": "/adapters", "lora_on_demand": True,
        "weight_folder": "/weights",
        "batch_folder": "/batches", "batch_file_bytes": 6000, "batch_max_requests": 7, "batch_concurrency": 8,
        "batch_max_open": 9, "batch_max_open_per_key": 10, "batch_max_ended_per_key": 11, "batch_max_files": 12,
        "batch_max_files_per_key": 13, "batch_max_bytes": 14, "batch_max_bytes_per_key": 15, "batch_max_uploads": 16,
        "batch_max_uploads_per_key": 17, "max_unread_bytes": 18, "max_unread_bytes_per_key": 19,
        "request_timeout_s": 7.5, "keep_alive_s": 1.5, "drain_timeout_s": 0.0, "body_timeout_s": 8.5,
        "allowed_host": ("llm.example.org", "b"), "response_store_bytes": 4000, "response_life_s": 60.5,
        "recorded_request_bytes": 5000, "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
        "request_log": False, "allow_chaos": True,
    }  # fmt: skip
    assert set(values) == {f.name for f in fields(HttpSettings)}, "a new field needs a value here"
    argv = ["serve", "some/model"]
    for name, value in values.items():
        for v in value if isinstance(value, tuple) else (value,):
            flag = name.replace("_", "-")
            argv += [f"--no-{flag}" if v is False else f"--{flag}", *([] if isinstance(v, bool) else [str(v)])]
    settings = http_settings(cli.parser().parse_args(argv))
    assert settings == HttpSettings(**values)
    assert settings.api_keys() == ("k0", "k1", "k2", "k3")
    assert http_settings(cli.parser().parse_args(["serve"])) == HttpSettings()


def test_the_number_of_replicas_is_fixed_or_has_bounds():
    def bounds(*argv):
        args = cli.parser().parse_args(["serve", *argv])
        scaling = ScalingSettings(**{f.name: getattr(args, f.name) for f in fields(ScalingSettings)})
        return scaling.least, scaling.most

    assert bounds() == (1, 1)
    assert bounds("--num-replicas", "3") == (3, 3)
    assert bounds("--idle-sleep", "10m") == (0, 1)
    assert bounds("--num-replicas", "2", "--max-replicas", "5") == (2, 5)
    assert bounds("--idle-sleep", "30", "--max-replicas", "5") == (0, 5)
    with pytest.raises(CallboardError, match="min_replicas is 3; it must be at most max_replicas, 2"):
        bounds("--min-replicas", "3", "--max-replicas", "2")


def test_a_start_waits_for_an_engine_that_loads_its_model(monkeypatch):
    """Serve reports an application as running although it does not need an engine."""
    from serve_app.server import readiness

    front = SimpleNamespace(replica_states={"RUNNING": 2})
    status = SimpleNamespace(applications={readiness.APP_NAME: SimpleNamespace(deployments={"Front": front})})
    engine = SimpleNamespace(stats=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr("ray.serve.status", lambda: status)
    monkeypatch.setattr(readiness, "_engines", lambda: [engine])
    settings = SimpleNamespace(models=[SimpleNamespace(scaling=ScalingSettings(idle_sleep=1))])
    for num_connections, is_connected in ((None, False), (1, False), (2, True)):

        def get(refs, num_connections=num_connections):
            if num_connections is None:
                raise RayError("it is being loaded")
            return [{"connections": num_connections}]

        monkeypatch.setattr("ray.get", get)
        assert readiness._fronts_are_connected(settings) == is_connected


def failed_application(**messages: str) -> SimpleNamespace:
    """Serve's status of an application with deployments that failed with these messages, if any."""
    deployments = {
        name: SimpleNamespace(status="DEPLOY_FAILED" if message else "UPDATING", message=message)
        for name, message in messages.items()
    }
    return SimpleNamespace(deployments=deployments, message="Failed to update the deployments ['Front'].")


def test_a_front_that_cannot_start_shows_its_last_line(capfd):
    from serve_app.server import readiness

    told = 'Error:\nTraceback (most recent call last):\n  File "x.py"\nImportError: No module named y\n'
    assert (
        readiness._why(failed_application(Engine="", Front=told)) == "Front failed with ImportError: No module named y"
    )
    assert capfd.readouterr().err == f"{told}\n", "the log has all of it"
    assert readiness._why(failed_application(Front="")) == "Failed to update the deployments ['Front']"


def test_a_front_that_fails_later_shows_its_error_and_log(tmp_path: Path):
    code = """
from actors.ray.process import report_faults
from runtime.base.types import CallboardError
with report_faults("A front"):
    raise CallboardError("The tokenizer cannot be read; send another.")
"""
    assert reported_fault(tmp_path) == ""
    (tmp_path / "worker-1.err").write_text(":job_id:01000000\n")
    with (log := tmp_path / "worker-2.err").open("w") as stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, cwd=ROOT)
    sentence = "A front cannot start: The tokenizer cannot be read; send another"
    assert reported_fault(tmp_path) == f"{sentence}; see {log}."
    log.write_text("callboard: cannot start: A front\nTraceback (most recent call last):\n  File")  # half written
    assert reported_fault(tmp_path) == ""


def test_spans_without_opentelemetry_are_refused_before_ray(monkeypatch, capsys):
    monkeypatch.setattr("serve_app.settings._has_module", lambda name: False)
    assert cli.main(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces"]) == 1
    assert "pip install 'callboard[otel]'" in capsys.readouterr().err


def test_a_server_without_keys_accepts_only_its_own_names():
    own = ("10.0.0.1", socket.gethostname())
    assert HttpSettings().listening_on("10.0.0.1").allowed_host == own
    assert HttpSettings(allowed_host=("a.example",)).listening_on("10.0.0.1").allowed_host == ("a.example", *own)
    assert HttpSettings(api_key=("k",)).listening_on("10.0.0.1").allowed_host == ()
    with_key = HttpSettings(api_key=("k",), allowed_host=("a.example",))
    assert with_key.listening_on("10.0.0.1").allowed_host == ("a.example", *own)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--port", "0"], "between 1 and 65535"),
        (["serve", "--port", "http"], "'http' is not a port"),
        (["serve", "--dtype", "int3"], "'int3' is not a choice"),
        (["serve", "--num-replicas", "0"], "at least 1"),
        (["serve", "--num-draft-tokens", "some"], "'some' must be a whole number or auto"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs is 0; it must be at least 1"),
        (["serve", "--max-body-bytes", "0"], "--max-body-bytes is 0; it must be at least 1"),
        (["serve", "--bogus"], "--bogus"),
        (["generate", "hi", "--temperature", "-1"], "--temperature is -1.0"),
        (["generate"], "prompt"),
        (["chat", "--top-p", "2"], "--top-p is 2.0"),
        (["chaos", "http://127.0.0.1:8000", "--every", "nan"], "'nan' must be a number of seconds above 0"),
    ],
)
def test_usage_errors(argv: list[str], says: str):
    done = callboard(*argv)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_version():
    done = callboard("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"callboard {version('callboard')}\n", "")


def test_a_second_server_on_a_port_fails_at_once():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with reserved_port("127.0.0.1", port):
        done = callboard("serve", "/no/such/model", "--port", str(port), timeout=600)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"callboard: Port {port} on 127.0.0.1 cannot be used (another callboard serve starts or runs there); "
        "stop its user or pass another --port."
    ]
    with reserved_port("127.0.0.1", port):  # it is free again
        pass


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-model-len", "129"], "--max-model-len is 129; the model's context is 128 tokens at most."),
        (
            ["--tensor-parallel-size", "3"],
            "--tensor-parallel-size is 3, which does not divide the model's 2 heads, 1 of keys and values, and "
            "feed-forward size of 64; it can be 1, 2.",
        ),
    ],
)
def test_model_limits_are_reported_without_ray_and_torch(write_tiny_gguf, tmp_path: Path, flags, says):
    for name in ("ray", "torch"):  # their import would fail the test
        (tmp_path / f"{name}.py").write_text("raise AssertionError")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "serve_app.cli", "serve", str(write_tiny_gguf()), "--port", port, *flags]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | path, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"callboard: {says}\n")


def test_a_port_in_use_is_reported_first():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The model does not exist either: the port is checked first.
        done = callboard("serve", "/no/such/model", "--port", str(port), timeout=600)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"callboard: Port {port} on 127.0.0.1 cannot be used (Address already in use); "
        "stop its user or pass another --port."
    ]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--api-key-file", "/no/such/keys"], "'/no/such/keys' cannot be read"),
        (["serve", "/no/such/model", "--port", "{free}"], "no model at '/no/such/model'"),
        (["serve", "--host", "no.such.host.invalid", "--port", "{free}"], "'no.such.host.invalid' is not an address"),
        (["serve", "--host", "192.0.2.1", "--port", "{free}"], "Cannot assign requested address"),
        (["generate", "hi", "--model", "/no/such/model"], "no model at '/no/such/model'"),
        (["chat", "--url", "http://127.0.0.1:{free}"], "No OpenAI-compatible server answers"),
    ],
)
def test_runtime_errors_are_one_sentence(argv: list[str], says: str):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = str(probe.getsockname()[1])
    done = callboard(*(word.replace("{free}", free) for word in argv))
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "/x"), "No space left on device (/x); check the path"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "The input is not UTF-8 at byte 0"),
    ],
)
def test_errors_of_files_are_one_sentence(error, says, monkeypatch, capsys):
    monkeypatch.setattr("serve_app.tools.replay.replay", Mock(side_effect=error))
    assert cli.main(["replay", "x"]) == 1
    assert says in capsys.readouterr().err


def test_an_unreadable_tokenizer_is_reported_before_the_start(write_tiny_gguf):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    done = callboard("serve", str(write_tiny_gguf(tokenizer__ggml__pre="nope")), "--port", port, timeout=600)
    assert done.returncode == 1
    assert "splits text by the rules of 'nope'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- in process ------------------------------------------------------------------------------------------------------


@pytest.mark.rotated
def test_generate_and_chat_in_process(smollm2_path: Path):
    flags = ["--temperature", "0", "--num-threads", "2", "--kv-cache-memory", "0.1"]
    done = callboard("generate", "-", "--model", str(smollm2_path), "--max-tokens", "8", *flags, stdin="1, 2, 3, 4,")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" 5, 6")
    question = "What is the capital of France? Answer in one sentence.\n"
    done = callboard("chat", str(smollm2_path), *flags, stdin=question)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"


# ---- the Serve application ------------------------------------------------------------------------------------------


def test_app_arguments_are_engine_config_and_serve_settings():
    from serve_app.app_args import AppArgs

    more = {"served_model_name", "num_fronts", "accelerator_type", "models"}
    configs = (*fields(EngineConfig), *fields(ScalingSettings), *fields(HttpSettings))
    assert set(AppArgs.model_fields) == {f.name for f in configs} | more
    assert AppArgs().engine_config() == EngineConfig()
    assert AppArgs().http_settings() == HttpSettings()
    assert AppArgs.model_validate({"api_key": "a,b"}).http_settings().api_keys() == ("a", "b")
    assert AppArgs().scaling() == ScalingSettings()
    assert AppArgs.model_validate({"idle_sleep": "10m", "max_replicas": "3"}).scaling().least == 0
    assert AppArgs(draft="ngram", num_draft_tokens="auto").engine_config() == EngineConfig(draft="ngram")
    # `serve run` passes every value as text.
    args = AppArgs.model_validate({"model": "m", "max_num_seqs": "8", "prefix_cache": "false", "kv_cache_memory": "2"})
    assert args.engine_config() == EngineConfig(model="m", max_num_seqs=8, prefix_cache=False, kv_cache_memory=2.0)
    args = AppArgs(accelerator_type="H100")
    assert (args.engine_config().device, args.model_settings()[0].accelerator_type) == ("cuda", "H100")
    with pytest.raises(CallboardError, match="accelerator_type is 'H100', but device is cpu; leave one out"):
        AppArgs(accelerator_type="H100", device="cpu").model_settings()
    for wrong, says in (
        ({"max_num_seq": 8}, "^args has 'max_num_seq', which is not a setting; "),
        ({"max_num_seqs": "x"}, '^max_num_seqs is "x": input should be a valid integer'),
        ({"models": [{"api_key": "k"}]}, "^An entry of models has 'api_key', which is not a setting of one model.$"),
        ({"models": [{"max_num_seqs": "x"}]}, '^max_num_seqs is "x": input should be'),
    ):
        with pytest.raises(CallboardError, match=says):
            AppArgs.model_validate(wrong).model_settings()
    with pytest.raises(CallboardError, match="block_size is 0"):
        AppArgs(block_size=0).engine_config()


def test_models_of_an_application_share_the_settings_outside():
    from serve_app.app_args import AppArgs

    entries = [{"model": "org/a"}, {"model": "org/b", "served_model_name": ["x", "y"], "max_num_seqs": 4}]
    a, b = AppArgs.model_validate({"max_num_seqs": 8, "max_replicas": 2, "models": entries}).model_settings()
    assert [(m.config.model, m.config.max_num_seqs, m.names, m.scaling.most, m.deployment) for m in (a, b)] == [
        ("org/a", 8, ("org/a",), 2, "Engine"),
        ("org/b", 4, ("x", "y"), 2, "Engine-x"),
    ]


def test_serve_gives_the_builder_its_argument_model():
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve.exceptions import RayServeException

    from serve_app.app import build_app

    with pytest.raises(RayServeException, match=r"^args has 'no_such_field'"):  # Serve shows it without a traceback
        call_user_app_builder_with_args_if_necessary(build_app, {"no_such_field": "1"})


def test_serve_run_reports_a_missing_model_in_one_sentence(monkeypatch):
    from serve_app import app

    nodes = [{"Alive": True, "NodeID": "a", "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(app, "application_of", lambda *args: "application")
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    args = app.AppArgs(model="/no/such/model")
    with pytest.raises(CallboardError, match="There is no model at '/no/such/model'"):
        app.build_app(args)
    run = click.Command("run", callback=lambda: app.build_app(args))  # as Ray's own command is
    told = CliRunner().invoke(run)
    assert (told.exit_code, told.output.count("\n")) == (1, 1)
    assert told.output.startswith("Error: There is no model at '/no/such/model'; ")
    nodes.append(nodes[0])  # the model may be on another machine
    assert app.build_app(args) == "application"
    nodes[:] = [{"Alive": True, "NodeID": "a", "Resources": {"memory": 4e9}}]  # a head that computes nothing
    assert app.build_app(args) == "application"

"""The output and refusals of the command line: help by subject, near misses, several names, keys, files of flags,
GPUs."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from runtime.base.config import EngineConfig
from serve_app import cli
from serve_app.command_line import gpu
from serve_app.command_line.flags import client_key, engine_config, http_settings
from serve_app.command_line.subjects import SUBJECTS
from serve_app.commands import chat, generate, inspect, serve
from serve_app.server.server_settings import ServerSettings
from serve_app.settings import HttpSettings, ScalingSettings
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer

ROOT = Path(__file__).parents[2]
WITH_SHORT_HELP = {"serve": serve, "chat": chat, "generate": generate, "inspect": inspect}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CALLBOARD_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    """The exit code and the output of a command line that argparse answers."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(argv))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


# ---- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", WITH_SHORT_HELP)
def test_help_fits_a_screen_and_names_the_rest(command: str, capsys):
    code, text, _ = shown(capsys, command, "--help")
    lines = text.splitlines()
    assert code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("[options]")
    for name in WITH_SHORT_HELP[command]._MOST_USED:
        assert f"--{name.split()[0]} " in text
    for way in ("--help=all", "--help=SUBJECT", "--help=NAME", "examples:"):
        assert way in text


@pytest.mark.parametrize("command", WITH_SHORT_HELP)
def test_examples_of_the_help_are_accepted(command: str):
    for example in WITH_SHORT_HELP[command]._EXAMPLES:
        words = shlex.split(example.partition(" <")[0])
        assert words[0] == "callboard"
        assert cli.parser().parse_args(words[1:]).run is WITH_SHORT_HELP[command].run


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "inspect", "pull"])
def test_the_default_model_has_its_name(command: str, capsys: pytest.CaptureFixture):
    text = " ".join(shown(capsys, command, "--help")[1].split())
    assert "default: SmolLM2-135M-Instruct" in text
    assert "(default: pypi:" not in text


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture):
    assert cli.main([]) == 0
    alone = capsys.readouterr().out
    assert alone == shown(capsys, "--help")[1]
    assert "models" in alone


def test_every_flag_of_serve_has_a_subject(capsys):
    named = [name for subject in SUBJECTS.values() for name in subject.names]
    settings = {f.name for each in (EngineConfig, HttpSettings, ScalingSettings) for f in fields(each)}
    assert len(named) == len(set(named))
    assert set(named) < settings
    everything = shown(capsys, "serve", "--help=all")[1]
    of_subjects = [shown(capsys, "serve", f"--help={subject}")[1] for subject in SUBJECTS if subject != "sampling"]
    for name in settings - {"model"}:
        flag = f"--{name.replace('_', '-')}"
        assert f"{flag} " in everything or f"{flag}," in everything
        assert sum(f"  {flag} " in text or f"  {flag}," in text for text in of_subjects) == 1, flag


def test_help_of_a_subject_or_a_part_of_a_name(capsys):
    code, text, _ = shown(capsys, "serve", "--help=scaling")
    assert code == 0
    assert "--min-replicas" in text
    assert "--num-fronts" in text
    assert "--device" not in text
    assert "longest prompt + output" in shown(capsys, "serve", "MODEL", "--help=--max_model_len")[1]
    assert "--temperature X" in shown(capsys, "generate", "--help=temp")[1]
    code, _, text = shown(capsys, "serve", "--help=bathces")
    assert code == 2
    assert "there is no flag or subject 'bathces'; did you mean --help=batches?" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("serve --port 99999", "--port: '99999' is not a port"),
        ("serve -p x", "--port: 'x' is not a port"),
        ("serve --prot 80", "there is no --prot; did you mean --port?"),
        ("serve --max_model_length=80", "there is no --max_model_length; did you mean --max-model-len?"),
        ("serve --dtype bf16", "--dtype: 'bf16' is not a choice; did you mean bfloat16? It can be auto"),
        ("serve --block-size x", "--block-size: 'x' must be a whole number"),
        ("serve --step-timeout-s x", "--step-timeout-s: 'x' must be a number"),
        ("chat a b", "'b' is one argument too many"),
        ("chat --temprature 1", "did you mean --temperature?"),
        ("srve", "there is no command 'srve'; did you mean serve?"),
        ("run tiny", "there is no command 'run'; did you mean chat or serve?"),
        ("list", "there is no command 'list'; did you mean ls?"),
        ("kill", "there is no command 'kill'; did you mean stop?"),
        ("ps", "there is no command 'ps'; `callboard serve` runs in a terminal, and GET /api/ps"),
        ("create x", "there is no command 'create'; a model is a name, a folder or a file"),
        ("help", "there is no command 'help'; did you mean --help?"),
        ("zzz", "there is no command 'zzz'; there are serve, stop, chat"),
    ],
)
def test_a_wrong_word_takes_three_lines_at_most(argv: str, says: str, capsys):
    code, out, err = shown(capsys, *argv.split())
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) <= 3
    assert err.splitlines()[-1].startswith("See callboard ")


# ---- several names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "model", "names"),
    [
        ("MODEL --served-model-name a b", "MODEL", ["a", "b"]),
        ("--served-model-name a b -- MODEL", "MODEL", ["a", "b"]),
        ("--served-model-name a --port 1 MODEL", "MODEL", ["a"]),
        ("MODEL --served-model-name a --served-model-name b", "MODEL", ["a", "b"]),
        ("--served-model-name a b", None, ["a", "b"]),
    ],
)
def test_several_names_leave_the_model_its_place(argv: str, model: str | None, names: list[str], monkeypatch):
    served = []
    monkeypatch.setattr("serve_app.server.serve.serve", served.append)
    assert cli.main(["serve", *argv.split()]) == 0
    assert served[0].models[0].config == (EngineConfig() if model is None else EngineConfig(model))
    assert served[0].models[0].names == tuple(names)


def test_a_model_among_the_names_is_refused(capsys):
    assert cli.main(["serve", "--served-model-name", "a", "/models/x"]) == 2
    assert "--served-model-name has '/models/x' as a name, and no MODEL is given" in capsys.readouterr().err


def test_the_application_takes_several_names():
    from serve_app.app_args import AppArgs

    assert AppArgs().served_model_name == AppArgs(served_model_name=None).served_model_name == ()
    assert AppArgs(served_model_name="a").served_model_name == ("a",)
    for given in ("a,b", ["a", "b"], ("a", "b")):  # `serve run` passes texts, a YAML file lists
        assert AppArgs.model_validate({"served_model_name": given}).served_model_name == ("a", "b")


async def test_all_names_are_accepted_and_listed_and_the_first_answers():
    import httpx

    from serve_app.application import build_http_app
    from serve_app.service.service import Service

    service = Service(FakeEngine(), byte_tokenizer(), "first", None, ("gpt-4o", "org/third", "first"))
    transport = httpx.ASGITransport(build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [
            (name, "first") for name in ("first", "gpt-4o", "org/third")
        ]
        assert (await client.get("/v1/models/org/third")).json()["id"] == "org/third"
        for name in ("first", "gpt-4o", "org/third"):
            answer = await client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 2})
            assert answer.json()["model"] == "first"
        refused = await client.post("/v1/completions", json={"model": "fourth", "prompt": "a"})
        assert refused.status_code == 404
        assert "'first', 'gpt-4o', 'org/third'" in refused.json()["error"]["message"]


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keys_come_from_the_environment_unless_they_are_given(monkeypatch):
    def keys(*argv: str) -> tuple[str, ...]:
        return http_settings(cli.parser().parse_args(["serve", *argv])).api_keys()

    assert keys() == ()
    monkeypatch.setenv("CALLBOARD_API_KEY", "one, two,")
    assert keys() == ("one", "two")
    assert keys("--api-key", "three") == ("three",)
    for command in (["chat"], ["chaos", "http://x"], ["replay", "id"]):
        assert client_key(cli.parser().parse_args(command)) == "one"
        assert client_key(cli.parser().parse_args([*command, "--api-key", "three"])) == "three"


def test_chat_sends_the_key_and_reports_a_refusal(monkeypatch, capsys):
    import httpx

    sent = []

    def get(client: httpx.Client, url: str) -> httpx.Response:
        sent.append(client.headers.get("authorization"))
        return httpx.Response(401, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx.Client, "get", get)
    says = []
    for key in ((), ("--api-key", "mine")):
        assert cli.main(["chat", "--url", "http://there", *key]) == 1
        says.append(capsys.readouterr().err)
    assert sent == [None, "Bearer mine"]
    end = "; pass --api-key or set CALLBOARD_API_KEY.\n"
    assert says == [
        f"callboard: http://there/v1 {what}{end}" for what in ("needs an API key", "does not know the API key")
    ]


# ---- files of flags -------------------------------------------------------------------------------------------------

YAML = """
model: some/model
port: 8001
max-model-len: 512
served_model_name: [a, b]
prefix_cache: false
quantization: none
api_key: [k1, k2]
num_draft_tokens: auto
kv_cache_memory:
"""
TOML = """
model = "some/model"
port = 8001
max_model_len = 512
served-model-name = ["a", "b"]
prefix-cache = false
quantization = "none"
api-key = ["k1", "k2"]
num_draft_tokens = "auto"
"""


@pytest.mark.parametrize(("name", "text"), [("flags.yaml", YAML), ("flags.toml", TOML)])
def test_a_file_of_flags_stands_below_the_command_line(name: str, text: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    argv = ["serve", "--config", str(tmp_path / name)]
    args = cli.parser().parse_args(argv)
    assert engine_config(args) == EngineConfig("some/model", max_model_len=512, prefix_cache=False, quantization="none")
    assert (args.port, args.host, args.served_model_name) == (8001, "127.0.0.1", ["a", "b"])
    assert http_settings(args).api_keys() == ("k1", "k2")
    over = ["-p", "9", "--api-key", "k3", "--prefix-cache", "--served-model-name", "c", "--", "other"]
    args = cli.parser().parse_args([*argv, *over])
    assert (args.port, args.api_key, args.served_model_name, args.model) == (9, ["k3"], ["c"], "other")
    assert engine_config(args).prefix_cache
    assert engine_config(args).max_model_len == 512


SEVERAL = """
port: 8001
max_model_len: 512
idle_sleep: 10m
models:
  - model: some/model
    served_model_name: [a, b]
  - {model: other, max_model_len: 1024, quantization: none, idle_sleep: 90}
"""


def test_a_file_of_flags_may_have_several_models(tmp_path: Path, monkeypatch):
    served: list[ServerSettings] = []
    monkeypatch.setattr("serve_app.server.serve.serve", served.append)
    (tmp_path / "flags.yaml").write_text(SEVERAL)
    argv = ["serve", "--config", str(tmp_path / "flags.yaml")]
    assert cli.main(argv) == 0
    first, second = served[0].models
    assert (first.config, first.names) == (EngineConfig("some/model", max_model_len=512), ("a", "b"))
    assert second.config == EngineConfig("other", max_model_len=1024, quantization="none")
    assert (second.names, served[0].port) == (("other",), 8001)
    assert (first.scaling.idle_sleep, second.scaling.idle_sleep) == (600, 90)
    assert cli.main([*argv, "--max-model-len", "64"]) == 0
    assert [model.config.max_model_len for model in served[1].models] == [64, 64]
    assert cli.main([*argv, "one", "two"]) == 2


def test_several_models_share_the_flags(monkeypatch):
    served: list[ServerSettings] = []
    monkeypatch.setattr("serve_app.server.serve.serve", served.append)
    for argv in (["m", "n", "--idle-sleep", "30s"], ["--idle-sleep", "30s", "m", "n"]):
        assert cli.main(["serve", *argv]) == 0
        assert [(m.names, m.scaling.idle_sleep) for m in served[-1].models] == [(("m",), 30), (("n",), 30)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [{model: m, port: 1}]", "has 'port', which is not a flag of one model"),
        ("models: m", "has models, which must be a list; each entry has a model and its flags"),
        ("idle_sleep: soon", "'soon' is not a duration; write seconds or units, such as 30s, 10m or 1h30m"),
        ("max_model_lenn: 5", "has 'max_model_lenn', which is not a flag; did you mean max-model-len?"),
        ("help: all", "has 'help', which is not a flag"),
        ("port: 0", "--port: '0' is not a port; it must be between 1 and 65535, in "),
        ("prefix_cache: 3", "has 3 for prefix-cache; it must be true or false"),
        ("port: [1, 2]", "has a list for port, which takes one value"),
        ("dtype: {a: b}", "has {'a': 'b'} for dtype; it must be a text or a number"),
        ("- a", "must hold a flag's name and its value in each line"),
        ("a: [", "is not YAML: "),
    ],
)
def test_a_wrong_file_of_flags_is_two_lines(text: str, says: str, tmp_path: Path, capsys):
    (tmp_path / "c.yaml").write_text(text)
    code, _, err = shown(capsys, "serve", "--config", str(tmp_path / "c.yaml"))
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 2


def test_a_missing_or_broken_file_of_flags_is_named(tmp_path: Path, capsys):
    assert "cannot be read: No such file" in shown(capsys, "serve", "--config", str(tmp_path / "none"))[2]
    (tmp_path / "c.toml").write_text("a = ")
    assert "c.toml is not TOML: " in shown(capsys, "serve", "--config", str(tmp_path / "c.toml"))[2]


# ---- errors name flags; Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "shows"),
    [
        ("max_model_len is 9; raise kv_cache_memory.", "--max-model-len is 9; raise --kv-cache-memory."),
        ("tensor_parallel_size=2 needs 2 GPUs; use device=cpu or add GPUs.",
         "--tensor-parallel-size 2 needs 2 GPUs; use --device cpu or add GPUs."),
        ("lora is 'x'; it must be NAME=FOLDER.", "--lora is 'x'; it must be NAME=FOLDER."),
        ("max_loras is 1; it must be at least 2, the number in lora.",
         "--max-loras is 1; it must be at least 2, the number in lora."),
        ("/x/max_model_len/generation_config.json: the model, the draft and 'max_model_len' stay.",) * 2,
    ],
)  # fmt: skip
def test_errors_of_commands_name_flags(sentence: str, shows: str):
    assert cli.parser().parse_args(["serve"]).parser.with_flags(sentence) == shows


@pytest.mark.parametrize("argv", ["serve", "chat", "generate hi", "inspect"])
def test_cuda_without_a_gpu_is_refused_at_once(argv: str, monkeypatch, capsys):
    monkeypatch.setattr(
        "serve_app.command_line.flags.missing_gpu", lambda: "this machine has no GPU that torch can use"
    )
    assert cli.main([*argv.split(), "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "callboard: --device is cuda, but this machine has no GPU that torch can use; use --device cpu, or see "
        "`callboard doctor`.\n"
    )


def test_a_gpu_is_missing_only_for_a_reason(monkeypatch):
    machine = {"libraries": (), "gpus": 0}

    class Library:
        def __init__(self, name: str) -> None:
            if name not in machine["libraries"]:
                raise OSError

        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count) -> None:
            count._obj.value = machine["gpus"]

        def nvmlShutdown(self) -> None:
            pass

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "_torch_has_no_cuda", lambda: False)
    monkeypatch.setattr(gpu.ctypes, "CDLL", Library)
    none = "this machine has no GPU that torch can use"
    for libraries, num_gpus, missing in (
        ((), 0, none),
        (("libcuda.so.1",), 0, None),  # without a counter
        (("libcuda.so.1", "libnvidia-ml.so.1"), 0, none),
        (("libcuda.so.1", "libnvidia-ml.so.1"), 2, None),
    ):
        machine.update(libraries=libraries, gpus=num_gpus)
        assert gpu.missing_gpu() == missing
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.missing_gpu() == "CUDA_VISIBLE_DEVICES hides all GPUs"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpu, "_torch_has_no_cuda", lambda: True)
    assert gpu.missing_gpu() == "torch is built without CUDA"


_SIGNAL_AT_AN_IMPORT = """
import os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["SIGNAL_AT"]:
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("module", ["callboard.__main__", "serve_app.cli", "runtime.base", "argparse"])
@pytest.mark.parametrize("is_script", [True, False])
def test_ctrl_c_at_any_import_is_one_line(module: str, is_script: bool, tmp_path: Path):
    """A finder sends the signal when the command, in a process of its own, imports the module."""
    (tmp_path / "sitecustomize.py").write_text(_SIGNAL_AT_AN_IMPORT)
    script = tmp_path / "callboard"  # as installers write it
    script.write_text("import sys\nfrom callboard.__main__ import main\nsys.exit(main())\n")
    command = [str(script)] if is_script else ["-m", "callboard"]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "serve_app" / "public")])
    env = os.environ | {"SIGNAL_AT": module, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command, "models"], capture_output=True, text=True, env=env, timeout=600)
    assert (done.stdout, done.stderr) == ("", "callboard: interrupted\n")
    assert done.returncode in (1, -signal.SIGINT)


@pytest.mark.parametrize("module", ["argparse", "typing", "difflib"])
def test_ctrl_c_while_modules_load_is_one_line(module: str, tmp_path: Path):
    """The signal arrives at the import of a module that the command needs."""
    (tmp_path / f"{module}.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\n")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from serve_app.cli import main; "
    code += f"sys.path.insert(0, {str(tmp_path)!r}); sys.modules.pop({module!r}, None); sys.exit(main(['models']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "callboard: interrupted\n")

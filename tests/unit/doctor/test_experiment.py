"""`rl-megatron doctor` finds what is wrong with an experiment, its servers' Python, and its tokenizer."""

import json

import pytest

from rl_megatron.cli import main
from rl_megatron.cli.early_checks import check_early
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.doctor.communication import compare_nodes, judge_transfers
from rl_megatron.doctor.experiment import check_files, check_layout, check_servers, check_tokenizer
from rl_megatron.doctor.findings import Transfer
from tests.unit.doctor.planted import program

VLLM = ("algorithm=grpo", "data=arithmetic", "generation.engine=vllm")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- servers ---


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 0.11.0; echo 0.1.0", "has vLLM 0.11.0, with which this package was not tried"),
        ("echo -; echo -", "has no vLLM"),
        ("echo 0.32.0; echo -", "but not this package"),
        ("exit 1", "does not run"),
    ],
)
def test_a_python_that_cannot_start_servers_is_a_problem(tmp_path, script, message):
    program(tmp_path / "bin" / "python", script)
    (finding,) = check_servers(load_config([*VLLM, f"generation.vllm.python={tmp_path}/bin/python"]))
    assert finding.state == "problem" and message in finding.message and "scripts/install_vllm.sh" in finding.remedy


def test_a_missing_python_of_the_servers_is_a_problem():
    (finding,) = check_servers(load_config([*VLLM]))
    assert finding.state == "problem" and ".venv-vllm/bin/python does not run" in finding.message


def test_a_python_with_the_tried_version_is_accepted(tmp_path):
    program(tmp_path / "bin" / "python", "echo 0.32.0+cpu; echo 0.1.0")
    config = load_config([*VLLM, f"generation.vllm.python={tmp_path}/bin/python"])
    assert [finding.state for finding in check_servers(config)] == ["ok"]
    assert check_servers(load_config([*VLLM, "generation.vllm.server_urls=[http://10.0.0.5:8000]"])) == []


# --- the experiment ---


def test_data_that_does_not_exist_is_a_problem():
    (finding,) = check_files(load_config(["algorithm=sft", "data=gsm8k", "data.path=absent"]), check_early)
    assert finding.state == "problem" and "absent" in finding.message


def test_a_layout_that_does_not_fit_the_ranks_is_a_problem():
    config = load_config(["experiment=quickstart", "parallel.tensor=2"])
    (finding,) = check_layout(config, {"WORLD_SIZE": "3"})
    assert finding.state == "problem" and "world size 3" in f"{finding.message} {finding.remedy}"
    assert check_layout(config, {"WORLD_SIZE": "4"})[0].state == "ok"
    assert check_layout(config, {}) == []


def test_a_tokenizer_that_cannot_be_read_is_a_problem(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in ("absent", "empty"):
        (finding,) = check_tokenizer(load_config(["algorithm=sft", "data=arithmetic", f"tokenizer.path={path}"]))
        assert finding.state == "problem", finding
        assert path in finding.message


def test_a_tokenizer_of_another_model_is_found(tmp_path):
    train_bpe(["one and two"] * 10, 270).save(tmp_path / "tokenizer")
    base = ["algorithm=sft", "data=arithmetic", f"tokenizer.path={tmp_path}/tokenizer"]
    (smaller,) = check_tokenizer(load_config([*base, "model.vocab_size=256"]))
    assert smaller.state == "problem" and "gives the embedding fewer" in f"{smaller.message} {smaller.remedy}"
    (larger,) = check_tokenizer(load_config([*base, "model.vocab_size=150000"]))
    assert larger.state == "warning" and "compare tokenizer.path" in larger.remedy
    (same,) = check_tokenizer(load_config([*base, "model.vocab_size=320"]))
    assert same.state == "ok"


# --- nodes ---


def test_nodes_with_different_versions_are_a_problem():
    versions = {"torch": "2.13.0", "triton": "3.7.1"}
    (finding,) = compare_nodes([("a", versions), ("b", versions), ("c", {**versions, "torch": "2.12.0"})])
    assert finding.state == "problem" and finding.message.startswith("c has torch 2.12.0 instead of 2.13.0")
    assert compare_nodes([("a", versions), ("b", versions)]) == []


def test_nccl_over_tcp_is_a_warning():
    slow, fast = Transfer(1 << 28, 0.5, 0.4e9), Transfer(1 << 28, 0.001, 200e9)
    assert judge_transfers([slow], "nccl", 16)[0].state == "warning"
    assert judge_transfers([slow], "gloo", 2)[0].state == judge_transfers([fast], "nccl", 16)[0].state == "ok"


# --- the command ---


def test_the_command_answers_in_json_and_ends_with_1_for_a_problem(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = main(["doctor", "experiment=quickstart", "output_dir=file/run", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status == 1 and answer["problems"] >= 1
    (storage,) = [finding for finding in answer["checks"] if finding["check"] == "storage"]
    assert storage["state"] == "problem" and storage["remedy"]


def test_the_command_needs_no_experiment_and_shows_remedies(capsys, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "http")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "MASTER_PORT=http is not a port" in shown and "→ set a number from 1 to 65535" in shown
    assert "problem(s)" in shown and "tokenizer" not in shown


def test_bad_input_ends_the_command_with_2(capsys):
    assert main(["doctor", "train.stpes=3"]) == 2
    assert "did you mean" in capsys.readouterr().err

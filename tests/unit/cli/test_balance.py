"""`rl-megatron balance` chooses from the metrics of a run how many nodes run servers."""

import json

import pytest

from rl_megatron.cli import main

RUN = (
    "balance", "algorithm=grpo", "data=arithmetic", "generation.engine=vllm", "generation.vllm.num_servers=2",
    "generation.vllm.tensor_parallel_size=2", "rollout.async_enabled=true", "output_dir=out",
)  # fmt: skip


def chosen(capsys, *options, run=RUN):
    status = main([*run, *options])
    out, err = capsys.readouterr()
    return (status, out.strip(), err) if status else out.strip()


def write_metrics(directory, trainer_devices, engine_devices, trainer_idle, engine_idle):
    line = {
        "stage": "grpo", "kind": "train", "trainer_devices": trainer_devices, "engine_devices": engine_devices,
        "trainer_idle": trainer_idle, "engine_idle": engine_idle,
    }  # fmt: skip
    (directory / "out").mkdir(exist_ok=True)
    (directory / "out" / "metrics.jsonl").write_text(
        "".join(json.dumps(line | {"step": step}) + "\n" for step in (2, 3))
    )


def test_nodes_go_to_the_part_that_is_busier(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--nodes", "8", "--ranks-per-node", "4")
    assert chosen(capsys, *options) == "4", "nothing was measured yet"
    assert chosen(capsys, *options, "--engine-nodes", "2") == "2"
    write_metrics(tmp_path, 16, 16, trainer_idle=0.5, engine_idle=0.0)
    assert chosen(capsys, *options, "--engine-nodes", "2") == "5"
    write_metrics(tmp_path, 16, 16, trainer_idle=0.0, engine_idle=0.7)
    assert chosen(capsys, *options) == "2"
    assert chosen(capsys, *options, "parallel.tensor=8") == "2", "6 nodes have 3 times 8 ranks"
    assert chosen(capsys, *options, "parallel.tensor=16") == "4", "only 4 nodes of 4 ranks have a multiple of 16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "1"), "--nodes 1: must be at least 2"),
        (("--nodes", "2", "--ranks-per-node", "0"), "--ranks-per-node 0: must be at least 1"),
        (("--nodes", "6", "--engine-nodes", "6"), "--engine-nodes 6: must be at least 1 and less than the 6 nodes"),
        (("--nodes", "2", "--engine-nodes", "0"), "--engine-nodes 0: must be at least 1 and less"),
        (("--nodes", "2", "parallel.tensor=16"), "--nodes 2 --ranks-per-node 8: no division fits"),
        (("--nodes", "2", "rollout.async_enabled=false"), "set rollout.async_enabled=true"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = chosen(capsys, *words)
    assert status == 2 and not out and message in err, err

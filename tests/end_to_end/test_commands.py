"""What the commands print and write: help, the effective configuration, deterministic numbers, a second start."""

import json
import math

import pytest
import yaml

import rl_megatron
from tests.end_to_end.launch import TINY, checkpoints, command, metrics

GRPO = (*TINY, "algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")


def test_help_and_version(tmp_path):
    shown = command(tmp_path, "--help")
    assert shown.status == 0 and shown.err == ""
    assert "train" in shown.out and "rl-megatron train experiment=quickstart" in shown.out
    assert command(tmp_path, "--version").out.strip() == rl_megatron.__version__


def test_print_config_shows_the_effective_configuration_and_writes_nothing(tmp_path, forks):
    shown = forks.run(tmp_path, "train", "experiment=quickstart", "--print-config", "optimizer.beta2=0.5")
    assert shown.status == 0 and shown.err == ""
    config = yaml.safe_load(shown.out)
    assert list(config["stages"]) == ["pretrain", "sft", "grpo"]
    assert {stage["optimizer"]["beta2"] for stage in config["stages"].values()} == {0.5}
    assert {path.name for path in tmp_path.iterdir()} == {"out0.txt", "err0.txt"}


def test_an_unknown_command_or_option_is_refused_with_the_usage(tmp_path, forks):
    for arguments in (["trian"], ["train", "--print-confg"], []):
        refused = forks.run(tmp_path, *arguments)
        assert refused.status == 2 and "usage: rl-megatron" in refused.err


def test_a_run_writes_its_files_and_a_second_start_only_reads_them(tmp_path, forks):
    first = command(tmp_path, "train", *TINY)
    assert first.status == 0, first.err
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "config.yaml", "metrics.jsonl", "summary.json", "curves.png", "checkpoints", "tokenizer", "tensorboard",
        "report.html", "samples.jsonl", "run_info.json", "attempts.jsonl",
    }  # fmt: skip
    assert [(line["kind"], line["step"]) for line in metrics(out)] == [
        ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3),
    ]  # fmt: skip
    assert checkpoints(out, "sft") == ["step-000003"]
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["stages"]["sft"]["model"]["hidden_size"] == 32
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["stages"]) == {"sft"} and summary["world_size"] == 1

    before = metrics(out, timed=True)
    files = {path: path.stat().st_mtime_ns for path in (out / "checkpoints").rglob("*")}
    second = forks.run(tmp_path, "train", *TINY)
    assert second.status == 0, second.err
    assert metrics(out, timed=True) == before, "the second start trained again"
    assert {path: path.stat().st_mtime_ns for path in (out / "checkpoints").rglob("*")} == files
    again = json.loads((out / "summary.json").read_text())
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}
    tables = [done.out[done.out.index("Held-out results") :].partition("┘")[0] for done in (first, second)]
    assert tables[0] == tables[1] and "sft" in tables[0]
    assert "Written to out" in first.out
    assert "nothing was trained: out is unchanged" in second.out and "Written to" not in second.out
    assert "stage sft: skipped, it is complete at step 3: out/checkpoints/sft/step-000003" in second.err


def test_a_mistake_gives_one_line(tmp_path, forks):
    refused = forks.run(tmp_path, "train", "train.stpes=1")
    assert refused.status == 2
    assert refused.err.startswith("error: unknown key 'train.stpes' in override 'train.stpes=1'; did you mean 'train.")
    assert refused.err.count("\n") == 1 and refused.err.endswith("\n")


@pytest.mark.parametrize("algorithm", ["pretrain", "sft", "grpo"])
def test_the_seed_decides_every_number(tmp_path, forks, algorithm):
    settings = {"grpo": GRPO}.get(algorithm, (*TINY, f"algorithm={algorithm}"))
    results = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        done = forks.run(tmp_path, "train", *settings, f"train.seed={seed}", f"output_dir={name}")
        assert done.status == 0, done.err
        results.append([line for line in metrics(tmp_path / name) if line["kind"] == "train"])
    assert results[0] == results[1]
    assert len(results[0]) == len(results[2]) == 3
    assert all(one["loss"] != other["loss"] or one != other for one, other in zip(results[0], results[2], strict=True))
    assert results[0][0]["loss"] != results[2][0]["loss"]


@pytest.mark.parametrize("settings", [TINY, GRPO], ids=["sft", "grpo"])
def test_bf16_runs_to_the_end_with_finite_numbers(tmp_path, forks, settings):
    done = forks.run(tmp_path, "train", *settings, "precision=bf16", "train.save_every=2")
    assert done.status == 0, done.err
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))


def test_two_ranks_give_the_numbers_of_one(tmp_path, forks):
    assert forks.run(tmp_path, "train", *TINY, "output_dir=one").status == 0
    done = forks.run_ranks(tmp_path, "train", *TINY, "output_dir=two", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    assert done[1].out == "" and done[1].err == "", "another rank than rank 0 printed something"
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert (two.pop("stage"), two.pop("kind")) == (one.pop("stage"), one.pop("kind"))
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_the_fused_head_and_overlap_give_the_numbers_of_whole_logits(tmp_path, forks):
    options = ("train.fused_head=true", "optimizer.overlap=true")
    for name, settings in {"whole": (), "fused": options}.items():
        given = ("parallel.tensor=2", "parallel.sequence=true", *settings, f"output_dir={name}")
        done = forks.run_ranks(tmp_path, "train", *GRPO, *given, ranks=4)
        assert [rank.status for rank in done] == [0] * 4, done
    for whole, fused in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "fused"), strict=True):
        assert (fused.pop("stage"), fused.pop("kind")) == (whole.pop("stage"), whole.pop("kind"))
        assert fused == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("settings", [TINY, GRPO], ids=["sft", "grpo"])
def test_packed_and_dynamic_microbatches_give_the_numbers_of_padded_ones(tmp_path, forks, settings):
    found = {}
    for batching in ("padded", "dynamic", "packed"):
        given = [f"train.batching={batching}", "train.micro_batch_tokens=64", f"output_dir={batching}"]
        done = forks.run(tmp_path, "train", *settings, *given)
        assert done.status == 0, done.err
        found[batching] = metrics(tmp_path / batching)
    efficiency = {
        batching: [line.pop("packing_efficiency") for line in lines if line["kind"] == "train"]
        for batching, lines in found.items()
    }
    for batching in ("dynamic", "packed"):
        for line, padded in zip(found[batching], found["padded"], strict=True):
            assert (line.pop("stage"), line.pop("kind")) == ("sft" if settings is TINY else "grpo", padded["kind"])
            assert line == pytest.approx({key: padded[key] for key in line}, rel=1e-4, abs=1e-6)
    assert efficiency["packed"] == [1.0] * 3
    assert all(padded <= dynamic for padded, dynamic in zip(efficiency["padded"], efficiency["dynamic"], strict=True))


def test_a_users_experiment_runs_from_its_own_directory(tmp_path, forks):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    stages = {"read": {"algorithm": {"name": "pretrain"}}, "answer": {"algorithm": {"name": "sft"}}}
    own = {"train": {"steps": 2}, "stages": stages}
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(
        "# @package _global_\n" + yaml.safe_dump(own, sort_keys=False)
    )
    tiny = [override for override in TINY if not override.startswith("train.steps")]
    done = forks.run(tmp_path, "train", "experiment=own", "--config-dir", "mine", *tiny)
    assert done.status == 0, done.err
    steps = [(line["stage"], line["step"]) for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert steps == [("read", 1), ("read", 2), ("answer", 1), ("answer", 2)]
    assert checkpoints(tmp_path / "out", "read") == checkpoints(tmp_path / "out", "answer") == ["step-000002"]

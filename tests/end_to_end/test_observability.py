"""What a run writes about itself: costs that add up, rollouts that can be learned from again, reports and traces."""

import gzip
import json
import re

import pytest

from tests.end_to_end.launch import TINY_GRPO, metrics

REWARD = """
def even(completion_ids, **_):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""  # an untrained model gets different rewards
RUN = (
    "train", *TINY_GRPO, "train.steps=4", "train.eval_every=2", "train.save_every=2", "parallel.pipeline=2",
    "model.num_layers=2",
    "reward.functions=[{path: even.py, name: even}]", "rollouts.save_every=1",
    "algorithm.updates_per_rollout=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, forks):
    """A directory with a run of two pipeline stages in out/, with rollouts and a profile of step 4."""
    directory = tmp_path_factory.mktemp("recorded")
    (directory / "even.py").write_text(REWARD)
    done = forks.run_ranks(directory, *RUN, "profile.steps=[4]", "generation.engine=transformers", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done[0].err
    return directory


def test_the_phases_of_a_step_add_up_to_it_and_the_steps_to_the_stage(recorded):
    lines = metrics(recorded / "out", timed=True)
    trained = [line for line in lines if line["kind"] == "train"]
    for line in trained:
        parts = {name for name in line if name.startswith("time_train_")} - {"time_train_s"}
        phases = {name for name in line if name.startswith("time_")} - parts - {"time_step_s"}
        assert sum(line[name] for name in phases) == pytest.approx(line["time_step_s"])
        assert sum(line[name] for name in parts) == pytest.approx(line["time_train_s"])
        assert (
            line["time_train_forward_s"] > 0 and line["time_train_backward_s"] > 0 and 0 < line["pipeline_bubble"] < 1
        )
        assert line["peak_memory_train_gb"] > 0.1 and line["tflops_per_rank"] > 0 and line["samples_per_s"] > 0
    until_the_last = lines[: lines.index(trained[-1]) + 1]
    wall_clock = sum(line["seconds"] for line in until_the_last)
    assert sum(line["time_step_s"] for line in trained) == pytest.approx(wall_clock, rel=0.01)


def test_a_replay_makes_the_same_updates(recorded, forks, tmp_path):
    (tmp_path / "even.py").write_text(REWARD)
    files = recorded / "out" / "rollouts" / "grpo"
    done = forks.run_ranks(tmp_path, *RUN, "--replay-rollouts", str(files), ranks=2)
    assert [rank.status for rank in done] == [0, 0], done[0].err
    learned = [
        [{name: line[name] for name in ("loss", "grad_norm", "reward", "mismatch_max")} for line in lines]
        for directory in (recorded, tmp_path)
        if (lines := [line for line in metrics(directory / "out") if line["kind"] == "train"])
    ]
    assert learned[0] == learned[1] and len({line["grad_norm"] for line in learned[0]}) == 4
    shards = [sorted(each.glob("out/checkpoints/grpo/step-000004/*.distcp")) for each in (recorded, tmp_path)]
    assert shards[0] and [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def test_rollouts_are_shown_by_reward_and_step(recorded, forks):
    shown = forks.run(recorded, "rollouts", "out", "--step", "2", "--min-reward", "0.5", "--json", "--limit", "100")
    assert shown.status == 0, shown.err
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert rows and all(row["step"] == 2 and row["reward"] >= 0.5 for row in rows)
    of_steps = forks.run(recorded, "rollouts", "out", "--limit", "2")
    assert "2 of 64 trajectories shown" in of_steps.out


def test_a_trace_has_every_phase_of_every_process(recorded):
    content = gzip.decompress((recorded / "out" / "profiles" / "grpo" / "step-000004.json.gz").read_bytes())
    events = json.loads(content)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    phases = {}
    for event in events:
        if event.get("cat") == "phase":
            phases.setdefault(processes[event["pid"]], set()).add(event["name"])
    of_ranks = {"refit", "gate", "generate", "reward", "advantages", "train", "forward", "backward", "optimizer"}
    assert phases["rank 0"] >= of_ranks and phases["rank 1"] >= of_ranks
    engine = next(name for name in phases if name.startswith("rollout engine 0"))
    assert "generate" in phases[engine]
    starts = [event["ts"] for event in events if "ts" in event]
    ends = [event["ts"] + event.get("dur", 0) for event in events if "ts" in event]
    assert min(starts) == 0 and max(ends) < 600e6  # microseconds: all clocks are one


def test_reports_stand_alone_and_runs_are_compared(recorded, forks):
    page = (recorded / "out" / "report.html").read_text()
    assert page.count("<svg") > 10 and not re.search(r"(src|href)=\"?http|url\(http|<link|<script", page)
    assert "complete" in page and "rollouts.save_every" in page
    compared = forks.run(recorded, "compare", "out", "out", "--output", "both.html")
    assert compared.status == 0 and (recorded / "both.html").read_text().count("<svg") > 5
    refused = forks.run(recorded, "report", ".")
    assert refused.status == 2 and "is not the output_dir of a run" in refused.err

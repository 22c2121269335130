"""What a run writes about itself: costs that add up, rollouts that can be learned from again, reports and traces."""

import gzip
import itertools
import json
import re
import shutil
import subprocess
import time

import matplotlib.image
import pytest

from tests.end_to_end.launch import TIMEOUT, TINY_GRPO, metrics

REWARD = """
def even(completion_ids, **_):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""  # an untrained model gets different rewards
RUN = (
    "train", *TINY_GRPO, "train.steps=4", "train.eval_every=2", "train.save_every=2", "parallel.pipeline=2",
    "model.num_layers=2",
    "reward.functions=[{path: even.py, name: even}]", "rollout.save_every=1",
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
    assert "complete" in page and "rollout.save_every" in page
    compared = forks.run(recorded, "compare", "out", "out", "--output", "both.html")
    assert compared.status == 0 and (recorded / "both.html").read_text().count("<svg") > 5
    refused = forks.run(recorded, "report", ".")
    assert refused.status == 2 and "is not the output_dir of a run" in refused.err


def _wait_in_step_30() -> None:
    """Let the run wait in step 30 until it is killed, since W&B may need longer for its file than all steps."""
    from rl_megatron.training.megatron_policy import MegatronPolicy

    train, steps = MegatronPolicy.train, itertools.count(1)

    def waiting(*arguments, **keywords):
        if next(steps) == 30:
            time.sleep(TIMEOUT)
        return train(*arguments, **keywords)

    MegatronPolicy.train = waiting


@pytest.mark.change
def test_a_killed_run_continues_its_runs_of_wandb_and_mlflow(tmp_path, forks, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = (
        "train", *TINY_GRPO, "train.steps=60", "train.eval_every=0", "train.save_every=2", "logger.wandb.mode=offline",
        "logger.mlflow.experiment_name=maths",
    )  # fmt: skip
    out = tmp_path / "out"
    with forks.start(tmp_path, *run, before=_wait_in_step_30) as running:
        running.wait_until(lambda: list(out.glob("mlruns/*/*/metrics/grpo/train/loss")), "point in MLflow")
        running.wait_until(lambda: list(out.glob("wandb/offline-run-*/*.wandb")), "file of W&B")
        first = len(metrics(out))
        running.kill()
    resumed = forks.run(tmp_path, *run)
    assert resumed.status == 0, resumed.err
    (run_directory,) = out.glob("mlruns/*/*/metrics")
    steps = [int(line.split()[2]) for line in (run_directory / "grpo/train/loss").read_text().splitlines()]
    assert set(steps) == set(range(1, 61)) and len(steps) >= 60 and first < 60
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({path.stem for path in files}) == 1, "both have the id of the run in their names"


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What a copy of a page does, so that the places of its charts are known. Pages themselves have no script.
TELL_PLACES = """<script>
document.body.dataset.places = JSON.stringify([...document.querySelectorAll("svg")].map(
  chart => { const box = chart.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom] }))
</script>"""


def in_browser(directory, page, *arguments):
    """Open a page in a browser without network, and return what it prints."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,12000",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={directory}/browser", *arguments, f"file://{page}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def coloured_pixels(directory, page):
    """Return how many pixels of each of the page's charts have a colour, as curves and areas have."""
    opened, with_places = directory / "opened.html", directory / "places.html"
    opened.write_text(page.read_text().replace("<details>", "<details open>"))
    with_places.write_text(opened.read_text().replace("</body>", TELL_PLACES + "</body>"))
    found = re.search(r'data-places="([^"]*)"', in_browser(directory, with_places, "--dump-dom"))
    in_browser(directory, opened, f"--screenshot={directory}/page.png")
    shown = matplotlib.image.imread(directory / "page.png")[..., :3]
    boxes = [[round(edge) for edge in box] for box in json.loads(found[1])]
    assert max(bottom for *_, bottom in boxes) <= shown.shape[0], "the page is longer than the picture"
    colourfulness = shown.max(axis=-1) - shown.min(axis=-1)
    return [int((colourfulness[top:bottom, left:right] > 0.25).sum()) for left, top, right, bottom in boxes]


@pytest.fixture(scope="module")
def failed(recorded, tmp_path_factory, forks):
    """The page of a run whose reward function raises in step 3."""
    directory = tmp_path_factory.mktemp("failed")
    (directory / "even.py").write_text(REWARD.replace("return", "calls.append(1); assert len(calls) < 45; return"))
    (directory / "even.py").write_text("calls = []\n" + (directory / "even.py").read_text())
    done = forks.run_ranks(directory, *RUN, "reward.num_workers=1", ranks=2)
    assert done[0].status == 1, done[0].err
    page = directory / "out" / "report.html"
    deadline = time.monotonic() + 60
    while not page.is_file():  # a process of its own writes it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return page


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_pages_of_finished_running_and_failed_runs_are_drawn(recorded, failed, tmp_path, forks):
    running = tmp_path / "running"
    running.mkdir()
    for name in ("config.yaml", "run_info.json", "metrics.jsonl", "samples.jsonl"):
        lines = (recorded / "out" / name).read_text().splitlines(keepends=True)
        (running / name).write_text("".join(lines if name != "metrics.jsonl" else lines[:-3]))
    for command in (("report", "running"), ("compare", str(recorded / "out"), "running", "--output", "both.html")):
        assert forks.run(tmp_path, *command).status == 0
    pages = {
        "complete": recorded / "out" / "report.html", "running": running / "report.html", "failed": failed,
        "compared": tmp_path / "both.html",
    }  # fmt: skip
    for state, page in pages.items():
        drawn = coloured_pixels(tmp_path, page)
        assert len(drawn) > 10 and min(drawn) > 20, (state, drawn)
        assert f"<dd>{state}</dd>" in page.read_text() or state == "compared"
    emptied = tmp_path / "emptied.html"
    emptied.write_text(re.sub(r"<(path|circle)[^>]*>|fill=\"#(?!333)[^\"]*\"", "", pages["complete"].read_text()))
    assert max(coloured_pixels(tmp_path, emptied)) < 20, "without its curves, a chart has no colour"

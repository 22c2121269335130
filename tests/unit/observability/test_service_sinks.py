"""W&B, MLflow, SwanLab and Trackio without a network, with their own libraries: what was written is read back."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import from_yaml, load_config, to_yaml
from rl_megatron.config.loggers import (
    LoggerConfig,
    MlflowConfig,
    SwanlabConfig,
    WandbConfig,
    check_loggers,
)
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.run_info import RunInfo
from rl_megatron.observability.service_sinks import SavedRunId, prepare_service_sinks

INFO = RunInfo({"optimizer": {"lr": 0.5}, "plugins": []}, "0123abcd", {"torch": "2.13.0"}, "2 ranks: TP 2", "cpu")
BLOCK = 32768  # bytes of a block of the files of W&B and SwanLab, which are logs in LevelDB's format


def run(directory, config, start, steps):
    """Write the lines of steps `start` + 1 to `steps`, as a run does that resumes after step `start`."""
    logger = MetricsLogger(directory, True, ("jsonl",), prepare_service_sinks(config, directory, INFO))
    logger.begin_stage("sft", start, steps)
    for step in range(start + 1, steps + 1):
        logger.record(step, {"loss": 1.0 / step, "pass@2": 0.5})
    logger.close()


def wandb_records(path):
    """Return the records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    return records_of(path, Record)


def records_of(path, record_class):
    """Return the records of a log in LevelDB's format, whose header has 7 bytes."""
    content, at, partial, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        partial += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(record_class.FromString(partial))
            partial = b""
    return records


def history(records):
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.change
def test_a_resumed_run_continues_its_wandb_run(tmp_path):
    config = LoggerConfig(wandb=WandbConfig(project="maths", group="ablation", tags=("a", "b"), mode="offline"))
    run(tmp_path, config, 0, 3)
    run(tmp_path, config, 2, 4)  # step 3 comes again
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    deadline = time.monotonic() + 30  # the library's own process writes, and may be late on a busy machine
    while not all(begun := [[each.run for each in wandb_records(path) if each.HasField("run")] for path in files]):
        assert time.monotonic() < deadline, "a file of W&B has no record of its run"
        time.sleep(0.1)
    first, second = map(wandb_records, files)
    begun = [runs[0] for runs in begun]
    assert begun[0].run_id == begun[1].run_id
    assert (begun[0].project, begun[0].run_group, list(begun[0].tags)) == ("maths", "ablation", ["a", "b"])
    assert begun[0].display_name == tmp_path.name
    recorded = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert recorded["optimizer"] == {"lr": 0.5}
    assert recorded["git_revision"] == "0123abcd" and recorded["layout"] == "2 ranks: TP 2"
    assert recorded["versions"] == {"torch": "2.13.0"}
    rows = [[(row["sft/step"], row["sft/train/loss"]) for row in history(each)] for each in (first, second)]
    assert rows == [[(1, 1.0), (2, 0.5), (3, 1 / 3)], [(3, 1 / 3), (4, 0.25)]]


@pytest.mark.change
def test_a_resumed_run_continues_its_mlflow_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = LoggerConfig(mlflow=MlflowConfig(experiment_name="maths", run_name="mine", tags={"team": "a"}))
    run(tmp_path, config, 0, 3)
    (written,) = tmp_path.glob("mlruns/*/*/metrics/sft/train/loss")
    written.write_text(written.read_text() + "17000")  # a killed process leaves such ends, and files without content
    (written.parent / "not_written_yet").touch()
    run(tmp_path, config, 2, 4)  # step 3 comes again
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("maths")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params == {"optimizer.lr": "0.5", "plugins": "[]"}
    tags = found.data.tags
    assert (tags["team"], tags["mlflow.source.git.commit"], tags["versions.torch"]) == ("a", "0123abcd", "2.13.0")
    assert tags["layout"] == "2 ranks: TP 2"
    points = client.get_metric_history(found.info.run_id, "sft/train/loss")
    assert [(each.step, each.value) for each in points] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]
    assert found.data.metrics["sft/train/pass_2"] == 0.5, "MLflow's names may not have @"


@pytest.mark.change
def test_a_resumed_run_continues_its_swanlab_run(tmp_path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    config = LoggerConfig(swanlab=SwanlabConfig(project="maths", tags=("a", "b"), mode="offline"))
    run(tmp_path, config, 0, 3)
    run(tmp_path, config, 2, 4)  # step 3 comes again
    files = sorted(tmp_path.glob("swanlog/run-*/*.swanlab"), key=lambda path: path.stat().st_mtime)
    first, second = (records_of(path, Record) for path in files)
    starts = [next(each.start for each in records if each.HasField("start")) for records in (first, second)]
    assert starts[0].id == starts[1].id == json.loads((tmp_path / "swanlab_run.json").read_text())["id"]
    assert (starts[0].project, starts[0].name, list(starts[0].tags)) == ("maths", tmp_path.name, ["a", "b"])
    points = [
        [
            (each.scalar.step, each.scalar.value.number)
            for each in records
            if each.HasField("scalar") and each.scalar.key == "sft/train/loss"
        ]
        for records in (first, second)
    ]
    assert points == [[(1, 1.0), (2, 0.5), (3, 1 / 3)], [(3, 1 / 3), (4, 0.25)]]
    written = "".join(path.read_text() for path in tmp_path.glob("swanlog/run-*/files/*"))
    assert "0123abcd" in written and "2 ranks: TP 2" in written
    assert sys.executable not in written, "the command of a run may hold secrets"


@pytest.mark.change
def test_a_resumed_run_continues_its_trackio_run(tmp_path):
    """It runs in processes of its own, because Trackio reads its directory once, when it is imported."""
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from rl_megatron.config.loggers import LoggerConfig, TrackioConfig
        from tests.unit.observability.test_service_sinks import run

        start, steps = map(int, sys.argv[2:])
        run(Path(sys.argv[1]), LoggerConfig(trackio=TrackioConfig(project="maths")), start, steps)
    """)
    environment = {name: value for name, value in os.environ.items() if name != "TRACKIO_DIR"}
    for steps in (["0", "3"], ["2", "4"]):  # step 3 comes again
        command = [sys.executable, "-c", program, str(tmp_path), *steps]
        subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[3], timeout=300)
    with sqlite3.connect(tmp_path / "trackio" / "maths.db") as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
        (recorded,) = database.execute("select config from configs").fetchall()
    (name,) = {row[0] for row in rows}
    assert name == json.loads((tmp_path / "trackio_run.json").read_text())["id"]
    assert name.startswith(f"{tmp_path.name}-")
    assert len({row[1] for row in rows}) == 1
    points = [(step, json.loads(metrics)["sft/train/loss"]) for _, _, step, metrics in rows]
    assert points == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]
    assert json.loads(recorded[0])["git_revision"] == "0123abcd"


def test_the_id_of_a_run_is_not_used_in_another_project(tmp_path):
    SavedRunId(tmp_path / "wandb_run.json", {"project": "a"}).save("one")
    assert SavedRunId(tmp_path / "wandb_run.json", {"project": "a"}).id == "one"
    assert SavedRunId(tmp_path / "wandb_run.json", {"project": "b"}).id is None


def test_a_damaged_file_of_the_id_begins_a_new_run(tmp_path):
    (tmp_path / "wandb_run.json").write_text("{")
    assert SavedRunId(tmp_path / "wandb_run.json", {}).id is None


def test_a_missing_package_is_refused_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"logger.wandb needs the Python package wandb.*pip install 'rl_megatron\[wandb\]'"
    ):
        check_loggers(LoggerConfig(wandb=WandbConfig()))
    check_loggers(LoggerConfig())


def test_services_are_chosen_by_their_sections():
    assert list(load_config([]).logger.iter_services()) == []
    config = load_config(["logger.wandb.mode=offline", "logger.wandb.tags=[a]", "logger.mlflow={}"])
    assert config.logger.wandb == WandbConfig(mode="offline", tags=("a",))
    assert config.logger.mlflow == MlflowConfig()


def test_true_chooses_a_service_with_its_defaults():
    config = load_config(["logger.wandb=true", "logger.mlflow=false"])
    assert list(config.logger.iter_services()) == [("wandb", WandbConfig())]
    assert from_yaml(to_yaml(config), "config.yaml") == config
    with pytest.raises(ConfigError, match="^logger.wandb='maths': must be true, .*, or a mapping of keys to values$"):
        load_config(["logger.wandb=maths"])


def test_a_mistyped_key_of_a_service_is_refused():
    with pytest.raises(ConfigError, match="logger.wandb.*projekt"):
        load_config(["logger.wandb.projekt=maths"])


def test_run_info_is_a_file_for_own_sinks(tmp_path):
    INFO.write(tmp_path)
    assert json.loads((tmp_path / "run_info.json").read_text()) == {
        "config": INFO.config, "git_revision": "0123abcd", "versions": INFO.versions, "layout": INFO.layout,
        "device": "cpu",
    }  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["run_info.json"]


def test_run_info_has_the_configuration_without_secrets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["logger.mlflow.tracking_uri=https://me:hunter2@host/mlflow"])
    info = RunInfo.from_config(config, "1 rank", "cpu")
    assert info.config["logger"]["mlflow"]["tracking_uri"] == "https://***@host/mlflow"
    assert info.git_revision is None, "the directory is not in a repository"
    assert "hunter2" not in repr(info)

"""Sinks of services: Weights & Biases, MLflow, SwanLab and Trackio. A run that is started again goes on there.

A sink is opened and called in the thread of a `QueuedSink`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rl_megatron import disk, log
from rl_megatron.config.loggers import LoggerConfig, MlflowConfig, SwanlabConfig, TrackioConfig, WandbConfig
from rl_megatron.observability.run_files import flatten
from rl_megatron.observability.run_info import RunInfo
from rl_megatron.observability.sinks import MetricLine, MetricSink

_FINISH_SECONDS = 12.0  # time that W&B takes to send what is left at the end, before the files are left to `wandb sync`
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w./ :-]")


class WandbSink:
    """A run of Weights & Biases, with `<stage>/<kind>/<metric>` over `<stage>/step`."""

    def __init__(self, settings: WandbConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose id wandb_run.json has."""
        import wandb  # slow to import, and only rank 0 needs it

        self._exit_code = 0
        known = KnownRun(output_dir / "wandb_run.json", {"project": settings.project, "entity": settings.entity})
        run_id = known.id or uuid.uuid4().hex[:8]
        known.keep(run_id)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or output_dir.resolve().name,
            group=settings.group,
            job_type=settings.job_type,
            tags=list(settings.tags),
            notes=settings.notes,
            mode=settings.mode,
            dir=str(settings.directory or output_dir),
            id=run_id,
            resume="allow" if settings.mode == "online" else None,  # offline, the same id is enough for `wandb sync`
            config=_facts(info) | info.config,
            allow_val_change=True,  # some settings may change when a run is started again
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=_FINISH_SECONDS,
                disable_code=True,
                disable_git=True,  # it would send the difference to the commit as well
                x_disable_meta=True,  # it would send the command, which may hold secrets
            ),
        )

    def begin_stage(self, stage: str, start: int) -> None:
        """Show the metrics of the stage over its own steps, because W&B's step may not go back after a restart."""
        self._run.define_metric(f"{stage}/step", hidden=True)
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        self._run.log({f"{line.stage}/step": line.step, **_named(line)})

    def fail(self) -> None:
        """Mark the run as failed."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the run."""
        self._run.finish(exit_code=self._exit_code)


class MlflowSink:
    """A run of MLflow, with `<stage>/<kind>/<metric>` at the steps of the stage."""

    def __init__(self, settings: MlflowConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose id mlflow_run.json has."""
        import mlflow  # slow to import, and only rank 0 needs it
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._status = Metric, "FINISHED"
        chosen = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = chosen or (output_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):  # MLflow refuses directories otherwise; a database needs its larger package
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        place = {"tracking_uri": chosen and log.redact(chosen), "experiment_name": settings.experiment_name}
        known = KnownRun(output_dir / "mlflow_run.json", place)
        tags = {"mlflow.source.git.commit": info.git_revision, **flatten(_facts(info)), **settings.tags}
        if known.id is None:
            found = self._client.get_experiment_by_name(settings.experiment_name)
            experiment = found.experiment_id if found else self._client.create_experiment(settings.experiment_name)
            name = settings.run_name or output_dir.resolve().name
            self.run_id = self._client.create_run(experiment, run_name=name).info.run_id
            known.keep(self.run_id)
            values = [Param(key, _cut(value, 6000)) for key, value in flatten(info.config).items()]
            for start in range(0, len(values), 100):  # the most of one request
                self._client.log_batch(self.run_id, params=values[start : start + 100])
        else:  # parameters cannot change: the settings of the first start stay
            self.run_id = known.id
            if uri.startswith("file:"):
                _drop_unfinished_points(Path(url2pathname(urlsplit(uri).path)), self.run_id)
            self._client.update_run(self.run_id, status="RUNNING")
        given = [RunTag(key, _cut(value, 5000)) for key, value in tags.items() if value is not None]
        self._client.log_batch(self.run_id, tags=given)

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: MLflow keeps several values of a step, and shows the newest."""

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        now = int(time.time() * 1000)
        values = [
            self._metric(_NOT_IN_MLFLOW_NAMES.sub("_", name), value, now, line.step)
            for name, value in _named(line).items()
        ]
        for start in range(0, len(values), 1000):  # the most of one request
            self._client.log_batch(self.run_id, metrics=values[start : start + 1000])

    def fail(self) -> None:
        """Mark the run as failed."""
        self._status = "FAILED"

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self.run_id, self._status)


def _drop_unfinished_points(store: Path, run_id: str) -> None:
    """Remove what a killed process was writing to files of metrics, because MLflow reads no run that has such files."""
    for path in store.glob(f"*/{run_id}/metrics/**/*"):
        if not path.is_file():
            continue
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            path.unlink()
        elif whole != content:
            disk.replace_file(path, whole)


class SwanlabSink:
    """A run of SwanLab, with `<stage>/<kind>/<metric>` at the steps of the stage."""

    def __init__(self, settings: SwanlabConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose id swanlab_run.json has."""
        import swanlab  # slow to import, and only rank 0 needs it

        place = {"project": settings.project, "workspace": settings.workspace, "mode": settings.mode}
        known = KnownRun(output_dir / "swanlab_run.json", place)
        run_id = known.id or uuid.uuid4().hex[:21]
        known.keep(run_id)
        self._run = swanlab.init(
            project=settings.project,
            workspace=settings.workspace,
            name=settings.name or output_dir.resolve().name,
            group=settings.group,
            job_type=settings.job_type,
            description=settings.description,
            tags=list(settings.tags),
            mode=settings.mode,
            log_dir=str(settings.log_dir or output_dir / "swanlog"),
            id=run_id,
            resume="allow",
            config=_facts(info) | info.config,
            settings=swanlab.Settings.model_validate(
                {
                    "interactive": False,  # it would ask for a key at the terminal
                    "terminal": {"proxy_type": "none"},
                    # The runtime has the command, which may hold secrets.
                    "probe": {"runtime": False, "git": False, "requirements": False, "monitor": False},
                }
            ),
        )

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: SwanLab keeps the steps of every metric apart."""

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        self._run.log(_named(line), step=line.step)

    def close(self) -> None:
        """Finish the run."""
        import swanlab

        swanlab.finish()


class TrackioSink:
    """A run of Trackio, with `<stage>/<kind>/<metric>` at the steps of the stage."""

    def __init__(self, settings: TrackioConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose name trackio_run.json has.

        Trackio knows runs by their names, so a new run's name gets an end that no other has.
        """
        import trackio  # slow to import, and only rank 0 needs it

        place = {"project": settings.project, "space_id": settings.space_id, "directory": settings.directory}
        known = KnownRun(output_dir / "trackio_run.json", place)
        name = known.id or f"{settings.name or output_dir.resolve().name}-{uuid.uuid4().hex[:6]}"
        known.keep(name)
        self._run = trackio.init(
            project=settings.project,
            name=name,
            group=settings.group,
            space_id=settings.space_id,
            config=_facts(info) | info.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: Trackio shows the newest value of a step."""

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        self._run.log(_named(line), step=line.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class KnownRun:
    """The id of a service's run, in a file of the output directory, so that a run that is resumed continues it."""

    def __init__(self, path: Path, place: Mapping[str, Any]):
        """Read the file. The id of a run in another place is not used."""
        self._path, self._place = path, dict(place)
        self.id: str | None = None
        try:
            kept = json.loads(path.read_text())
            if kept["place"] == self._place:
                self.id = str(kept["id"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            log.LOGGER.warning("%s cannot be read (%s); a new run of the service is begun", path, error)

    def keep(self, run_id: str) -> None:
        """Write the id to the file."""
        self.id = run_id
        disk.replace_file(self._path, json.dumps({"id": run_id, "place": self._place}) + "\n")


SERVICES: dict[str, Callable[[Any, Path, RunInfo], MetricSink]] = {
    "wandb": WandbSink, "mlflow": MlflowSink, "swanlab": SwanlabSink, "trackio": TrackioSink,
}  # fmt: skip


def service_sinks(config: LoggerConfig, output_dir: Path, info: RunInfo) -> dict[str, Callable[[], MetricSink]]:
    """Import the packages of the services that a run uses, and return what opens their sinks, by name.

    The imports end before a thread begins, because a thread that imports while a checkpoint's writer is forked would
    leave the writer waiting for the lock of the import.
    """
    opened: dict[str, Callable[[], MetricSink]] = {}
    for name, settings in config.chosen():
        if name not in SERVICES:
            continue
        if isinstance(settings, TrackioConfig):  # its package reads the directory when it is imported
            os.environ.setdefault("TRACKIO_DIR", str(Path(settings.directory or output_dir / "trackio").resolve()))
        importlib.import_module(settings.package)
        opened[name] = partial(SERVICES[name], settings, output_dir, info)
    return opened


def _named(line: MetricLine) -> dict[str, float]:
    values = line.metrics | {"seconds": line.seconds}
    return {f"{line.stage}/{line.kind}/{name}": value for name, value in values.items()}


def _facts(info: RunInfo) -> dict[str, Any]:
    """Return what is known about the run besides its configuration."""
    return {
        "git_revision": info.git_revision,
        "versions": info.versions,
        "layout": info.layout,
        "device_type": info.device,
    }


def _cut(value: Any, most: int) -> str:
    return str(value)[:most]

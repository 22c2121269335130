"""Sinks of services: Weights & Biases, MLflow, SwanLab, Trackio and Prometheus.

A resumed training run continues the same run in the service. All sinks but Prometheus's are opened and called in the
thread of a `QueuedSink`.
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
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loggers import (
    LoggerConfig,
    MlflowConfig,
    PrometheusConfig,
    SwanlabConfig,
    TrackioConfig,
    WandbConfig,
)
from rl_megatron.observability.run_files import flatten
from rl_megatron.observability.run_info import RunInfo
from rl_megatron.observability.sinks import MetricLine, MetricSink

_FINISH_SECONDS = 12.0  # how long W&B may take to send the last metrics at the end; `wandb sync` can send the rest
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w./ :-]")
_NOT_IN_PROMETHEUS_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_PROMETHEUS_OWN = ("step", "phase", "restarts")  # gauges that do not come from lines of metrics
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by the launcher


class WandbSink:
    """A run of Weights & Biases, in which `<stage>/<kind>/<metric>` is plotted against `<stage>/step`."""

    def __init__(self, settings: WandbConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose id is in wandb_run.json."""
        import wandb  # slow to import, and only rank 0 needs it

        self._exit_code = 0
        saved_id = SavedRunId(output_dir / "wandb_run.json", {"project": settings.project, "entity": settings.entity})
        run_id = saved_id.id or uuid.uuid4().hex[:8]
        saved_id.save(run_id)
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
            config=_collect_facts(info) | info.config,
            allow_val_change=True,  # some settings may change when a run is started again
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=_FINISH_SECONDS,
                disable_code=True,
                disable_git=True,  # wandb would also send uncommitted changes
                x_disable_meta=True,  # wandb would send the command, which may hold secrets
            ),
        )

    def begin_stage(self, stage: str, start: int) -> None:
        """Plot the stage's metrics against its own steps, because W&B's step cannot go back after a restart."""
        self._run.define_metric(f"{stage}/step", hidden=True)
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        self._run.log({f"{line.stage}/step": line.step, **_name_metrics(line)})

    def fail(self) -> None:
        """Mark the run as failed."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the run."""
        self._run.finish(exit_code=self._exit_code)


class MlflowSink:
    """A run of MLflow, with `<stage>/<kind>/<metric>` at the steps of the stage."""

    def __init__(self, settings: MlflowConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose id is in mlflow_run.json."""
        import mlflow  # slow to import, and only rank 0 needs it
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._status = Metric, "FINISHED"
        chosen = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = chosen or (output_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):  # MLflow refuses a directory otherwise, and a database needs MLflow's full package
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        destination = {"tracking_uri": chosen and log.redact(chosen), "experiment_name": settings.experiment_name}
        saved_id = SavedRunId(output_dir / "mlflow_run.json", destination)
        tags = {"mlflow.source.git.commit": info.git_revision, **flatten(_collect_facts(info)), **settings.tags}
        if saved_id.id is None:
            experiment = self._client.get_experiment_by_name(settings.experiment_name)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment_name)
            )
            name = settings.run_name or output_dir.resolve().name
            self.run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
            saved_id.save(self.run_id)
            values = [Param(key, str(value)[:6000]) for key, value in flatten(info.config).items()]
            for start in range(0, len(values), 100):  # the most in one request
                self._client.log_batch(self.run_id, params=values[start : start + 100])
        else:  # parameters cannot change: the settings of the first start stay
            self.run_id = saved_id.id
            if uri.startswith("file:"):
                _drop_unfinished_points(Path(url2pathname(urlsplit(uri).path)), self.run_id)
            self._client.update_run(self.run_id, status="RUNNING")
        run_tags = [RunTag(key, str(value)[:5000]) for key, value in tags.items() if value is not None]
        self._client.log_batch(self.run_id, tags=run_tags)

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: MLflow keeps several values of a step, and shows the newest."""

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        now = int(time.time() * 1000)
        values = [
            self._metric(_NOT_IN_MLFLOW_NAMES.sub("_", name), value, now, line.step)
            for name, value in _name_metrics(line).items()
        ]
        for start in range(0, len(values), 1000):  # the most in one request
            self._client.log_batch(self.run_id, metrics=values[start : start + 1000])

    def fail(self) -> None:
        """Mark the run as failed."""
        self._status = "FAILED"

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self.run_id, self._status)


def _drop_unfinished_points(store: Path, run_id: str) -> None:
    """Remove the points that a killed process was writing, because MLflow cannot read a run with unfinished points."""
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
        """Begin the run, or continue the one whose id is in swanlab_run.json."""
        import swanlab  # slow to import, and only rank 0 needs it

        destination = {"project": settings.project, "workspace": settings.workspace, "mode": settings.mode}
        saved_id = SavedRunId(output_dir / "swanlab_run.json", destination)
        run_id = saved_id.id or uuid.uuid4().hex[:21]
        saved_id.save(run_id)
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
            config=_collect_facts(info) | info.config,
            settings=swanlab.Settings.model_validate(
                {
                    "interactive": False,  # SwanLab would ask for an API key at the terminal
                    "terminal": {"proxy_type": "none"},
                    # `runtime` would send the command, which may hold secrets.
                    "probe": {"runtime": False, "git": False, "requirements": False, "monitor": False},
                }
            ),
        )

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: SwanLab has separate steps for every metric."""

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        self._run.log(_name_metrics(line), step=line.step)

    def close(self) -> None:
        """Finish the run."""
        import swanlab

        swanlab.finish()


class TrackioSink:
    """A run of Trackio, with `<stage>/<kind>/<metric>` at the steps of the stage."""

    def __init__(self, settings: TrackioConfig, output_dir: Path, info: RunInfo):
        """Begin the run, or continue the one whose name is in trackio_run.json.

        Trackio identifies runs by their names, so a new run's name gets a unique suffix.
        """
        import trackio  # slow to import, and only rank 0 needs it

        destination = {"project": settings.project, "space_id": settings.space_id, "directory": settings.directory}
        saved_id = SavedRunId(output_dir / "trackio_run.json", destination)
        name = saved_id.id or f"{settings.name or output_dir.resolve().name}-{uuid.uuid4().hex[:6]}"
        saved_id.save(name)
        self._run = trackio.init(
            project=settings.project,
            name=name,
            group=settings.group,
            space_id=settings.space_id,
            config=_collect_facts(info) | info.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: Trackio shows the newest value of a step."""

    def write(self, line: MetricLine) -> None:
        """Log the metrics of the line."""
        self._run.log(_name_metrics(line), step=line.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class PrometheusSink:
    """A web server in a thread of this process, with gauges `rl_megatron_<metric>{run, stage, kind}`.

    It also has `rl_megatron_step`, `rl_megatron_phase` (1 for the phase that runs, 0 for earlier phases) and
    `rl_megatron_restarts`.
    """

    def __init__(self, settings: PrometheusConfig, output_dir: Path):
        """Start listening. Raise ConfigError if the address is in use or does not belong to this machine."""
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge = Gauge
        self._registry, self._gauges = CollectorRegistry(), {}
        self._run, self._stage, self._phases = output_dir.resolve().name, "", set()
        try:
            self._server, self._thread = start_http_server(settings.port, addr=settings.host, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"logger.prometheus.host={settings.host} and logger.prometheus.port={settings.port}: the endpoint "
                f"cannot listen there ({error.strerror}); choose another port, or end the process that uses it"
            ) from error
        self._set("restarts", int(os.environ.get(_RESTARTS, "0")))

    @property
    def port(self) -> int:
        """Return the port on which the server listens; `logger.prometheus.port=0` chooses a free one."""
        return self._server.server_port

    def begin_stage(self, stage: str, start: int) -> None:
        """Show the stage's first step."""
        self._stage = stage
        self._set("step", start, stage=stage)

    def enter_phase(self, phase: str | None) -> None:
        """Show which phase runs; None between phases."""
        if phase is not None:
            self._phases.add(phase)
        for name in self._phases:
            self._set("phase", float(name == phase), phase=name)

    def write(self, line: MetricLine) -> None:
        """Show the values of the line."""
        if line.kind == "train":
            self._set("step", line.step, stage=line.stage)
        for name, value in line.metrics.items():
            gauge = f"{name}_metric" if name in _PROMETHEUS_OWN else name
            self._set(gauge, value, stage=line.stage, kind=line.kind)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, value: float, **labels: str) -> None:
        full = f"rl_megatron_{_NOT_IN_PROMETHEUS_NAMES.sub('_', name)}"
        if full not in self._gauges:
            self._gauges[full] = self._gauge(full, name, ["run", *labels], registry=self._registry)
        self._gauges[full].labels(run=self._run, **labels).set(value)


class SavedRunId:
    """The id of a run in a service, saved in the output directory, so that a resumed training continues that run."""

    def __init__(self, path: Path, destination: Mapping[str, object]):
        """Read the file. The id is not used if it was saved for another destination."""
        self._path, self._destination = path, dict(destination)
        self.id: str | None = None
        try:
            content = json.loads(path.read_text())
            if content["place"] == self._destination:
                self.id = str(content["id"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            log.LOGGER.warning(
                "%s, with the id of the run to continue, cannot be read (%s); metrics go to a new run in that service",
                path,
                error,
            )

    def save(self, run_id: str) -> None:
        """Write the id to the file."""
        self.id = run_id
        disk.replace_file(self._path, json.dumps({"id": run_id, "place": self._destination}) + "\n")


SERVICES: dict[str, Callable[[Any, Path, RunInfo], MetricSink]] = {
    "wandb": WandbSink, "mlflow": MlflowSink, "swanlab": SwanlabSink, "trackio": TrackioSink,
}  # fmt: skip


def prepare_service_sinks(config: LoggerConfig, output_dir: Path, info: RunInfo) -> dict[str, Callable[[], MetricSink]]:
    """Import the packages of a run's services, and return for each service's name the function that opens its sink.

    The imports end before a thread begins. If a thread imported a module while a checkpoint's writer is forked, the
    writer would wait for the import's lock forever.
    """
    openers: dict[str, Callable[[], MetricSink]] = {}
    for name, settings in config.iter_services():
        if name not in SERVICES:
            continue
        if isinstance(settings, TrackioConfig):  # the package reads this variable when it is imported
            os.environ.setdefault("TRACKIO_DIR", str(Path(settings.directory or output_dir / "trackio").resolve()))
        importlib.import_module(settings.package)
        openers[name] = partial(SERVICES[name], settings, output_dir, info)
    return openers


def _name_metrics(line: MetricLine) -> dict[str, float]:
    values = line.metrics | {"seconds": line.seconds}
    return {f"{line.stage}/{line.kind}/{name}": value for name, value in values.items()}


def _collect_facts(info: RunInfo) -> dict[str, object]:
    """Return what a service records about the run besides its configuration."""
    return {
        "git_revision": info.git_revision,
        "versions": info.versions,
        "layout": info.layout,
        "device_type": info.device,
    }

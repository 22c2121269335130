"""The settings of loggers and of profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from rl_megatron.config.extras import require_extra
from rl_megatron.config.loading.settings import NonNegative, Positive, section


@section
class WandbConfig:
    """Weights & Biases. Keys have the names of the arguments of `wandb.init`.

    Attributes:
        package: The Python package that it needs.
    """

    package: ClassVar[str] = "wandb"

    project: str = "rl_megatron"  # the W&B project
    entity: str | None = None  # the user or team that owns the project. null: the default of the account
    name: str | None = None  # the name of the run. null: the last part of output_dir
    group: str | None = None  # runs with the same group are shown together
    job_type: str | None = None  # a kind of run within its group
    tags: tuple[str, ...] = ()  # tags of the run
    notes: str | None = None  # a longer description of the run
    # online: send metrics during the run. offline: write files only, which `wandb sync` sends later.
    mode: Literal["online", "offline"] = "online"
    directory: str | None = None  # the directory in which W&B makes its directory wandb/. null: output_dir


@section
class MlflowConfig:
    """MLflow, on a tracking server or in a directory.

    Attributes:
        package: The Python package that it needs.
    """

    package: ClassVar[str] = "mlflow"

    # Where MLflow keeps runs: a tracking server such as http://10.0.0.5:5000, or a directory as file:///data/mlruns.
    # null: the environment variable MLFLOW_TRACKING_URI or, without it, mlruns/ in output_dir.
    tracking_uri: str | None = None
    experiment_name: str = "rl_megatron"  # the experiment, which is created if it does not exist
    run_name: str | None = None  # the name of the run. null: the last part of output_dir
    tags: dict[str, str] = field(default_factory=dict)  # tags of the run


@section
class SwanlabConfig:
    """SwanLab. Keys have the names of the arguments of `swanlab.init`.

    Attributes:
        package: The Python package that it needs.
    """

    package: ClassVar[str] = "swanlab"

    project: str = "rl_megatron"  # the project
    workspace: str | None = None  # the user or organization that owns the project. null: the account's default
    name: str | None = None  # the name of the run. null: the last part of output_dir
    group: str | None = None  # runs with the same group are shown together
    job_type: str | None = None  # a kind of run within its group
    tags: tuple[str, ...] = ()  # tags of the run
    description: str | None = None  # a longer description of the run
    # online: send metrics during the run. offline: write files only, which `swanlab sync` sends later.
    mode: Literal["online", "offline"] = "online"
    log_dir: str | None = None  # the directory of its files. null: swanlog/ in output_dir


@section
class TrackioConfig:
    """Trackio, which keeps runs in a local database. Keys have the names of the arguments of `trackio.init`.

    Attributes:
        package: The Python package that it needs.
    """

    package: ClassVar[str] = "trackio"

    project: str = "rl_megatron"  # the project
    name: str | None = None  # the name of the run. null: the last part of output_dir
    group: str | None = None  # runs with the same group are shown together
    space_id: str | None = None  # the Hugging Face Space that shows the runs. null: this machine, with `trackio show`
    directory: str | None = None  # the directory of the database. null: trackio/ in output_dir


@section
class PrometheusConfig:
    """An endpoint that Prometheus reads.

    Attributes:
        package: The Python package that it needs.
    """

    package: ClassVar[str] = "prometheus_client"

    host: str = "127.0.0.1"  # the address at which rank 0 listens; whoever reaches it can read the metrics
    port: NonNegative = 9464  # the port; 0: a free one


Service = WandbConfig | MlflowConfig | SwanlabConfig | TrackioConfig | PrometheusConfig


def _convert_switch(value: object) -> object:
    """Return an empty mapping for true, and None for false."""
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, str | int | float | list):
        raise ValueError("must be true, which uses the defaults of its keys, or a mapping of keys to values")
    return value


_Switch = BeforeValidator(_convert_switch)


@section
class LoggerConfig:
    """Services that metrics are sent to, besides the sinks of metric_sinks. A service that is null is not used."""

    wandb: Annotated[WandbConfig | None, _Switch] = None  # Weights & Biases; true uses the defaults of its keys
    mlflow: Annotated[MlflowConfig | None, _Switch] = None  # MLflow; true uses the defaults of its keys
    swanlab: Annotated[SwanlabConfig | None, _Switch] = None  # SwanLab; true uses the defaults of its keys
    trackio: Annotated[TrackioConfig | None, _Switch] = None  # Trackio; true uses the defaults of its keys
    # an endpoint for Prometheus; true uses the defaults of its keys
    prometheus: Annotated[PrometheusConfig | None, _Switch] = None

    def iter_services(self) -> Iterator[tuple[str, Service]]:
        """Yield the name and the settings of each service that is used."""
        for service in fields(self):
            settings = getattr(self, service.name)
            if settings is not None:
                yield service.name, settings


def check_loggers(config: LoggerConfig) -> None:
    """Refuse a service whose Python package is missing; the message names the extra that installs it."""
    for name, settings in config.iter_services():
        require_extra(f"logger.{name}", name, settings.package, otherwise=f"set logger.{name}=null")


@section
class ProfileConfig:
    """Profiles of chosen steps, in the directory profiles/STAGE of output_dir."""

    steps: tuple[Positive, ...] = ()  # the steps that are profiled
    # ranks whose operators and kernels are recorded; phases are recorded on all ranks
    ranks: tuple[NonNegative, ...] = (0,)
    with_stack: bool = False  # record the Python stack of each operator, which makes steps much slower
    memory: bool = True  # on a GPU, also write a snapshot of every allocation of these ranks

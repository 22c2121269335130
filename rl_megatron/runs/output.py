"""The output directory of a run: its first files, and the logger of its metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

from rl_megatron import disk
from rl_megatron.checkpoint.directory import CONFIG, LEFTOVERS
from rl_megatron.config.checkpoint_metadata import HUGGING_FACE, find_hugging_face_files
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import RunConfig
from rl_megatron.data.run_tokenizer import save_tokenizer
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.observability.failures import Attempts
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.run_info import RunInfo
from rl_megatron.observability.service_sinks import prepare_service_sinks
from rl_megatron.runs.lock import OutputLock
from rl_megatron.runs.rerun import move_aside
from rl_megatron.topology.topology import Topology

_WITH_FILES = ("rollouts/*/", "reference_logprobs/", "evaluations/*/*/")  # directories of files that are replaced
_OF_STEPS = ("checkpoints/*/step-*", "exported/*/step-*")


def begin_output(config: RunConfig, run_yaml: str, lock: OutputLock, tokenizer: Tokenizer) -> None:
    """Lock the run's directory, and write the files that it has from the start: the tokenizer and the configuration.

    An earlier run that this one does not continue is moved aside first. If the model came from Hugging Face, its files
    other than weights are copied too, for exports of this run's checkpoints.
    """
    output_dir = Path(config.output_dir)
    lock.release()  # of the earlier run's directory, which may move
    move_aside(config)
    output_dir.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    _remove_leftovers(output_dir)
    save_tokenizer(tokenizer, output_dir)
    path = output_dir / CONFIG
    if not path.is_file() or path.read_text() != run_yaml:
        disk.replace_file(path, run_yaml)
    carried = find_hugging_face_files(Path(config.init_from)) if config.init_from else None
    kept = output_dir / HUGGING_FACE
    if carried is not None and carried.resolve() != kept.resolve():
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(carried, kept)


def _remove_leftovers(output_dir: Path) -> None:
    """Remove the files and checkpoints that killed runs were writing or deleting, and nothing else."""
    for directory in (output_dir, *(path for pattern in _WITH_FILES for path in output_dir.glob(pattern))):
        disk.remove_unfinished(directory)
    for pattern in _OF_STEPS:
        for path in output_dir.glob(pattern):
            if path.suffix in LEFTOVERS:
                shutil.rmtree(path, ignore_errors=True)


def open_metrics(config: RunConfig, layout: Topology, attempts: Attempts) -> MetricsLogger:
    """Return the run's metrics logger, whose sinks rank 0 opens. Rank 0 also writes the run's facts and start."""
    output_dir, is_writer = Path(config.output_dir), layout.ranks.leads
    try:
        services = {}
        if is_writer:
            info = RunInfo.from_config(config, layout.describe(), layout.device.type)
            info.write(output_dir)
            attempts.begin(info.layout)
            services = prepare_service_sinks(config.logger, output_dir, info)
        return MetricsLogger(output_dir, is_writer, config.metric_sinks, services, config.logger.prometheus)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{output_dir} cannot be written: {disk.describe(error, output_dir)}") from error
    except Exception as error:  # a user's sink may raise anything, and the other ranks must not wait for this one
        chosen = [*config.metric_sinks, *(f"logger.{name}" for name, _ in config.logger.iter_services())]
        raise ConfigError(f"metric_sinks={chosen} cannot be opened: {error}") from error

"""The teachers of a distillation: `algorithm.teachers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import NonNegative, Positive, PositiveFloat, section
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.schema import StageConfig


@section
class TeacherConfig:
    """A frozen model that a student learns from: one on the student's ranks (path), or one on a server (url)."""

    path: str | None = None  # a checkpoint, or a Hugging Face directory
    url: str | None = None  # a server that returns logprobs of prompts, such as vLLM's at http://127.0.0.1:8000/v1
    weight: PositiveFloat = 1.0  # its share among several teachers; their weights need not sum to 1
    # The names of the data sets of data.mix that it teaches; empty: all. weight is then its share among the teachers of
    # a data set.
    data_sets: tuple[str, ...] = ()
    # Its own parallel layout on the same ranks, with all keys of the section parallel. null: the student's layout,
    # which loss=full_distillation requires. Other losses need only top-k logits or logprobs of the teacher.
    parallel: ParallelConfig | None = None
    # Where its weights are kept: on the device (resident), or in host memory between its forward passes (offload).
    placement: Literal["resident", "offload"] = "resident"
    model: str | None = None  # with url: the model's name at the server
    api_key_env: str | None = None  # with url: the environment variable with the server's key; null: no key
    request_seconds: PositiveFloat = 60.0  # with url: how long one attempt may take
    retries: NonNegative = 5  # with url: how often a failed request is retried
    concurrency: Positive = 64  # with url: the maximum number of concurrent requests

    def check(self) -> None:
        """Check that the teacher has a path or a url, not both, and with a url has `model` but not `parallel`."""
        if (self.path is None) == (self.url is None):
            raise ConfigError(
                "algorithm.teachers: each teacher needs either path (a checkpoint or a Hugging Face directory) or url "
                f"(a server), but one has path={self.path} and url={self.url}"
            )
        if self.url is not None and self.model is None:
            raise ConfigError(f"algorithm.teachers: url={self.url} needs model, the teacher's name at the server")
        if self.url is not None and self.parallel is not None:
            raise ConfigError(f"algorithm.teachers: url={self.url} has its own layout; leave parallel out")


def check_teachers(teachers: Sequence[TeacherConfig], stage: StageConfig) -> None:
    """Check that there is a teacher, and for full_distillation only one, with a path and the student's layout."""
    if not teachers:
        raise ConfigError(
            "algorithm.teachers is empty: distillation needs a teacher; set it to the path of a checkpoint or of a "
            "Hugging Face directory, as in 'algorithm.teachers=[{path: outputs/teacher}]'"
        )
    for teacher in teachers:
        teacher.check()
    _check_data_sets(teachers, stage)
    if len(teachers) > 1 and stage.loss.get("name") == "full_distillation":
        raise ConfigError(
            f"algorithm.teachers has {len(teachers)} teachers, and loss.name=full_distillation compares the whole "
            "vocabulary with only one; name one teacher, or set loss=distillation"
        )
    if stage.loss.get("name") == "full_distillation" and teachers[0].url is not None:
        raise ConfigError(
            f"algorithm.teachers: {teachers[0].url} returns logprobs of a few tokens, but loss.name=full_distillation "
            "compares whole vocabularies; set loss=distillation and algorithm.top_k, or name the teacher by path"
        )
    if stage.loss.get("name") == "full_distillation" and teachers[0].parallel is not None:
        raise ConfigError(
            f"algorithm.teachers: {teachers[0].path} has a parallel layout of its own, but loss.name=full_distillation "
            "compares whole vocabularies shard by shard, in the student's layout; leave parallel out, or set "
            "loss=distillation and algorithm.top_k"
        )


def _check_data_sets(teachers: Sequence[TeacherConfig], stage: StageConfig) -> None:
    """Check that the teachers' data_sets name data sets of the mixture, and that every data set has a teacher."""
    chosen = [name for teacher in teachers for name in teacher.data_sets]
    if not chosen:
        return
    names = [data_set.shown_name for data_set in stage.data.mix]
    if unknown := sorted(set(chosen) - set(names)):
        raise ConfigError(
            f"algorithm.teachers: data_sets has {unknown[0]!r}, but data.mix has only {names}; use one of these names "
            "(an element of data.mix can set its key name), or leave data_sets out"
        )
    everywhere = any(not teacher.data_sets for teacher in teachers)
    if untaught := [name for name in names if name not in chosen and not everywhere]:
        raise ConfigError(
            f"algorithm.teachers: no teacher teaches the data set {untaught[0]!r} of data.mix; add it to the data_sets "
            "of a teacher, or name a teacher without data_sets, which teaches all"
        )

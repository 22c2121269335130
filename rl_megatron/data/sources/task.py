"""The data source for registered tasks: problems, demonstrations and, if the task generates its data, documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.data_kinds import ANSWERS, DOCUMENTS
from rl_megatron.config.data_sources import TaskConfig, sources_providing
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.plain_text import plain_texts
from rl_megatron.data.records import Record
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import DataSource, HeldoutProblemSet
from rl_megatron.data.tasks.registry import build_task, check_task_files, reads_path
from rl_megatron.data.tasks.task import GeneratedTask, Problem, Task
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, PromptAnswerDataset, TextDataset


@register_source(TaskConfig)
class TaskSource(DataSource[TaskConfig]):
    """The source of the task that `data.task` names. `data.path` sets the task's option `path`, if it has one."""

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check the task's options and files."""
        check_task_files(self.task())

    def texts(self) -> Iterator[str]:
        """Yield the documents of a task that generates its data, or the demonstrations of another task."""
        task = self.task()
        if isinstance(task, GeneratedTask):
            yield from task.pretraining_documents(self.data.num_documents, seed=self.stage.train.seed)
        else:
            yield from plain_texts([example.as_record() for example in task.demonstrations()], self.data)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the task's documents or demonstrations."""
        if kind == DOCUMENTS:
            return self._documents(tokenizer)
        if kind == ANSWERS:
            return self._demonstrations(tokenizer)
        return super().dataset(kind, tokenizer)

    def first_record(self) -> Record:
        """Return the first demonstration of the task."""
        return self.task().demonstrations(1, seed=self.stage.train.seed)[0].as_record()

    def task(self) -> Task:
        """Return the task with its options.

        Raises:
            ConfigError: `data.path` is set, and the task reads no files.
        """
        options = dict(self.data.task)
        if self.data.path is not None:
            if not reads_path(options["name"]):
                raise ConfigError(
                    f"data.path={self.data.path} has no effect on data.task.name={options['name']}, which reads no "
                    "files; leave it out"
                )
            options.setdefault("path", self.data.path)
        return build_task(**options)

    def problems(self, wanted: int) -> list[Problem]:
        """Return `wanted` training problems of a task that generates them, or all problems of another task."""
        task = self.task()
        return task.train_problems(wanted if isinstance(task, GeneratedTask) else None, seed=self.stage.train.seed)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutProblemSet:
        """Return held-out problems."""
        task = self.task()
        return HeldoutProblemSet(task, task.heldout_problems(self.data.num_eval_examples))

    def _documents(self, tokenizer: Tokenizer) -> TextDataset:
        task, data = self.task(), self.data
        if not isinstance(task, GeneratedTask):
            others = [name for name in sources_providing(DOCUMENTS) if name != data.source]
            raise ConfigError(
                f"data.task.name={task.name} has no text to pretrain on; use data.source={' or '.join(others)}"
            )
        from rl_megatron.data.datasets import TextDataset

        documents = task.pretraining_documents(data.num_documents, seed=self.stage.train.seed)
        return TextDataset(documents, tokenizer, data.sequence_length)

    def _demonstrations(self, tokenizer: Tokenizer) -> PromptAnswerDataset:
        from rl_megatron.data.datasets import PromptAnswerDataset

        shown = self.task().demonstrations(self.data.num_demonstrations, seed=self.stage.train.seed)
        return PromptAnswerDataset(
            [demonstration.as_record() for demonstration in shown],
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

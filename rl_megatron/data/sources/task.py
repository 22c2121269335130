"""The data source for registered tasks: problems, demonstrations and, if the task generates its data, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from rl_megatron.config.data import ANSWERS, DOCUMENTS
from rl_megatron.config.data_sources import TaskConfig, find_sources
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import USUAL_EVAL_EXAMPLES
from rl_megatron.data.plain_text import write_texts
from rl_megatron.data.records import Record
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import DataSource, HeldoutProblemSet
from rl_megatron.data.tasks.registry import build_task, call_task, check_task_files, reads_path
from rl_megatron.data.tasks.task import Demonstration, GeneratedTask, Problem, Task, TooFewProblems
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, PromptAnswerDataset, TextDataset

_T = TypeVar("_T")


@register_source(TaskConfig)
class TaskSource(DataSource[TaskConfig]):
    """The source of the task that `data.task` names. `data.path` sets the task's option `path`, if it has one."""

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check the task's options and files."""
        task = self.task()
        self._call(lambda: check_task_files(task))

    def texts(self) -> Iterator[str]:
        """Yield documents if the task generates its data, otherwise its demonstrations."""
        task = self.task()
        if isinstance(task, GeneratedTask):
            yield from self._generate_documents(task)
        else:
            demonstrations = self._call(task.demonstrations)
            yield from write_texts([example.as_record() for example in demonstrations], self.data)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the task's documents or demonstrations."""
        if kind == DOCUMENTS:
            return self._build_documents(tokenizer)
        if kind == ANSWERS:
            return self._build_demonstrations(tokenizer)
        return super().dataset(kind, tokenizer)

    def first_record(self) -> Record:
        """Return the first demonstration of the task."""
        return self._draw_demonstrations(1)[0].as_record()

    def task(self) -> Task:
        """Return the task with its options."""
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
        """Return `wanted` training problems if the task generates them, otherwise all of its training problems."""
        task = self.task()
        count = wanted if isinstance(task, GeneratedTask) else None
        return self._call(lambda: task.train_problems(count, seed=self.stage.train.seed))

    def heldout(self, tokenizer: Tokenizer) -> HeldoutProblemSet:
        """Return held-out problems."""
        task, count = self.task(), self.data.num_eval_examples

        def problems() -> list[Problem]:
            if count is not None:
                return task.heldout_problems(count)
            try:
                return task.heldout_problems(USUAL_EVAL_EXAMPLES)
            except TooFewProblems:
                return task.heldout_problems()

        return HeldoutProblemSet(task, self._call(problems, f"data.num_eval_examples={count}"))

    def _build_documents(self, tokenizer: Tokenizer) -> TextDataset:
        task, data = self.task(), self.data
        if not isinstance(task, GeneratedTask):
            others = [name for name in find_sources(DOCUMENTS) if name != data.source]
            raise ConfigError(
                f"data.task.name={task.name} has no text to pretrain on; use data.source={' or '.join(others)}"
            )
        from rl_megatron.data.datasets import TextDataset

        return TextDataset(self._generate_documents(task), tokenizer, data.sequence_length)

    def _build_demonstrations(self, tokenizer: Tokenizer) -> PromptAnswerDataset:
        from rl_megatron.data.datasets import PromptAnswerDataset

        return PromptAnswerDataset(
            [demonstration.as_record() for demonstration in self._draw_demonstrations(self.data.num_demonstrations)],
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

    def _draw_demonstrations(self, count: int) -> list[Demonstration]:
        task = self.task()
        asked = f"data.num_demonstrations={count}"
        return self._call(lambda: task.demonstrations(count, seed=self.stage.train.seed), asked)

    def _generate_documents(self, task: GeneratedTask) -> list[str]:
        count, seed = self.data.num_documents, self.stage.train.seed
        return self._call(lambda: task.pretraining_documents(count, seed=seed))

    def _call(self, call: Callable[[], _T], asked: str = "data.task") -> _T:
        """Return `call()`, a call of a method of the task; an error that it raises names the task.

        If the task has too few problems, the error begins with `asked`, the setting (key=value) that asks for them.
        """
        try:
            return call_task(self.data.task["name"], call)
        except TooFewProblems as error:
            raise ValueError(f"{asked}: {error}") from error

"""The data source for records of prompts, whose completions are scored by `reward.functions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rl_megatron.config.data_sources import PromptsConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.conversations import find_last_answer, get_message_text, is_conversation, read_prompt
from rl_megatron.data.plain_text import PlainText, refuse_conversation
from rl_megatron.data.records import Record
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import HeldoutProblemSet, count_evaluated, require_heldout
from rl_megatron.data.tasks.task import Demonstration, Problem
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.tokenizer import Tokenizer


class PromptsTask:
    """The task of problems without a reward of their own: `reward.functions` or an environment rewards them."""

    name: ClassVar[str] = "prompts"

    def __init__(self, train: list[Problem], heldout: list[Problem]):
        self._train, self._heldout = train, heldout

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return the training problems, in the order of the data."""
        return self._train[:count]

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return the held-out problems, in the order of the data."""
        return self._heldout[:count]

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the training problems with their answers."""
        return [Demonstration(problem.prompt, problem.answer) for problem in self.train_problems(count, seed)]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 0; an environment's reward is added to it. `reward.functions` are used instead of this method."""
        return 0.0


@register_source(PromptsConfig)
class PromptsSource(RecordSource[PromptsConfig]):
    """The source of prompts from files.

    A record has the fields of `data.prompt_template`, a field such as `prompt`, or messages. Its answer is the field
    `answer`, `reward_model.ground_truth` (as in files for verl), or the assistant's message at the end. Reward
    functions get all fields of the record.
    """

    def __init__(self, stage: StageConfig, data: PromptsConfig):
        super().__init__(stage, data)
        self._texts = PlainText(data.prompt_template)  # all blocks of streamed data share it

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that every record has a prompt, and that the first one can be turned into tokens."""
        for number, problem in enumerate(map(self.build_problem, records)):
            if tokenizer is not None and number == 0:
                self.renderer(tokenizer).encode_problem(problem)

    def texts(self) -> Iterator[str]:
        """Yield prompt and answer of every training record as one text."""
        for record in self.parts()[0]:
            refuse_conversation(record, self.data)
            problem = self.build_problem(record)
            yield problem.prompt + problem.answer

    def task(self) -> PromptsTask:
        """Return the problems as a task."""
        train, heldout = self.parts()
        return PromptsTask(*([self.build_problem(record) for record in part] for part in (train, heldout)))

    def problems(self, wanted: int) -> list[Problem]:
        """Return all training problems."""
        return [self.build_problem(record) for record in self.parts()[0]]

    def problems_to_check(self) -> list[Problem]:
        """Return all problems, held-out ones included."""
        return [self.build_problem(record) for part in self.parts() for record in part]

    def heldout(self, tokenizer: Tokenizer) -> HeldoutProblemSet:
        """Return the first held-out problems."""
        records = require_heldout(self.parts(), self.data)
        problems = [
            self.build_problem(record) for record in records[: count_evaluated(self.data, len(records), "prompts")]
        ]
        return HeldoutProblemSet(PromptsTask([], problems), problems)

    def build_problem(self, record: Record) -> Problem:
        """Return the problem of a record, which must have a prompt."""
        return Problem(self._write_prompt(record), find_reference_answer(record), record.values, record.location)

    def _write_prompt(self, record: Record) -> str:
        """Return the prompt as text: the filled template, or the last message of a conversation."""
        if self.data.format != "plain" and is_conversation(record):
            return get_message_text(read_prompt(record).messages[-1])
        return self._texts.write_prompt(record)


def find_reference_answer(record: Record) -> str:
    """Return the answer of a record as text, or "" if it has none.

    It is `answer`, `reward_model.ground_truth`, or the last of `messages` if that is the assistant's, in this order.
    """
    reward_model = record.values.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    answer = record.values.get("answer", ground_truth)
    if answer is None:
        answer = find_last_answer(record)
    return "" if answer is None else str(answer)

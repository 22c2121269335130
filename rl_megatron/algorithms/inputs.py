"""From the data section of a stage to tokenizer, training rows and held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rl_megatron.algorithms.evaluate import HeldoutPairs, HeldoutProblems, HeldoutText
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import DataConfig, StageConfig
from rl_megatron.data.datasets import PromptAnswerDataset, TextDataset
from rl_megatron.data.preferences import PreferenceDataset, answer_records, load_preferences
from rl_megatron.data.sources import load_records, load_text
from rl_megatron.data.tasks import GeneratedTask, Problem, Task, build_task
from rl_megatron.data.templates import require_fields
from rl_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from rl_megatron.generation.interfaces import Sampling

_Part = TypeVar("_Part")


def stage_task(config: StageConfig) -> Task | None:
    if config.data.source != "task":
        return None
    options = dict(config.data.task)
    if config.data.path is not None and options.get("name") == "gsm8k":
        options.setdefault("path", config.data.path)
    return build_task(**options)


def build_tokenizer(config: StageConfig) -> Tokenizer:
    """The tokenizer at `tokenizer.path`, or a BPE trained on the stage's training text; deterministic."""
    if config.tokenizer.path is not None:
        return load_tokenizer(config.tokenizer.path)
    return train_bpe(_training_texts(config), config.tokenizer.vocab_size)


def _training_texts(config: StageConfig) -> Iterator[str]:
    data = config.data
    if data.source == "text":
        yield from load_text(data.path, data.heldout_fraction)[0].splitlines(keepends=True)
    elif data.source == "prompt_answer":
        records = load_records(data.path, data.heldout_fraction)[0]
        require_fields(records, data.prompt_template)
        require_fields(records, data.answer_template)
        for record in records:
            yield data.prompt_template.format(**record.values) + data.answer_template.format(**record.values)
    elif data.source == "preference":
        yield from _preference_texts(data)
    else:
        task = stage_task(config)
        if isinstance(task, GeneratedTask):
            yield from task.pretraining_documents(data.num_documents, seed=config.train.seed)
        else:
            yield from (shown.prompt + shown.answer for shown in task.demonstrations())


def _preference_texts(data: DataConfig) -> Iterator[str]:
    records = load_preferences(data.path, data.heldout_fraction, data.prompt_template)[0]
    require_fields(records, data.prompt_template)
    for record in records:
        sides = answer_records(record)
        require_fields(sides, data.answer_template)
        yield data.prompt_template.format(**record.values)
        yield from (data.answer_template.format(**side.values) for side in sides)


def pretraining_rows(config: StageConfig, tokenizer: Tokenizer) -> TextDataset:
    """Windows of the training text."""
    data = config.data
    if data.source == "text":
        return TextDataset([load_text(data.path, data.heldout_fraction)[0]], tokenizer, data.sequence_length)
    task = stage_task(config)
    if not isinstance(task, GeneratedTask):
        raise ConfigError(f"data.task.name={task.name} has no text to pretrain on; use data.source=text")
    documents = task.pretraining_documents(data.num_documents, seed=config.train.seed)
    return TextDataset(documents, tokenizer, data.sequence_length)


def answer_rows(config: StageConfig, tokenizer: Tokenizer) -> PromptAnswerDataset:
    """Prompts with answers to learn."""
    data = config.data
    if data.source == "task":
        shown = stage_task(config).demonstrations(data.num_demonstrations, seed=config.train.seed)
        return PromptAnswerDataset.from_demonstrations(
            shown, tokenizer, config.model.max_sequence_length, too_long=data.too_long
        )
    return _records_as_rows(config, tokenizer, heldout=False)


def _records_as_rows(config: StageConfig, tokenizer: Tokenizer, heldout: bool) -> PromptAnswerDataset:
    data = config.data
    parts = load_records(data.path, data.heldout_fraction)
    return PromptAnswerDataset(
        _heldout(parts, data) if heldout else parts[0],
        tokenizer,
        config.model.max_sequence_length,
        prompt_template=data.prompt_template,
        answer_template=data.answer_template,
        too_long=data.too_long,
    )


def preference_rows(config: StageConfig, tokenizer: Tokenizer, heldout: bool = False) -> PreferenceDataset:
    """Pairs of answers, for training or held out."""
    data = config.data
    parts = load_preferences(data.path, data.heldout_fraction, data.prompt_template)
    return PreferenceDataset(
        _heldout(parts, data) if heldout else parts[0],
        tokenizer,
        config.model.max_sequence_length,
        prompt_template=data.prompt_template,
        answer_template=data.answer_template,
        too_long=data.too_long,
    )


def heldout_pairs(config: StageConfig, tokenizer: Tokenizer) -> HeldoutPairs:
    """The first held-out pairs in their order, at most `data.num_eval_rows` rows, two per pair; compared per token
    where the loss does."""
    pairs = preference_rows(config, tokenizer, heldout=True)
    batch = pairs.batch(range(min(len(pairs), config.data.num_eval_rows // 2)))
    return HeldoutPairs(batch, per_token=bool(config.loss.get("preference_average_log_probs")))


def training_problems(config: StageConfig, task: Task) -> list[Problem]:
    """Problems to sample completions for: enough for every step of the stage, or all there are."""
    algorithm = config.algorithm
    rounds = algorithm.dynamic_sampling_max_rounds if algorithm.name == "grpo" and algorithm.dynamic_sampling else 1
    wanted = config.train.steps * rounds * algorithm.prompts_per_step
    return task.train_problems(wanted if isinstance(task, GeneratedTask) else None, seed=config.train.seed)


def heldout_text(config: StageConfig, tokenizer: Tokenizer) -> HeldoutText | None:
    """Held-out rows whose likelihood the stage measures, at most `data.num_eval_rows`."""
    data = config.data
    if data.source == "text":
        text = _heldout(load_text(data.path, data.heldout_fraction), data)
        rows = TextDataset([text], tokenizer, data.sequence_length)
        batch = rows.batch(range(min(len(rows), data.num_eval_rows)))
        return HeldoutText(batch, rows.num_predicted_tokens / rows.num_characters)
    if data.source == "prompt_answer":
        rows = _records_as_rows(config, tokenizer, heldout=True)
        return HeldoutText(rows.batch(range(min(len(rows), data.num_eval_rows))))
    return None


def _heldout(parts: tuple[_Part, _Part], data: DataConfig) -> _Part:
    """The second of (training, held-out).  Raises: ConfigError where nothing is held out."""
    if not parts[1]:
        raise ConfigError(
            f"data.heldout_fraction={data.heldout_fraction} holds nothing of data.path={data.path} out to measure on; "
            "set it above 0"
        )
    return parts[1]


def heldout_problems(config: StageConfig, task: Task, tokenizer: Tokenizer) -> HeldoutProblems:
    """Held-out problems to answer greedily, at most `data.num_eval_rows`."""
    problems = task.heldout_problems(config.data.num_eval_rows)
    return HeldoutProblems(task, problems, tokenizer, sampling(config, tokenizer, greedy=True))


def check_room(config: StageConfig, problems: Sequence[Problem], tokenizer: Tokenizer) -> int:
    """Tokens of the longest prompt with its longest completion.

    Raises: ConfigError where a problem's prompt leaves too little room for its completion.
    """
    longest = max((len(tokenizer.encode(prompt)) for prompt in {problem.prompt for problem in problems}), default=0)
    wanted, limit = config.generation.max_new_tokens, config.model.max_sequence_length
    if longest + wanted > limit:
        raise ConfigError(
            f"generation.max_new_tokens={wanted} and the longest prompt, {longest} tokens, exceed "
            f"model.max_sequence_length={limit}; lower the one or raise the other"
        )
    return longest + wanted


def sampling(config: StageConfig, tokenizer: Tokenizer, greedy: bool = False) -> Sampling:
    """The stage's generation section, its stop tokens as ids.

    Raises: ConfigError where a stop string is not exactly one token.
    """
    generation = config.generation
    stop_ids = [tokenizer.eos_id]
    for text in generation.stop_tokens:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(f"generation.stop_tokens: {text!r} is {len(ids)} tokens; each must be exactly one")
        stop_ids += ids
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_k=0 if greedy else generation.top_k,
        top_p=1.0 if greedy else generation.top_p,
        stop_ids=tuple(stop_ids),
    )


_TOKENIZER = "tokenizer"  # in a run's output directory


def run_tokenizer(config: StageConfig, output_dir: Path) -> Tokenizer:
    """The tokenizer that the run in `output_dir` saved, or else the configured one. The same on every rank: training a
    BPE is deterministic."""
    saved = output_dir / _TOKENIZER
    return load_tokenizer(saved) if saved.is_dir() else build_tokenizer(config)


def save_tokenizer(tokenizer: Tokenizer, output_dir: Path) -> None:
    """Keeps the run's tokenizer in `output_dir`, whole or not at all; does nothing where it is there already."""
    final = output_dir / _TOKENIZER
    if not final.is_dir():
        partial = final.with_suffix(".incomplete")
        tokenizer.save(partial)
        partial.rename(final)

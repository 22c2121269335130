"""The two sides of `grpo_step.py`: a run of this package, and TRL's GRPOTrainer, each in a process of its own.

A side waits before each step until it is told to take it, and then answers with the times of the step. So the sides
take turns, and a side that waits uses no processor.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PHASES = ("generate", "reward", "logprobs", "train", "other")

REWARD = '''"""A reward that is cheap and differs between the completions of random weights."""


def digits(completion: str, **_) -> float:
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
'''


@dataclass(frozen=True)
class Work:
    """What both sides do.

    Attributes:
        directory: A directory with the model (`model`), its checkpoint (`checkpoint`) and `reward.py`.
        overrides: Our configuration of it.
        prompts: The prompts of all steps, in order.
        prompts_per_step: The number of different prompts of a step.
        samples: Completions of each prompt.
        new_tokens: Tokens of every completion.
        steps: How many steps are taken, warm-up included.
        threads: torch's threads.
        processor_time: Whether the time is that of the process on all processors, instead of that of the wall clock.
    """

    directory: Path
    overrides: tuple[str, ...]
    prompts: tuple[str, ...]
    prompts_per_step: int
    samples: int
    new_tokens: int
    steps: int
    threads: int
    processor_time: bool = False

    @property
    def now(self) -> Callable[[], float]:
        """Return the function that returns the time in seconds."""
        return time.process_time if self.processor_time else time.perf_counter


@dataclass(frozen=True)
class Step:
    """One step of a side: its time, that of its phases, and how much it did."""

    seconds: float
    phases: dict[str, float]
    prompt_tokens: int
    completion_tokens: int


class _Turns:
    """The steps of one side: each begins if the other end says so, and is answered with a `Step`."""

    def __init__(self, connection: Connection, clock: Clock):
        self._connection, self._clock, self._began = connection, clock, None
        connection.send("ready")

    def next(self) -> None:
        """Answer the step that ends now, if there is one, and wait for the next turn."""
        if self._began is not None:
            self._connection.send(self._clock.step(self._clock.now() - self._began))
        self._connection.recv()
        self._began = self._clock.now()


class Clock:
    """The seconds of each phase of the current step, and the tokens that it generated.

    A phase within another one is part of the outer one: the logprob check within "generate" computes logprobs too.
    """

    def __init__(self, now: Callable[[], float], rest: str = "other") -> None:
        """Start without any time. The time that no phase has is that of `rest`."""
        self.now, self._rest = now, rest
        self.seconds: dict[str, float] = {}
        self.tokens = (0, 0)
        self._running = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._running:
            yield
            return
        self._running, began = True, self.now()
        yield
        self._running = False
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - began

    def timed(self, name: str, function: Callable) -> Callable:
        def call(*args: Any, **keywords: Any) -> Any:
            with self.phase(name):
                return function(*args, **keywords)

        return call

    def step(self, seconds: float) -> Step:
        """Return the step that took `seconds`, and begin the next one."""
        phases = {name: self.seconds.get(name, 0.0) for name in PHASES}
        phases[self._rest] = seconds - sum(phases.values())
        step = Step(seconds, phases, *self.tokens)
        self.seconds, self.tokens = {}, (0, 0)
        return step


def ours(connection: Connection, work: Work, case: Sequence[str]) -> None:
    """Take the steps of `rl-megatron train algorithm=grpo` with the settings of a case.

    Everything is that of a run, from the training loop to the sinks of metrics, except that a completion has no stop
    token, and that there is no evaluation and no checkpoint.
    """
    from rl_megatron.config.loading.load import load_config
    from rl_megatron.rollouts import sampler
    from rl_megatron.runs import run, stage, stage_runner

    _prepare(work.threads)
    clock = Clock(work.now)

    class FullLength:
        """The stage's rollout engine, without stop tokens."""

        def __init__(self, engine: Any):
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def complete(self, requests: list[Any]) -> Any:
            endless = [replace(each, sampling=replace(each.sampling, stop_ids=())) for each in requests]
            with clock.phase("generate"):
                completions = self._engine.complete(endless)
            lengths = sum(len(completion.ids) for completion in completions)
            clock.tokens = (sum(len(each.prompt) for each in requests), lengths)
            return completions

    class Raced(stage.Stage):
        """A stage whose steps wait for their turn."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.policy.get_logprobs = clock.timed("logprobs", self.policy.get_logprobs)
            self.policy.train = clock.timed("train", self.policy.train)

        def steps(self) -> Iterator[int]:
            self.metrics_logger.begin_stage(self.name, 0, self.config.train.steps, self.progress_metric)
            turns = _Turns(connection, clock)
            for step in range(1, work.steps + 1):
                turns.next()
                yield step
            turns.next()

    class TimedSampler(sampler.Sampler):
        """A sampler whose completions have their full length."""

        def __init__(self, loop: Any, policy: Any, engine: Any, rollouts: Any):
            rollouts.scorer.score_samples = clock.timed("reward", rollouts.scorer.score_samples)
            super().__init__(loop, policy, FullLength(engine), rollouts)  # pyright: ignore[reportArgumentType]

    stage_runner.Stage = Raced  # pyright: ignore[reportPrivateImportUsage]
    stage_runner.Sampler = TimedSampler  # pyright: ignore[reportPrivateImportUsage]
    output_dir = work.directory / "-".join(setting.replace("=", "-") for setting in case)
    config = load_config([*work.overrides, *case, f"output_dir={output_dir}"])
    try:
        run.run_stages(config)
    except EOFError:  # the other end has all its figures
        connection.close()


def trl(connection: Connection, work: Work) -> None:
    """Take the steps of TRL's GRPOTrainer in its own training loop.

    Its phase "train" is all that is not within its `_generate_and_score_completions`, and "other" is the rest of that
    method: tokenisation, advantages, metrics.
    """
    import runpy

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    _prepare(work.threads)
    clock = Clock(work.now, rest="train")
    digits = runpy.run_path(str(work.directory / "reward.py"))["digits"]

    class Turns(TrainerCallback):
        def __init__(self) -> None:
            self._turns: _Turns | None = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self._turns is None:
                self._turns = _Turns(connection, clock)
            self._turns.next()

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **keywords: Any) -> Any:
            with clock.phase("generate"):
                completions, *rest = super()._generate_single_turn(prompt_ids, *args, **keywords)
            clock.tokens = (sum(map(len, prompt_ids)), sum(map(len, completions)))
            return completions, *rest

        def _calculate_rewards(self, *args: Any, **keywords: Any) -> Any:
            with clock.phase("reward"):
                return super()._calculate_rewards(*args, **keywords)

        def _generate_and_score_completions(self, *args: Any, **keywords: Any) -> Any:
            began = clock.now()
            batch = super()._generate_and_score_completions(*args, **keywords)
            clock.seconds["other"] = clock.now() - began - sum(clock.seconds.values())
            return batch

    tokenizer = AutoTokenizer.from_pretrained(work.directory / "model")
    model = AutoModelForCausalLM.from_pretrained(work.directory / "model", dtype=torch.float32)
    size = work.prompts_per_step * work.samples
    settings = GRPOConfig(
        output_dir=str(work.directory / "trl"), per_device_train_batch_size=size, gradient_accumulation_steps=1,
        num_generations=work.samples, max_completion_length=work.new_tokens, max_steps=work.steps + 1,
        generation_kwargs={"min_new_tokens": work.new_tokens}, shuffle_dataset=False, use_cpu=True, bf16=False,
        gradient_checkpointing=False, learning_rate=1e-6, lr_scheduler_type="constant", weight_decay=0.01,
        adam_beta2=0.95, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    # One more step is begun, whose turn never comes: the one before it ends there.
    dataset = Dataset.from_dict({"prompt": [*work.prompts, *work.prompts[-work.prompts_per_step :]]})
    trainer = Timed(
        model, [lambda completions, **_: [digits(text) for text in completions]], settings, dataset,
        processing_class=tokenizer, callbacks=[Turns()],
    )  # fmt: skip
    try:
        trainer.train()
    except EOFError:  # the other end has all its figures
        connection.close()


def _prepare(threads: int) -> None:
    """Set torch's threads, and silence what is printed in every step."""
    import torch
    from transformers.utils import logging as of_transformers

    torch.set_num_threads(threads)
    of_transformers.disable_progress_bar()
    sys.stdout = open(os.devnull, "w")
    warnings.filterwarnings("ignore")
    for name in ("megatron", "transformers", "torch.distributed", "datasets", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)

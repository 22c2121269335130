"""Evaluation on the named sets of `eval.sets`: several samples of each problem, on any rollout engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rl_megatron import log
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.eval_sets import EvalSetConfig, list_statistics
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.eval_problems import SetProblems, build_set_stage, read_set_problems
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import encode_prompts
from rl_megatron.evaluation.results import ProblemResult, read_start_values, results_file, write_results
from rl_megatron.evaluation.statistics import ProblemSamples, compute_problem_values, compute_set_metrics
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.generation.requests import derive_seed
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.rewards.reward_models import RewardModels
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.runner import RolloutRunner
from rl_megatron.rollouts.scored import Scored, ScoredRollouts
from rl_megatron.topology.ranks import Ranks

# How many completions are generated together. Their random numbers depend on this number.
COMPLETIONS_PER_BLOCK = 1024
SEED = 0  # the same in all runs, so that evaluations of two runs can be compared


@dataclass(frozen=True)
class ScoredCompletions:
    """The scored completions of a block, in the order of their numbers.

    Attributes:
        lengths: The number of tokens of each completion.
        truncated: Whether each completion ended without a stop token.
    """

    texts: list[str]
    rewards: list[float]
    lengths: list[int]
    truncated: list[bool]


class EvalSet:
    """One set of problems. It owns the workers that score its completions.

    With P problems, completion number i is sample i // P of problem i % P. Its random numbers depend only on i, so a
    larger `n` does not change the first samples.

    Attributes:
        digest: The digest of the problems, the task and the sampling, and of `right_from`.
        metric_names: The names of the set's metrics by which the best checkpoint can be chosen.
    """

    def __init__(
        self,
        stage: StageConfig,
        config: EvalSetConfig,
        tokenizer: Tokenizer,
        ranks: Ranks,
        models: RewardModels | None = None,
    ):
        """Read the problems. `ranks` score completions together; `models` are the stage's reward models."""
        self.config, self._tokenizer = config, tokenizer
        of_set = build_set_stage(stage, config)
        self._problems: SetProblems = read_set_problems(stage, config)
        encoded = encode_prompts(of_set, self._problems.problems, build_source(of_set).renderer(tokenizer))
        self._prompts: Sequence[EncodedPrompt] = encoded.prompts
        self._sampling: Sampling = make_sampling(of_set, tokenizer, end_of_turn_ids=encoded.end_of_turn_ids)
        of_ranks = None if models is None else models.load(of_set.reward)
        self.scorer = Scorer(of_set.reward, lambda: self._problems.task, ranks, models=of_ranks)
        self.digest = _compute_digest(self._prompts, of_set, config)
        names = list_statistics(config.n, self._problems.reads_answers)
        self.metric_names = tuple(f"{config.name}/{name}" for name in names)

    @property
    def num_completions(self) -> int:
        return len(self._prompts) * self.config.n

    def complete_block(self, engine: RolloutEngine, runner: RolloutRunner, block: int) -> ScoredCompletions:
        """Return the scored completions of a block. Collective."""
        total = self.num_completions
        numbers = range(block * COMPLETIONS_PER_BLOCK, min((block + 1) * COMPLETIONS_PER_BLOCK, total))
        prompts = [self._prompts[number % len(self._prompts)] for number in numbers]
        rollouts = ScoredRollouts(runner, self.scorer, self._tokenizer)
        scored = rollouts.make(engine, prompts, self._sampling, derive_seed(SEED, block))
        return runner.ranks.share(lambda: self._read_completions(scored))

    def _read_completions(self, scored: Scored | None) -> ScoredCompletions:
        assert scored is not None  # this is rank 0
        if scored.num_failed:
            log.LOGGER.warning(
                "evaluation set %s: %d of %d trajectories failed, and count as wrong answers",
                *(self.config.name, scored.num_failed, len(scored.samples)),
            )
        texts, truncated = zip(*((sample.completion, sample.truncated) for sample in scored.samples), strict=True)
        return ScoredCompletions(list(texts), scored.rewards.tolist(), list(scored.num_sampled), list(truncated))

    def build_results(self, blocks: Sequence[ScoredCompletions]) -> list[ProblemResult]:
        """Return the results of every problem, from the completions of all blocks."""
        texts, rewards, lengths, truncated = (
            [value for block in blocks for value in getattr(block, name)]
            for name in ("texts", "rewards", "lengths", "truncated")
        )
        task, count = self._problems.task, len(self._prompts)
        read: Callable[[str], str | None] | None = getattr(task, "final_answer", None)
        results = []
        for index, prompt in enumerate(self._prompts):
            samples_here = slice(index, None, count)
            answers = None if read is None else [read(text) for text in texts[samples_here]]
            samples = ProblemSamples(rewards[samples_here], lengths[samples_here], truncated[samples_here], answers)
            shown = self._tokenizer.decode(prompt.ids, skip_special_tokens=False)
            problem = prompt.problem
            results.append(ProblemResult(shown, problem.answer, problem.location, texts[samples_here], samples))
        return results

    def evaluate(self, engine: RolloutEngine, runner: RolloutRunner) -> list[ScoredCompletions]:
        """Return the scored completions of all blocks, for `build_results`. Collective."""
        blocks = -(-self.num_completions // COMPLETIONS_PER_BLOCK)
        return [self.complete_block(engine, runner, block) for block in range(blocks)]

    def compute_metrics(self, results: Sequence[ProblemResult], start: Path | None = None) -> dict[str, float]:
        """Return the metrics of the set, with the changes since the results in the file `start`."""
        values = [compute_problem_values(result.samples, self.config.right_from) for result in results]
        start_values = None if start is None else read_start_values(start, self.digest)
        return {
            f"{self.config.name}/{name}": value for name, value in compute_set_metrics(values, start_values).items()
        }

    def close(self) -> None:
        self.scorer.close()


class EvalSets:
    """The sets of one stage. The results of every problem are written to the run's `output_dir`."""

    def __init__(
        self,
        stage: StageConfig,
        name: str,
        tokenizer: Tokenizer,
        runner: RolloutRunner,
        output_dir: Path,
        models: RewardModels | None = None,
    ):
        self.sets = [EvalSet(stage, config, tokenizer, runner.ranks, models) for config in stage.eval.sets]
        self._every, self._name, self._output_dir = stage.train.eval_every, name, output_dir
        self._runner = runner

    def select_due(self, step: int, last: bool) -> list[EvalSet]:
        """Return the sets that are evaluated after a step; step 0 means before the first step."""
        if last or step == 0:
            return list(self.sets)
        intervals = (self._every if eval_set.config.every is None else eval_set.config.every for eval_set in self.sets)
        return [eval_set for eval_set, every in zip(self.sets, intervals, strict=True) if is_multiple(step, every)]

    def evaluate(self, step: int, sets: Sequence[EvalSet], engine: RolloutEngine) -> dict[str, float]:
        """Return the metrics of some of the sets, and write the results of every problem. Collective."""
        metrics: dict[str, float] = {}
        for eval_set in sets:
            metrics |= self._record(eval_set, eval_set.evaluate(engine, self._runner), step)
        return metrics

    def _record(self, eval_set: EvalSet, completions: list[ScoredCompletions], step: int) -> dict[str, float]:
        """Write the results of a set on rank 0, and return its metrics on all ranks."""
        start = results_file(self._output_dir, self._name, eval_set.config.name, 0) if step > 0 else None
        path = results_file(self._output_dir, self._name, eval_set.config.name, step)
        metrics: dict[str, float] = {}

        def write() -> None:
            results = eval_set.build_results(completions)
            metrics.update(eval_set.compute_metrics(results, start))
            write_results(path, results, eval_set.config.right_from, eval_set.digest)

        ranks = self._runner.ranks
        failure = ranks.try_on_rank0(write)
        if failure is not None:
            raise SaveFailed(f"{path}: the results of the evaluation cannot be written: {failure}; free space")
        return ranks.share(lambda: metrics)

    def close(self) -> None:
        for eval_set in self.sets:
            eval_set.close()


def is_multiple(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps is due after a step; `every` = 0 means never."""
    return bool(every) and step % every == 0


def list_set_metric_names(stage: StageConfig, tokenizer: Tokenizer) -> dict[str, EvalSetConfig]:
    """Return the names of the metrics by which the best checkpoint can be chosen, each with its set's configuration."""
    sets = [EvalSet(stage, config, tokenizer, Ranks()) for config in stage.eval.sets]
    return {name: eval_set.config for eval_set in sets for name in eval_set.metric_names}


def _compute_digest(prompts: Sequence[EncodedPrompt], of_set: StageConfig, config: EvalSetConfig) -> str:
    generation = of_set.generation
    keys = ("max_new_tokens", "temperature", "top_k", "top_p", "stop_tokens", "stop_strings")
    sampling = {key: getattr(generation, key) for key in keys} | {"n": config.n, "right_from": config.right_from}
    sampling["task"] = config.task
    problems = [(list(prompt.ids), prompt.problem.answer) for prompt in prompts]
    return sha256(json.dumps([sampling, problems], default=str).encode()).hexdigest()

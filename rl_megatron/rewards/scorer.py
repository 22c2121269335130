"""Score completions: `Scorer` distributes the samples of rank 0 among the workers of all nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, RunFailed, describe_error
from rl_megatron.config.reward_models import REWARD_MODEL, list_models_on_ranks
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.rewards.loading import build_specs, build_task_spec
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rewards.reward_function import ERRORS, SCORE, TIMEOUTS, BadResult, is_finite_reward, read_result
from rl_megatron.rewards.reward_models import RewardModel
from rl_megatron.rewards.samples import Failure, FunctionSpec, Outcome, Sample
from rl_megatron.rewards.workers import RewardWorkers
from rl_megatron.topology.ranks import Ranks

# The longest time that a rank scores before all ranks meet in a collective. It is shorter than the timeouts of
# collectives, so that ranks which wait for those that still score do not time out.
_SECONDS_BETWEEN_MEETINGS = 5.0
_SECONDS_ALONE = 0.5  # how often a scorer of a single rank checks whether it is closed
_MOST_WARNINGS = 5  # of one function
_T = TypeVar("_T")


class RewardFailed(RunFailed):
    """The error that ends the run because a reward function failed."""


class _Report(NamedTuple):
    """The report of one rank when all ranks meet.

    Attributes:
        is_done: Whether it has nothing left to score.
        error: An error outside of the functions, such as that of a new worker that cannot load them.
        failed: (function, sample, failure) of the failure that ends the run, or None.
    """

    is_done: bool = True
    error: ConfigError | RewardFailed | None = None
    failed: tuple[int, int, Failure] | None = None


class Scorer:
    """The scorer of one stage's completions. On the first rank of each node, it owns the node's worker processes.

    The first call starts workers. `score` is collective: rank 0 has the samples, sends the first rank of every other
    node those for its workers, and receives the outcomes. Other ranks have neither samples nor workers.
    """

    def __init__(
        self,
        settings: RewardConfig,
        task: Callable[[], Task],
        ranks: Ranks,
        models: Mapping[int, RewardModel] | None = None,
    ):
        """Start nothing yet.

        Args:
            settings: The section `reward`.
            task: Returns the task whose reward is used if `reward.functions` is empty.
            ranks: The ranks that score together. With `Ranks()`, this rank scores all samples by itself, and no method
                is collective.
            models: The reward models on the ranks, by the indices of their functions in `reward.functions`.
        """
        self._settings, self._task, self._ranks = settings, task, ranks
        self._is_closed = False
        self._models = dict(models or {})
        # Below, indices of functions follow this order: functions of workers first, then those with models on ranks.
        on_workers = [index for index in range(len(settings.functions)) if index not in self._models]
        self._functions = [settings.functions[index] for index in (*on_workers, *self._models)]
        self._specs: list[FunctionSpec] = []
        self._workers: RewardWorkers | None = None
        self._scoring_ranks: list[int] = []
        self._warnings: dict[str, int] = {}

    def start(self) -> None:
        """Start a worker on every node, which loads the functions while this process continues. Collective."""
        if self._specs:
            return
        if list_models_on_ranks(self._settings).keys() != self._models.keys():
            raise ConfigError(
                "reward.functions: reward_model with init_from or hf runs only on the ranks of a training stage with "
                "synchronous rollouts; serve the model elsewhere, and set url"
            )
        worker_specs = build_specs(self._settings)
        if not self._functions:
            worker_specs = [build_task_spec(self._task())]
        self._specs = worker_specs + [
            FunctionSpec(self._settings.functions[index].shown_name, f"reward.functions[{index}]")
            for index in self._models
        ]
        if not worker_specs:
            return
        are_first = self._ranks.gather(int(os.environ.get("LOCAL_RANK", self._ranks.rank)) == 0)  # of their nodes
        self._scoring_ranks = [rank for rank, is_first in enumerate(are_first) if is_first] or [0]
        if self._ranks.rank in self._scoring_ranks:
            self._workers = RewardWorkers(worker_specs, self._settings)
            with suppress(OSError):  # `score` tries again, and reports a second failure to all ranks
                self._workers.start()

    def score(
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        truncated: Sequence[bool],
    ) -> tuple[Tensor, RewardMetrics]:
        """Return the reward of each completion, [B] fp32, and the metrics of the functions, on rank 0. Collective.

        The arguments of ranks other than 0 are ignored, and these ranks get no rewards or metrics. An entry of
        `truncated` is true if its completion ended without a stop token.

        Raises:
            RewardFailed: A function gave no score, and `reward.on_error` or `on_timeout` is "error". The message names
                the function, the prompt and the completion. It is raised on every rank.
            ConfigError: A worker cannot load a function; raised on every rank.
        """
        parts = zip(problems, completions, completion_ids, truncated, strict=True)
        return self.score_samples([Sample(problem, text, list(ids), bool(cut)) for problem, text, ids, cut in parts])

    def score_samples(self, samples: Sequence[Sample]) -> tuple[Tensor, RewardMetrics]:
        """Return what `score` returns, for samples that may have several turns. Collective."""
        self.start()
        # Every rank gets the scores of rank 0's sequences; a rank without samples drops them.
        sequences = [sample.sequence_ids for sample in samples]
        results = [model.score(sequences)[: len(samples)] for model in self._models.values()]
        outcomes = self._run_workers(self._distribute(samples))
        combined = self._ranks.run_on_rank0(
            lambda: self._combine(samples, {**outcomes, **self._read_model_results(samples, results)}), (RewardFailed,)
        )
        return combined or (torch.zeros(0), RewardMetrics())

    @property
    def reads_sequences(self) -> bool:
        """Return whether a function is a reward model, which reads `sequence_ids` and `sequence_text` of samples."""
        return any(function.name == REWARD_MODEL and function.path is None for function in self._settings.functions)

    def _read_model_results(
        self, samples: Sequence[Sample], results: Sequence[Sequence[dict[str, float]]]
    ) -> dict[tuple[int, int], Outcome]:
        """Return the outcomes of reward models on the ranks, with the keys (function, sample)."""
        outcomes = {}
        for function, model_results in enumerate(results, len(self._specs) - len(self._models)):
            for index, (sample, result) in enumerate(zip(samples, model_results, strict=True)):
                try:
                    outcomes[function, index] = Outcome(*read_result(result))
                except BadResult as error:
                    outcomes[function, index] = self._fail(sample, function, str(error))
        return outcomes

    def close(self) -> None:
        """End the workers. If this rank is the only one, a call of `score` that runs in another thread soon fails."""
        self._is_closed = True
        if self._workers is not None:
            self._workers.close()

    def _distribute(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return all samples on rank 0, the node's share on the first rank of every other node, and none elsewhere."""
        others = self._scoring_ranks[1:]
        if self._ranks.leads:
            for node, rank in enumerate(others, 1):
                dist.send_object_list([samples[node :: len(others) + 1]], rank)
            return samples
        return _receive_from(0) if self._ranks.rank in others else ()

    def _run_workers(self, samples: Sequence[Sample]) -> dict[tuple[int, int], Outcome]:
        """Run the workers of all nodes; return, on rank 0, the outcomes by (function, sample). Collective."""
        rank = self._ranks.rank
        node = self._scoring_ranks.index(rank) if rank in self._scoring_ranks else None
        has_begun = has_reported = False
        while True:
            report = _Report()
            if node is not None and not has_reported:
                report = self._work(None if has_begun else samples, node)
                has_begun, has_reported = True, report.is_done
            reports = self._ranks.gather(report)
            self._raise_first(reports, samples)
            if all(report.is_done for report in reports):
                return self._collect_outcomes()

    def _collect_outcomes(self) -> dict[tuple[int, int], Outcome]:
        """Return the outcomes of all nodes on rank 0, and none on other ranks."""
        others = self._scoring_ranks[1:]
        outcomes = {} if self._workers is None else self._workers.outcomes
        if self._ranks.leads:
            outcomes = dict(outcomes)
            for node, rank in enumerate(others, 1):
                node_outcomes: dict[tuple[int, int], Outcome] = _receive_from(rank)
                for (function, sample), outcome in node_outcomes.items():
                    outcomes[function, self._global_index(sample, node)] = outcome
            return outcomes
        if self._ranks.rank in others:
            dist.send_object_list([outcomes], 0)
        return {}

    def _global_index(self, sample: int, node: int) -> int:
        """Return the index that a node's sample has among all samples; on node 0, both indices are equal."""
        return sample if node == 0 else node + sample * len(self._scoring_ranks)

    def _work(self, samples: Sequence[Sample] | None, node: int) -> _Report:
        """Begin to score samples (None: continue) until all ranks meet; return this rank's report."""
        assert self._workers is not None  # this is a scoring rank
        try:
            if self._is_closed:
                raise RuntimeError("the run ends")
            if samples is not None:
                mine = range(0, len(samples), len(self._scoring_ranks) if node == 0 else 1)
                self._workers.submit(samples, mine, with_lists=node == 0)
            is_done = self._workers.advance(_SECONDS_ALONE if self._ranks.size == 1 else _SECONDS_BETWEEN_MEETINGS)
        except ConfigError as error:
            return _Report(error=error)
        except Exception as error:  # any failure, such as that of a new process: the other ranks wait for this one
            return _Report(error=RewardFailed(f"the reward workers cannot continue: {describe_error(error)}"))
        failed = self._workers.failed
        if failed is not None:
            function, sample, failure = failed
            failed = function, self._global_index(sample, node), failure
        return _Report(is_done, None, failed)

    def _raise_first(self, reports: Sequence[_Report], samples: Sequence[Sample]) -> None:
        """Raise the error or failure of the lowest rank that reports one; rank 0, with all samples, describes it."""
        if all(report.error is None and report.failed is None for report in reports):
            return
        if self._workers is not None:
            self._workers.abandon()
        for report in reports:
            if report.error is not None:
                raise report.error
            if report.failed is not None:
                function, sample, failure = report.failed
                raise RewardFailed(
                    self._ranks.share(lambda f=function, s=sample, e=failure: self._describe_failure(f, e, samples[s]))
                )

    def _describe_failure(self, function: int, failure: Failure, sample: Sample) -> str:
        """Return a message about a failure, with the remedy."""
        spec = self._specs[function]
        name = f"the reward of task {spec.label!r}" if spec.is_task else f"the reward function {spec.label!r}"
        late = failure.kind == "timeout"
        key, remedy = ("timeout", "raise reward.timeout_seconds") if late else ("error", "correct the function")
        return (
            f"{name} {failure.message}, for {sample.describe()}; {remedy}, or let such samples score 0 with "
            f"reward.on_{key}=zero"
        )

    def _combine(
        self, samples: Sequence[Sample], outcomes: Mapping[tuple[int, int], Outcome]
    ) -> tuple[Tensor, RewardMetrics]:
        """Return the rewards, which are weighted sums of the functions' scores, and the metrics."""
        weights = [function.weight for function in self._functions] or [1.0]
        metrics, rewards = RewardMetrics(), []
        for spec in self._specs:  # tolerated failures are counted, even if there are none
            for policy, name in ((self._settings.on_error, ERRORS), (self._settings.on_timeout, TIMEOUTS)):
                if policy == "zero":
                    metrics.count(f"reward_{spec.label}_{name}", 0)
        for index, sample in enumerate(samples):
            sample_outcomes = [outcomes[function, index] for function in range(len(weights))]
            if all(outcome.failure is None and outcome.score is None for outcome in sample_outcomes):
                message = "does not apply to the sample, and no other function does"
                sample_outcomes = [self._fail(sample, function, message) for function in range(len(weights))]
            reward = _sum_weighted(weights, sample_outcomes)
            while not is_finite_reward(reward):
                parts = [
                    abs(weight * (outcome.score or 0.0))
                    for weight, outcome in zip(weights, sample_outcomes, strict=True)
                ]
                largest = parts.index(max(parts))
                score = sample_outcomes[largest].score
                message = f"scored {score:g}, and with the weight {weights[largest]:g} the reward is not finite"
                sample_outcomes[largest] = self._fail(sample, largest, message)
                reward = _sum_weighted(weights, sample_outcomes)
            for function, outcome in enumerate(sample_outcomes):
                self._observe(metrics, function, outcome, sample)
                metrics.scores.setdefault(self._specs[function].label, []).append(outcome.score)
            rewards.append(reward)
        return torch.tensor(rewards, dtype=torch.float32), metrics

    def _fail(self, sample: Sample, function: int, message: str) -> Outcome:
        """Return the outcome for an unusable score; raise RewardFailed instead if `reward.on_error` is "error"."""
        failure = Failure("error", message)
        if self._settings.on_error == "error":
            raise RewardFailed(self._describe_failure(function, failure, sample))
        return Outcome(None, {}, failure)

    def _observe(self, metrics: RewardMetrics, function: int, outcome: Outcome, sample: Sample) -> None:
        """Add one outcome to the metrics, and log a failure that scores 0."""
        spec = self._specs[function]
        prefix = f"reward_{spec.label}_"
        if outcome.failure is not None:
            metrics.count(prefix + (TIMEOUTS if outcome.failure.kind == "timeout" else ERRORS), 1)
            num_warnings = self._warnings[spec.label] = self._warnings.get(spec.label, 0) + 1
            if num_warnings <= _MOST_WARNINGS:
                more = "; further ones are only counted" if num_warnings == _MOST_WARNINGS else ""
                log.LOGGER.warning(
                    "%s (the sample scores 0)%s", self._describe_failure(function, outcome.failure, sample), more
                )
        elif outcome.score is not None and not spec.is_task:  # the score of a task is the reward itself
            metrics.observe(prefix + SCORE, outcome.score)
        for name, value in outcome.metrics.items():
            metrics.observe(prefix + name, value)


def _sum_weighted(weights: Sequence[float], outcomes: Sequence[Outcome]) -> float:
    scored = zip(weights, outcomes, strict=True)
    return sum(weight * outcome.score for weight, outcome in scored if outcome.score is not None)


def _receive_from(rank: int) -> Any:
    """Return the object that a rank sends."""
    box: list[Any] = [None]
    dist.recv_object_list(box, rank)
    return box[0]

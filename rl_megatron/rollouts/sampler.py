"""`Sampler`: provides the scored trajectories that steps learn from, in synchronous and in asynchronous training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_megatron.batching.batch import DATA_SET, Batch
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.checkpoint.resumed_state import MustBe
from rl_megatron.config.algorithm_kinds import PolicyGradientConfig, RolloutConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.sources import build_source
from rl_megatron.data.training_data import RolloutPrompts
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.async_rollouts import AsyncRollouts, Group
from rl_megatron.rollouts.batch import index_data_sets
from rl_megatron.rollouts.group_queue import GroupQueue, QueueRules
from rl_megatron.rollouts.pace import AsyncPace
from rl_megatron.rollouts.record import ORDER, LoggedStep, RolloutRecord
from rl_megatron.rollouts.runner import ROLLOUT_ERRORS, RolloutTask
from rl_megatron.rollouts.scored import Scored, ScoredRollouts, Scores, build_tasks
from rl_megatron.rollouts.statistics import describe_rollouts, informative_groups
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy

_ROUNDS_PER_SEED = 1000  # distance between the seeds of two steps, so that their rounds have different seeds


class Sampler:
    """The sampler of scored trajectories for the prompts of a step.

    The prompts of a stage form a stream of rounds, each with `prompts_per_step` prompts. The prompt and the random
    numbers of a group depend only on `train.seed` and the group's position in the stream. In synchronous training, all
    ranks produce the rounds of a step together. In asynchronous training, rank 0 produces the groups of coming steps,
    in the order of the same stream, while all ranks train.

    A resumed run therefore samples the same as an uninterrupted run. In asynchronous training it first learns again
    from the tokens of the logged steps, and then repeats the groups that were not complete.
    """

    def __init__(self, loop: Loop, policy: MegatronPolicy, engine: SyncedEngine, rollouts: ScoredRollouts):
        """Begin to sample for a stage whose section `algorithm` is a `RolloutConfig`.

        Args:
            loop: The stage's loop. Its checkpoints contain the sampler's state.
            policy: The stage's policy.
            engine: The rollout engine, which always generates with the policy's current weights.
            rollouts: The stage's rollout worker with its reward functions.
        """
        config, rollout = loop.config, loop.config.rollout
        algorithm: RolloutConfig = config.algorithm  # pyright: ignore[reportAssignmentType] the algorithm samples
        is_asynchronous = (
            isinstance(algorithm, PolicyGradientConfig) and rollout.is_asynchronous and rollout.replay is None
        )
        self._loop, self._policy, self.engine, self._rollouts = loop, policy, engine, rollouts
        self._seed, self._ranks = config.train.seed, policy.topology.ranks
        self._group_size, self._per_step = algorithm.samples_per_prompt, algorithm.prompts_per_step
        self._rounds_per_step, self._drops_equal = algorithm.rounds_per_step, algorithm.drops_equal_rewards
        if not is_asynchronous:
            rollouts.start()  # workers load the reward functions while the first completions are generated
        self._prompts = RolloutPrompts(config, algorithm, loop.tokenizer)
        loop.use_loader(self._prompts.loader)
        loop.keep("sampler", self)
        self._sampling = make_sampling(config, loop.tokenizer, end_of_turn_ids=self._prompts.end_of_turn_ids)
        self._mixture = [data_set.shown_name for data_set in config.data.mix] if algorithm.reads_data_sets else []
        self._store = TensorStore(rollout.max_host_bytes, rollout.disk_directory)
        self._record = RolloutRecord(
            replace(rollout, save_every=1, save_prompts=None) if is_asynchronous else rollout, loop.rollout_files,
            loop.tokenizer, self._group_size, self._ranks,
            reward=config.reward if algorithm.reads_components else None, mixture=self._mixture,
        )  # fmt: skip
        self._logged: dict[int, LoggedStep] = {}  # steps that an asynchronous run learns from again
        self._new: LoggedStep | None = None  # the line of the log that `keep` writes
        self._is_replayed = False
        self._async: AsyncRollouts | None = None
        if is_asynchronous:
            self._logged = self._ranks.share(self._record.log.read)
            self._async = self._begin_asynchronous()

    def _begin_asynchronous(self) -> AsyncRollouts:
        loop, config, rollout = self._loop, self._loop.config, self._loop.config.rollout
        rules = QueueRules(
            self._per_step, config.train.steps, rollout.max_trajectory_age_steps, rollout.over_sampling,
            rollout.partial, self._rounds_per_step, self._drops_equal,
        )  # fmt: skip
        rollouts = AsyncRollouts(
            self._rollouts, Scorer(config.reward, lambda: build_source(config).task(), Ranks()), rules,
            self._build_tasks_at, self.engine, lambda: self._policy.weight_version, self._sampling,
            waits_for_requests=not rollout.in_flight_weight_updates,
        )  # fmt: skip
        loop.close_at_end(rollouts)
        self._pace = AsyncPace(loop.name, config, self._per_step, self._ranks.size)
        return rollouts

    def collect(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Return (the rollouts that the step learns from, statistics of all rollouts since the last step).

        Afterwards the engine releases memory until it generates again.

        With dynamic sampling, groups whose rewards are all equal are dropped, and other prompts are sampled until the
        step is full or has used all its rounds.

        Raises:
            RolloutFailed, RewardFailed, EngineFailed, EngineMismatch: See `ScoredRollouts.make` and `SyncedEngine`.
        """
        logged = self._logged.pop(step, None)
        self._is_replayed = logged is not None
        if self._async is None:
            collected = self._make_rounds(step)
        elif logged is None:
            collected = self._take_groups(self._async, step)
        else:
            collected = self._replay(self._async.queue, logged)
        self.engine.sleep()
        return collected

    def draw(self, step: int, round_: int = 0) -> BatchedDataDict:
        """Return `samples_per_prompt` scored completions for each of the round's prompts, on every rank.

        The batch is the one that `generate` returns, with `rewards` [B]. Samples of a prompt are contiguous.
        """
        rollouts, _ = self._make_round(step, round_)
        whole = share_rollouts(rollouts)
        if ORDER in rollouts.facts:
            whole[ORDER] = rollouts.facts[ORDER]
        return whole

    def keep(self, step: int, learned: Batch) -> None:
        """Write the rollouts of a step to a file, and to the log if training is asynchronous. Collective.

        Args:
            step: The step.
            learned: The rollouts that the step learns from, with `advantages`.

        Raises:
            SaveFailed: They cannot be written.
        """
        if not self._is_replayed:
            self._record.write(step, learned, self._policy.weight_version, self._new)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: the seed of the next round, or the groups that are left. Collective."""
        if self._async is None:
            return {"next_seed": derive_batch_seed(self._seed, self._loop.next_batch_number)}
        return {
            "queue": self._async.state_dict(),
            "batches_skipped": self._loop.batch_number(0),
            "weight_version": self._policy.weight_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. After a roll-back, remove later steps from the log, and skip their groups.

        Raises:
            ConfigError: The next round has another seed than in the checkpoint.
        """
        if self._async is None:
            MustBe(self.state_dict()).load_state_dict(state)
            return
        self._policy.model.version = state["weight_version"]  # weight versions continue from the checkpoint's
        queue = self._async.queue
        queue.load_state_dict(state["queue"])
        skipped = self._loop.batch_number(0) - state["batches_skipped"]
        if skipped:
            self._logged = {}
            self._record.forget_steps(after=queue.next_step - 1)
            queue.leave_out(skipped)

    # --- synchronous steps ---

    def _make_rounds(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Run the rounds that a step needs; see `collect`."""
        wanted, used, rounds, metrics = self._per_step * self._group_size, [], [], RewardMetrics()
        for round_ in range(self._rounds_per_step):
            rollouts, round_metrics = self._make_round(step, round_)
            metrics.add(round_metrics)
            rounds.append(rollouts)
            used.append(keep_informative(rollouts, self._group_size) if self._drops_equal else rollouts)
            if sum(part.trajectories.num_trajectories for part in used) >= wanted:
                break
        outcome = describe_rollouts(rounds, self._group_size) | self._ranks.share(metrics.values)
        outcome |= self._record.read_logged_metrics(step)
        if self._drops_equal:
            outcome["sampling_rounds"] = float(len(rounds))
            used = [part for part in used if part.size] or rounds[-1:]  # if no rewards differ, the step has no gradient
        return join(used, wanted), outcome

    def _make_round(self, step: int, round_: int) -> tuple[Batch, RewardMetrics]:
        """Return a round of trajectories, and on rank 0 the metrics of their rewards. Collective."""
        number = (self._loop.batch_number(step) - 1) * self._rounds_per_step + round_
        prompts, seed = self._draw_prompts(number)
        prompts = [prompt for prompt in prompts for _ in range(self._group_size)]
        if self._record.replays:
            batch_here, metrics = self._record.replay(step, round_, len(prompts)), RewardMetrics()
        else:
            scored = self._rollouts.make(self.engine, prompts, self._sampling, seed, self._group_size)
            batch_here, metrics = (None, RewardMetrics()) if scored is None else (scored.batch, scored.metrics)
            add_data_sets(batch_here, prompts, self._mixture)
        batch = self._gather(batch_here)
        self._record.add(round_, batch, prompts, metrics)
        return batch, metrics

    # --- asynchronous steps ---

    def _take_groups(self, rollouts: AsyncRollouts, step: int) -> tuple[Batch, dict[str, float]]:
        """Return the rollouts of the groups that the queue has for a step; see `collect`."""
        prompts, _ = self._draw_prompts((step - 1) * self._rounds_per_step)
        groups = rollouts.take(step, [prompt.ids for prompt in prompts])
        used, used_metrics = self._gather_groups(groups.used)
        # Of groups in which no sample counts, only the metrics are used, because they have no rewards to compare.
        silent = [group for group in groups.equal if not self._has_samples(group)]
        equal, equal_metrics = self._gather_groups([group for group in groups.equal if self._has_samples(group)])
        prompts_used = [result.task.prompt for group in groups.used for result in group.results]
        self._record.add(0, used[0], prompts_used, used_metrics)
        metrics = RewardMetrics()
        for part in (used_metrics, equal_metrics, *(replace(group.scores.metrics, scores={}) for group in silent)):
            metrics.add(part)
        others = self._ranks.share(lambda: metrics.values() | groups.compute_metrics() | self._pace.devices)
        others["old_logprobs_of_engine"] = float(self._loop.config.rollout.correction == "engine")
        outcome = describe_rollouts([*used, *equal], self._group_size) | others
        self._new = groups.build_log_entry(step, outcome)
        self._pace.note(step, outcome)
        return used[0], outcome

    def _replay(self, queue: GroupQueue, logged: LoggedStep) -> tuple[Batch, dict[str, float]]:
        """Return the rollouts of a step that the run logged before it ended; see `collect`."""
        rollouts = self._gather(self._record.read_step(logged.step))
        queue.replay(logged.ended)
        return rollouts, dict(logged.metrics)

    def _gather_groups(self, groups: Sequence[Group]) -> tuple[list[Batch], RewardMetrics]:
        """Return [the batch of rank 0's groups], or [] if there are none, and on rank 0 their metrics. Collective."""
        scored = self._ranks.run_on_rank0(lambda: self._assemble(groups), ROLLOUT_ERRORS)
        if not self._ranks.share(lambda: scored is not None):
            return [], RewardMetrics()
        batch, metrics = (None, RewardMetrics()) if scored is None else (scored.batch, scored.metrics)
        return [self._gather(batch)], metrics

    def _assemble(self, groups: Sequence[Group]) -> Scored | None:
        if not groups:
            return None
        results = [result for group in groups for result in group.results]
        scores = Scores.join([group.scores for group in groups])
        scored = self._rollouts.assemble(results, scores, self._sampling, self._group_size)
        add_data_sets(scored.batch, [result.task.prompt for result in results], self._mixture)
        return scored

    def _has_samples(self, group: Group) -> bool:
        """Return whether a sample of a group may be learned from."""
        return bool(self._rollouts.on_failure.samples_that_count(group.scores.succeeded, self._group_size).any())

    # --- both ---

    def _build_tasks_at(self, number: int) -> list[RolloutTask]:
        """Return the tasks of the group at a position of the stream."""
        round_, position = divmod(number, self._per_step)
        prompts, seed = self._draw_prompts(round_)
        return build_tasks([prompts[position]] * self._group_size, seed, position * self._group_size)

    def _draw_prompts(self, number: int) -> tuple[list[EncodedPrompt], int]:
        """Return the prompts of a round of the stream, and its seed."""
        batch, round_ = divmod(number, self._rounds_per_step)
        return self._prompts.loader.batch(number), derive_batch_seed(self._seed, batch + 1) + round_

    def _gather(self, batch: BatchedDataDict | None) -> Batch:
        """Return rank 0's batch as a batch that all ranks share. Collective."""
        if batch is not None and self._loop.config.train.share_prefixes == "auto":
            batch[PREFIX_SET] = TrajectoryIndex(batch).owner // self._group_size
        return Batch.gather_facts(batch, self._policy.topology, self._store)


def derive_batch_seed(seed: int, batch_number: int) -> int:
    """Return the seed of the first round of a batch (counted from 1); further rounds have the next seeds."""
    return (seed * 1_000_003 + batch_number) * _ROUNDS_PER_SEED


def add_data_sets(rollouts: BatchedDataDict | None, prompts: Sequence[EncodedPrompt], mixture: Sequence[str]) -> None:
    """Add the key `data_set` to rollouts of these prompts, if there are rollouts and `mixture` has names."""
    if rollouts is not None and mixture:
        indices = index_data_sets([prompt.data_set for prompt in prompts], mixture)
        rollouts[DATA_SET] = TrajectoryIndex(rollouts).spread(indices)


def share_rollouts(rollouts: Batch) -> BatchedDataDict:
    """Return the rollouts that rank 0 has produced, on every rank. Collective."""
    return rollouts.all_ranks.share(lambda: rollouts.local)


def keep_informative(rollouts: Batch, group_size: int) -> Batch:
    """Return the trajectories of groups whose rewards differ."""
    index = rollouts.trajectories
    rewards, counts = (index.take_first(rollouts.facts[key]) for key in ("rewards", "sample_mask"))
    kept = informative_groups(rewards, group_size, counts).repeat_interleave(group_size)
    return rollouts.select(index.spread(kept))


def join(parts: Sequence[Batch], limit: int) -> Batch:
    """Return several rounds of rollouts as one batch of at most `limit` trajectories."""
    joined = Batch.join(parts)
    index = joined.trajectories
    return joined if index.num_trajectories <= limit else joined.select(index.owner < limit)

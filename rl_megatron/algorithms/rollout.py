"""Sample completions for prompts, score them, and add logprobs: the rollouts that policy gradients learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import informative_groups, token_rewards
from rl_megatron.algorithms.loop import Loop
from rl_megatron.algorithms.registry import LossNeeds
from rl_megatron.algorithms.rollout_record import ORDER, RolloutRecord
from rl_megatron.algorithms.rollout_statistics import mean_over_tokens, statistics
from rl_megatron.batching.batch import DATA_SET, Batch
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.checkpoint.resumed_state import MustBe
from rl_megatron.config.algorithm_kinds import PolicyGradientConfig, RolloutConfig
from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import RolloutPrompts
from rl_megatron.generation.stage_sampling import stage_sampling
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.functional import kl_penalty
from rl_megatron.losses.registry import configured_loss
from rl_megatron.policy.interfaces import PolicyInterface
from rl_megatron.rewards.reward_metrics import RewardMetrics
from rl_megatron.rollouts.batch import TURN_REWARDS, data_set_places
from rl_megatron.rollouts.trajectory_index import TrajectoryIndex
from rl_megatron.timing import count_tokens, phase

# The keys of rollouts when they reach the loss.
ROLLOUT_KEYS = frozenset(
    "input_ids input_lengths token_mask sample_mask rewards advantages temperature generation_logprobs prev_logprobs "
    "reference_policy_logprobs covariance_mask".split()
)
_ROUNDS_PER_SEED = 1000  # distance between the seeds of two steps, so that their rounds have different seeds


def _uses_advantages(loss_fn: LossFunction) -> bool:
    return "advantages" in getattr(loss_fn, "required_keys", ("advantages",))  # an undeclared loss is assumed to use it


ROLLOUT_LOSS = LossNeeds("advantages", _uses_advantages, ROLLOUT_KEYS, "clipped_pg")


def uses_reference(stage: StageConfig) -> bool:
    """Return whether the stage's loss, or its reward, uses the reference policy."""
    return needs_reference(rollout_loss(stage))


def rollout_loss(stage: StageConfig) -> LossFunction:
    """Return the loss of a stage, which weights old trajectories as `rollout.importance_correction` says."""
    recomputed = stage.rollout.correction == "recomputed" and stage.rollout.async_enabled
    return configured_loss({**stage.loss, **({"use_importance_sampling_correction": True} if recomputed else {})})


def check_problems(stage: StageConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Check that a step has enough different problems; return the tokens of the longest prompt with its completion.

    Raises:
        ConfigError: There are too few problems, or a completion may not fit after a prompt.
    """
    algorithm: RolloutConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    return [(RolloutPrompts(stage, algorithm, tokenizer).longest + stage.generation.max_new_tokens,)]


def check_policy_gradient(stage: StageConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Check what `check_problems` checks, and that the loss can learn without the logprobs that are not recomputed.

    Raises:
        ConfigError: See `check_problems` and `recomputes_logprobs`.
    """
    algorithm: PolicyGradientConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    recomputes_logprobs(stage, algorithm, rollout_loss(stage))
    return check_problems(stage, tokenizer)


def seed_of_batch(seed: int, batch_number: int) -> int:
    """Return the seed of the first round of a batch; those of further rounds follow it.

    Args:
        seed: `train.seed`.
        batch_number: The number of the batch, from 1 on.
    """
    return (seed * 1_000_003 + batch_number) * _ROUNDS_PER_SEED


class Sampler:
    """The sampler of scored completions for the prompts of a step.

    The prompts and random numbers depend only on `train.seed` and on the numbers of the step and the round. A resumed
    run therefore samples the same as an uninterrupted run.
    """

    def __init__(self, stage: Loop, algorithm: RolloutConfig):
        config, self._stage, self._algorithm = stage.config, stage, algorithm
        self._engine, self._seed = stage.engine, config.train.seed
        self._per_prompt = algorithm.samples_per_prompt
        self._rollouts, self._metrics = stage.rollouts, RewardMetrics()
        self._rollouts.start()  # workers load the reward functions while the first completions are generated
        self._prompts = RolloutPrompts(config, algorithm, stage.tokenizer)
        stage.use_loader(self._prompts.loader)
        stage.keep("sampler", self)
        self._sampling = stage_sampling(config, stage.tokenizer, end_of_turn_ids=self._prompts.end_of_turn_ids)
        self._mixture = mixture_to_tell_apart(config, algorithm)
        self._store = TensorStore(config.rollout.max_host_bytes, config.rollout.disk_directory)
        self._record = RolloutRecord(
            config.rollout, stage.rollout_files, stage.tokenizer, self._per_prompt,
            stage.policy.topology.ranks,
            reward=config.reward if algorithm.reads_components else None, mixture=self._mixture,
        )  # fmt: skip

    def collect(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Return (the rollouts that the step learns from, statistics of all sampled rollouts).

        With dynamic sampling, groups whose rewards are all equal are dropped, and other prompts are sampled until the
        step is full or has used all its rounds.
        """
        group_size, drops = self._per_prompt, self._algorithm.drops_equal_rewards
        wanted = self._algorithm.prompts_per_step * group_size
        kept, seen = [], []
        for round_ in range(self._algorithm.rounds_per_step):
            rollouts = self.produce(step, round_)
            seen.append(rollouts)
            kept.append(keep_informative(rollouts, group_size) if drops else rollouts)
            if sum(part.num_trajectories for part in kept) >= wanted:
                break
        outcome = statistics(join(seen, len(seen) * wanted), group_size) | self._reward_metrics()
        outcome |= self._record.logged_metrics(step)
        if drops:
            outcome["sampling_rounds"] = float(len(seen))
            kept = [part for part in kept if part.size] or seen[-1:]  # if no group differs, the step has no gradient
        return join(kept, wanted), outcome

    def draw(self, step: int, round_: int = 0) -> BatchedDataDict:
        """Return `samples_per_prompt` scored completions for each of the round's prompts, on every rank.

        The batch is the one that `generate` returns, with `rewards` [B]. Samples of a prompt are
        contiguous.
        """
        rollouts = self.produce(step, round_)
        whole = on_every_rank(rollouts)
        if ORDER in rollouts.facts:
            whole[ORDER] = rollouts.facts[ORDER]
        return whole

    def produce(self, step: int, round_: int) -> Batch:
        """Return the completions of `draw` on the rank that has produced them, which is rank 0. Collective."""
        number = self._stage.batch_number(step)
        prompts = [prompt for prompt in self._prompts.at(number, round_) for _ in range(self._per_prompt)]
        if self._record.replays:
            own, metrics = self._record.replayed(step, round_, len(prompts)), RewardMetrics()
        else:
            seed = seed_of_batch(self._seed, number) + round_
            scored = self._rollouts.make(self._engine, prompts, self._sampling, seed, self._per_prompt)
            own, metrics = (None, RewardMetrics()) if scored is None else (scored.batch, scored.metrics)
            add_data_sets(own, prompts, self._mixture)
        topology = self._stage.policy.topology
        rollouts = Batch.gather_facts(own, topology, self._store)
        self._record.add(round_, rollouts, prompts, metrics)
        self._metrics.add(metrics)
        return rollouts

    def keep(self, step: int, learned: Batch) -> None:
        """Write the rollouts of a step to a file if `rollout.save_every` says so. Collective.

        Args:
            step: The step.
            learned: The rollouts that the step learns from, with `advantages`.
        """
        self._record.write(step, learned, self._stage.policy.weight_version)

    def state_dict(self) -> dict[str, int]:
        """Return the seed of the next draw, which checkpoints keep."""
        return {"next_seed": seed_of_batch(self._seed, self._stage.next_batch_number)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Check that the next draw has the seed that a checkpoint says; see `MustBe.load_state_dict`."""
        MustBe(self.state_dict()).load_state_dict(state)

    def _reward_metrics(self) -> dict[str, float]:
        """Return the metrics of the reward functions over all draws since the last call, which rank 0 has."""
        metrics, self._metrics = self._metrics, RewardMetrics()
        return self._stage.policy.topology.ranks.share(metrics.values)


def mixture_to_tell_apart(stage: StageConfig, algorithm: RolloutConfig) -> list[str]:
    """Return the names of the data sets of the mixture if the algorithm reads which one a sample is of."""
    return [each.shown_name for each in stage.data.mix] if algorithm.reads_data_sets else []


def add_data_sets(rollouts: BatchedDataDict | None, prompts: Sequence[EncodedPrompt], mixture: Sequence[str]) -> None:
    """Add the key `data_set` to rollouts of these prompts, if there are any, and data sets to tell apart."""
    if rollouts is not None and mixture:
        places = data_set_places([prompt.data_set for prompt in prompts], mixture)
        rollouts[DATA_SET] = TrajectoryIndex(rollouts).spread(places)


def recomputes_logprobs(stage: StageConfig, algorithm: PolicyGradientConfig, loss_fn: LossFunction) -> bool:
    """Return whether `prev_logprobs` are computed before the policy learns from a rollout.

    With `rollout.importance_correction=engine` they are those of the engine. With `algorithm.recompute_logprobs=auto`
    they are computed, unless the loss takes them from the forward pass of the training step (`Loss.on_policy_keys`),
    and nothing else may read them.

    Raises:
        ConfigError: `algorithm.recompute_logprobs=never`, and the loss needs them.
    """
    if stage.rollout.correction == "engine":
        return False
    key = "prev_logprobs"
    needed = key in getattr(loss_fn, "required_keys", ())
    if algorithm.recompute_logprobs == "never" and needed:
        raise ConfigError(
            f"algorithm.recompute_logprobs=never: loss.name={stage.loss['name']} needs {key!r} in its batch; set it to "
            "auto"
        )
    if algorithm.recompute_logprobs != "auto":
        return algorithm.recompute_logprobs == "always"
    derived = key in getattr(loss_fn, "on_policy_keys", ())
    return not derived or algorithm.may_read_logprobs() or algorithm.needs_logprobs(stage) is not None


def whole_trajectories(rollouts: Batch) -> Tensor | None:
    """Return the number of the trajectory of each sequence, or None if each trajectory is one sequence."""
    trajectories = rollouts.trajectories()
    return None if len(trajectories) == int(trajectories[-1]) + 1 else trajectories


def with_logprobs(
    rollouts: Batch, policy: PolicyInterface, *, recompute: bool, reference: bool, from_engine: bool = False
) -> Batch:
    """Return the rollouts with the `prev_logprobs` and `reference_policy_logprobs` that are asked for.

    `prev_logprobs` are those of the current policy, or with `from_engine` those that the engine reported.
    """
    if from_engine:
        rollouts["prev_logprobs"] = rollouts["generation_logprobs"].clone()
    if recompute:
        with phase("logprobs"):
            rollouts["prev_logprobs"] = policy.get_logprobs(rollouts)["logprobs"]
            count_tokens(rollouts.num_tokens)
    if reference:
        with phase("reference"):
            rollouts["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(rollouts)["reference_logprobs"]
            count_tokens(rollouts.num_tokens)
    return rollouts


def kl_in_reward(loss_fn: LossFunction) -> float:
    """Return β if the KL penalty is part of the reward (`use_kl_in_reward`) instead of the loss, otherwise 0."""
    cfg = _kl_settings(loss_fn)
    return 0.0 if cfg is None else cfg.reference_policy_kl_penalty


def _kl_settings(loss_fn: LossFunction) -> ClippedPGLossConfig | None:
    """Return the settings of a loss whose KL penalty is part of the reward, or None for another loss."""
    cfg = getattr(loss_fn, "cfg", None)
    return cfg if getattr(cfg, "use_kl_in_reward", False) else None


def needs_reference(loss_fn: LossFunction) -> bool:
    """Return whether the loss, or the reward, uses the reference policy."""
    return "reference_policy_logprobs" in getattr(loss_fn, "required_keys", ()) or kl_in_reward(loss_fn) > 0


def rewards_per_token(rollouts: BatchedDataDict, loss_fn: LossFunction) -> Tensor:
    """Return token rewards [B, S]: the reward of each trajectory at its last sampled token, and the KL penalty.

    Rewards that an environment gave for turns are at the last tokens of these turns instead. If the KL penalty is part
    of the reward, β·KL(π_prev‖π_ref) is subtracted at every sampled token.
    """
    kl, index = _kl_of_tokens(rollouts, loss_fn), TrajectoryIndex(rollouts)
    at_end, of_turns = rollouts["rewards"].float(), rollouts.get(TURN_REWARDS)
    if of_turns is not None:  # they have their own places, and what is left belongs to the end
        at_end = torch.where(index.is_last(), at_end - index.spread(index.total(of_turns.sum(1))), 0.0)
    rewards = token_rewards(at_end, rollouts["token_mask"], kl, kl_in_reward(loss_fn))
    return rewards if of_turns is None else rewards + of_turns


def reward_kl(rollouts: Batch, loss_fn: LossFunction) -> dict[str, float]:
    """Return the metric `reward_kl`: the mean KL over sampled tokens, without the factor β. Collective.

    The result is empty if the KL penalty is not part of the reward.
    """
    kl = _kl_of_tokens(rollouts, loss_fn)
    return {} if kl is None else {"reward_kl": mean_over_tokens(kl, rollouts)}


def _kl_of_tokens(rollouts: Mapping[str, Tensor], loss_fn: LossFunction) -> Tensor | None:
    """Return KL(π_prev‖π_ref) [B, S], with the loss's estimator and clamps, or None if the reward has no KL penalty."""
    cfg = _kl_settings(loss_fn)
    if cfg is None or cfg.reference_policy_kl_penalty == 0:
        return None
    return kl_penalty(
        rollouts["prev_logprobs"], rollouts["reference_policy_logprobs"], cfg.reference_policy_kl_type,
        cfg.kl_input_clamp_value, cfg.kl_output_clamp_value,
    )  # fmt: skip


def on_every_rank(rollouts: Batch) -> BatchedDataDict:
    """Return the rollouts that rank 0 has produced, on every rank. Collective."""
    return rollouts.all_ranks.share(lambda: rollouts.own)


def keep_informative(rollouts: Batch, group_size: int) -> Batch:
    """Return the trajectories of groups whose rewards differ."""
    numbers = rollouts.facts
    index = TrajectoryIndex(numbers)
    rewards, counts = (index.of_first(numbers[key]) for key in ("rewards", "sample_mask"))
    kept = informative_groups(rewards, group_size, counts).repeat_interleave(group_size)
    return rollouts.select(index.spread(kept))


def join(parts: Sequence[Batch], limit: int) -> Batch:
    """Return several rounds of rollouts as one batch of at most `limit` trajectories."""
    joined = Batch.join(parts)
    return joined.select(joined.trajectories() < limit)

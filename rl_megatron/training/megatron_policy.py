"""`MegatronPolicy`: a sharded megatron-core model that trains on global batches and computes their logprobs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching, require_count
from rl_megatron.batching.rank_plan import RankPlan, require_key
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.checkpoint.adapters import describe_model_adapters, find_base, holds_adapter
from rl_megatron.checkpoint.directory import check_head, read_manifest, read_model_section
from rl_megatron.checkpoint.hf_weights import open_hugging_face
from rl_megatron.checkpoint.load import load_checkpoint, start_from_weights
from rl_megatron.checkpoint.save import Save, begin_checkpoint
from rl_megatron.checkpoint.training_state import TrainingState
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.foreign import as_loss
from rl_megatron.model.build import Head
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.policy.interfaces import BatchT, ColocatablePolicyInterface
from rl_megatron.timing import phase
from rl_megatron.topology.topology import Topology, start_topology
from rl_megatron.training.inference import Inference, allow_sharing, build_runner, build_whole_batch
from rl_megatron.training.metrics import combine_steps
from rl_megatron.training.reference import AdapterReference, Placement, RecordedReference, ReferenceModel
from rl_megatron.training.runner import FusedHead
from rl_megatron.training.steps import OptimizerStep, StepPlanner
from rl_megatron.training.teacher import Teacher
from rl_megatron.training.trainer import Trainer
from rl_megatron.training.training_memory import TrainingMemory
from rl_megatron.weight_sync.exporter import digest_weights
from rl_megatron.weight_sync.ipc import WeightHandle
from rl_megatron.weight_sync.process_group import Handle
from rl_megatron.weight_sync.sender import PendingGroup, WeightSender

# The keys of a batch that a model reads without a loss.
_READ = (PREFIX_SET, "input_ids", "input_lengths", "token_mask", "temperature", ROUTED_EXPERTS)


class MegatronPolicy(ColocatablePolicyInterface):
    """A model with its optimizer. Every rank calls every method with the same arguments and gets the same result.

    Instead of a dictionary that all ranks have, each rank may pass a `Batch` of the sequences that it owns, and then
    gets the results for these.

    The policy distributes sequences over data-parallel ranks, and adds padding sequences with zero loss weight until
    all ranks have equally many. An algorithm therefore does not depend on the layout. The caller's batch is not
    changed or moved: each rank sends only its own sequences to its device. With `head="score"` the policy is a reward
    model or a critic. Without `optimizer` it cannot be trained.

    Attributes:
        model: The sharded model, which owns the weights and their version.
        model_config: The shape of the model.
        topology: How the model is sharded.
        vocab_size: The tokenizer's vocabulary size.
        weights: The sender of the weights to rollout engines.
        reference: The frozen model or the recorded logprobs with which the policy is compared, or None.
        optimizer: megatron-core's optimizer, or None if the policy was built without one.
        scheduler: The optimizer's learning-rate schedule, or None.
        memory: The gradient buffers and optimizer state, and whether they are on the device.
        batching: How a batch is split into microbatches by default.
    """

    def __init__(  # noqa: PLR0913  # each is a choice of the script that builds a policy
        self,
        model: ModelConfig,
        topology: Topology,
        *,
        vocab_size: int,
        precision: str = "fp32",
        seed: int = 0,
        optimizer: OptimizerConfig | None = None,
        total_steps: int | None = None,
        global_batch_size: int = 32,
        batching: Batching = Batching(),
        head: Head = "lm",
        fused_head: FusedHead | None = None,
        reference_placement: Placement = "resident",
        initialise: bool = True,
        max_skipped_steps: int = 0,
        peft: LoraConfig | None = None,
    ):
        """Build the policy with random weights or, with `initialise=False`, with zeros until they are loaded.

        With `peft`, the policy trains adapters, `peft.modules_to_save` and a score head; all other weights are frozen.
        It skips up to `max_skipped_steps` optimizer steps in a row whose loss or gradient norm is not finite. The
        learning rate decays until `optimizer.decay_steps` or, by default, `total_steps`; a decay needs one of them.
        """
        self.model = ShardedModel(
            model, topology, vocab_size=vocab_size, precision=precision, seed=seed, head=head, initialise=initialise,
            lora=peft,
        )  # fmt: skip
        self.model_config, self.topology, self.vocab_size = self.model.config, topology, vocab_size
        self.runner = build_runner(self.model, fused_head)
        self._trainer = self.optimizer = self.scheduler = None
        if optimizer is not None:
            trainer = Trainer(self.model, self.runner, optimizer, precision, total_steps, max_skipped_steps)
            self._trainer, self.optimizer, self.scheduler = trainer, trainer.optimizer, trainer.scheduler
        self.weights = WeightSender(self.model)
        self.memory = TrainingMemory(self.model, self.optimizer)
        self.reference: ReferenceModel | AdapterReference | RecordedReference | None = None
        self.batching = allow_sharing(batching, self.runner.backend)
        self._inference = Inference(self.model, self.runner)
        self._planner = StepPlanner(self.model, self._inference.cost)
        self._global_batch_size = global_batch_size
        self._fused_head = fused_head
        self._reference_placement: Placement = reference_placement
        self.model.set_training(False)

    @classmethod
    def from_hf(
        cls, directory: str | Path, *, parallel: ParallelConfig | None = None, device: str = "auto", **options: Any
    ) -> Self:
        """Build a policy from a Hugging Face directory. Each rank reads only the rows of its own shards.

        `parallel` and `device` are passed to `start_topology`, and `options` to the constructor.

        Raises:
            ConfigError: The directory does not hold a supported model, or the parallel degrees do not fit.
        """
        weights = open_hugging_face(Path(directory))
        topology = start_topology(parallel, device=device, seed=options.get("seed", 0))
        initialise = options.get("head", "lm") != "lm"  # a score head starts from random weights
        policy = cls(weights.model, topology, vocab_size=weights.vocab_size, initialise=initialise, **options)
        weights.load_into(policy.model)
        start_from_weights(policy.model, policy.optimizer)
        return policy

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, *, parallel: ParallelConfig | None = None, device: str = "auto",
        weights_only: bool = False, **options: Any,
    ) -> Self:  # fmt: skip
        """Build a policy from a checkpoint that was saved under any parallel layout.

        The model's shape is the checkpoint's, and so are vocabulary size, head and precision unless `options` has them.
        The other arguments are those of `from_hf`, and `weights_only` is that of `load_checkpoint`.

        Raises:
            ConfigError: The checkpoint cannot be read, or the parallel degrees do not fit.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if holds_adapter(manifest):
            find_base(path, manifest)  # raises early if the checkpoint of an adapter's base is missing
        topology = start_topology(parallel, device=device, seed=options.get("seed", 0))
        options = {key: manifest[key] for key in ("vocab_size", "head", "precision") if key in manifest} | options
        initialise = check_head(path, manifest, options.get("head", "lm"), weights_only)
        policy = cls(read_model_section(path, manifest), topology, initialise=initialise, **options)
        policy.load_checkpoint(path, weights_only=weights_only)
        return policy

    @property
    def weight_version(self) -> int:
        """Return a number that changes whenever the weights change."""
        return self.model.version

    def distribute(self, batch: Batch, sizes: Sequence[int] | None = None, groups: Tensor | None = None) -> Batch:
        """Move every sequence to the data-parallel rank that computes its logprobs and trains on it. Collective.

        Args:
            batch: The sequences on the ranks that have produced them.
            sizes: The number of sequences of each optimizer step. Each step is spread evenly over the ranks. None:
                every step has as many trajectories as the policy's global batch size.
            groups: [B] A number for each sequence. Neighbouring sequences with the same number stay on one rank. None:
                there are no groups.

        Raises:
            ConfigError: A single sequence exceeds the token limit of a microbatch.
        """
        if batch.is_whole:
            return batch.keep_all()
        gbs = self._global_batch_size
        steps = sizes or batch.trajectories.step_sizes(gbs)
        steps = steps or [min(gbs, batch.size - start) for start in range(0, batch.size, gbs)]
        with phase("exchange"):
            return self._planner.distribute(batch, self.batching, steps, groups)

    # --- training ---

    def prepare_for_training(self) -> None:
        """Put the model into training mode, with gradient buffers and optimizer state on the device.

        Raises:
            RuntimeError: The policy was built without an optimizer.
        """
        self._require_trainer()
        self.weights.release()
        self.memory.restore_optimizer()
        self.memory.allocate_gradients()
        self.model.set_training(True)

    def finish_training(self) -> None:
        """Put the model into evaluation mode. Collective if `ShardedModel.gather_parameters` is."""
        self.model.gather_parameters()
        self.model.set_training(False)

    def train(
        self,
        data: Mapping[str, object],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        sizes: Sequence[int] | None = None,
        teacher: Teacher | None = None,
        on_policy: bool = False,
    ) -> dict[str, Any]:
        """Take one optimizer step for each `gbs` sequences of `data` in order (the last step may have fewer).

        A global batch without a valid token changes nothing: weights, moments and learning rate stay the same.

        Args:
            data: The sequences, with everything that the loss reads. A language model with experts routes tokens to
                the experts of `routed_experts` [B, S, L, k], if the batch has them.
            loss_fn: The loss.
            eval_mode: Compute the metrics only.
            gbs: The number of sequences per optimizer step. The default is the policy's global batch size.
            mbs: The number of sequences per forward pass. The default is that of `batching`.
            sizes: The number of sequences of each optimizer step, instead of `gbs`.
            teacher: The model whose logits the loss reads as `teacher_logits`, sharded like the policy's.
            on_policy: Whether the weights are those that sampled the batch. If they are and there is only one step, a
                policy gradient loss computes missing `prev_logprobs` in the step's own forward pass.

        Returns:
            The loss's metrics, with `packing_efficiency` (tokens per token slot that the model computed), `grad_norm`
            (before clipping; also of groups of layers, as in `grad_norm_embedding`), `grad_norm_clipped`, `lr` and
            `num_updates`, and `skipped_steps` if steps may be skipped; a skipped step has no metrics of the loss. Each
            metric is reduced over a global batch as the loss declares, and then over steps: the minimum of minima, the
            maximum of maxima, and the mean of all others.

        Raises:
            NonFiniteLoss: The loss or the gradient norm is not finite, and the step may not be skipped. It is raised on
                every rank before a weight has changed.
            ValueError: The batch has no sequence or no token, a token is not in the vocabulary, or tensors do not fit
                each other. Or a size is not a whole number above 0, `sizes` do not add up to the batch, or they
                separate sequences that the loss needs together (preference pairs). Or `prev_logprobs` are missing, and
                there are several steps or `on_policy` is false.
        """
        loss, gbs = as_loss(loss_fn), self._global_batch_size if gbs is None else gbs
        require_count("gbs", gbs)
        steps = self._planner.plan_steps(self.as_batch(data), loss, self._batching(mbs), gbs, sizes, teacher, on_policy)
        if eval_mode:
            self.finish_training()
            reports = [
                self.runner.train_step(step.plan.microbatches, loss, step.denominators, forward_only=True)
                | {"packing_efficiency": step.plan.efficiency}
                for step in steps
            ]
            return combine_steps(reports, loss)
        self.prepare_for_training()
        metrics = self._require_trainer().train(steps, loss)
        self.model.set_training(False)  # the next forward, or the next reader, gathers the weights
        return metrics

    def _batching(self, mbs: int | None) -> Batching:
        if mbs is None:
            return self.batching
        require_count("mbs", mbs)
        return replace(self.batching, sequences=mbs)

    def _require_trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("this policy was built without an optimizer; pass `optimizer` to train it")
        return self._trainer

    def accumulate_gradients(
        self, data: Mapping[str, object], loss_fn: LossFunction, mbs: int | None = None, teacher: Teacher | None = None
    ) -> dict[str, float]:
        """Return the loss's metrics on one global batch, and store the gradient in the parameters' `main_grad`."""
        loss = as_loss(loss_fn)
        step = self._plan_step(data, loss, mbs, teacher)
        self.prepare_for_training()
        metrics = self._require_trainer().accumulate(step, loss)
        self.finish_training()
        return metrics

    def plan(self, data: Mapping[str, object], loss_fn: LossFunction, mbs: int | None = None) -> RankPlan:
        """Return the plan of this rank's microbatches for one global batch."""
        return self._plan_step(data, as_loss(loss_fn), mbs).plan

    def _plan_step(
        self, data: Mapping[str, object], loss: Loss, mbs: int | None, teacher: Teacher | None = None
    ) -> OptimizerStep:
        batch = self.as_batch(data)
        (step,) = self._planner.plan_steps(batch, loss, self._batching(mbs), batch.size or 1, teacher=teacher)
        return step

    def as_batch(self, data: Mapping[str, object], keys: Sequence[str] = ()) -> Batch:
        """Convert a user's dictionary to a `Batch` that has only `keys` or, by default, all keys.

        A `Batch` is returned unchanged. The errors are those of `build_whole_batch`.
        """
        if isinstance(data, Batch):
            return data
        require_key(data, "input_ids")
        return build_whole_batch(self.model, {key: data[key] for key in keys or data if key in data})

    def _read(self, data: BatchT, read: Callable[[Batch], dict[str, Tensor]]) -> BatchT:
        """Return the values that `read` computes for a batch, as a batch of the same kind on the same device."""
        batch = self.as_batch(data, _READ)
        values = read(batch)
        if batch is data:
            return replace(batch, local=BatchedDataDict(values))  # pyright: ignore[reportReturnType]  # `data` is a Batch
        device = data["input_ids"].device
        return BatchedDataDict(  # pyright: ignore[reportReturnType]  # it is a batch of the core's class
            {key: value.to(device) for key, value in values.items()}
        )

    # --- logprobs and scores ---

    def get_logprobs(self, data: BatchT, micro_batch_size: int | None = None) -> BatchT:
        """Return `logprobs` [B, S] fp32 at each sequence's `temperature` (default 1).

        Entry t corresponds to token t. Entry 0 and entries past a sequence's `input_lengths` are 0. A model with
        experts routes tokens to the experts of the batch's `routed_experts` [B, S, L, k], if it has them.
        """
        self.model.require_head("lm", "get_logprobs")
        self.finish_training()
        batching = self._batching(micro_batch_size)
        return self._read(
            data, lambda batch: {"logprobs": self._inference.logprobs(batch, batching, replay_routing=True)}
        )

    def get_topk_logits(self, data: BatchT, k: int, micro_batch_size: int | None = None) -> BatchT:
        """Return `topk_logits` [B, S, k] fp32, largest first, and `topk_indices` [B, S, k] int64: a teacher's targets.

        Entry t is read after token t and predicts token t+1. `temperature` is ignored. Entries past `input_lengths`
        are 0.
        """
        self.model.require_head("lm", "get_topk_logits")
        self.finish_training()
        batching = self._batching(micro_batch_size)

        def read(batch: Batch) -> dict[str, Tensor]:
            logits, ids = self._inference.topk_logits(batch, k, batching)
            return {"topk_logits": logits, "topk_indices": ids}

        return self._read(data, read)

    def get_values(self, data: BatchT, micro_batch_size: int | None = None) -> BatchT:
        """Return `values` [B, S] fp32 of a score head. Entry t is the score read *before* token t.

        Entry 0 and entries past a sequence's `input_lengths` are 0.
        """
        self.model.require_head("score", "get_values")
        self.finish_training()
        batching = self._batching(micro_batch_size)
        return self._read(data, lambda batch: {"values": self._inference.values(batch, batching)})

    def score(self, data: BatchT, micro_batch_size: int | None = None) -> BatchT:
        """Return `scores` [B] fp32 of a score head, read after each sequence's last token (`input_lengths`)."""
        self.model.require_head("score", "score")
        self.finish_training()
        batching = self._batching(micro_batch_size)
        return self._read(data, lambda batch: {"scores": self._inference.scores(batch, batching)})

    # --- the reference ---

    def freeze_reference(self) -> None:
        """Copy the current weights into a frozen reference model, which is kept beside the policy.

        If the policy has adapters, the reference shares its frozen weights, and keeps the adapters as they are now.
        """
        self.model.require_head("lm", "freeze_reference")
        self.reference = None  # first, so that there is never a third model in memory
        if self.model.lora is not None:
            self.reference = AdapterReference(self.model, self._inference)
        else:
            self.reference = ReferenceModel(self.model, self._reference_placement, self._fused_head)

    def record_reference(self, path: Path, batches: Iterable[BatchedDataDict]) -> None:
        """Compute reference logprobs of `batches` with the current weights, and keep them instead of a second model.

        The reference then has logprobs of these sequences only, in whatever batch they occur, and stores them in
        `path`. If the file has logprobs of the same weights, they are not computed again.
        """
        self.model.require_head("lm", "record_reference")
        self.reference = None
        recorded = RecordedReference(path, digest_weights(self.model), self.topology.ranks)
        recorded.complete(batches, lambda batch: self.get_logprobs(batch)["logprobs"])
        self.reference = recorded

    def get_reference_policy_logprobs(self, data: BatchT, micro_batch_size: int | None = None) -> BatchT:
        """Return `reference_logprobs` [B, S] of the frozen or recorded reference, in the format of `get_logprobs`."""
        self.model.require_head("lm", "get_reference_policy_logprobs")
        if (reference := self.reference) is None:
            raise RuntimeError("there is no reference policy yet; call freeze_reference() first")
        batching = self._batching(micro_batch_size)
        return self._read(data, lambda batch: {"reference_logprobs": reference.logprobs(batch, batching)})

    # --- weights for rollout engines ---

    def offload_before_refit(self) -> None:
        """Free the gradient buffers until `prepare_for_training`, to make memory available for buckets of weights."""
        self.finish_training()
        self.memory.free_gradients()

    def offload_after_refit(self) -> None:
        """Free gradients and shared memory, and on a GPU move optimizer state to the host until training continues."""
        self.offload_before_refit()
        self.weights.release()
        self.memory.offload_optimizer()

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each Hugging Face tensor, in the order in which they are sent."""
        return self.weights.list_tensors()

    def init_collective(
        self, ip: str, port: int, world_size: int, timeout_seconds: float = 600.0
    ) -> list[PendingGroup]:
        """Start to join a process group with engines; see `WeightSender.join`. Wait for the handles that it returns."""
        return [self.weights.join(ip, port, world_size, timeout_seconds)]

    def broadcast_weights_for_collective(self) -> list[Handle]:
        """Send all weights over the group of `init_collective`; see `WeightSender.broadcast`."""
        return self.weights.broadcast()

    def prepare_weights_for_ipc(self, max_bytes: int | None = None) -> list[list[str]]:
        """Return the groups of keys that `get_weights_ipc_handles` accepts; see `WeightSender.list_key_groups`."""
        return self.weights.list_key_groups(max_bytes)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, WeightHandle]:
        """Return, by device, the handle of the weights of one group of keys; see `WeightSender.share`."""
        return self.weights.share(keys)

    # --- checkpoints ---

    def save_checkpoint(self, directory: str | Path, step: int, *, config: str | None = None, **extra: object) -> Path:
        """Write the checkpoint `directory/step-<step>` and return its path; see `checkpoint.save.begin_checkpoint`."""
        return self.begin_checkpoint(directory, step, config=config, **extra).finish()

    def begin_checkpoint(self, directory: str | Path, step: int, *, config: str | None = None, **extra: object) -> Save:
        """Start to write a checkpoint while training continues. Call `finish` on the result to complete it."""
        state, entries = self._state(), describe_model_adapters(self.model)
        return begin_checkpoint(Path(directory), step, state, config=config, **entries, **extra)

    def load_checkpoint(self, path: str | Path, weights_only: bool = False, verify: bool = True) -> dict[str, Any]:
        """Load a checkpoint of any layout, and return its manifest; see `checkpoint.load.load_checkpoint`."""
        return load_checkpoint(Path(path), self._state(), weights_only, verify)

    def _state(self) -> TrainingState:
        """Return the training state with optimizer state on the device and weights gathered. Collective."""
        self.memory.restore_optimizer()
        self.finish_training()
        selection = "all" if self.model.lora is None else "adapters"
        return TrainingState(self.model, self.optimizer, self.scheduler, selection)

    def shutdown(self) -> bool:
        """Release model, optimizer and reference, and return whether there was a model."""
        self.weights.close()
        self.memory.release()
        self._trainer = self.optimizer = self.scheduler = self.reference = None
        had_model = self.model.release()
        gc.collect()  # megatron-core's wrappers and hooks form reference cycles
        if self.topology.is_cuda:
            torch.cuda.empty_cache()
        return had_model

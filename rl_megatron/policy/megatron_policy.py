"""The policy: a sharded megatron-core model that trains on whole batches and gives logprobs of whole batches."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.config import Batching, Planned, row_lengths
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.checkpoint import directory as checkpoint
from rl_megatron.checkpoint import load as loading
from rl_megatron.checkpoint.load import TrainingState
from rl_megatron.checkpoint.rng_state import random_state, random_state_file
from rl_megatron.checkpoint.save import Save, begin_save
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig, OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import Denominators, FusedHead, Microbatch, NonFiniteLoss, Runner, over_steps
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.foreign import as_loss
from rl_megatron.model.backend import choose_backend
from rl_megatron.model.build import Head, build_model, unwrap
from rl_megatron.model.layers.router import move_biases, moving_routers
from rl_megatron.policy.colocated import ColocatedPolicy
from rl_megatron.policy.optimizer import build_optimizer, build_scheduler, complete_parameters, wrap_for_gradients
from rl_megatron.policy.reference import ReferencedPolicy, Residence
from rl_megatron.topology.topology import Topology

_NUMBER = torch.zeros(())  # of a token, where a stream has one


class MegatronPolicy(ColocatedPolicy, ReferencedPolicy):
    """Every rank calls every method with the same global batch, and gets the same global result.

    Rows are spread over data-parallel ranks inside (with zero-weight filler rows where they do not divide), so what an
    algorithm sees does not depend on the layout. Without `optimizer` the policy only gives logprobs and generates.

    With `head="score"` it is a reward model or a critic: the same engine under a head that gives one number a token.
    """

    def __init__(
        self,
        model: ModelConfig,
        topology: Topology,
        *,
        vocab_size: int,
        precision: str = "fp32",
        seed: int = 0,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        global_batch_size: int = 32,
        batching: Batching = Batching(),
        head: Head = "lm",
        fused_head: FusedHead | None = None,
        reference: Residence = "resident",
    ):
        ColocatedPolicy.__init__(self)
        ReferencedPolicy.__init__(self, reference)
        self.model_config = model
        self.head = head
        self.topology = topology
        self.vocab_size = vocab_size
        self.precision = precision
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.batching = batching
        self.fused_head = fused_head if head == "lm" else None  # a score head has no logits
        self._cost = SequenceCost.of_model(model, vocab_size)
        self.chunks = self._new_model()
        self.optimizer = self.scheduler = None
        if optimizer is not None:
            self.chunks = wrap_for_gradients(self.chunks, topology, optimizer)
            self.optimizer = build_optimizer(self.chunks, optimizer, precision)
            self.scheduler = build_scheduler(self.optimizer, optimizer, total_steps)
        self._runner = self._runner_of(self.chunks)
        self._overlaps = optimizer is not None and optimizer.overlap and optimizer.distributed
        self._weights_are_scattered = False  # a step left each rank with the weights it updated
        self.finish_training()

    def _new_model(self) -> list[torch.nn.Module]:
        return build_model(
            self.model_config,
            self.topology,
            vocab_size=self.vocab_size,
            precision=self.precision,
            seed=self.seed,
            head=self.head,
        )

    def _runner_of(self, chunks: list[torch.nn.Module]) -> Runner:
        backend = choose_backend(self.model_config, self.topology.device)
        return Runner(chunks, self.topology, self.vocab_size, backend, self.fused_head)

    # --- training ---

    def prepare_for_training(self) -> None:
        if self.optimizer is None:
            raise RuntimeError("this policy was built without an optimizer; pass `optimizer` to train it")
        self._hand_over.release()
        self._bring_back()
        for chunk in self.chunks:
            chunk.train()

    def finish_training(self) -> None:
        """Collective where `optimizer.overlap` left the last step's weights to be gathered."""
        if self._weights_are_scattered:
            complete_parameters(self.chunks)
            self._weights_are_scattered = False
        self._leave_training()

    def _leave_training(self) -> None:
        for chunk in self.chunks:
            chunk.eval()

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each `gbs` rows of `data` in order (the last may be smaller).

        Returns the loss's metrics, reduced over each global batch as they declare and over the steps taken (minima and
        maxima as such, others averaged), with `packing_efficiency` (tokens per token slot that the model computed),
        `grad_norm` (before clipping), `lr` and `num_updates`. A global batch without a valid token moves nothing:
        weights, moments and learning rate stay. `eval_mode` computes the metrics alone.

        Raises: NonFiniteLoss, on every rank, before a weight moved; ValueError where the sizes would separate rows
            that the loss needs together (preference pairs).
        """
        loss = as_loss(loss_fn)
        gbs, unit = gbs or self.global_batch_size, loss.group_size
        batching = self._batching(mbs)
        counts = {"the batch": data.size, "gbs": gbs}
        if batching.kind == "padded":
            counts["mbs"] = batching.rows
        for name, rows in counts.items():
            if rows % unit:
                raise ValueError(f"{loss.display_name} needs {unit} rows together, and {name} has {rows} rows")
        lengths = self._check(data)
        data = data.to(self.topology.device)
        if eval_mode:
            self.finish_training()
        else:
            self.prepare_for_training()
        reports = []
        for start in range(0, data.size, gbs):
            rows = slice(start, min(start + gbs, data.size))
            batch = data.slice(rows.start, rows.stop)
            planned = batching.plan(batch, lengths[rows], self.topology, unit, self._cost)
            reports.append((self._evaluate if eval_mode else self._step)(batch, planned, loss))
        self._leave_training()  # the next step's forward gathers weights, or whoever wants them before
        result = over_steps(reports, loss)
        return result | ({} if eval_mode else {"num_updates": int(sum(r["updated"] for r in reports))})

    def _batching(self, mbs: int | None) -> Batching:
        return self.batching if mbs is None else replace(self.batching, rows=mbs)

    def _evaluate(self, batch: BatchedDataDict, planned: Planned, loss: Loss) -> dict[str, float]:
        report = self._runner.train_step(planned.microbatches, loss, Denominators.count(batch), forward_only=True)
        return report | {"packing_efficiency": planned.efficiency}

    def _step(self, batch: BatchedDataDict, planned: Planned, loss: Loss) -> dict[str, float]:
        denominators = Denominators.count(batch)
        report = self._accumulate_gradients(planned, loss, denominators)
        updated, grad_norm, lr = False, 0.0, self.optimizer.param_groups[0]["lr"]
        if denominators.tokens > 0:
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(grad_norm):  # step() would clip by it, and with it ruin every weight
                raise NonFiniteLoss(f"the gradient norm is {grad_norm} at a finite loss of {report['loss']:.4g}")
            updated, _, _ = self.optimizer.step()
            self._weights_are_scattered = self._overlaps
            self.weight_version += int(updated)
            if updated:
                move_biases(moving_routers(self.chunks), self.topology.groups.tp_dp_cp)
            self.scheduler.step(increment=1)
        moved = {"grad_norm": grad_norm, "lr": lr, "updated": float(updated)}
        return report | moved | {"packing_efficiency": planned.efficiency}

    def accumulate_gradients(
        self, batch: BatchedDataDict, loss_fn: LossFunction, mbs: int | None = None
    ) -> dict[str, float]:
        """The loss's metrics on one global batch; its gradient is left in the parameters' `main_grad`."""
        loss, batch = as_loss(loss_fn), batch.to(self.topology.device)
        planned = self.plan(batch, loss, mbs)
        self.prepare_for_training()
        report = self._accumulate_gradients(planned, loss, Denominators.count(batch))
        self.finish_training()
        return report

    def plan(self, batch: BatchedDataDict, loss_fn: LossFunction, mbs: int | None = None) -> Planned:
        """This rank's microbatches of one global batch."""
        unit = as_loss(loss_fn).group_size
        return self._batching(mbs).plan(batch, self._check(batch), self.topology, unit, self._cost)

    def _accumulate_gradients(self, planned: Planned, loss: Loss, denominators: Denominators) -> dict[str, float]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        report = self._runner.train_step(planned.microbatches, loss, denominators)
        self._weights_are_scattered = False  # its forward gathered them
        return report

    def _check(self, data: BatchedDataDict) -> list[int]:
        """The rows' lengths, of a batch that the model can take."""
        longest = data["input_ids"].size(1)
        if longest > self.model_config.max_sequence_length:
            raise ConfigError(
                f"a row has {longest} tokens and model.max_sequence_length is {self.model_config.max_sequence_length}; "
                "shorten the rows (data.too_long=truncate) or raise the limit"
            )
        return row_lengths(data)

    # --- logprobs and scores ---

    def require_head(self, head: Head, call: str) -> None:
        """Raises: RuntimeError naming `call` where the model has another head than the call is for."""
        if self.head != head:
            raise RuntimeError(f"{call} is for a policy built with head={head!r}; this one has head={self.head!r}")

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`logprobs` [B, S] fp32 at the rows' `temperature` (default 1); entry t speaks of token t; entry 0 and what
        lies past a row's `input_lengths` are 0."""
        self.require_head("lm", "get_logprobs")
        logprobs = self._token_stream(self._runner.next_token_logprobs, data, micro_batch_size)
        return BatchedDataDict({"logprobs": logprobs})

    def get_topk_logits(self, data: BatchedDataDict, k: int, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`topk_logits` [B, S, k] fp32, largest first and not divided by the rows' `temperature`, and `topk_indices`
        [B, S, k] int64, their ids; entry t is read after token t and speaks of token t+1: what `DistillationLossFn`
        takes as teacher_topk_logits and teacher_topk_indices. What lies past a row's `input_lengths` is 0."""
        self.require_head("lm", "get_topk_logits")
        if not 1 <= k <= self.vocab_size:  # here, where every stage sees it
            raise ValueError(f"k={k} must be at least 1 and at most the vocabulary's {self.vocab_size} ids")
        of, entry = partial(self._runner.topk_logits, k=k), torch.zeros(k, 2, dtype=torch.int32)
        bits, ids = self._token_stream(of, data, micro_batch_size, first_column=0, entry=entry).unbind(-1)
        logits = bits.contiguous().view(torch.float32)
        return BatchedDataDict({"topk_logits": logits, "topk_indices": ids.long()})

    def get_values(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`values` [B, S] fp32 of a score head; entry t is the score read *before* token t; entry 0 and what lies past
        a row's `input_lengths` are 0."""
        self.require_head("score", "get_values")

        def before_each_token(microbatches: list[Microbatch]) -> list[Tensor]:
            return [scores[:, :-1] for scores in self._runner.scores(microbatches)]

        return BatchedDataDict({"values": self._token_stream(before_each_token, data, micro_batch_size)})

    def score(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`scores` [B] fp32 of a score head: what it says after each row's last token (`input_lengths`)."""
        self.require_head("score", "score")
        scores = self._token_stream(self._runner.scores, data, micro_batch_size, first_column=0)
        last = data["input_lengths"][:, None] - 1
        return BatchedDataDict({"scores": scores.gather(1, last.to(scores.device))[:, 0]})

    def _token_stream(
        self,
        of: Callable[[list[Microbatch]], list[Tensor]],
        data: BatchedDataDict,
        micro_batch_size: int | None,
        first_column: int = 1,
        entry: Tensor = _NUMBER,
    ) -> Tensor:
        """[B, S, …] on every rank, from what `of` gives for this rank's microbatches on the last stage, which speaks of
        tokens `first_column` and on; `entry` […], zeros like one token's part of it, elsewhere and past the rows' ends.
        """
        self.finish_training()
        topology, home = self.topology, data["input_ids"].device
        lengths = self._check(data)
        keys = [key for key in ("input_ids", "temperature") if key in data]
        data = BatchedDataDict({key: data[key] for key in keys})  # without token_mask: every token is asked for
        data["sample_mask"] = torch.ones(data.size)
        data = data.to(topology.device)
        width = data["input_ids"].size(1)
        planned = self._batching(micro_batch_size).plan(data, lengths, topology, cost=self._cost)
        entry = entry.to(topology.device)
        whole = planned.spread(of(planned.microbatches), width, first_column, entry)
        if topology.pipeline > 1:
            dist.broadcast(whole, src=topology.last_stage_rank, group=topology.groups.pp)
        if topology.data > 1:
            dist.all_reduce(whole, group=topology.groups.dp)  # each row is one rank's; the others have 0
        past_the_end = (torch.arange(width) >= torch.tensor(lengths)[:, None]).to(home)
        return whole.to(home).masked_fill(past_the_end.view(data.size, width, *(1 for _ in entry.shape)), 0)

    # --- checkpoints ---

    def save_checkpoint(self, directory: str | Path, step: int, *, config: str | None = None, **extra: Any) -> Path:
        """Writes `directory/step-<step>`: weights, moments, schedule and random states, and `config`, the run's YAML;
        `extra` travels in its manifest. Collective.

        Raises: SaveFailed, on every rank, where one could not write; nothing of it stays, earlier checkpoints stand.
        """
        return self.begin_checkpoint(directory, step, config=config, **extra).finish()

    def begin_checkpoint(self, directory: str | Path, step: int, *, config: str | None = None, **extra: Any) -> Save:
        """As `save_checkpoint`, written from a copy while training goes on: a checkpoint once it is finished."""
        self._bring_back(gradients=False)
        self.finish_training()
        kept = {"head": self.head, "vocab_size": self.vocab_size, "precision": self.precision}
        kept |= {"model": asdict(self.model_config), "layout": self.topology.describe(), **extra}
        files = {random_state_file(dist.get_rank()): random_state()}
        if config is not None and dist.get_rank() == 0:
            files[checkpoint.CONFIG] = config.encode()
        return begin_save(Path(directory), step, self._state.sharded(loading=False), kept, files)

    def load_checkpoint(self, path: str | Path, weights_only: bool = False, verify: bool = True) -> dict[str, Any]:
        """Restores a checkpoint saved under any layout and returns its manifest. `weights_only` starts a new training
        from its weights: fresh moments and schedule, and, where a score head goes on a language model, a fresh head.
        Every file is read and held against its digest first, unless `verify` is false: who has done so need not again.

        Raises: ConfigError where the checkpoint is damaged, of another model, or has another head than is needed.
        """
        path = Path(path)
        self._bring_back(gradients=False)
        self.finish_training()  # should anything be wrong with the checkpoint, the weights are whole
        manifest = checkpoint.read_manifest(path, self.model_config)
        new_head = checkpoint.check_head(path, manifest, self.head, weights_only)
        if verify:
            loading.verify(path)
        self.weight_version += 1  # whatever comes of it
        loading.load(path, manifest, self._state, weights_only, new_head)
        return manifest

    @property
    def _state(self) -> TrainingState:
        chunks = [unwrap(chunk) for chunk in self.chunks]
        return TrainingState(chunks, self.optimizer, self.scheduler, self.topology.describe())

    def shutdown(self) -> bool:
        """Drops model, optimizer and reference; true when there was something to drop."""
        held = bool(self.chunks)
        self._hand_over.close()
        self.chunks, self.optimizer, self.scheduler = [], None, None
        self.drop_reference()
        self._runner = self._runner_of([])
        gc.collect()  # megatron-core's wrappers and hooks refer to each other
        if self.topology.is_cuda:
            torch.cuda.empty_cache()
        return held

    def describe(self) -> dict[str, Any]:
        """Model, layout and precision, for summaries."""
        return {"model": asdict(self.model_config), "layout": self.topology.describe(), "precision": self.precision}

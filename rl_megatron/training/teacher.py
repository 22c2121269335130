"""`Teacher`: a frozen model, with its own weights, whose next-token distributions a policy learns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.rank_plan import RankPlan
from rl_megatron.batching.shared_prefixes import PREFIX_FACTS
from rl_megatron.checkpoint.directory import MANIFEST, check_head, read_manifest, read_model_section
from rl_megatron.checkpoint.hf_weights import HuggingFaceWeights, open_hugging_face
from rl_megatron.checkpoint.load import load_checkpoint
from rl_megatron.checkpoint.training_state import TrainingState
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.teachers import TeacherConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.topology.job_store import TIMEOUT_MINUTES
from rl_megatron.topology.topology import Topology, build_beside, use_in_megatron
from rl_megatron.training.inference import Inference, build_runner
from rl_megatron.training.reference import HostWeights, Placement
from rl_megatron.training.runner import FusedHead

_READ = ("input_ids", "input_lengths", "temperature")  # the keys of a batch that a teacher reads


class Teacher:
    """A frozen model on the policy's ranks, in the policy's layout or another. It owns its weights and their placement.

    Every method is collective.
    """

    def __init__(
        self,
        model: ShardedModel,
        placement: Placement = "resident",
        fused_head: FusedHead | None = None,
        own_layout: bool = False,
    ):
        """Initialise the teacher with the weights of `model`, and freeze them.

        With `own_layout`, the model has another topology than the policy, so batches that are distributed over the
        policy's ranks are gathered for it.
        """
        self._own_layout = own_layout
        self.model = model
        for model_chunk in model.model_chunks:
            model_chunk.eval().requires_grad_(False)
        self._runner = build_runner(model, fused_head)
        self._inference = Inference(model, self._runner)
        self._host_weights: HostWeights | None = None
        if placement == "offload" and model.topology.is_cuda:
            self._host_weights = HostWeights(model.model_chunks, model.topology.device)

    @property
    def backend(self) -> str:
        """Return the backend of the layers; see `choose_backend`."""
        return self._runner.backend

    def logprobs(self, batch: Batch, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32 at each sequence's `temperature`. Entry t corresponds to token t."""
        with self._use_weights():
            return self._select_local(batch, self._inference.logprobs(self._gather(batch), batching))

    def topk_logits(self, batch: Batch, k: int, batching: Batching) -> tuple[Tensor, Tensor]:
        """Return (logits [B, S, k] fp32, ids [B, S, k] int64), largest first. Entry t is read after token t."""
        with self._use_weights():
            logits, ids = self._inference.topk_logits(self._gather(batch), k, batching)
        return self._select_local(batch, logits), self._select_local(batch, ids)

    def attach_logits(self, plan: RankPlan) -> RankPlan:
        """Return the plan with the teacher's logits of each microbatch as `teacher_logits`.

        They are sharded like the student's, and computed from hidden states when a loss reads them. The hidden states
        of all microbatches of the step are kept until then. Only the last pipeline stage has teacher logits.
        """
        with self._use_weights():
            deferred = self._runner.deferred_logits(plan.microbatches)
        if not deferred:
            return plan
        microbatches = []
        for microbatch, logits in zip(plan.microbatches, deferred, strict=True):
            # Keep the weight's tensor, because the parameter may be offloaded before the loss reads it.
            logits = replace(logits, weight=logits.weight.detach())
            batch = BatchedDataDict(microbatch.batch | {"teacher_logits": logits})
            microbatches.append(replace(microbatch, batch=batch))
        return replace(plan, microbatches=microbatches)

    def _gather(self, batch: Batch) -> Batch:
        """Return the batch as the model needs it: with all sequences on every rank if the model has its own layout."""
        if batch.is_whole or not self._own_layout:
            return batch
        values = batch.gather_on_rank_0([key for key in _READ if key in batch])
        whole = Batch.from_whole(self.model.topology.ranks.share(lambda: values))
        return replace(whole, facts=whole.facts | {key: batch.facts[key] for key in PREFIX_FACTS if key in batch.facts})

    def _select_local(self, batch: Batch, values: Tensor) -> Tensor:
        """Return this rank's part of the values of the batch that `_gather` returned."""
        return values if batch.is_whole or not self._own_layout else batch.select_local(values)

    @contextmanager
    def _use_weights(self) -> Iterator[None]:
        """Keep the weights on the device, and let megatron-core use the teacher's layout, during the block."""
        with ExitStack() as stack:
            if self._own_layout:
                stack.enter_context(use_in_megatron(self.model.topology))
            if self._host_weights is not None:
                stack.enter_context(self._host_weights.on_device())
            yield


def load_teacher(
    config: TeacherConfig,
    topology: Topology,
    vocab_size: int,
    precision: str,
    fused_head: FusedHead | None,
    timeout_minutes: float = TIMEOUT_MINUTES,
) -> Teacher:
    """Return a teacher whose weights are in a checkpoint of any layout, or in a Hugging Face directory. Collective.

    A checkpoint that holds only an adapter is loaded with its base. `topology` is the student's, and `timeout_minutes`
    is how long a collective of the teacher's own layout may wait for its peers.
    """
    path = Path(str(config.path))
    shape, weights = topology.ranks.all_or_none(lambda: open_teacher(path))
    own_layout = config.parallel is not None
    if config.parallel is not None:
        topology = build_beside(config.parallel, topology, timeout_minutes)
    with use_in_megatron(topology) if own_layout else nullcontext():
        model = ShardedModel(shape, topology, vocab_size=vocab_size, precision=precision, initialise=False)
        if weights is not None:
            weights.load_into(model)
        else:
            load_checkpoint(path, TrainingState(model, None, None), weights_only=True)
    return Teacher(model, config.placement, fused_head, own_layout)


def open_teacher(path: Path) -> tuple[ModelConfig, HuggingFaceWeights | None]:
    """Return the shape of the language model at `path`, and its weights, or None if `path` is a checkpoint."""
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        weights = open_hugging_face(path)
        return weights.model, weights
    manifest = read_manifest(path)
    check_head(path, manifest, "lm", weights_only=True)
    return read_model_section(path, manifest), None


def check_vocabulary(path: Path, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless the teacher at `path` has the student's tokenizer, so that ids mean the same tokens."""
    _, weights = open_teacher(path)
    if weights is None:
        manifest = read_manifest(path)
        digest, size = manifest.get("tokenizer", tokenizer.digest), manifest.get("vocab_size", tokenizer.vocab_size)
    else:
        digest = tokenizer.digest if weights.tokenizer is None else weights.tokenizer.digest
        size = weights.vocab_size
    if size == tokenizer.vocab_size and digest == tokenizer.digest:
        return
    student = f"a vocabulary of {tokenizer.vocab_size}, digest {tokenizer.digest[:8]}"
    raise ConfigError(
        f"algorithm.teachers: the teacher {path} has another tokenizer (a vocabulary of {size}, digest {digest[:8]}) "
        f"than the student ({student}), but distillation compares both models' distributions token by token; set "
        "tokenizer.path to the teacher's tokenizer and train the student with it, or choose a teacher with the "
        "student's tokenizer"
    )

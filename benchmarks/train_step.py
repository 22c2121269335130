"""Race a GRPO step of the policy against a bare language-model step of megatron-core:

    python benchmarks/train_step.py
    torchrun --nproc-per-node 2 benchmarks/train_step.py --layout tensor=2

Both train a model of the same shape from the same seed, with the same optimizer and the same microbatches. They
alternate, one step each. The GRPO step is all of `MegatronPolicy.train`: it plans microbatches, counts denominators,
and computes logprobs, the clipped loss against `prev_logprobs` and advantages, reduced metrics, checks, gradient
clipping and Adam. The bare step is what megatron-core does for pretraining: its schedule, its model with `labels` (and
so its `vocab_parallel_cross_entropy`), Σ losses · mask / tokens, and the optimizer. Its microbatches are made before.

A third and a fourth candidate alternate with them on one rank: a step of supervised fine-tuning, which is
`MegatronPolicy.train` with the loss `nll`, and the same step of the same model in transformers with torch's AdamW.
Under bf16, weights, gradients and moments of transformers are bf16; the policy keeps fp32 ones besides its weights.

Advantages are 1 and `prev_logprobs` are the policy's own, so the gradient of the first step is that of the bare loss.
All gradient norms are printed, and must agree. The learning rate is so small that ratios stay at 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.transformers_step import TransformersStep  # noqa: E402
from rl_megatron.batching.config import Batching  # noqa: E402
from rl_megatron.batching.microbatch import Microbatch  # noqa: E402
from rl_megatron.config.errors import ConfigError  # noqa: E402
from rl_megatron.config.loading.load import load_config  # noqa: E402
from rl_megatron.config.model import ModelConfig  # noqa: E402
from rl_megatron.config.optimizer import OptimizerConfig  # noqa: E402
from rl_megatron.config.parallel import ParallelConfig  # noqa: E402
from rl_megatron.data.batch import BatchedDataDict  # noqa: E402
from rl_megatron.losses import build_loss  # noqa: E402
from rl_megatron.model.build import build_model  # noqa: E402
from rl_megatron.topology import topology  # noqa: E402
from rl_megatron.topology.device import start_device  # noqa: E402
from rl_megatron.topology.topology import Topology  # noqa: E402
from rl_megatron.topology.transfer import send  # noqa: E402
from rl_megatron.training.megatron_policy import MegatronPolicy  # noqa: E402
from rl_megatron.training.model_input import ModelInput  # noqa: E402
from rl_megatron.training.optimizer import build_optimizer, wrap_for_gradients  # noqa: E402
from rl_megatron.training.runner import FusedHead  # noqa: E402

_OPTIMIZER = OptimizerConfig(lr=1e-7, decay_style="constant")
_SEED = 0
_NORMS_AGREE = {"fp32": 1e-4, "bf16": 1e-2}  # relative


@dataclass(frozen=True)
class Given:
    """The prepared microbatch of the bare step: the model's inputs, and labels and mask with the same layout."""

    model_input: ModelInput
    labels: Tensor
    mask: Tensor

    @classmethod
    def of(cls, microbatch: Microbatch, policy: MegatronPolicy) -> Given:
        ids, backend = microbatch.batch["input_ids"], policy.runner.backend
        made = ModelInput.build(microbatch, policy.topology, policy.vocab_size, backend, counts_experts=False)
        layout = made.sharding.layout(made.tokens, tuple(ids.shape))
        mask = microbatch.batch["token_mask"] * microbatch.batch["sample_mask"][:, None]
        labels, mask = (layout.scatter(pad(x[:, 1:], (0, 1)), 0) for x in (ids, mask.float()))
        return send(cls(made, labels, mask), policy.topology.device)


class BareStep:
    """The bare step: megatron-core's model, DDP, optimizer and schedule, as for pretraining."""

    def __init__(self, policy: MegatronPolicy, microbatches: list[Microbatch], num_tokens: Tensor):
        self.topology, self.num_tokens = policy.topology, num_tokens
        precision = policy.model.precision
        model = build_model(
            policy.model_config, self.topology, vocab_size=policy.vocab_size, precision=precision, seed=_SEED
        )
        self.model_chunks = wrap_for_gradients(model, self.topology, _OPTIMIZER)
        self.optimizer = build_optimizer(self.model_chunks, _OPTIMIZER, precision, self.topology)
        self.given = [Given.of(microbatch, policy) for microbatch in microbatches]
        self.shapes = [microbatch.shape(self.topology) for microbatch in microbatches]
        for chunk in self.model_chunks:
            chunk.train()

    def __call__(self) -> float:
        """Take one step, and return its gradient norm."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_model_config(self.model_chunks[0]).variable_seq_lengths = len(set(self.shapes)) > 1
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(self.given) for _ in self.model_chunks],
            model=self.model_chunks,
            num_microbatches=len(self.given),
            seq_length=self.shapes[0][1],
            micro_batch_size=self.shapes[0][0],
            forward_only=False,
            pg_collection=self.topology.groups,
        )
        _, grad_norm, _ = self.optimizer.step()
        return float(grad_norm)

    def _forward(self, iterator: Iterator[Given], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        given = next(iterator)
        packing = given.model_input.packing
        output = chunk(given.model_input.tokens, None, None, labels=given.labels, packed_seq_params=packing)

        def loss_of(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = (losses * given.mask).sum() / self.num_tokens
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach()}

        return output, loss_of


def rollouts(vocab_size: int, rows: int, length: int, prompt: int) -> BatchedDataDict:
    """Return random sequences of up to `length` tokens, of which the first `prompt` are the prompt.

    The first sequence has `length` tokens, so that the width is the same for every seed.
    """
    generator = torch.Generator().manual_seed(_SEED)
    lengths = torch.randint(max(prompt + 1, length // 2), length + 1, (rows,), generator=generator)
    lengths[0] = length
    positions = torch.arange(length)
    mask = ((positions >= prompt) & (positions < lengths[:, None])).float()
    return BatchedDataDict(
        input_ids=torch.randint(0, vocab_size, (rows, length), generator=generator) * (positions < lengths[:, None]),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(rows),
        temperature=torch.ones(rows),
        advantages=mask.clone(),
    )


@dataclass(frozen=True)
class Figures:
    """The medians in seconds, of the slowest rank, and the gradient norms of the first step.

    `spreads` has the smallest and the largest of each that was timed, in the order of the fields.
    """

    grpo: float
    bare: float
    grpo_grad_norm: float
    bare_grad_norm: float
    nll: float | None = None
    transformers: float | None = None
    nll_grad_norm: float | None = None
    transformers_grad_norm: float | None = None
    spreads: tuple[tuple[float, float], ...] = ()

    @property
    def ratio(self) -> float:
        return self.grpo / self.bare

    @property
    def nll_ratio(self) -> float | None:
        return None if self.nll is None or self.transformers is None else self.nll / self.transformers


def measure(
    model: ModelConfig, layout: Topology, vocab_size: int, precision: str, batching: Batching, batch: BatchedDataDict,
    steps: int, fused_head: FusedHead | None = None,
) -> Figures:  # fmt: skip
    """Time `steps` alternating steps of each, after one that is not timed. The call is collective."""
    policy = MegatronPolicy(
        model, layout, vocab_size=vocab_size, precision=precision, seed=_SEED, optimizer=_OPTIMIZER,
        total_steps=steps + 1, global_batch_size=batch.size, batching=batching, fused_head=fused_head,
    )  # fmt: skip
    loss_fn = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0})
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    on_device = batch.to(layout.device)
    num_tokens = on_device["token_mask"][:, 1:].sum()
    bare = BareStep(policy, policy.plan(batch, loss_fn).microbatches, num_tokens)
    steps_of: list[Callable[[], float]] = [lambda: policy.train(batch, loss_fn)["grad_norm"], bare]
    if dist.get_world_size() == 1:
        nll = build_loss("nll", {})
        steps_of.append(lambda: policy.train(batch, nll)["grad_norm"])
        steps_of.append(TransformersStep(policy, on_device, _OPTIMIZER, batching.sequences))
    norms = [step() for step in steps_of]
    seconds = [[_seconds(layout, step) for step in steps_of] for _ in range(steps)]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=layout.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    columns = slowest.T.tolist()
    medians, spreads = [statistics.median(column) for column in columns], tuple((min(c), max(c)) for c in columns)
    policy.shutdown()
    found = Figures(*medians[:2], *norms[:2], *medians[2:], *norms[2:])
    return replace(found, spreads=spreads)


def _seconds(layout: Topology, step: Callable[[], float]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    if layout.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="micro", help="a preset of configs/model")
    made.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of model: num_layers=4")
    made.add_argument("--layout", nargs="*", default=[], metavar="KEY=VALUE", help="keys of parallel: tensor=2")
    made.add_argument(
        "--vocab-size", type=int, default=4096, help="a multiple of 64: bare megatron-core counts padding"
    )
    made.add_argument("--tokens", type=int, default=2048, help="of a global batch, padding included")
    made.add_argument("--length", type=int, default=256, help="of the longest row")
    made.add_argument("--micro-batch-tokens", type=int, default=2048, help="of a microbatch, padding included")
    made.add_argument("--packed", action="store_true", help="pack the rows instead of padding them")
    made.add_argument("--fused-head", action="store_true", help="of the GRPO step: train.fused_head")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--steps", type=int, default=7, help="timed steps of each")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the figures there, as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # These warnings address the libraries' developers.
    warnings.filterwarnings("ignore", module="megatron.*|torch.distributed.*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    rows = max(1, options.tokens // options.length)
    micro_rows = max(1, options.micro_batch_tokens // options.length)
    try:
        overrides = [f"parallel.{key}" for key in options.layout]
        shape = [f"model={options.model}", f"model.max_sequence_length={options.length}"]
        config = load_config([*shape, *(f"model.{key}" for key in options.set), *overrides]).first
        parallel: ParallelConfig = config.parallel
        layout = topology.build(parallel, start_device(options.device), _SEED)
        batching = Batching("packed" if options.packed else "padded", micro_rows, options.micro_batch_tokens)
        batch = rollouts(options.vocab_size, rows, options.length, prompt=options.length // 8)
        figures = measure(
            config.model, layout, options.vocab_size, options.precision, batching, batch, options.steps,
            FusedHead() if options.fused_head else None,
        )  # fmt: skip
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if dist.get_rank() == 0:
        report(figures, layout, options)
    dist.destroy_process_group()
    norms = (figures.grpo_grad_norm, figures.nll_grad_norm, figures.transformers_grad_norm)
    agree = partial(math.isclose, figures.bare_grad_norm, rel_tol=_NORMS_AGREE[options.precision])
    if not all(agree(norm) for norm in norms if norm is not None):
        print("the gradient norms differ: the steps do not do the same work", file=sys.stderr)
        return 1
    return 0


def report(figures: Figures, layout: Topology, options: argparse.Namespace) -> None:
    kind = ("packed" if options.packed else "padded") + ", fused head" * options.fused_head
    made = Table(title=f"{options.model}, {options.precision}, {kind}, {layout.describe()}", title_justify="left")
    for name in ("", "median step", "gradient norm, first step"):
        made.add_column(name, justify="right" if name else "left")
    made.add_row("GRPO, policy.train", f"{1000 * figures.grpo:.1f} ms", f"{figures.grpo_grad_norm:.6g}")
    made.add_row("megatron-core alone", f"{1000 * figures.bare:.1f} ms", f"{figures.bare_grad_norm:.6g}")
    made.add_row("ratio", f"{figures.ratio:.3f}", "")
    if figures.nll is not None and figures.transformers is not None:
        made.add_row("NLL, policy.train", f"{1000 * figures.nll:.1f} ms", f"{figures.nll_grad_norm:.6g}")
        made.add_row("transformers", f"{1000 * figures.transformers:.1f} ms", f"{figures.transformers_grad_norm:.6g}")
        made.add_row("ratio", f"{figures.nll_ratio:.3f}", "")
    Console().print(made)
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        threads = {"threads": torch.get_num_threads(), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
        content = {
            "settings": settings | threads,
            "figures": asdict(figures) | {"ratio": figures.ratio, "nll_ratio": figures.nll_ratio},
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

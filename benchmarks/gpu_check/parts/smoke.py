"""The smallest workloads give on a GPU what they give on the CPU, from the same seeds.

The workload of `rl-megatron certify` has a reference on the CPU: one padded microbatch with whole logits, in fp32. On
the device, every batching is compared with it, with whole logits and with the fused head: losses, logprobs, every
gradient, and the weights after a step. A GRPO step of the quickstart's size follows, with greedy tokens of the embedded
engine, and a step after a checkpoint was saved and loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process, key_of
from benchmarks.train_step import rollouts
from rl_megatron.certify.measurement import Measurement, run_workload
from rl_megatron.certify.single_process import run_in_one_process
from rl_megatron.certify.workload import SMALL_FUSED_HEAD, STANDARD_OBJECTIVES, Workload, build_small_batching, shrink
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.losses import build_loss
from rl_megatron.model.shards import gather_full
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

MODELS = {"dense": "qwen2_5_0_5b", "experts": "nano_moe", "window": "gemma3_1b"}
LOGPROBS, GRADIENTS, WEIGHTS = "largest error of a logprob", "gradients", "weights after a step"
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}  # of loss, gradient norm and the mean error of logprobs
TENSOR_LIMIT = 1e-4  # of gradients, weights and the GRPO step, in fp32
# A bf16 run on a GPU may be this much further from fp32 than one on the CPU: both round, but in another order.
BF16_FACTOR = 1.1
# In bf16, another rounding decides whether a ratio near its limit is clipped. DPO's gradient has no such steps.
OBJECTIVES = {"fp32": ("nll", "clipped_pg"), "bf16": ("nll", "dpo")}
KINDS = {  # name → (batching, fused head)
    "padded": ("padded", False),
    "packed, fused head": ("packed", True),
    "packed": ("packed", False),
    "padded, fused head": ("padded", True),
    "dynamic": ("dynamic", False),
}
_TINY_KINDS = ("packed", "padded, fused head")
SEQUENCES = {False: 512, True: 16}  # of the GRPO step
PROMPT, LENGTH, GREEDY_TOKENS = 8, 16, 16
_SECONDS_OF_STEP = 12.0


@dataclass(frozen=True)
class Reference:
    """What the CPU gives for a workload in fp32, and how far its own run in bf16 is from that."""

    objectives: dict[str, Measurement]
    errors: dict[str, float]


@dataclass(frozen=True)
class Step:
    """What a step of GRPO gives, from a new model.

    Attributes:
        values: The loss and the gradient norm, also of the next step.
        logprobs: The logprobs before the step.
        weights: Every parameter after the step.
        tokens: Greedy completions before the step.
        resumed: The values of the next step, from a checkpoint.
    """

    values: dict[str, float]
    logprobs: Tensor
    weights: dict[str, Tensor]
    tokens: list[list[int]]
    resumed: dict[str, float]


def rows(tiny: bool) -> list[str]:
    return [f"largest error of a token's logprob, {precision}" for precision in LIMITS]


def run(setting: Setting, record: Record) -> None:
    workloads, largest = workloads_of(setting.tiny), dict.fromkeys(LIMITS, 0.0)
    # Before a GPU is used, because processes that compute on the CPU may be started.
    references = {name: setting.expected(key_of_workload(*name), _reference(*name)) for name in workloads}
    wanted_step = setting.expected(key_of_step(setting.tiny), _step(setting))
    layout = topology.build(ParallelConfig(), start_device(setting.device), Workload.seed)
    compare_steps(grpo_step(setting.device, setting.tiny, setting.directory), wanted_step, record)
    for (model, precision), workload in workloads.items():
        errors: dict[str, list[tuple[float, str]]] = {}
        reference = references[model, precision]
        for kind in _TINY_KINDS if setting.tiny else KINDS:
            if setting.seconds_left < _SECONDS_OF_STEP:
                record.fact(f"not compared: {model}, {precision}, {kind}", "the part's time was over")
                continue
            for name, found in run_kind(workload, layout, kind).items():
                for quantity, error in compare(found, reference.objectives[name], precision).items():
                    errors.setdefault(quantity, []).append((error, f"{kind}, {name}"))
        for quantity, found_errors in errors.items():
            error, place = max(found_errors, key=lambda found: math.inf if math.isnan(found[0]) else found[0])
            if quantity == LOGPROBS:
                largest[precision] = max(largest[precision], error)
            else:
                limit = limit_of(quantity, precision, reference.errors)
                record.at_most(f"{model}, {precision}: {quantity}", error, limit, place)
    for name, precision in zip(rows(setting.tiny), LIMITS, strict=True):
        record.figure(name, largest[precision], "nats", at_most=LIMITS["fp32"] if precision == "fp32" else None)
    dist.destroy_process_group()


def expect(setting: Setting) -> dict[str, Any]:
    values = {key_of_workload(*name): _reference(*name)() for name in workloads_of(setting.tiny)}
    return values | {key_of_step(setting.tiny): _step(setting)()}


def workloads_of(tiny: bool) -> dict[tuple[str, str], Workload]:
    models = ["dense"] if tiny else MODELS
    return {(model, precision): workload_of(model, precision) for model in models for precision in LIMITS}


def workload_of(model: str, precision: str) -> Workload:
    """Return certify's workload with the smallest model of a family."""
    small, _ = shrink(load_config([f"model={MODELS[model]}"]).first.model, ParallelConfig())
    return Workload(small, {name: STANDARD_OBJECTIVES[name] for name in OBJECTIVES[precision]}, precision=precision)


def key_of_workload(model: str, precision: str) -> str:
    return key_of(f"smoke: {model}, {precision}", workload_of(model, precision))


def key_of_step(tiny: bool) -> str:
    return key_of(f"smoke: a GRPO step of {SEQUENCES[tiny]} sequences", _model(), PROMPT, LENGTH, GREEDY_TOKENS)


def _reference(model: str, precision: str):
    return lambda: in_new_process(on_the_cpu, workload_of(model, precision), sees_gpus=False)


def _step(setting: Setting):
    return lambda: in_new_process(grpo_step, "cpu", setting.tiny, setting.directory / "cpu", sees_gpus=False)


def on_the_cpu(workload: Workload) -> Reference:
    """Return the reference of a workload; in a process of its own."""
    exact = run_in_one_process(replace(workload, precision="fp32"), "cpu")
    found = exact if workload.precision == "fp32" else run_in_one_process(workload, "cpu")
    errors = [compare(found[name], exact[name], workload.precision) for name in exact]
    return Reference(exact, {quantity: max(each.get(quantity, 0.0) for each in errors) for quantity in errors[-1]})


def limit_of(quantity: str, precision: str, errors: Mapping[str, float]) -> float:
    """Return the largest error of a quantity that is not one of logprobs."""
    if quantity not in (GRADIENTS, WEIGHTS):
        return LIMITS[precision]
    return TENSOR_LIMIT if precision == "fp32" else BF16_FACTOR * errors[quantity]


def run_kind(workload: Workload, layout: topology.Topology, kind: str) -> dict[str, Measurement]:
    """Return what one batching gives."""
    batching, fused = KINDS[kind]
    batchings = {
        name: build_small_batching(batching, 4, objective.group_size, ParallelConfig())  # type: ignore[arg-type]
        for name, objective in workload.objectives.items()
    }
    return run_workload(replace(workload, fused_head=SMALL_FUSED_HEAD if fused else None), layout, batchings)


def compare(found: Measurement, wanted: Measurement, precision: str) -> dict[str, float]:
    """Return the errors of one objective.

    Those of logprobs are in nats. Below −1 nat they are relative, because fp32 has only 24 bits.
    """
    stream = wanted.stream.double()
    difference = (found.stream.cpu().double() - stream).abs() / stream.abs().clamp(min=1.0)
    errors = {
        "loss": _relative(found.metrics["loss"], wanted.metrics["loss"]),
        "gradient norm": _relative(_norm(found.gradients), _norm(wanted.gradients)),
        "mean error of logprobs": difference.mean().item(),
        LOGPROBS: difference.max().item(),
        GRADIENTS: apart(found.gradients, wanted.gradients, precision),
    }
    return errors | ({WEIGHTS: apart(found.weights, wanted.weights, precision)} if wanted.weights else {})


def apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], precision: str) -> float:
    """Return the error of tensors.

    In fp32 it is the largest error of an entry beside the largest entry of its tensor. In bf16 it is the norm of the
    error of all tensors beside their norm, because single entries are nearly noise.
    """
    if found.keys() != wanted.keys():
        return math.inf
    errors = {name: found[name].double() - wanted[name].double() for name in wanted}
    if precision == "bf16":
        return _norm(errors) / _norm(wanted)
    ratios = [(error.abs().max() / wanted[name].abs().max().clamp(min=1e-30)).item() for name, error in errors.items()]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def _relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted)


# --- a step of GRPO ---


def _model():
    return load_config(["experiment=quickstart"]).stages["grpo"].model


def grpo_step(device: str, tiny: bool, directory: Path) -> Step:
    """Take a step of GRPO from a new model, save it, take the next one, and take that from the checkpoint as well."""
    layout, count = topology.build(ParallelConfig(), start_device(device), 0), SEQUENCES[tiny]
    vocab_size, loss = 260, build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0})

    def build() -> MegatronPolicy:
        return MegatronPolicy(
            _model(), layout, vocab_size=vocab_size, total_steps=10, global_batch_size=count,
            optimizer=OptimizerConfig(lr=1e-3, epsilon=1e-3),  # see certify's Workload
        )  # fmt: skip

    def train(policy: MegatronPolicy) -> tuple[float, float]:
        metrics = policy.train(batch, loss)
        return metrics["loss"], metrics["grad_norm"]

    policy, batch = build(), rollouts(vocab_size, count, LENGTH, prompt=PROMPT)
    batch["advantages"] *= torch.randn(count, 1, generator=torch.Generator().manual_seed(0))
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    prompts = batch["input_ids"][:16, :PROMPT].tolist()
    completions = generate(EmbeddedEngine(policy, batch_size=16), prompts, Sampling(GREEDY_TOKENS, temperature=0.0), 0)
    values: dict[str, float] = dict(zip(("loss", "gradient norm"), train(policy), strict=True))
    weights = gather_full(policy.model.model_chunks)
    path = policy.save_checkpoint(directory, 1)
    following = ("next loss", "next gradient norm")
    values |= dict(zip(following, train(policy), strict=True))
    policy.shutdown()
    resumed = build()
    resumed.load_checkpoint(path)
    values_resumed: dict[str, float] = dict(zip(following, train(resumed), strict=True))
    resumed.shutdown()
    logprobs, tokens = batch["prev_logprobs"].cpu(), completions["input_ids"].tolist()
    return Step(values, logprobs, weights, tokens, values_resumed)


def compare_steps(found: Step, wanted: Step, record: Record) -> None:
    """Check a step of GRPO against that of the CPU."""
    for name, value in wanted.values.items():
        record.at_most(f"GRPO step, fp32: {name}", _relative(found.values[name], value), TENSOR_LIMIT)
    for name, value in found.resumed.items():
        error = _relative(value, found.values[name])
        record.at_most(f"GRPO step, fp32: {name} after a checkpoint", error, LIMITS["fp32"])
    record.at_most("GRPO step, fp32: logprobs", (found.logprobs - wanted.logprobs).abs().max().item(), TENSOR_LIMIT)
    record.at_most(f"GRPO step, fp32: {WEIGHTS}", apart(found.weights, wanted.weights, "fp32"), TENSOR_LIMIT)
    differ = sum(one != other for one, other in zip(found.tokens, wanted.tokens, strict=True))
    record.equal(f"greedy completions of {len(wanted.tokens)} that differ from the CPU's", differ, 0)

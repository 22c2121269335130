"""Optimizer state moves between optimizers, implementations of Adam and versions of the format, and is held once."""

from __future__ import annotations

import json
import math
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as megatron_distrib_optimizer
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import load_plain_tensors

from rl_megatron import __version__
from rl_megatron.checkpoint.optimizer_state import get_step_count, list_parts, request_optimizer_state
from rl_megatron.checkpoint.training_state import TrainingState, collect_model_state
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.model.build import unwrap
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel import write_released_checkpoints as released
from tests.parallel.layouts import EXPERTS, OPTIMIZER, build_policy, weights, worst_relative_error
from tests.parallel.write_released_checkpoints import train

DATA, SINGLE = (2, {}), (1, {})


class FusedAdam(torch.optim.Optimizer):
    """An Adam with the state of Transformer Engine 2.20's FusedAdam: moments per parameter, and one int step per group.

    Like the original it refuses a step that is not an int, and states that it does not know.
    """

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode, capturable=False):
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for states in state_dict["state"].values():
            for name in states:
                if name not in ("exp_avg", "exp_avg_sq", "master_param"):
                    raise KeyError(name)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            if type(group["step"]) is not int:
                raise TypeError(f"multi_tensor_adam takes an int as step, but got {group['step']!r}")
            for parameter in group["params"]:
                state, gradient, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** group["step"])
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                parameter.sub_(group["lr"] * mean / root)


def use_fused_adam(used: bool) -> None:
    """Let megatron-core use `FusedAdam`, as it uses Transformer Engine's if that is installed, or torch's."""
    adam = FusedAdam if used else torch.optim.AdamW
    megatron_optimizer.Adam = megatron_distrib_optimizer.Adam = adam  # pyright: ignore[reportAttributeAccessIssue]
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = not used


def policy_with(fused: bool, optimizer: OptimizerConfig, **options: Any) -> MegatronPolicy:
    start_device("cpu")  # the first call lets megatron-core use torch's Adam
    use_fused_adam(fused)
    try:
        policy = build_policy(options.pop("parallel", {}), optimizer=optimizer, **options)
    finally:
        use_fused_adam(False)
    assert policy.optimizer is not None
    assert isinstance(list_parts(policy.optimizer)[0].optimizer, FusedAdam if fused else torch.optim.AdamW)
    return policy


def change_adam(directory: str, distributed: bool, saved_by_fused: bool, steps: int) -> tuple[Any, Any]:
    """Return a step count and weights without and with a checkpoint in which Adam's implementation changes.

    The checkpoint is saved after `steps` steps, and two more are taken.
    """
    optimizer = replace(OPTIMIZER, distributed=distributed)
    saver = policy_with(saved_by_fused, optimizer)
    train(saver, range(steps))
    path = saver.save_checkpoint(directory, steps)
    loader = policy_with(not saved_by_fused, optimizer, seed=99)
    loader.load_checkpoint(path)
    found = []
    for policy in (saver, loader):
        train(policy, range(steps, steps + 2))
        assert policy.optimizer is not None
        found.append((get_step_count(policy.optimizer), weights(policy)))
    return found[0], found[1]


@pytest.mark.parametrize("steps", [3, 0])
@pytest.mark.parametrize("saved_by_fused", [True, False], ids=["fused to torch", "torch to fused"])
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_a_checkpoint_continues_with_another_implementation_of_adam(
    ranks, tmp_path, distributed, saved_by_fused, steps
):
    for kept, changed in ranks.run(2, change_adam, str(tmp_path), distributed, saved_by_fused, steps):
        assert kept[0] == changed[0] == steps + 2
        if kept[1]:  # rank 0 has the weights
            error, name = worst_relative_error(changed[1], kept[1])
            assert error <= 1e-5, (name, error)  # a wrong step count changes the bias correction by a factor of two


def save(parallel: dict, directory: str, options: dict) -> tuple[list[float], dict]:
    policy = build_policy(parallel, **options)
    train(policy, range(2))
    policy.save_checkpoint(directory, 2)
    return train(policy, range(2, 4)), weights(policy)


def load_and_train(parallel: dict, path: str, options: dict) -> tuple[list[float], dict]:
    policy = build_policy(parallel, seed=99, **options)
    policy.load_checkpoint(path)
    return train(policy, range(2, 4)), weights(policy)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("saved", "was_distributed", "loaded", "is_distributed"),
    [(DATA, True, DATA, False), (DATA, False, DATA, True), (DATA, True, SINGLE, True), (SINGLE, True, DATA, True)],
    ids=["distributed to plain", "plain to distributed", "to one rank", "from one rank"],
)
def test_a_checkpoint_loads_into_the_other_optimizer(
    ranks, tmp_path, precision, saved, was_distributed, loaded, is_distributed
):
    options = [
        {"precision": precision, "model": EXPERTS, "optimizer": replace(OPTIMIZER, distributed=distributed)}
        for distributed in (was_distributed, is_distributed)
    ]
    norms, kept = ranks.run(saved[0], save, saved[1], str(tmp_path), options[0])[0]
    path = str(tmp_path / "step-000002")
    found_norms, found = ranks.run(loaded[0], load_and_train, loaded[1], path, options[1])[0]
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert found_norms == pytest.approx(norms, rel=tolerance)
    error, name = worst_relative_error(found, kept)
    assert error <= (1e-4 if precision == "fp32" else 2e-2), (name, error)


def continue_released(name: str, distributed: bool, path: str, again: str) -> tuple[int, list[dict], list[Any]]:
    """Load a checkpoint of a release, and save it with this version.

    Returns:
        The step count, the tensors of both checkpoints, and the norms and weights of two more steps from both.
    """
    results, tensors, step = [], [], 0
    for checkpoint in (path, again):
        policy = released.build(name, distributed, seed=99)
        policy.load_checkpoint(checkpoint)
        tensors.append(read_tensors(checkpoint))
        if checkpoint == path:
            assert policy.optimizer is not None
            step = get_step_count(policy.optimizer)
            policy.save_checkpoint(str(Path(again).parent), 2)
        results.append((train(policy, range(2, 4)), weights(policy)))
    return step, tensors, results


@pytest.mark.parametrize("archive", sorted(released.RELEASED.glob("*.tar.xz")), ids=lambda path: path.name[:-7])
@pytest.mark.parametrize("distributed", [True, False], ids=["into distributed", "into plain"])
def test_a_checkpoint_of_a_release_loads_and_continues(ranks, tmp_path, archive, distributed):
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    name, paths = archive.name[:-7].partition("_")[2], [str(tmp_path / f"{part}step-000002") for part in ("", "again/")]
    answers = ranks.run(released.WORLD_SIZE, continue_released, name, distributed, *paths)
    step, (stored, resaved), (first, second) = answers[0]
    assert step == 2 and len(stored) > 20
    assert stored.keys() == resaved.keys() and all(torch.equal(resaved[key], value) for key, value in stored.items())
    tolerance = 2e-2 if name.startswith("bf16") else 1e-5
    assert first[0] == pytest.approx(json.loads((tmp_path / released.CONTINUED).read_text()), rel=tolerance)
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys() and all(torch.equal(w, second[1][k]) for k, w in first[1].items())


def test_this_version_has_written_its_checkpoints():
    assert {path.name for path in released.RELEASED.iterdir()} >= {
        f"{__version__}_{name}.tar.xz" for name in released.CASES
    }


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in load_plain_tensors(path).items() if isinstance(value, torch.Tensor)}


def held_numbers(parallel: dict, options: dict) -> tuple[int, int, int]:
    """Return how many numbers of optimizer state this rank holds to save, and to load, and the parameters' number."""
    policy = build_policy(parallel, **options)
    optimizer, model = policy.optimizer, unwrap(policy.model.model_chunks[0])
    assert optimizer is not None
    saved = TrainingState(policy.model, optimizer, policy.scheduler).build_sharded()["optimizer"]["tensors"]
    models = [collect_model_state(model)]
    requested = request_optimizer_state(optimizer, models)["tensors"]
    held = [sum(e.data.numel() for states in tree.values() for e in states.values()) for tree in (saved, requested)]
    assert dist.is_initialized()
    return held[0], held[1], sum(math.prod(p.shape) for p in model.parameters())


def test_data_parallel_ranks_hold_each_parameters_whole_optimizer_state_once(ranks):
    options = {"optimizer": replace(OPTIMIZER, distributed=True)}
    found = ranks.run(4, held_numbers, {}, options)
    numbers = found[0][2]
    for kind in (0, 1):
        held = [answer[kind] for answer in found]
        assert sum(held) == 3 * numbers
        assert max(held) < 0.5 * 3 * numbers and min(held) > 0.1 * 3 * numbers


def update(split: bool, precision: str) -> tuple[bool, list[float], dict]:
    """Return whether the optimizer is megatron-core's distributed one, and the norms and weights of three steps."""
    with patch("rl_megatron.training.optimizer.has_replicas", return_value=split):
        policy = build_policy({}, precision=precision, optimizer=replace(OPTIMIZER, distributed=True, clip_grad=0.0))
    assert policy.optimizer is not None
    kinds = {isinstance(p, megatron_distrib_optimizer.DistributedOptimizer) for p in list_parts(policy.optimizer)}
    return kinds == {True}, train(policy, range(3)), weights(policy)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_without_the_distributed_optimizer_takes_the_same_steps(ranks, precision):
    was_distributed, norms, kept = ranks.run(1, update, True, precision)[0]
    is_distributed, found_norms, found = ranks.run(1, update, False, precision)[0]
    assert (was_distributed, is_distributed) == (True, False)
    assert found_norms == pytest.approx(norms, rel=1e-6)  # gradients lie at other addresses, and norms round otherwise
    assert all(torch.equal(found[name], whole) for name, whole in kept.items())

"""Checkpoints: one layout continues from what another saved, and an error names what cannot be loaded."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from rl_megatron.checkpoint.directory import publish
from rl_megatron.checkpoint.training_state import load_model
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.losses import NLLLoss
from rl_megatron.model.build import unwrap
from rl_megatron.model.shards import pieces
from tests.parallel.layouts import (
    DISTRIBUTED_OPTIMIZER,
    EXPERTS,
    MODEL,
    OPTIMIZER,
    build_policy,
    weights,
    worst_relative_error,
)
from tests.parallel.test_layouts import random_batch

TENSOR, PIPELINE = (2, {"tensor": 2}), (2, {"pipeline": 2})
INTERLEAVED, DATA = (2, {"pipeline": 2, "virtual_pipeline": 2}), (2, {})


def save_after_two_steps(
    parallel: dict, directory: str, distributed: bool, model: ModelConfig = MODEL
) -> tuple[torch.Tensor, dict, dict]:
    """Train two steps and save; return the logprobs there, and the report and the weights of a third step."""
    policy = build_policy(parallel, model=model, optimizer=DISTRIBUTED_OPTIMIZER if distributed else OPTIMIZER)
    for seed in range(2):
        policy.train(random_batch(8, 16, seed), NLLLoss(), gbs=8)
    policy.save_checkpoint(directory, 2, note="kept")
    logprobs = policy.get_logprobs(random_batch(8, 16, 7))["logprobs"]
    report = policy.train(random_batch(8, 16, 5), NLLLoss(), gbs=8)
    return logprobs, report, weights(policy)


def load_and_continue(
    parallel: dict, directory: str, distributed: bool, model: ModelConfig = MODEL
) -> tuple[torch.Tensor, dict, dict, dict]:
    """Load the checkpoint; return what `save_after_two_steps` returns, and the checkpoint's manifest."""
    optimizer = DISTRIBUTED_OPTIMIZER if distributed else OPTIMIZER
    policy = build_policy(parallel, model=model, seed=99, optimizer=optimizer)
    manifest = policy.load_checkpoint(Path(directory) / "step-000002")
    logprobs = policy.get_logprobs(random_batch(8, 16, 7))["logprobs"]
    report = policy.train(random_batch(8, 16, 5), NLLLoss(), gbs=8)
    return logprobs, report, weights(policy), manifest


def save_and_load_before_the_first_step(directory: str, distributed: bool) -> tuple[float, float]:
    """Return the first step's gradient norm, and the same after a checkpoint was saved and loaded before that step.

    A critic's warm-up leaves its policy in such a state.
    """
    optimizer = DISTRIBUTED_OPTIMIZER if distributed else OPTIMIZER
    saver, loader = build_policy({}, optimizer=optimizer), build_policy({}, seed=99, optimizer=optimizer)
    loader.load_checkpoint(saver.save_checkpoint(directory, 0))
    reports = [policy.train(random_batch(8, 16, 5), NLLLoss(), gbs=8) for policy in (saver, loader)]
    assert weights(saver).keys() == weights(loader).keys()
    assert all(torch.equal(whole, weights(loader)[name]) for name, whole in weights(saver).items())
    return tuple(report["grad_norm"] for report in reports)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_a_checkpoint_before_the_first_step_continues(ranks, tmp_path, distributed):
    ((saved, loaded),) = ranks.run(1, save_and_load_before_the_first_step, str(tmp_path), distributed)
    assert saved == loaded


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
@pytest.mark.parametrize(
    "saved, loaded",
    [
        (TENSOR, PIPELINE),
        (TENSOR, (1, {})),
        pytest.param(PIPELINE, TENSOR, marks=pytest.mark.fast),
        ((1, {}), INTERLEAVED),
        (INTERLEAVED, DATA),
        (DATA, TENSOR),
        (TENSOR, (2, {"context": 2})),
    ],
    ids=lambda layout: f"{layout[0]} {layout[1]}",
)
def test_a_checkpoint_continues_under_another_layout(ranks, tmp_path, saved, loaded, distributed):
    check_continuation(ranks, tmp_path, saved, loaded, distributed, MODEL)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
@pytest.mark.parametrize(
    "saved, loaded",
    [
        ((2, {"expert": 2}), (1, {})),
        ((1, {}), (2, {"expert": 2, "tensor": 2, "sequence": True})),
        ((2, {"expert": 2, "tensor": 2, "sequence": True}), PIPELINE),
        (DATA, (2, {"expert": 2})),
        ((2, {"expert_tensor": 2}), (2, {"expert": 2, "tensor": 2, "sequence": True})),
        ((1, {}), (4, {"expert": 2, "expert_tensor": 2, "tensor": 2, "sequence": True})),
        ((4, {"expert": 2, "expert_tensor": 2, "tensor": 2, "sequence": True}), PIPELINE),
    ],
    ids=lambda layout: f"{layout[0]} {layout[1]}",
)
def test_a_checkpoint_of_experts_continues_under_another_layout(ranks, tmp_path, saved, loaded, distributed):
    check_continuation(ranks, tmp_path, saved, loaded, distributed, EXPERTS)


def check_continuation(ranks, tmp_path, saved, loaded, distributed, model):
    given = (str(tmp_path), distributed, model)
    logprobs, report, after = ranks.run(saved[0], save_after_two_steps, saved[1], *given)[0]
    found = ranks.run(loaded[0], load_and_continue, loaded[1], *given)[0]
    torch.testing.assert_close(found[0], logprobs, atol=1e-5, rtol=0)
    for name in ("loss", "grad_norm", "lr"):
        assert found[1][name] == pytest.approx(report[name], rel=1e-5), name
    error, name = worst_relative_error(found[2], after)
    assert error <= 1e-4, (name, error)  # the next Adam step is the same, so moments and step count were restored
    assert found[3]["note"] == "kept" and found[3]["step"] == 2


def learning_rates(directory: str, distributed: bool) -> tuple[float, int, float]:
    """Load the checkpoint of step 2 into a policy that is at step 3 and has another learning-rate schedule.

    Returns:
        The learning rate of the next step, the scheduler's step after loading, and the learning rate of the step after.
    """
    save_after_two_steps({}, directory, distributed)
    schedule = dataclasses.replace(OPTIMIZER, distributed=distributed, lr=0.5, decay_style="constant")
    policy = build_policy({}, optimizer=schedule)
    for seed in range(3):
        policy.train(random_batch(4, 12, seed), NLLLoss(), gbs=4)
    policy.load_checkpoint(Path(directory) / "step-000002")
    steps = policy.scheduler.num_steps
    report = policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    return report["lr"], steps, policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)["lr"]


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_the_run_gives_the_schedule_and_the_checkpoint_the_step(ranks, tmp_path, distributed):
    lr, steps, next_lr = ranks.run(1, learning_rates, str(tmp_path), distributed)[0]
    assert steps == 2
    assert lr == next_lr == 0.5


def load_errors(directory: str) -> list[str]:
    """Damage a checkpoint in several ways and return the message of each attempt to load it."""
    messages = []

    def refused(path: Path, **model_changes):
        policy = build_policy({}, model=dataclasses.replace(MODEL, **model_changes))
        with pytest.raises(ConfigError) as error:
            policy.load_checkpoint(path)
        messages.append(str(error.value))

    whole = Path(directory) / "step-000002"
    refused(Path(directory) / "step-000003")
    refused(whole, num_layers=2)
    largest = max((f for f in whole.iterdir()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])
    refused(whole)
    largest.unlink()
    refused(whole)
    (whole / MANIFEST).unlink()
    refused(whole)
    return messages


def test_unusable_checkpoints_are_named(ranks, tmp_path):
    ranks.run(1, save_after_two_steps, {}, str(tmp_path), True)
    absent, other_model, truncated, missing, incomplete = ranks.run(1, load_errors, str(tmp_path))[0]
    assert "step-000003 does not exist" in absent and "step-000002" in absent
    assert "model.num_layers: checkpoint 4, run 2" in other_model
    assert "damaged" in truncated and "bytes instead of" in truncated
    assert "is missing" in missing
    assert MANIFEST in incomplete


class Planted:
    """An object whose pickle makes a directory when it is read without limits."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and its digest."""
    manifest, partial = json.loads((checkpoint / MANIFEST).read_text()), checkpoint.with_suffix(".incomplete")
    checkpoint.rename(partial)
    (partial / MANIFEST).unlink()
    (partial / name).write_bytes(content)
    publish(partial, checkpoint, {key: manifest[key] for key in manifest.keys() - {"format", "files", "sha256"}})


def errors_of_replaced_files(directory: str) -> dict[str, list[str]]:
    """Return the messages of attempts to load checkpoints of which one file, with its digest, is another one."""
    whole, planted = Path(directory) / "step-000002", pickle.dumps(Planted(f"{directory}/planted"))
    state, messages = io.BytesIO(), {}
    torch.save({"cpu": torch.zeros(3)}, state)
    for name, contents in {
        "common.pt": (planted, b"", pickle.dumps(3)),
        "random_00000.pt": (planted, state.getvalue()),
        "metadata.json": (b"[1", b"3", b"\xff"),
        ".metadata": (planted, b""),
    }.items():
        before, messages[name] = (whole / name).read_bytes(), []
        for content in contents:
            replace_file(whole, name, content)
            with pytest.raises(ConfigError) as error:
                build_policy({}).load_checkpoint(whole)
            messages[name].append(str(error.value))
        replace_file(whole, name, before)
    build_policy({}).load_checkpoint(whole)
    return messages


def test_a_file_that_was_replaced_with_its_digest_is_named_and_runs_no_code(ranks, tmp_path):
    ranks.run(1, save_after_two_steps, {}, str(tmp_path), True)
    for name, messages in ranks.run(1, errors_of_replaced_files, str(tmp_path))[0].items():
        assert all(f"is damaged: {name} cannot be read (" in message for message in messages), messages
    assert not (tmp_path / "planted").exists()


def names_of_a_checkpoint(directory: str) -> tuple[set[str], list[str]]:
    """Return the names of a checkpoint's tensors, and of the model's parameters.

    Also check that loading a state with a missing or a surplus tensor is refused.
    """
    policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER)
    path = policy.save_checkpoint(directory, 1)
    held = set(FileSystemReader(path).read_metadata().state_dict_metadata)
    model = unwrap(policy.model.model_chunks[0])
    state = dict(model.state_dict())
    dropped = next(iter(state))
    refusals = []
    for wrong in ({k: v for k, v in state.items() if k != dropped}, state | {"surplus.weight": torch.zeros(1)}):
        with pytest.raises(RuntimeError) as error:
            load_model(model, wrong)
        refusals.append(str(error.value))
    assert dropped in refusals[0] and "surplus.weight" in refusals[1]
    return held, [piece.name for piece in pieces(policy.model.model_chunks)]


def test_a_checkpoint_holds_parameters_and_optimizer_state_only(ranks, tmp_path):
    """Parameters have the same name with every backend, and a checkpoint holds no state of a backend's modules."""
    held, parameters = ranks.run(1, names_of_a_checkpoint, str(tmp_path))[0]
    held = {name for name in held if not name.startswith("common_state")}  # megatron-core 0.19 puts plain values there
    states = {f"optimizer.{state}.{name}" for name in parameters for state in ("param", "exp_avg", "exp_avg_sq")}
    assert held == set(parameters) | states

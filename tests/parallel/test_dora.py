"""Adapters with magnitudes (DoRA): the gradients of one process in all layouts, and the logits and the loss of peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.hf_convert import export_peft, import_weights
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.model.lora import layers
from rl_megatron.model.lora.attach import find_adapters
from rl_megatron.model.lora.dora import compute_factors
from rl_megatron.model.lora.layers import LinearAdapter
from rl_megatron.model.lora.targets import MAGNITUDE, Part
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.family_cases import SHAPE, hf_model, save
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, OPTIMIZER, build_policy
from tests.parallel.test_grid import QUICK_OF_FEW
from tests.parallel.test_layouts import random_batch
from tests.parallel.test_lora import (
    DORA,
    OF_ATTENTION,
    SEQUENCE,
    assert_gradients_of_one_process,
    assert_logits_of_peft,
)


@pytest.mark.parametrize("layout", QUICK_OF_FEW[:4])
def test_a_layout_gives_the_gradients_of_one_process(ranks, layout):
    """Logprobs, the gradients of A, B and m, the weights after a step and the metrics are those of one process."""
    excluded = ".*experts.*" if layout.factors.expert else None
    assert_gradients_of_one_process(ranks, layout, replace(DORA, exclude_modules=excluded))


@pytest.mark.parametrize(
    ("case", "layout", "lora"),
    [
        ("qwen2", (2, {"tensor": 2}), DORA),
        ("qwen3", SEQUENCE, replace(DORA, target_modules=("q_proj", "v_proj", "o_proj", "down_proj"))),
        ("deepseek_v3", SEQUENCE, replace(OF_ATTENTION["deepseek_v3"], use_dora=True)),
    ],
    ids=["biases", "some parts of a linear", "latent attention"],
)
def test_logits_are_those_of_peft_and_the_adapter_comes_back(ranks, tmp_path, case, layout, lora):
    assert_logits_of_peft(ranks, tmp_path, case, layout, lora)


def steps_in_bf16(parallel: dict, directory: str) -> dict[str, list]:
    """Take steps in bf16, save after the second and go on in a resumed policy too."""
    new = replace(DORA, init_lora_weights=True)
    options = {"precision": "bf16", "optimizer": DISTRIBUTED_OPTIMIZER, "peft": new}
    policy, batches = build_policy(parallel, **options), [random_batch(4, 12, seed) for seed in range(4)]
    found = {"start": policy.get_logprobs(batches[0])["logprobs"]}
    with policy.model.adapters_off():
        found["base"] = policy.get_logprobs(batches[0])["logprobs"]
    magnitudes = [adapter.get_parameter(f"{part.key}_{MAGNITUDE}") for adapter, part in parts_of(policy)]
    before = [magnitude.detach().clone() for magnitude in magnitudes]
    for batch in batches[:2]:
        policy.train(batch, NLLLoss(), gbs=4)
    found["changed"] = [bool((old != now).all()) for old, now in zip(before, magnitudes, strict=True)]
    found["dtypes"] = [magnitude.dtype for magnitude in magnitudes]
    path = policy.save_checkpoint(directory, 1)
    other = build_policy(parallel, **options)
    other.load_checkpoint(path)
    for each in (policy, other):
        for batch in batches[2:]:
            each.train(batch, NLLLoss(), gbs=4)
    found["ends"] = [each.get_logprobs(batches[0])["logprobs"] for each in (policy, other)]
    sent = {name: tensor.clone() for name, tensor in policy.weights.stream()}
    policy.model.mark_changed()
    found["sent again"] = [torch.equal(tensor, sent[name]) for name, tensor in policy.weights.stream()]
    return found


def parts_of(policy: MegatronPolicy) -> list[tuple[LinearAdapter, Part]]:
    adapters = find_adapters(policy.model.model_chunks)
    return [(adapter, part) for adapter in adapters for part in adapter.parts if part.has_adapter]


@pytest.mark.parametrize("layout", [(2, {}), (4, {"tensor": 2, "sequence": True})], ids=["data 2", "data 2 tensor 2"])
def test_magnitudes_learn_in_bf16_and_resume(ranks, tmp_path, layout):
    """A bf16 magnitude would not change in a step of 1e-3 of its length. Training starts from the base."""
    for found in ranks.run(layout[0], steps_in_bf16, layout[1], str(tmp_path)):
        assert torch.equal(found["start"], found["base"])
        assert set(found["dtypes"]) == {torch.float32} and all(found["changed"])
        assert torch.equal(*found["ends"]) and all(found["sent again"])


def test_a_row_of_zeros_keeps_its_factor():
    magnitudes = torch.tensor([0.0, 3.0], requires_grad=True)
    factors = compute_factors(magnitudes, torch.tensor([0.0, 2.0]))
    factors.sum().backward()
    assert factors.tolist() == [1.0, 1.5] and magnitudes.grad.tolist() == [0.0, 0.5]


def dropped(x: torch.Tensor, p: float, *options: int) -> torch.Tensor:
    """Drop every other feature."""
    return x * (torch.arange(x.size(-1)) % 2) / (1 - p)


def loss_while_training(parallel: dict, base: str, directory: str) -> tuple[Path, float]:
    """Return an adapter's checkpoint after a step, and the loss with dropout then."""
    kept, layers.dropout = layers.dropout, dropped
    options = {"parallel": ParallelConfig(**parallel), "device": "cpu", "weights_only": True}
    policy = MegatronPolicy.from_checkpoint(
        base, peft=replace(DORA, lora_dropout=0.5), optimizer=OPTIMIZER, **options
    )  # fmt: skip
    batch = of_equal_weight()
    policy.train(batch, NLLLoss(), gbs=4)
    loss = policy.accumulate_gradients(batch, NLLLoss())["loss"]
    layers.dropout = kept
    return policy.save_checkpoint(directory, 1), loss


def test_dropout_also_acts_on_what_the_magnitudes_add(ranks, tmp_path, monkeypatch):
    """The loss while training is that of peft, if both drop the same features."""
    import peft

    hf = hf_model("qwen2")
    import_weights(save(hf, tmp_path / "hf"), tmp_path / "base")
    checkpoint, found = ranks.run(2, loss_while_training, SEQUENCE[1], str(tmp_path / "base"), str(tmp_path / "run"))[0]
    export_peft(checkpoint, tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter", is_trainable=True).train()
    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)
    ids = of_equal_weight()["input_ids"]
    with torch.no_grad():
        assert abs(model(ids, labels=ids).loss - found) < 1e-5
        monkeypatch.undo()
        assert abs(model.eval()(ids, labels=ids).loss - found) > 1e-3


def of_equal_weight() -> BatchedDataDict:
    """Return sequences of one length, all of whose tokens but the first are trained on."""
    ids = torch.randint(SHAPE["vocab_size"], (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    lengths, weights = torch.full((4,), 12), torch.ones(4)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": weights})

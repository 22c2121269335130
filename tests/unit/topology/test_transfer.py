"""What a step needs reaches the device in one transfer, with the same values, dtypes and structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology import transfer
from rl_megatron.topology.transfer import read_numbers, send

META = torch.device("meta")


@dataclass(frozen=True)
class Step:
    batch: BatchedDataDict
    parts: list[tuple[torch.Tensor | None, int]]
    kind: str = field(default="step", init=False)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Copies(TorchDispatchMode):
    """Counts the copies to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.count += func is torch.ops.aten._to_copy.default and kwargs.get("device") == META
        return func(*args, **kwargs)


def test_a_tree_keeps_its_structure_and_is_sent_in_one_copy():
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.bool)
    step = Step(BatchedDataDict(input_ids=ids, again=ids, names=["a", "b"]), [(mask, 3), (None, 4)])
    with Copies() as copies:
        sent, pair = send((step, Pair(ids, mask[:, 1])), META)
    assert copies.count == 1
    assert type(sent.batch) is BatchedDataDict and sent.batch["names"] == ["a", "b"] and sent.kind == "step"
    assert sent.batch["input_ids"].device == META and sent.batch["input_ids"].shape == (2, 3)
    assert sent.batch["again"] is sent.batch["input_ids"] is pair.first, "a tensor that occurs twice is sent once"
    assert sent.parts[0][0].dtype is torch.bool and sent.parts[0][1] == 3 and sent.parts[1] == (None, 4)
    assert type(pair) is Pair and pair.second.shape == (2,)
    assert step.batch["input_ids"] is ids and ids.device.type == "cpu", "the tree that was given stays on the host"


def test_tensors_that_are_there_already_are_not_copied():
    ids, there = torch.arange(3), torch.empty(4, device=META)
    sent = send([ids, there], META)
    assert sent[1] is there and sent[0].device == META
    assert send([ids], torch.device("cpu"))[0] is ids


def test_sent_tensors_have_the_same_values():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 8, generator=generator)
    tensors = [
        torch.tensor(True), wide[:, ::3], wide.double().T, torch.zeros(0, 4), wide.bfloat16(),
        torch.randint(-9, 9, (3, 1, 2), generator=generator, dtype=torch.int16), torch.tensor(1 << 40),
    ]  # fmt: skip
    sent = transfer.send_tensors(tensors, torch.device("cpu"))
    for found, wanted in zip(sent, tensors, strict=True):
        assert found.dtype is wanted.dtype and torch.equal(found, wanted) and found.is_contiguous()
        assert found.data_ptr() % 16 == sent[0].data_ptr() % 16, "kernels read aligned memory faster"


def test_writing_to_one_sent_tensor_does_not_count_as_a_change_of_the_others():
    weight = torch.ones(3, requires_grad=True)
    kept, written = transfer.send_tensors([torch.arange(3.0), torch.zeros(3)], torch.device("cpu"))
    loss = (weight * kept).sum()
    written += 1.0
    loss.backward()  # autograd refuses if a tensor that it kept has changed
    assert weight.grad.tolist() == [0.0, 1.0, 2.0]


def test_numbers_are_read_as_python_numbers():
    assert read_numbers(torch.tensor([1.5, 2.0], requires_grad=True)) == [1.5, 2.0]

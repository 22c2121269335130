"""Weights that an engine refuses to serve."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec, WeightsRefused, fingerprint, plan_buckets
from rl_megatron.weight_sync.receiver import ParameterSink, WeightReceiver

SPECS = [TensorSpec("a", (4, 3), "bfloat16"), TensorSpec("b", (5,), "float32"), TensorSpec("c", (2, 2), "bfloat16")]
PLAN = RefitPlan({}, 10, plan_buckets(SPECS, max_bytes=24))


def model() -> dict[str, torch.Tensor]:
    return {spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in SPECS}


def sent(index: int) -> torch.Tensor:
    bucket = PLAN.buckets[index]
    buffer = torch.zeros(bucket.num_words, dtype=torch.int64)
    for position in range(len(bucket.tensors)):
        tensor = bucket.tensor(buffer, position)
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + index + 1)
        bucket.fingerprints(buffer)[position] = fingerprint(tensor)
    return buffer


def test_a_complete_refit_is_served():
    parameters = model()
    receiver = WeightReceiver(ParameterSink(parameters), PLAN)
    assert receiver.version is None
    receiver.begin(7)
    for index in reversed(range(len(PLAN.buckets))):
        receiver.accept(index, sent(index))
    assert receiver.version is None  # not before the end
    assert receiver.finish() == receiver.version == 7
    assert parameters["b"].tolist() == [2, 3, 4, 5, 6]
    receiver.begin(8)
    assert receiver.version is None  # parameters are about to be a mixture


def test_parameters_that_need_a_gradient_are_filled():
    parameters = {name: torch.nn.Parameter(value) for name, value in model().items()}
    receiver = WeightReceiver(ParameterSink(parameters), PLAN)
    receiver.begin(7)
    for index in range(len(PLAN.buckets)):
        receiver.accept(index, sent(index))
    assert receiver.finish() == 7 and parameters["b"].tolist() == [2, 3, 4, 5, 6]


def test_buckets_are_received_while_those_before_are_loaded():
    parameters, started = model(), []

    class Group:
        """A group whose sums arrive as soon as they are waited for."""

        device = torch.device("cpu")

        def all_reduce(self, buffer):
            words = sent(len(started))
            started.append(len(words))
            return SimpleNamespace(wait=lambda: buffer.copy_(words))

    receiver = WeightReceiver(ParameterSink(parameters), PLAN)
    assert receiver.receive(Group(), 7) == receiver.version == 7
    assert started == [bucket.num_words for bucket in PLAN.buckets]
    assert [parameters[name].flatten()[0].item() for name in "abc"] == [1, 2, 3]


def refuse(receiver: WeightReceiver, message: str, act) -> None:
    with pytest.raises(WeightsRefused, match=message):
        act()
    assert receiver.version is None
    for step in (lambda: receiver.accept(0, sent(0)), receiver.finish):  # nothing until a new refit begins
        with pytest.raises(WeightsRefused, match="refused, or none has begun"):
            step()
    receiver.begin(2)
    for index in range(len(PLAN.buckets)):
        receiver.accept(index, sent(index))
    assert receiver.finish() == 2


def altered(index: int) -> torch.Tensor:
    buffer = sent(index)
    PLAN.buckets[index].tensor(buffer, 0)[0] += 1
    return buffer


def test_a_refused_tensor_is_named_and_nothing_is_served_until_a_refit_succeeds():
    for message, act in {
        "b is missing: bucket 1 never came": lambda r: (r.accept(0, sent(0)), r.accept(2, sent(2)), r.finish()),
        "a came twice": lambda r: (r.accept(0, sent(0)), r.accept(0, sent(0))),
        "b arrived altered": lambda r: r.accept(1, altered(1)),
        "a arrived altered": lambda r: r.accept(0, torch.cat([sent(2)] * 3)),  # another bucket's words
        "c is missing: bucket 2 came with 1 words": lambda r: r.accept(2, sent(2)[:1]),
        "bucket 3 is unknown": lambda r: r.accept(3, sent(0)),
    }.items():
        receiver = WeightReceiver(ParameterSink(model()), PLAN)
        receiver.begin(1)
        refuse(receiver, message, lambda act=act, receiver=receiver: act(receiver))


def test_a_model_that_differs_from_the_plan_is_refused():
    for parameters, message in (
        ({"a": model()["a"], "b": model()["b"]}, "c is unknown to the engine's model"),
        (model() | {"d": torch.zeros(3)}, "d of the engine's model is missing"),
        (model() | {"b": torch.zeros(6)}, r"b will come as float32 \[5\], but the engine's model has float32 \[6\]"),
        (model() | {"b": torch.zeros(5).half()}, "b will come as float32 .* float16"),
    ):
        with pytest.raises(WeightsRefused, match=message):
            WeightReceiver(ParameterSink(parameters), PLAN)
    tied = model()
    WeightReceiver(ParameterSink(tied | {"a_again": tied["a"]}), PLAN)  # filled under its other name


def test_the_engine_side_imports_neither_megatron_nor_a_model_nor_a_policy():
    program = (
        "import sys, rl_megatron.weight_sync.receiver, rl_megatron.weight_sync.ipc\n"
        "heavy = ('megatron', 'transformers', 'ray', 'rl_megatron.model', 'rl_megatron.training')\n"
        "print(sorted(name for name in sys.modules if name.startswith(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"

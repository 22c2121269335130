"""GPUs that are not there: shapes, devices, memory, waits and collectives without data, and nothing left behind."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.plan.fake_cuda import FakeCuda, Observer
from rl_megatron.plan.fake_cuda.stand_ins import list_stand_ins
from rl_megatron.topology.topology import start_topology


class Notes(Observer):
    """All that was reported."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.operators: list[str] = []
        self.collectives: list[tuple[str, int, int]] = []

    def on_wait(self, reason):
        self.waits.append(reason)

    def on_launch(self, operator, args, kwargs, result):
        self.operators.append(operator.name())

    def on_communication(self, kind, group, num_bytes):
        self.collectives.append((kind, group.size(), num_bytes))


def _devices():
    with FakeCuda(0, 1):
        x = torch.zeros(2, 3, device="cuda", dtype=torch.bfloat16)
        y = torch.zeros(3).to("cuda")
        claims = [
            x.device, y.device, (x.float() @ y).device, x.new_empty(1).device, torch.empty_like(x).device,
            torch.tensor([1.0], device=x.device).device, x.cpu().device, x.is_cuda, x.is_cpu, x.type(),
            torch.nn.Linear(3, 3).cuda().weight.device,
        ]  # fmt: skip
    return [str(claim) for claim in claims]


def test_tensors_say_that_they_are_on_a_gpu(fresh_process):
    gpu = "cuda:0"
    assert fresh_process.run(_devices) == [
        gpu, gpu, gpu, gpu, gpu, gpu, "cpu", "True", "False", "torch.cuda.BFloat16Tensor", gpu
    ]  # fmt: skip


def _mixed():
    with FakeCuda(0, 1):
        on_gpu = torch.zeros(3, device="cuda")
        on_gpu + 1.0 + torch.tensor(2.0)  # a number on the host is allowed
        try:
            on_gpu + torch.zeros(3)
        except RuntimeError as error:
            return str(error)


def test_an_operator_on_tensors_of_both_devices_is_refused(fresh_process):
    assert "found at least two devices, cuda:0 and cpu" in fresh_process.run(_mixed)


def _waits():
    def waits_of(action):
        notes.waits.clear()
        action()
        return list(notes.waits)

    with FakeCuda(0, 1, notes := Notes()):
        x, pinned = torch.zeros(4, device="cuda"), torch.zeros(4)
        return {
            "item": waits_of(lambda: x.sum().item()),
            "if": waits_of(lambda: bool(x.sum() > 0)),
            "tolist": waits_of(lambda: x.tolist()),
            "to the host": waits_of(lambda: x.cpu()),
            "to the device": waits_of(lambda: pinned.to("cuda")),
            "tensor of a list": waits_of(lambda: torch.tensor([1.0, 2.0], device="cuda")),
            "by a mask": waits_of(lambda: x.index_put_((x > 0,), torch.zeros(4, device="cuda"))),
            "synchronize": waits_of(lambda: torch.cuda.synchronize()),
            "stream": waits_of(lambda: torch.cuda.current_stream().synchronize()),
            # These do not wait.
            "not blocking": waits_of(lambda: pinned.to("cuda", non_blocking=True)),
            "fill by a mask": waits_of(lambda: x.__setitem__(x > 0, 0.0)),
            "arithmetic": waits_of(lambda: (x * 2 + 1).softmax(0)),
            "on the host": waits_of(lambda: pinned.sum().item()),
        }


def test_everything_that_waits_for_a_gpu_is_reported_and_nothing_else(fresh_process):
    waits = fresh_process.run(_waits)
    free = {"not blocking", "fill by a mask", "arithmetic", "on the host"}
    assert {name for name, reasons in waits.items() if not reasons} == free
    assert all(len(reasons) == 1 for name, reasons in waits.items() if name not in free)


def _attention_operators():
    with FakeCuda(0, 1, notes := Notes()):
        found = {}
        for name, dtype, kv_heads, masked in (
            ("plain", torch.bfloat16, 4, False),
            ("grouped", torch.bfloat16, 2, False),
            ("masked", torch.bfloat16, 4, True),
            ("fp32", torch.float32, 4, False),
            ("fp32 grouped", torch.float32, 2, False),
        ):
            query = torch.zeros(2, 4, 8, 16, dtype=dtype, device="cuda", requires_grad=True)
            key = torch.zeros(2, kv_heads, 8, 16, dtype=dtype, device="cuda", requires_grad=True)
            mask = torch.ones(8, 8, dtype=torch.bool, device="cuda") if masked else None
            notes.operators.clear()
            output = scaled_dot_product_attention(query, key, key, mask, is_causal=not masked, enable_gqa=kv_heads < 4)
            output.sum().backward()
            assert output.shape == query.shape and query.grad.shape == query.shape and key.grad.shape == key.shape
            kinds = [each.split("aten::")[1].split(".")[0] for each in notes.operators if "attention" in each]
            found[name] = kinds
        return found


def test_attention_runs_the_operators_of_a_gpu(fresh_process):
    flash = ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
    efficient = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]
    found = fresh_process.run(_attention_operators)
    assert found == {"plain": flash, "grouped": flash, "masked": efficient, "fp32": efficient, "fp32 grouped": []}


def _causal_operators():
    """Return the operators of causal attention in portable layers, by whether cuDNN is asked for and by dtype."""
    from megatron.core.transformer.enums import AttnMaskType

    from rl_megatron.model.layers.attention import PortableAttention

    with FakeCuda(0, 1, notes := Notes()):
        found = {}
        for by_cudnn in (False, True):
            for dtype in (torch.bfloat16, torch.float32):
                config = SimpleNamespace(window_size=None, window_attn_skip_freq=None, softmax_type="vanilla")
                config.cudnn_attention = by_cudnn
                layer = PortableAttention(config, 1, AttnMaskType.causal, "self")
                query = torch.zeros(8, 2, 4, 16, dtype=dtype, device="cuda", requires_grad=True)
                key = torch.zeros(8, 2, 2, 16, dtype=dtype, device="cuda", requires_grad=True)
                notes.operators.clear()
                layer(query, key, key).sum().backward()
                kinds = [each.split("attention")[0] for each in notes.operators if "attention" in each]
                found[by_cudnn, str(dtype)] = [kind.removeprefix("aten::_scaled_dot_product_") for kind in kinds]
        return found


def test_causal_attention_is_flash_unless_cudnn_is_asked_for(fresh_process):
    assert fresh_process.run(_causal_operators) == {
        (False, "torch.bfloat16"): ["flash_"] * 2,
        (True, "torch.bfloat16"): ["cudnn_"] * 2,
        (False, "torch.float32"): ["efficient_"] * 2,
        (True, "torch.float32"): ["efficient_"] * 2,
    }


class _Recomputed(torch.autograd.Function):
    """Notes the device that its backward pass sees, where recomputation runs a forward pass."""

    seen: list[str] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        _Recomputed.seen.append(str(gradient.device))
        return gradient


def _backward_passes():
    _Recomputed.seen.clear()
    with FakeCuda(0, 1):
        x = torch.zeros(3, device="cuda", requires_grad=True)
        _Recomputed.apply(x).sum().backward()
        torch.autograd.backward(_Recomputed.apply(x), torch.ones_like(x))
        torch.autograd.grad(_Recomputed.apply(x).sum(), x)
    return _Recomputed.seen


def test_code_within_a_backward_pass_sees_the_gpu(fresh_process):
    assert fresh_process.run(_backward_passes) == ["cuda:0"] * 3


def _one_of_16384():
    with FakeCuda(5000, 16384, notes := Notes()):
        parallel = ParallelConfig(tensor=8, sequence=True, pipeline=16, context=2, expert=64)
        topology = start_topology(parallel, device="cuda")
        x = torch.zeros(8, device=topology.device)
        dist.all_reduce(x, group=topology.groups.tp)
        whole = x.new_empty(2, 8)
        dist.all_gather_into_tensor(whole, x, group=topology.groups.cp)
        return topology.describe(), topology.pipeline_rank, notes.collectives


@pytest.mark.change
def test_one_rank_of_16384_has_all_its_process_groups(fresh_process):
    description, stage, collectives = fresh_process.run(_one_of_16384)
    assert description.startswith("16384 rank(s): tensor 8 × pipeline 16 × context 2 × data 64")
    assert stage == 5000 // (16384 // 16)
    assert collectives == [("all_reduce", 8, 32), ("all_gather", 2, 64)]


def _before_and_after():
    watched = {
        "to": torch.Tensor.to, "apply": torch.nn.Module._apply, "available": torch.cuda.is_available,
        "group": dist.new_group, "stream": torch.cuda.Stream,
    }  # fmt: skip
    with FakeCuda(0, 8):
        assert torch.cuda.is_available() and dist.get_world_size() == 8
    after = {
        "to": torch.Tensor.to, "apply": torch.nn.Module._apply, "available": torch.cuda.is_available,
        "group": dist.new_group, "stream": torch.cuda.Stream,
    }  # fmt: skip
    value = torch.ones(3).sum().item()
    return watched == after, dist.is_initialized(), value


def test_everything_is_put_back(fresh_process):
    assert fresh_process.run(_before_and_after) == (True, False, 3.0)


def test_every_stand_in_takes_the_place_of_something():
    for owner, name, _ in list_stand_ins():
        assert hasattr(owner, name) or find_spec(f"{owner.__name__}.{name}") is not None, (owner, name)


def _twice():
    with FakeCuda(0, 1):
        try:
            FakeCuda(0, 1).__enter__()
        except ConfigError as error:
            return str(error)


def test_a_process_with_another_device_is_refused(fresh_process):
    assert "start a new process to plan" in fresh_process.run(_twice)

"""The choice of a rank's device; the redirection of CUDA calls to the CPU leaves other libraries what they need."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.device import choose_device

SCRIPT = """
from rl_megatron.topology.device import start_device
start_device("cpu")
import torch
assert torch.zeros(2, device="cuda").device.type == "cpu"
with torch.device("meta"):
    made = [torch.arange(2), torch.empty(2), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight]
print({tensor.device.type for tensor in made})
"""


@pytest.mark.change
def test_a_device_context_still_says_where_tensors_are_made():
    """transformers loads models in such a context. The test needs a new process, in which nothing has used one."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'meta'}\n", done.stderr


def test_a_rank_whose_gpu_is_not_visible_is_told_how_to_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert choose_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"LOCAL_RANK=1 computes on cuda:1, .* sees 1 GPU\(s\); start at most"):
            choose_device(name)

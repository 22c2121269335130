"""The redirection of CUDA calls to the CPU does not break what other libraries need of torch."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from rl_megatron.topology.device import start_device
start_device("cpu")
import torch
assert torch.zeros(2, device="cuda").device.type == "cpu"
with torch.device("meta"):
    made = [torch.arange(2), torch.empty(2), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight]
print({tensor.device.type for tensor in made})
"""


def test_a_device_context_still_says_where_tensors_are_made():
    """transformers loads models in such a context. The test needs a new process, in which nothing has used one."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'meta'}\n", done.stderr

"""The redirection to the CPU leaves torch as other libraries need it."""

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
    """transformers loads models through one; it matters that nothing has used one before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'meta'}\n", done.stderr

"""Arguments that do not fit are named, and so is a backend that cannot run."""

import math
import re
import subprocess
import sys

import pytest
import torch

from rl_megatron.logprobs import kernels, vocab_parallel_logprobs
from rl_megatron.logprobs.kernels.backends import TORCH, choose_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # to choose kernels for one, nobody needs to have it


class TestBadArgumentsAreNamed:
    logits = torch.zeros(4, 10)
    targets = torch.zeros(4, dtype=torch.long)

    @pytest.mark.parametrize("bad", [10, -1, -99, 1 << 40])
    def test_target_outside_the_vocabulary(self, bad):
        targets = self.targets.clone()
        targets[2] = bad
        with pytest.raises(ValueError, match=rf"id {bad} .* \[0, 10\)"):
            vocab_parallel_logprobs(self.logits, targets)

    def test_gather_id_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match="id 11 "):
            vocab_parallel_logprobs(self.logits, self.targets, gather_ids=torch.full((4, 2), 11))

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"targets \(3,\), logits \(4, 10\)"):
            vocab_parallel_logprobs(self.logits, self.targets[:3])
        with pytest.raises(ValueError, match=r"gather_ids \(3, 2\), targets \(4,\)"):
            vocab_parallel_logprobs(self.logits, self.targets, gather_ids=torch.zeros(3, 2, dtype=torch.long))

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0, 1.0, 1.0])], ids=str)
    def test_temperature(self, bad):
        with pytest.raises(ValueError, match="temperature"):
            vocab_parallel_logprobs(self.logits, self.targets, temperature=bad)

    @pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 4, 1)], ids=str)
    def test_temperature_of_another_shape(self, shape):
        with pytest.raises(ValueError, match=re.escape(f"temperature {shape} must be a number or broadcast to")):
            vocab_parallel_logprobs(self.logits, self.targets, temperature=torch.ones(shape))

    def test_temperature_that_wants_a_gradient(self):
        with pytest.raises(ValueError, match="gradient"):
            vocab_parallel_logprobs(self.logits, self.targets, temperature=torch.ones(4, requires_grad=True))

    def test_vocab_range(self):
        with pytest.raises(ValueError, match="spans 11 ids"):
            vocab_parallel_logprobs(self.logits, self.targets, vocab_range=(0, 11))
        with pytest.raises(ValueError, match=r"vocab_range=\(5, 15\) must start at 0 without a tp_group"):
            vocab_parallel_logprobs(self.logits, self.targets, vocab_range=(5, 15))

    def test_backend(self):
        with pytest.raises(ValueError, match="backend='cuda'.*torch"):
            vocab_parallel_logprobs(self.logits, self.targets, backend="cuda")


class TestTheBackendThatIsChosen:
    @pytest.fixture
    def without_triton(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "rl_megatron.logprobs.kernels.triton", raising=False)
        monkeypatch.delattr(kernels, "triton", raising=False)

    def test_auto_is_triton_on_a_gpu_and_torch_elsewhere(self):
        triton_kernels = pytest.importorskip("rl_megatron.logprobs.kernels.triton")
        assert choose_kernels("auto", GPU).row_stats is triton_kernels.row_stats
        assert choose_kernels("auto", CPU) == choose_kernels("torch", GPU) == TORCH

    def test_auto_without_triton_is_torch_and_says_so_once(self, without_triton, logged):
        assert choose_kernels("auto", GPU) == choose_kernels("auto", GPU) == TORCH
        (message,) = logged
        assert "`pip install triton`" in message

    def test_triton_without_triton_names_the_remedy(self, without_triton):
        with pytest.raises(ValueError, match="not installed: `pip install triton`"):
            choose_kernels("triton", GPU)

    def test_triton_on_a_cpu_names_the_interpreter(self, monkeypatch):
        triton_kernels = pytest.importorskip("rl_megatron.logprobs.kernels.triton")
        monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
        with pytest.raises(ValueError, match="TRITON_INTERPRET=1 before"):
            vocab_parallel_logprobs(torch.zeros(4, 10), torch.zeros(4, dtype=torch.long), backend="triton")

    def test_triton_is_not_imported_where_it_is_not_used(self):
        program = (
            "import sys, torch\nfrom rl_megatron.logprobs import vocab_parallel_logprobs\n"
            "vocab_parallel_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]))\n"
            "assert 'triton' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], timeout=120, check=True)

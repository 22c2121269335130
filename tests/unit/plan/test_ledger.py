"""The ledger counts memory whose size changes: freed for a while, or made larger by an operator."""

from __future__ import annotations

import torch

from rl_megatron.plan.fake_cuda import FakeCuda
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.measured import Measured


def _resized() -> tuple[Measured, Measured]:
    ledger = Ledger()
    with FakeCuda(0, 1, ledger):
        x = torch.zeros(1024, device="cuda")
        view = x[512:]
        with ledger.phase("refit") as freed:
            x.untyped_storage().resize_(0)
            other = torch.zeros(256, device="cuda")
        with ledger.phase("train") as restored:
            x.untyped_storage().resize_(4096)
            torch.cat([view, other], out=other)
        del x, view, other
        with ledger.phase("save") as nothing:
            pass
        assert nothing[0].start_bytes == 0
    return freed[0], restored[0]


def test_memory_that_is_resized_counts_at_its_size(fresh_process):
    freed, restored = fresh_process.run(_resized)
    assert (freed.start_bytes, sum(freed.peak), freed.end_bytes) == (4096, 4096, 1024)
    larger = 4 * (512 + 256)
    assert (restored.start_bytes, sum(restored.peak), restored.end_bytes) == (1024, 4096 + larger, 4096 + larger)

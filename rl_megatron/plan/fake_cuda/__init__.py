"""Fake CUDA: tensors on "cuda" have shapes and sizes, but no data, so that any rank of any world size can run.

While `FakeCuda` is active, tensors on "cuda" are tensors on torch's "meta" device that report the device cuda, so every
operator runs without data and without memory. Tensors on the CPU stay real, because batches are planned from their
values. Collectives have no peers. An observer is called for every operator, allocation, collective and wait.

Two torch modes intercept functions of tensors (functions.py) and operators (operators.py). patches.py lists the other
functions of torch and megatron-core that are replaced, and stand_ins.py those of this package. All replaced functions
are restored when the context ends.
"""

from rl_megatron.plan.fake_cuda.device import FakeCuda
from rl_megatron.plan.fake_cuda.sides import Observer

__all__ = ["FakeCuda", "Observer"]

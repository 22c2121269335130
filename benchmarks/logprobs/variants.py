"""Define the variants: this package, plain torch, megatron-core, TRL, other kernels if installed, and peers."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from benchmarks.logprobs.cases import DTYPES, Case, Mode, Problem
from rl_megatron.logprobs import BACKENDS, vocab_parallel_logprobs

Outputs = tuple[Tensor, ...]
_UNFUSED: tuple[Mode, ...] = ("logprob", "entropy", "gather", "inference")
_TRL_ROW = 256  # tokens of one sequence of a batch
_LOGPROB: tuple[Mode, ...] = ("logprob", "inference")


@dataclass(frozen=True)
class Variant:
    """One implementation that takes part.

    `run(problem, logits)`, or in mode fused `run(problem, hidden, weight)`, returns the outputs of the problem's mode:
    logprobs[, entropy[, gathered]], or their sum, a scalar, if the implementation returns no more than that.

    `bytes_per_logit` is None if the counters see all of its bytes. Otherwise it returns the number for a case, or None
    if the number is not known.
    """

    name: str
    run: Callable[..., Outputs]
    modes: tuple[Mode, ...] = _UNFUSED
    any_tensor: bool = True  # also if the vocabulary is sharded over several ranks
    dtypes: tuple[str, ...] = tuple(DTYPES)
    is_ours: bool = False
    is_products: bool = False  # matrix products without a result
    bytes_per_logit: Callable[[Case], float | None] | None = field(default=None, repr=False)

    def takes(self, case: Case) -> bool:
        return case.mode in self.modes and case.dtype in self.dtypes and (self.any_tensor or case.tensor == 1)


def _unseen(case: Case) -> None:
    return None


def _ours(problem: Problem, logits: Tensor, backend: str) -> Outputs:
    mode, group = problem.case.mode, problem.group
    stats = vocab_parallel_logprobs(
        logits, problem.targets, group, entropy=mode in ("entropy", "gather"),
        gather_ids=problem.ids if mode == "gather" else None, backend=backend,
    )  # fmt: skip
    return tuple(output for output in stats if output is not None)


def _plain(problem: Problem, logits: Tensor, upcast: bool) -> Outputs:
    log_p = (logits.float() if upcast else logits).log_softmax(-1)
    outputs = [log_p.gather(1, problem.targets[:, None])[:, 0]]
    if problem.case.mode in ("entropy", "gather"):
        outputs.append(-(log_p.exp() * log_p).sum(-1))
    if problem.case.mode == "gather":
        outputs.append(log_p.gather(1, problem.ids))
    return tuple(outputs)


def _cross_entropy(problem: Problem, logits: Tensor) -> Outputs:
    return (-torch.nn.functional.cross_entropy(logits, problem.targets, reduction="none"),)


@cache
def _compiled() -> Callable[[Problem, Tensor], Outputs]:
    function = torch.compile(lambda x, targets: x.float().log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return lambda problem, x: (function(x, problem.targets),)


def _megatron(problem: Problem, logits: Tensor) -> Outputs:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return (-vocab_parallel_cross_entropy(logits[:, None], problem.targets[:, None])[:, 0],)


def _megatron_fused(problem: Problem, logits: Tensor) -> Outputs:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    loss = fused_vocab_parallel_cross_entropy(logits[:, None], problem.targets[:, None], problem.group)
    return (-loss[:, 0],)


def _trl(problem: Problem, logits: Tensor) -> Outputs:
    from trl.trainer.utils import selective_log_softmax

    rows = (-1, math.gcd(len(logits), _TRL_ROW))  # it takes one sequence of the batch at a time
    return (selective_log_softmax(logits.unflatten(0, rows), problem.targets.unflatten(0, rows)).flatten(),)


def _liger(problem: Problem, logits: Tensor) -> Outputs:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    loss = LigerCrossEntropyFunction.apply(logits, problem.targets, None, -100, 0.0, 0.0, "none")
    return (-(loss[0] if isinstance(loss, tuple) else loss),)


def _flash_attention(problem: Problem, logits: Tensor) -> Outputs:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return (-cross_entropy_loss(logits, problem.targets, inplace_backward=True)[0],)


def logits_variants(device: torch.device) -> list[Variant]:
    """Return the variants, ours first: the backend of `backend="auto"` before the other one."""
    variants = []
    for backend in sorted(BACKENDS, reverse=True):  # triton, torch
        if backend == "torch" or device.type == "cuda":
            counted = None if backend == "torch" else (lambda case: float(case.floor_bytes))
            run = _with_backend(backend)
            variants.append(Variant(f"rl_megatron {backend}", run, is_ours=True, bytes_per_logit=counted))
    variants += [
        Variant("torch log_softmax", lambda problem, x: _plain(problem, x, upcast=False), any_tensor=False),
        Variant("torch float().log_softmax", lambda problem, x: _plain(problem, x, upcast=True), any_tensor=False,
                dtypes=("bf16",)),
        Variant("torch cross_entropy", _cross_entropy, _LOGPROB, any_tensor=False),
        Variant("megatron-core cross entropy", _megatron, _LOGPROB),
        # Its backward returns bf16 gradients, whatever the dtype of the logits.
        Variant("megatron-core fused", _megatron_fused, _LOGPROB, dtypes=("bf16",), bytes_per_logit=_unseen),
    ]  # fmt: skip
    further = {
        "trl": Variant("TRL selective_log_softmax", _trl, _LOGPROB, any_tensor=False),
        "liger_kernel": Variant("Liger cross entropy", _liger, _LOGPROB, any_tensor=False, bytes_per_logit=_unseen),
        "flash_attn": Variant("flash-attn", _flash_attention, _LOGPROB, any_tensor=False, bytes_per_logit=_unseen),
    }
    if device.type == "cuda":
        name, run = "torch.compile of float().log_softmax", lambda problem, x: _compiled()(problem, x)
        variants.append(Variant(name, run, _LOGPROB, any_tensor=False, dtypes=("bf16",), bytes_per_logit=_unseen))
    needs_gpu = ("liger_kernel", "flash_attn")
    for module, variant in further.items():
        on_gpu = device.type == "cuda"
        if importlib.util.find_spec(module) is not None and (on_gpu or module not in needs_gpu):
            # On a GPU, TRL uses its own Triton kernels.
            variants.append(replace(variant, bytes_per_logit=_unseen) if on_gpu else variant)
    return variants


def _with_backend(backend: str) -> Callable[[Problem, Tensor], Outputs]:
    return lambda problem, x: _ours(problem, x, backend)


def load_peer(where: str) -> Callable[[Tensor, Tensor], Tensor | Outputs]:
    """Return the function that `--peer MODULE:FUNCTION` names.

    Raises:
        ValueError: There is no such module or function.
    """
    module_name, colon, name = where.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"--peer {where}: give MODULE:FUNCTION, such as my_package.kernels:logprobs")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--peer {where}: {module_name} cannot be imported ({error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        kind = "nothing" if function is None else f"a {type(function).__name__}"
        raise ValueError(f"--peer {where}: {module_name} has {kind} called {name}; a function is needed")
    return function


def peer_variant(where: str, device: torch.device) -> Variant:
    """Return a peer as a variant, after a small call that shows what it returns.

    Raises:
        ValueError: The call fails, or does not return what the contract says.
    """
    function = load_peer(where)
    logits = torch.randn(4, 8, device=device, requires_grad=True)
    targets = torch.arange(4, device=device)
    try:
        returned = function(logits.clone(), targets)
    except Exception as error:
        raise ValueError(f"--peer {where}: it fails on logits [4, 8] and targets [4]: {error}") from error
    outputs = returned if isinstance(returned, tuple) else (returned,)
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
    if shapes not in ([(4,)], [(4,), (4,)]):
        raise ValueError(f"--peer {where}: of logits [4, 8] it returned {shapes}; logprobs [4], or also entropy [4]")
    modes = (*_LOGPROB, "entropy") if len(outputs) == 2 else _LOGPROB

    def run(problem: Problem, x: Tensor) -> Outputs:
        found = function(x, problem.targets)
        found = found if isinstance(found, tuple) else (found,)
        return found if problem.case.mode == "entropy" else found[:1]

    unseen = _unseen if device.type == "cuda" else None
    return Variant(where, run, modes, any_tensor=False, bytes_per_logit=unseen)

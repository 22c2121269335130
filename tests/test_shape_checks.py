"""The tests, and only the tests, compare tensors with the shapes in annotations."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from rl_megatron import logprobs, losses
from rl_megatron.algorithms.advantages import whiten
from rl_megatron.logprobs import DeferredLogits, LogprobStats, vocab_parallel_logprobs
from tests import shape_checks

# A call with wrong shapes that the function itself does not refuse.
WRONG = "whiten(torch.ones(2, 3, 4), torch.ones(2, 3, 4))"


def test_a_wrong_shape_is_refused():
    with pytest.raises(TypeCheckError, match="batch sequence"):
        eval(WRONG, {"whiten": whiten, "torch": torch})


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="Float"):
        whiten(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3))


def test_fields_of_a_dataclass_must_agree():
    DeferredLogits(torch.zeros(3, 2, 8), torch.zeros(10, 8), 1)
    with pytest.raises(TypeCheckError, match="hidden"):
        DeferredLogits(torch.zeros(3, 2, 8), torch.zeros(10, 7), 1)


def test_fields_of_a_named_tuple_are_compared_with_the_arguments(monkeypatch):
    logits, targets = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    vocab_parallel_logprobs(logits, targets)
    monkeypatch.setattr(LogprobStats, "map", lambda self, function: LogprobStats(torch.zeros(3, 2)))
    with pytest.raises(TypeCheckError, match="tokens"):
        vocab_parallel_logprobs(logits, targets)


def test_a_call_that_the_function_refuses_keeps_its_message():
    with pytest.raises(ValueError, match="targets must have the logits' leading shape"):
        vocab_parallel_logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))


def test_installing_after_an_import_is_refused():
    with pytest.raises(RuntimeError, match="rl_megatron.logprobs"):
        shape_checks.install.__wrapped__()


@pytest.mark.change
def test_nothing_is_checked_outside_the_tests():
    program = (
        "import sys, torch\n"
        "from rl_megatron.algorithms.advantages import whiten\n"
        f"{WRONG}\n"
        "assert not hasattr(whiten, '__wrapped__') and 'beartype' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def refusal_on_a_rank():
    try:
        eval(WRONG, {"whiten": whiten, "torch": torch})
    except TypeCheckError as error:
        return str(error)


def test_ranks_check_shapes_too(ranks):
    [refusal] = ranks.run(1, refusal_on_a_rank)
    assert "batch sequence" in (refusal or "")


def modules_of(package):
    names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [name for name in names if not name.endswith(".triton")]  # imported only on request


@pytest.mark.parametrize("name", ["rl_megatron.algorithms.advantages", *modules_of(logprobs), *modules_of(losses)])
def test_every_annotation_can_be_read(name):
    """jaxtyping ignores an annotation that it cannot read, for example one with two dimensions `*name`."""
    module = importlib.import_module(name)
    own = [x for x in vars(module).values() if getattr(x, "__module__", None) == name]
    for member in own:
        if inspect.isclass(member):
            if is_dataclass(member) or hasattr(member, "_fields"):
                typing.get_type_hints(member)
            own += [x for x in vars(member).values() if inspect.isfunction(x)]
        elif inspect.isfunction(member):
            typing.get_type_hints(member)

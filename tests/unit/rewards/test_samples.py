"""How functions are sent to workers: by name if a worker can import them, and otherwise with their code."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_megatron.rewards.samples import pickle_for_worker


@pytest.mark.parametrize("name", ["elsewhere", "nowhere"])
def test_a_package_that_only_its_own_finder_finds_is_sent_by_name(monkeypatch, name):
    """The finder of an editable install is not on `sys.path`."""
    package: Any = ModuleType(name)
    exec("def reward(completion):\n    return 'its code'", package.__dict__)
    monkeypatch.setitem(sys.modules, name, package)
    spec = ModuleSpec("elsewhere", None)
    finder = SimpleNamespace(find_spec=lambda name, path: spec if name == "elsewhere" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert (b"its code" in pickle_for_worker(package.reward, "a reward")) == (name == "nowhere")

"""How functions are sent to workers: by name if a worker can import them, and otherwise with their code."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from rl_megatron.rewards.samples import _can_be_imported


def test_a_package_that_only_its_own_finder_finds_is_sent_by_name(monkeypatch):
    """The finder of an editable install is not on `sys.path`."""
    package = ModuleType("elsewhere")
    assert not _can_be_imported(package)
    spec = ModuleSpec("elsewhere", None)
    finder = SimpleNamespace(find_spec=lambda name, path: spec if name == "elsewhere" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert _can_be_imported(package)

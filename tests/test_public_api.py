"""The public names of `rl_megatron` exist and are declared for type checkers; importing it imports no torch."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rl_megatron

STUB = Path(rl_megatron.__file__).with_suffix(".pyi")


def test_every_public_name_can_be_imported():
    for name in rl_megatron.__all__:
        assert getattr(rl_megatron, name) is not None
    assert set(rl_megatron.__all__) <= set(dir(rl_megatron))


def test_the_stub_declares_each_name_where_it_is_loaded_from():
    declared = {
        alias.asname: (node.module or "").removeprefix("rl_megatron.")
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared.keys() == set(rl_megatron.__all__) - {"__version__"}
    for name, module in declared.items():
        assert getattr(rl_megatron, name) is getattr(importlib.import_module(f"rl_megatron.{module}"), name)


def test_importing_the_package_imports_no_torch():
    program = "import sys, rl_megatron\nrl_megatron.ConfigError\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="MegatronPolicies"):
        _ = rl_megatron.MegatronPolicies

"""The public names of `rl_megatron` exist and are declared for type checkers; importing it imports no torch."""

import ast
import importlib
import inspect
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


def test_public_functions_classes_and_their_methods_are_documented():
    undocumented = []
    for name in set(rl_megatron.__all__) - {"__version__"}:
        public = getattr(rl_megatron, name)
        members = vars(public) if inspect.isclass(public) else {}
        fields = members.get("__annotations__", {})  # the class's docstring has them
        methods = [key for key in members if inspect.isfunction(members[key]) and key[0] != "_" and key not in fields]
        documented = {name: public} | {f"{name}.{key}": getattr(public, key) for key in methods}
        undocumented += [key for key, value in documented.items() if not inspect.getdoc(value)]
    assert undocumented == []


def test_importing_the_package_imports_no_torch():
    program = "import sys, rl_megatron\nrl_megatron.ConfigError\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="MegatronPolicies"):
        _ = rl_megatron.MegatronPolicies

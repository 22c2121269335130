"""What the package never does: load pickles from files, trust code from a model's directory, run a shell."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rl_megatron"
# Module → where its pickles come from. Those that others can reach have a list of the classes that they may name.
UNPICKLING = {
    "certify/single_process.py": "the pipe from the parent process",
    "cli/launcher.py": "the store in which nodes meet, with a list of the classes that it may name",
    "checkpoint/metadata.py": "a checkpoint, with a list of the classes that it may name",
    "rewards/worker.py": "the socket pair of a parent and its child",
    "workers/plain_data.py": "the socket pair of a parent and its child, of which plain data is read",
    "workers/frames.py": "the socket pair of a parent and its child",
    "topology/ranks.py": "the process group of the ranks, whose own messages are pickles too",
}


@cache
def nodes():
    """Return (module, node) of all calls and classes of the package."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call | ast.ClassDef)
    ]


@cache
def calls():
    """Return (module, call, its function as text) of the package."""
    return [(module, node, ast.unparse(node.func)) for module, node in nodes() if isinstance(node, ast.Call)]


def constant(call, name):
    """Return the value of a keyword argument that is a constant, or None."""
    found = [each.value for each in call.keywords if each.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


@pytest.mark.change
def test_torch_loads_weights_only_and_numpy_no_pickles():
    loads = [(module, call, name) for module, call, name in calls() if name in ("torch.load", "np.load", "numpy.load")]
    assert loads
    wrong = [
        f"{module}:{call.lineno} {ast.unparse(call)}"
        for module, call, name in loads
        if (constant(call, "weights_only") if name == "torch.load" else constant(call, "allow_pickle") is False)
        is not True
    ]
    assert wrong == []


@pytest.mark.change
def test_only_modules_with_a_private_channel_unpickle():
    loading = ("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads")
    found = {module for module, _, name in calls() if name in loading}
    classes = {
        module
        for module, node in nodes()
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "pickle.Unpickler" for base in node.bases)
    }
    assert found | classes == set(UNPICKLING)


@pytest.mark.change
def test_code_of_a_model_is_not_trusted_and_yaml_is_read_safely():
    for module, call, name in calls():
        if name.endswith((".from_pretrained", ".from_config")) and name.startswith("Auto"):
            assert constant(call, "trust_remote_code") is False, f"{module}:{call.lineno}"
        assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), f"{module}:{call.lineno}"
        assert constant(call, "shell") is not True and name != "os.system", f"{module}:{call.lineno}"

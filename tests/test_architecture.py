"""The architecture, as the imports show it: subpackages import only those to their left, and torch is imported late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rl_megatron"
# A subpackage may import itself and those before it.
PACKAGES = (
    "config", "topology", "workers", "data", "batching", "logprobs", "losses", "model", "checkpoint",
    "weight_sync", "policy", "training", "generation", "rewards", "rollouts", "observability", "evaluation",
    "algorithms", "runs", "service", "certify", "plan", "doctor", "compat", "cli", "api",
)  # fmt: skip
FOR_ALL = {"log", "disk", "timing", "rl_megatron"}  # rl_megatron: the package root, which holds the version
IMPORT_ANYTHING = {"__main__"}
KNOWN = {*PACKAGES, *FOR_ALL, *IMPORT_ANYTHING}
MEGATRON_PACKAGES = {"topology", "model", "checkpoint", "training", "generation", "plan"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return a module's subpackage: losses for rl_megatron.losses.nll, and rl_megatron for the package's root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports_of(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Return (line, absolute dotted name) of all imports in `source`, also in functions and for type checking.

    `from package import name` counts as `package.name`. That is the right package if `name` is a module and if it is a
    member; if the package is the root or a namespace such as `megatron.core`, only the name says which module it is.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join(package + ([node.module] if node.module else []))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the rules that the imports of a module break, as "line: rule"."""
    package, broken = package_of(module), []
    for line, name in imports_of(source, module, is_package):
        if name.split(".")[0] == "rl_megatron":
            target = package_of(name)
            if target not in KNOWN:  # a name of the root, as __version__
                target = "rl_megatron"
            if package in IMPORT_ANYTHING or target in FOR_ALL or target == package:
                pass
            elif target in IMPORT_ANYTHING or package in FOR_ALL:
                broken.append(f"{line}: {package} imports {name}")
            elif PACKAGES.index(target) > PACKAGES.index(package):
                broken.append(f"{line}: {package} imports {name}, which is to its right")
        elif name.split(".")[0] == "megatron":
            if package not in MEGATRON_PACKAGES:
                broken.append(f"{line}: {package} imports {name}; megatron-core belongs to {sorted(MEGATRON_PACKAGES)}")
            if "parallel_state" in name.split(".") and module != "rl_megatron.topology.topology":
                broken.append(f"{line}: {module} imports {name}; only topology/topology.py may")
    return broken


def test_imports_point_left():
    found = {}
    for path in MODULES:
        module = module_name(path)
        assert package_of(module) in KNOWN, f"{module}: its subpackage is not in PACKAGES"
        found[module] = violations(path.read_text(), module, path.name == "__init__.py")
    assert {module: broken for module, broken in found.items() if broken} == {}


@pytest.mark.parametrize(
    ("source", "module", "message"),
    [
        (
            "from rl_megatron.training import checkpoint",
            "rl_megatron.losses.nll",
            "losses imports rl_megatron.training.checkp",
        ),
        (
            "def f():\n    import rl_megatron.training",
            "rl_megatron.model.build",
            "2: model imports rl_megatron.training",
        ),
        ("from rl_megatron import training", "rl_megatron.model.build", "model imports rl_megatron.training"),
        ("from ..training import optimizer", "rl_megatron.data.batch", "data imports rl_megatron.training.optimizer"),
        ("from .compat import nemo_rl", "rl_megatron", "rl_megatron imports rl_megatron.compat.nemo_rl"),
        ("from rl_megatron.config import errors", "rl_megatron.log", "log imports rl_megatron.config.errors"),
        ("from megatron.core import mpu", "rl_megatron.losses.nll", "losses imports megatron.core.mpu"),
        ("import megatron", "rl_megatron.runs.run", "runs imports megatron"),
        ("from megatron.core import parallel_state", "rl_megatron.training.optimizer", "only topology/topology.py may"),
        ("import megatron.core.parallel_state as mpu", "rl_megatron.training", "only topology/topology.py may"),
    ],
)
def test_a_violation_is_found(source, module, message):
    assert any(message in violation for violation in violations(source, module, is_package=module == "rl_megatron"))


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from rl_megatron import __version__, log", "rl_megatron.config.loading.load"),
        ("from rl_megatron.losses import NLLLoss", "rl_megatron.losses.clipped_pg"),
        ("from . import nll", "rl_megatron.losses.registry"),
        ("from rl_megatron.training import megatron_policy", "rl_megatron.compat.nemo_rl"),
        ("from megatron.core import parallel_state", "rl_megatron.topology.topology"),
    ],
)
def test_allowed_imports_are_not_violations(source, module):
    assert violations(source, module) == []


# --- cycles ---


def module_graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Return the modules of `sources` that each of them imports.

    `from package import name` imports `package.name` if that is a module, and the package's own `__init__` if not.

    Args:
        sources: For each module, its source and whether it is a package's `__init__`.
    """
    graph = {}
    for module, (source, is_package) in sources.items():
        targets = set()
        for _, name in imports_of(source, module, is_package):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            targets.add(name)
        graph[module] = targets - {module, ""}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not: the strongly connected components."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        waiting = list(graph[module])
        reached[module] = set()
        while waiting:
            target = waiting.pop()
            if target not in reached[module]:
                reached[module].add(target)
                waiting += graph[target]
    components = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return sorted(map(list, components))


def test_no_modules_import_each_other():
    sources = {module_name(path): (path.read_text(), path.name == "__init__.py") for path in MODULES}
    assert cycles(module_graph(sources)) == []


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"p": "", "p.a": "from p import b", "p.b": "from p.a import f"}, [["p.a", "p.b"]]),
        ({"p": "", "p.a": "from p.b import f", "p.b": "if TYPE_CHECKING:\n    import p.a"}, [["p.a", "p.b"]]),
        ({"p": "from p.a import f", "p.a": "from p import g"}, [["p", "p.a"]]),
        (
            {"p": "from p.a import f", "p.a": "from p import b", "p.b": "def f():\n    from . import a"},
            [["p.a", "p.b"]],
        ),
        ({"p": "", "p.a": "from p import b", "p.b": "import p.c", "p.c": "from .a import f"}, [["p.a", "p.b", "p.c"]]),
        ({"p": "from p.a import f", "p.a": "from p import b", "p.b": "import torch"}, []),
    ],
)
def test_a_cycle_is_found(sources, found):
    graph = module_graph({module: (source, module == "p") for module, source in sources.items()})
    assert cycles(graph) == found


# --- the policy is composed of parts and inherits no behaviour ---


def inherited_behaviour(sources: dict[str, str]) -> list[str]:
    """Return "Class(Ancestor): methods" for every ancestor in `sources` that has methods which are not abstract."""
    classes = {
        node.name: node
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(node: ast.ClassDef) -> set[str]:
        """Return the ancestors of a class in `sources`; a base is found by its last name, without type arguments."""
        bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases} & classes.keys() - {
            node.name
        }
        return bases | {name for base in bases for name in ancestors(classes[base])}

    return [
        f"{name}({ancestor}): {', '.join(methods)}"
        for name, node in classes.items()
        for ancestor in sorted(ancestors(node))
        if (methods := concrete_methods(classes[ancestor]))
    ]


def concrete_methods(node: ast.ClassDef) -> list[str]:
    return [
        method.name
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("abstractmethod" in ast.unparse(decorator) for decorator in method.decorator_list)
    ]


@pytest.mark.change
def test_no_class_of_the_policy_inherits_behaviour():
    sources = {module_name(path): path.read_text() for path in MODULES}
    classes = {name for module in sources if package_of(module) == "training" for name in classes_in(sources[module])}
    wrong = [line for line in inherited_behaviour(sources) if line.partition("(")[0] in classes]
    assert classes and wrong == []


def classes_in(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def test_inherited_behaviour_is_found():
    mixin = "class Mixin:\n    def work(self): ..."
    interface = "class Interface(ABC):\n    @abstractmethod\n    def work(self): ..."
    between = "class Between(Mixin[int]): ..."
    policy = "class Policy(Interface, parts.Between): ..."
    found = inherited_behaviour({"a": mixin, "b": interface, "c": between, "d": policy})
    assert found == ["Between(Mixin): work", "Policy(Mixin): work"]


def test_names_say_what_a_module_is_for():
    parts = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not parts & FORBIDDEN_NAMES
    assert not [part for part in parts if part.rpartition("_v")[2].isdigit() and "_v" in part]


def test_the_command_line_and_the_configuration_import_no_torch():
    program = (
        "import sys, rl_megatron.cli, rl_megatron.config.loading.load, rl_megatron.config.schema\n"
        "print(sorted(set(sys.modules) & {'torch', 'megatron', 'transformers', 'tensorboard', 'matplotlib'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_help_imports_no_torch():
    program = (
        "import sys\nfrom rl_megatron.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout

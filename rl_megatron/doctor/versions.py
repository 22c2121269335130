"""Check that the installed versions fit each other: Python, torch, megatron-core, numpy, transformers, GPU packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import machinery, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from rl_megatron.doctor.findings import Finding, ok, problem, warning

# Distributions whose requirements are compared with what is installed.
_COMPARED = ("torch", "megatron-core", "transformers", "numpy", "tokenizers")
_LAST_FOR_311 = Version("0.16.1")  # the last megatron-core for Python 3.11
_TRIED = {(3, 11): "0.16.1", (3, 12): "0.19.2"}  # the megatron-core of constraints.txt for each Python
_OLDEST_TRANSFORMER_ENGINE = Version("2.0")
_OLDEST_TRITON = Version("3.2")
_INSTALL = "scripts/install.sh installs the versions of constraints.txt"
_CUDA_OF_TORCH = re.compile(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)  # in torch/version.py


class Installed:
    """The distributions and modules in `path`, by default `sys.path`, found without importing any of them."""

    def __init__(self, path: Sequence[str] | None = None):
        self._path = None if path is None else list(path)

    def find_version(self, name: str) -> str | None:
        """Return the version of a distribution, or None if it is not installed."""
        distribution = self._find_distribution(name)
        return None if distribution is None else distribution.version

    def list_requirements(self, name: str) -> list[Requirement]:
        """Return the requirements of a distribution in this environment, without those of its extras."""
        distribution = self._find_distribution(name)
        texts = (distribution.requires or []) if distribution is not None else []
        requirements = [Requirement(text) for text in texts]
        return [needed for needed in requirements if needed.marker is None or needed.marker.evaluate({"extra": ""})]

    def find_module(self, name: str) -> Path | None:
        """Return the directory of a top-level package or the file of a top-level module, or None if it is not found."""
        spec = machinery.PathFinder.find_spec(name, self._path)
        if spec is None:
            return None
        directories = list(spec.submodule_search_locations or [])
        return Path(directories[0]) if directories else Path(spec.origin) if spec.origin else None

    def find_torch_cuda(self) -> tuple[int, int] | None:
        """Return the CUDA version that torch was built for, or None if torch is a CPU build or not installed."""
        torch = self.find_module("torch")
        if torch is None or not (torch / "version.py").is_file():
            return None
        match = _CUDA_OF_TORCH.search((torch / "version.py").read_text("utf-8"))
        return None if match is None else (int(match[1]), int(match[2]))

    def _find_distribution(self, name: str) -> metadata.Distribution | None:
        if self._path is None:
            return next(iter(metadata.distributions(name=name)), None)
        return next(iter(metadata.distributions(name=name, path=self._path)), None)


def check_versions(installed: Installed, python: tuple[int, int] | None = None) -> list[Finding]:
    """Check that the installed versions fit the requirements of this package and of its main dependencies."""
    python = python or (sys.version_info.major, sys.version_info.minor)
    findings = [*_check_python(installed, python), *_check_ranges(installed), *_check_requirements(installed)]
    if findings:
        return findings
    names = ("torch", "megatron-core", "transformers", "numpy")
    listed = ", ".join(f"{name} {installed.find_version(name)}" for name in names)
    return [ok("versions", f"Python {python[0]}.{python[1]}, {listed}")]


def _check_python(installed: Installed, python: tuple[int, int]) -> list[Finding]:
    text = installed.find_version("megatron-core")
    name = f"Python {python[0]}.{python[1]}"
    if python < (3, 11):
        return [
            problem("versions", f"{name}: this package needs 3.11 or newer", "PYTHON=python3.12 scripts/install.sh")
        ]
    if text is None:
        return []  # `_check_ranges` reports it
    version = Version(text)
    if python == (3, 11) and version > _LAST_FOR_311:
        return [
            problem(
                "versions",
                f"megatron-core {text} with {name}: {_LAST_FOR_311} is its last release for Python 3.11",
                f"pip install megatron-core=={_LAST_FOR_311}, or use Python 3.12 or newer",
            )
        ]
    if python >= (3, 12) and version <= _LAST_FOR_311:
        tried = _TRIED[3, 12]
        return [
            warning(
                "versions",
                f"megatron-core {text} with {name} was not tried; {tried} was",
                f"pip install megatron-core=={tried}",
            )
        ]
    return []


def _check_ranges(installed: Installed) -> list[Finding]:
    """Compare the installed versions with the ranges of setup.py."""
    if installed.find_version("rl-megatron") is None:
        return [
            warning(
                "versions",
                "this package runs from its sources and is not installed, so its version ranges are unknown",
                "pip install --no-deps --editable . in the repository",
            )
        ]
    findings = []
    for needed in installed.list_requirements("rl-megatron"):
        version = installed.find_version(needed.name)
        if version is None:
            findings.append(problem("versions", f"{needed.name} is not installed ({needed} is needed)", _INSTALL))
        elif not needed.specifier.contains(version, prereleases=True):
            findings.append(
                problem(
                    "versions",
                    f"{needed.name} {version} is outside the range {needed.specifier} of this package",
                    f'pip install "{needed.name}{needed.specifier}"; {_INSTALL}',
                )
            )
    return findings


def _check_requirements(installed: Installed) -> list[Finding]:
    """Compare the installed versions with the ranges that the most important packages require."""
    findings = []
    for name in _COMPARED:
        for needed in installed.list_requirements(name):
            version = installed.find_version(needed.name)
            # A missing requirement may be on purpose: NVIDIA's image builds torch without metadata.
            if version is not None and not needed.specifier.contains(version, prereleases=True):
                findings.append(
                    problem(
                        "versions",
                        f"{name} {installed.find_version(name)} needs {needed.name}{needed.specifier}, and {version} "
                        "is installed",
                        f'pip install "{needed.name}{needed.specifier}"',
                    )
                )
    return findings


def check_transformer_engine(installed: Installed, has_gpu: bool) -> list[Finding]:
    """Check that Transformer Engine is installed completely and fits torch's CUDA version."""
    name, extra = "Transformer Engine", "pip install --no-build-isolation 'transformer-engine[pytorch]'"
    version = installed.find_version("transformer-engine")
    if version is None:
        if not has_gpu:
            return [ok(name, "not installed; it needs a GPU")]
        return [warning(name, "not installed, so layers use the slower portable torch modules", extra)]
    if Version(version) < _OLDEST_TRANSFORMER_ENGINE:
        return [problem(name, f"{version} is older than {_OLDEST_TRANSFORMER_ENGINE}", f"{extra} --upgrade")]
    if installed.find_module("transformer_engine_torch") is None:
        return [problem(name, f"{version} has no module transformer_engine_torch, its part for torch", extra)]
    cuda = installed.find_torch_cuda()
    for major in (11, 12, 13, 14):
        if (
            installed.find_version(f"transformer-engine-cu{major}") is not None
            and cuda is not None
            and cuda[0] != major
        ):
            return [
                problem(
                    name,
                    f"its libraries are for CUDA {major}, and torch is built for CUDA {cuda[0]}.{cuda[1]}",
                    f"pip uninstall transformer-engine-cu{major}, and pip install 'transformer-engine[pytorch]'",
                )
            ]
    return [ok(name, version)]


def check_apex(installed: Installed) -> list[Finding]:
    """Check that the installed `apex` is NVIDIA's, and not the unrelated package of the same name."""
    version, module = installed.find_version("apex"), installed.find_module("apex")
    if version is None and module is None:
        return [ok("Apex", "not installed; it is optional")]
    if module is None or not (module / "multi_tensor_apply").is_dir():
        name = version or f"in {module}"
        message = f"the installed apex {name} is not NVIDIA's; PyPI's apex is an unrelated package"
        return [problem("Apex", message, "pip uninstall apex; NVIDIA's comes with its PyTorch container image")]
    return [ok("Apex", f"NVIDIA's {version or ''}".rstrip())]


def check_triton(installed: Installed, has_gpu: bool) -> list[Finding]:
    """Check that Triton is installed for the GPU kernels, and is not too old."""
    version = installed.find_version("triton")
    if version is None and installed.find_module("triton") is None:
        if not has_gpu:
            return [ok("Triton", "not installed; its kernels need a GPU")]
        remedy = "install the triton that torch's CUDA build names: pip install --force-reinstall torch"
        return [warning("Triton", "not installed, so logprobs use the slower torch kernels", remedy)]
    if version is not None and Version(version) < _OLDEST_TRITON:
        return [
            problem("Triton", f"{version} is older than {_OLDEST_TRITON}", f'pip install "triton>={_OLDEST_TRITON}"')
        ]
    return [ok("Triton", version or "installed without metadata")]

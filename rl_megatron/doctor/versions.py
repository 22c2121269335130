"""Check that the installed versions fit each other: Python, torch, megatron-core, numpy, transformers, GPU packages."""

from __future__ import annotations

import sys

from packaging.version import Version

from rl_megatron.doctor.findings import Finding, ok, problem, warning
from rl_megatron.doctor.installed import Installed

# Distributions whose own requirements are compared with what is installed.
_COMPARED = ("torch", "megatron-core", "transformers", "numpy", "tokenizers")
_LAST_FOR_311 = Version("0.16.1")  # the last megatron-core for Python 3.11
_TRIED = {(3, 11): "0.16.1", (3, 12): "0.19.2"}  # constraints.txt: the megatron-core that a Python was tried with
_OLDEST_TRANSFORMER_ENGINE = Version("2.0")
_OLDEST_TRITON = Version("3.2")
_INSTALL = "scripts/install.sh installs the versions of constraints.txt"


def check_versions(installed: Installed, python: tuple[int, int] | None = None) -> list[Finding]:
    """Return what is wrong with the versions of this package's requirements and of theirs."""
    python = python or (sys.version_info.major, sys.version_info.minor)
    found = [*_check_python(installed, python), *_check_ranges(installed), *_check_requirements(installed)]
    if found:
        return found
    names = ("torch", "megatron-core", "transformers", "numpy")
    listed = ", ".join(f"{name} {installed.version(name)}" for name in names)
    return [ok("versions", f"Python {python[0]}.{python[1]}, {listed}")]


def _check_python(installed: Installed, python: tuple[int, int]) -> list[Finding]:
    text = installed.version("megatron-core")
    name = f"Python {python[0]}.{python[1]}"
    if python < (3, 11):
        return [
            problem("versions", f"{name}: this package needs 3.11 or newer", "PYTHON=python3.12 scripts/install.sh")
        ]
    if text is None:
        return []  # the ranges report it
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
    """Compare what is installed with the ranges of setup.py."""
    if installed.version("rl-megatron") is None:
        return [
            warning(
                "versions",
                "this package runs from its sources and is not installed, so its ranges cannot be compared",
                "pip install --no-deps --editable . in the repository",
            )
        ]
    findings = []
    for needed in installed.requirements("rl-megatron"):
        version = installed.version(needed.name)
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
    """Compare what is installed with the ranges that the most important packages state."""
    findings = []
    for name in _COMPARED:
        for needed in installed.requirements(name):
            version = installed.version(needed.name)
            # A package without its requirements may be on purpose: NVIDIA's image builds torch without metadata.
            if version is not None and not needed.specifier.contains(version, prereleases=True):
                findings.append(
                    problem(
                        "versions",
                        f"{name} {installed.version(name)} needs {needed.name}{needed.specifier}, and {version} is "
                        "installed",
                        f'pip install "{needed.name}{needed.specifier}"',
                    )
                )
    return findings


def check_transformer_engine(installed: Installed, has_gpu: bool) -> list[Finding]:
    """Return whether Transformer Engine is there, is whole and fits torch's CUDA version."""
    name, extra = "Transformer Engine", "pip install --no-build-isolation 'transformer-engine[pytorch]'"
    version = installed.version("transformer-engine")
    if version is None:
        if not has_gpu:
            return [ok(name, "not installed; it needs a GPU")]
        return [warning(name, "not installed, so that layers use the slower portable torch modules", extra)]
    if Version(version) < _OLDEST_TRANSFORMER_ENGINE:
        return [problem(name, f"{version} is older than {_OLDEST_TRANSFORMER_ENGINE}", f"{extra} --upgrade")]
    if installed.module("transformer_engine_torch") is None:
        return [problem(name, f"{version} has no module transformer_engine_torch, its part for torch", extra)]
    cuda = installed.cuda_of_torch()
    for major in (11, 12, 13, 14):
        if installed.version(f"transformer-engine-cu{major}") is not None and cuda is not None and cuda[0] != major:
            return [
                problem(
                    name,
                    f"its libraries are for CUDA {major}, and torch is built for CUDA {cuda[0]}.{cuda[1]}",
                    f"pip uninstall transformer-engine-cu{major}, and pip install 'transformer-engine[pytorch]'",
                )
            ]
    return [ok(name, version)]


def check_apex(installed: Installed) -> list[Finding]:
    """Return whether the installed `apex` is NVIDIA's, and not the unrelated package of the index."""
    version, module = installed.version("apex"), installed.module("apex")
    if version is None and module is None:
        return [ok("Apex", "not installed; it is optional")]
    if module is None or not (module / "multi_tensor_apply").is_dir():
        which = version or f"in {module}"
        message = f"the installed apex {which} is not NVIDIA's; PyPI's apex is an unrelated package"
        return [problem("Apex", message, "pip uninstall apex; NVIDIA's comes with its PyTorch container image")]
    return [ok("Apex", f"NVIDIA's {version or ''}".rstrip())]


def check_triton(installed: Installed, has_gpu: bool) -> list[Finding]:
    """Return whether Triton is there for the GPU kernels, and not too old."""
    version = installed.version("triton")
    if version is None and installed.module("triton") is None:
        if not has_gpu:
            return [ok("Triton", "not installed; its kernels need a GPU")]
        remedy = "install the triton that torch's CUDA build names: pip install --force-reinstall torch"
        return [warning("Triton", "not installed, so that logprobs use the slower torch kernels", remedy)]
    if version is not None and Version(version) < _OLDEST_TRITON:
        return [
            problem("Triton", f"{version} is older than {_OLDEST_TRITON}", f'pip install "triton>={_OLDEST_TRITON}"')
        ]
    return [ok("Triton", version or "installed without metadata")]

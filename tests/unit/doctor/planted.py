"""Environments in which one thing is wrong: distributions without code, a fake nvidia-smi, and fake Pythons."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.doctor.versions import Installed

# What fits together: the versions of constraints.txt, and what this package and torch require.
WHOLE = {
    "rl-megatron": ("0.1.0", ["torch>=2.10,<2.15", "megatron-core>=0.16.1,<0.20", "numpy>=1.26", "transformers>=5"]),
    "torch": ("2.13.0", ["filelock", 'triton==3.7.1; platform_system == "Linux"']),
    "megatron-core": ("0.19.2", ["torch", "numpy"]),
    "numpy": ("2.4.6", []),
    "transformers": ("5.23.0", ["tokenizers>=0.22,<0.24"]),
    "tokenizers": ("0.23.0", []),
    "triton": ("3.7.1", []),
}


def installed(directory: Path, *without: str, cuda: str | None = None, **versions: str) -> Installed:
    """Return an environment of the distributions in `WHOLE`.

    Args:
        directory: Where its files are written.
        without: Distributions that it lacks.
        cuda: The CUDA version of its torch.
        versions: Other versions of distributions, and further distributions, with _ for -.
    """
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    for name in {*WHOLE, *named} - {*without}:
        version, requirements = WHOLE.get(name, ("", []))
        distribution = directory / f"{name.replace('-', '_')}-{named.get(name, version)}.dist-info"
        distribution.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {named.get(name, version)}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        (distribution / "METADATA").write_text("\n".join(lines) + "\n")
    module(directory, "torch", "version.py", f"cuda: Optional[str] = {cuda!r}\n")
    return Installed([str(directory)])


def module(directory: Path, name: str, file: str = "__init__.py", text: str = "") -> None:
    """Write a file of a package."""
    path = directory / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    (directory / name / "__init__.py").touch()
    path.write_text(text)


def program(path: Path, script: str) -> None:
    """Write a shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def nvidia_smi(directory: Path, *gpus: str, cuda: str = "13.0") -> None:
    """Write an `nvidia-smi` that knows the GPUs, each a line such as "H100, 100, 81559, 580.1"."""
    listed = "\n".join(gpus)
    program(
        directory / "nvidia-smi",
        f"if [ $# -gt 0 ]; then cat <<END\n{listed}\nEND\nelse echo '| CUDA Version: {cuda}   |'; fi",
    )

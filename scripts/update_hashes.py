#!/usr/bin/env python3
"""Write hashes.txt and hashes-adapters.txt: what scripts/install.sh and install_adapters.sh compare downloads with.

    scripts/update_hashes.py

Run it after a change of constraints.txt, of setup.py's requirements, or of the releases below. It asks the package
index alone, with `uv` in an environment of its own, and writes the hash of every file that the index has of a release:
those of all platforms and Pythons. Where pip finds a CPU build of torch (an extra index or PIP_FIND_LINKS), the hash of
the build for this machine is written, too. Those of earlier calls stay as long as the release is the same.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ADAPTERS = "verifiers==0.3.1 openenv-core==0.3.0 setuptools==84.2.1"
OLDEST = "3.11.5"  # what mkdocs-material's extensions need; Python 3.11 of before installs no `docs` and `dev`
# The extras of setup.py whose requirements constraints.txt does not pin.
_WITHOUT_HASHES = {"te", "verifiers", "openenv"}
_OF_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$)")  # what a CUDA build of torch needs besides
_PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", re.MULTILINE)
_HEAD = """\
# The SHA-256 of every file of the releases that {what} installs; scripts/update_hashes.py writes this file.
# {how}
"""


def extras() -> list[str]:
    """Return the extras of setup.py that have hashes."""
    text = (REPO / "setup.py").read_text().partition("extras_require={")[2].partition("\n    }")[0]
    names = re.findall(r'^        "(\w+)": ', text, re.MULTILINE)
    return [name for name in names if name not in _WITHOUT_HASHES]


class Uv:
    """`uv` in an environment of its own."""

    def __init__(self, directory: Path):
        """Install it into a directory."""
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([directory / "bin" / "pip", "install", "--quiet", "uv"], check=True)
        self._command = [directory / "bin" / "uv", "pip", "compile", "--no-config", "--quiet", "--universal"]

    def compile(self, requirements: str, *options: str) -> str:
        """Return the pins, with their conditions, of what some requirements need."""
        options = ("--no-header", "--no-annotate", "--python-version", OLDEST, "--no-emit-index-url", *options)
        command = [*self._command, *options, "-"]
        done = subprocess.run(command, input=requirements, cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"uv cannot resolve {requirements!r}: {done.stderr}")
        return done.stdout


def blocks_of(pins: str) -> dict[tuple[str, str], str]:
    """Return the lines of each pin, by name and version. What only other systems than Linux need is left out."""
    parts = re.split(r"\n(?=\S)", pins.strip())
    found = {match.groups(): part for part in parts if (match := _PIN.match(part))}
    return {key: part for key, part in found.items() if not re.search(r"; sys_platform == '(win32|emscripten)'", part)}


def hashes_of(part: str) -> list[str]:
    """Return the hashes of a pin."""
    return re.findall(r"sha256:[0-9a-f]{64}", part)


def cpu_build(version: str, python: str, directory: Path) -> str | None:
    """Return the pin of the CPU build of a release of torch that pip prefers here; None if it prefers the index's."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", directory]
    command = [sys.executable, "-m", "pip", "download", *options, f"torch=={version}+cpu"]
    if subprocess.run(command, capture_output=True).returncode:
        return None
    (file,) = directory.iterdir()
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    compared = {"3.11": "<", "3.12": ">="}[python]
    marker = f"python_full_version {compared} '3.12' and platform_machine == '{platform.machine()}'"
    return f"torch=={version}+cpu ; {marker} \\\n    --hash=sha256:{digest}"


def write(path: Path, what: str, how: str, blocks: list[tuple[str, str]]) -> None:
    """Write a file of hashes, whose blocks have a comment and a pin."""
    head = _HEAD.format(what=what, how=how)
    path.write_text(head + "".join(f"\n{comment}{part}\n" for comment, part in blocks))
    print(f"{path.name}: {len(blocks)} releases, {sum(len(hashes_of(part)) for _, part in blocks)} hashes")


def main() -> None:
    """Write both files."""
    path = REPO / "hashes.txt"
    earlier = blocks_of(re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)) if path.exists() else {}
    constraints = ("--constraint", "constraints.txt")
    with tempfile.TemporaryDirectory() as scratch:
        uv = Uv(Path(scratch) / "uv")
        groups = {}
        for name in ("package", *extras()):
            target = "." if name == "package" else f".[{name}]"
            groups[name] = {key for key, _ in _PIN.findall(uv.compile(f"{target}\nsetuptools>=77", *constraints))}
        blocks = []
        for (name, version), part in blocks_of(uv.compile(".[dev]", *constraints, "--generate-hashes")).items():
            if name == "torch":
                python = "3.11" if "< '3.12'" in part else "3.12"
                found = cpu_build(version, python, Path(scratch) / version) or earlier.get((name, f"{version}+cpu"))
                blocks += [("# CPU\n", found)] if found is not None else []
            of = [group for group, names in groups.items() if name in names]
            of = ["package"] if "package" in of else of
            if _OF_CUDA.match(name):
                of = [*(["triton", "dev"] if name == "triton" else []), "CUDA"]
            blocks.append((f"# {', '.join(of)}\n", part))
        adapters = blocks_of(uv.compile(ADAPTERS.replace(" ", "\n"), "--generate-hashes"))
    how = "The comment before a release says what needs it: the package, or extras, or builds of torch for CPU or CUDA."
    write(path, "scripts/install.sh", how, blocks)
    how = "pip install --require-hashes -r reads it."
    parts = [("", part) for part in adapters.values()]
    write(REPO / "hashes-adapters.txt", "scripts/install_adapters.sh", how, parts)


if __name__ == "__main__":
    main()

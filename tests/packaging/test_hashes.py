"""What the scripts install is what was tried: every release is pinned, and has the hashes of its files."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FILES = ("hashes.txt", "hashes-adapters.txt")
NEEDED = ("pip", "pip-*", "setuptools", "setuptools-*", "_distutils_hack")
PIN = re.compile(r"([a-z0-9][a-z0-9.-]*)==(\S+?)( ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)")


def pins(file):
    """Return (group, name, version) of each release of a file of hashes. Every line must belong to one."""
    found = []
    for block in re.split(r"\n\n+", (REPO / file).read_text().strip())[1:]:
        comment, _, pin = block.partition("\n") if block.startswith("# ") else ("", "", block)
        match = PIN.fullmatch(pin)
        assert match, f"{file} has a release without a version or hashes: {pin[:200]}"
        found.append((comment.removeprefix("# ").split(", "), match[1], match[2]))
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_release_has_hashes_and_no_address_of_a_registry(file):
    assert len(pins(file)) > 100
    assert not re.search(r"https?:|\.org|\.com|--index|--find-links", (REPO / file).read_text())


def test_the_pins_with_hashes_are_those_of_the_constraints():
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pairs = [line.partition(";")[0].strip().split("==") for line in lines if not line.startswith("#")]
    pinned = {f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}" for name, version in pairs}
    hashed = {f"{name}=={version}" for of, name, version in pins("hashes.txt") if "package" in of or "dev" in of}
    assert pinned - hashed == set(), "run scripts/update_hashes.py"
    assert {pin.partition("==")[0] for pin in hashed - pinned} <= {"httpx2-jsfetch"}, "constraints.txt lacks a pin"
    for name in ("setuptools", "torch", "megatron-core", "numpy"):
        assert any(pin.startswith(f"{name}==") for pin in hashed)


def test_the_adapters_are_those_that_the_script_names():
    (default,) = re.findall(r"ADAPTERS:-([^}]+)}", (REPO / "scripts" / "install_adapters.sh").read_text())
    assert set(default.split()) <= {f"{name}=={version}" for _, name, version in pins("hashes-adapters.txt")}


@pytest.fixture
def tree(tmp_path):
    """A copy of install.sh whose package and only dependency are tiny, and a Python whose pip looks in a directory."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "install.sh").write_text((REPO / "scripts" / "install.sh").read_text())
    (tmp_path / "constraints.txt").write_text("tiny==1.0\n")
    setup = "from setuptools import setup\nsetup(name='own', py_modules=[], install_requires=['tiny'])\n"
    (tmp_path / "setup.py").write_text(setup)
    (tmp_path / "pyproject.toml").write_text("")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    installed = Path(pytest.__file__).parents[1]
    for path in (path for name in NEEDED for path in installed.glob(name)):
        (packages / path.name).symlink_to(path)
    return tmp_path


def wheel(directory, text):
    """Write the wheel tiny 1.0, and return its hash."""
    tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = directory / "tiny-1.0-py3-none-any.whl"
    files = {
        "tiny.py": text,
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": tags,
        "tiny-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(zipfile.ZipInfo(name), content)  # without the time, so that the hash is the same again
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(tree, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tree)}
    environment |= {"VENV": str(tree / "venv"), "PIP_NO_BUILD_ISOLATION": "0"} | variables  # 0: there is none
    command = ["bash", tree / "scripts" / "install.sh"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.change
def test_a_file_with_another_hash_is_refused_unless_hashes_are_turned_off(tree):
    tried = wheel(tree, "tried = True")
    (tree / "hashes.txt").write_text(f"# About\n\n# package\ntiny==1.0 \\\n    --hash=sha256:{tried}\n")
    wheel(tree, "tried = False")
    refused = install(tree)
    assert refused.returncode == 1 and "DO NOT MATCH THE HASHES" in refused.stderr, refused.stderr
    assert "HASHES=off installs without comparing" in refused.stderr
    assert not list(tree.glob("venv/lib/python*/site-packages/tiny.py"))
    without = install(tree, HASHES="off")
    assert without.returncode == 0 and without.stdout.count("HASHES=off: only the versions") == 1, without.stderr
    (file,) = tree.glob("venv/lib/python*/site-packages/tiny.py")
    file.unlink()
    (tree / "venv" / ".installed").unlink()
    for record in tree.glob("venv/lib/python*/site-packages/tiny-1.0.dist-info/*"):
        record.unlink()
    assert wheel(tree, "tried = True") == tried
    accepted = install(tree)
    assert accepted.returncode == 0 and "HASHES" not in accepted.stdout, accepted.stderr
    (file,) = tree.glob("venv/lib/python*/site-packages/tiny.py")
    assert file.read_text() == "tried = True"

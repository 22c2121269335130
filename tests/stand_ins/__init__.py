"""Stand-ins for servers that need a GPU, and how tests start them."""

import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def python_with_sglang(directory: Path) -> str:
    """Write a Python that finds the stand-in for SGLang, and return its path."""
    path = directory / "python-with-sglang"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(HERE))} exec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return str(path)

"""Transformer Engine's Python without its compiled extension: its layers and its optimizer are built, but cannot run.

Its wheel of 1.2 MB has all the Python. What it takes from the extension, while it is imported and builds modules, has a
stand-in here.
"""

from __future__ import annotations

import importlib
import os
import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any


class _Enumeration(type):
    """The type of a class that gives each attribute it is asked for a number of its own."""

    @property
    def __members__(cls) -> dict[str, int]:
        """Return what it was asked for. Transformer Engine compares this with its own list, after asking for all."""
        return {name: member for name, member in vars(cls).items() if isinstance(member, cls)}

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = int.__new__(cls, next(cls.numbers))  # pyright: ignore
        member.name = name
        setattr(cls, name, member)
        return member


class _StandIn(ModuleType):
    """A module that has every name. Each is a class of integers, even if it is a function in the extension."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "numbers": count(),
            "__new__": lambda cls, *args, **options: int.__new__(cls, 0),
            "__class_getitem__": classmethod(lambda cls, item: cls),
        }
        found = _Enumeration(name, (int,), members)
        setattr(self, name, found)
        return found


def provide(directory: Path) -> str:
    """Make Transformer Engine in `directory` importable, and return its version. megatron-core may not be loaded yet.

    Args:
        directory: What its wheel has been unpacked into.
    """
    assert "megatron.core" not in sys.modules, "megatron-core has looked for Transformer Engine already"
    sys.path.insert(0, str(directory))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then loads no libraries of CUDA
    extension: Any = _StandIn("transformer_engine_torch")
    extension.get_cublasLt_version = lambda: 130000
    extension.get_cudnn_version = lambda: 91300
    extension.get_stream_priority_range = lambda *a: (-1, 0)
    extension.get_num_cublas_streams = lambda: 4
    sys.modules["transformer_engine_torch"] = extension
    # It compiles functions for an export to ONNX, with the operators of the extension.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = _StandIn("transformer_engine.pytorch.onnx_extensions")
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda framework: None
    return importlib.import_module("importlib.metadata").version("transformer-engine")

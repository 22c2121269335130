"""Record what ranks on Transformer Engine's layers consist of, from its own Python. No GPU and no CUDA are needed:

pip install --no-deps --target /tmp/transformer_engine transformer-engine==2.20.2    # 1.2 MB, without the libraries
python -m tests.transformer_engine.record /tmp/transformer_engine
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.transformer_engine.without_extension import provide

RECORDED = Path(__file__).parent / "recorded.json"


def record(directory: Path) -> dict[str, Any]:
    """Return what every family's ranks consist of with Transformer Engine in `directory`. Call it once in a process."""
    found = provide(directory)
    import torch

    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    from tests.transformer_engine.cases import FAMILIES, of_family

    versions = {"transformer-engine": found, "megatron-core": version("megatron-core"), "torch": version("torch")}
    return {"versions": versions, "families": {family: of_family(family) for family in FAMILIES}}


def text_of(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each name and its shapes."""
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {text_of(value[key], inner)}" for key in sorted(value)]
    elif isinstance(value, list) and value and isinstance(value[0], dict | str):
        items = [text_of(each, inner) for each in value]
    else:
        return json.dumps(value)
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closed}"


if __name__ == "__main__":
    RECORDED.write_text(text_of(record(Path(sys.argv[1]))) + "\n")

"""Write the table of GPUs and links of docs/plan.md:

python docs/generate_plan.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rl_megatron.plan.devices import LINKS, NETWORKS  # noqa: E402
from rl_megatron.topology.gpus import GPUS  # noqa: E402

PAGE = REPOSITORY / "docs" / "plan.md"


def table() -> str:
    """Return the GPUs and links as Markdown tables."""
    lines = [
        "| `--gpu` | memory, GiB | bf16, TFLOP/s | fp32, TFLOP/s | memory, GB/s | link |",
        "|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| `{gpu.name}` | {gpu.memory_gib:g} | {gpu.bf16_tflops:g} | {gpu.fp32_tflops:g} | {gpu.memory_gb_per_s:g} "
        f"| `{gpu.link}` |"
        for gpu in GPUS.values()
    ]
    lines += ["", "| key | name | GB/s |", "|---|---|---:|"]
    for key, links in (("plan.link", LINKS), ("plan.network", NETWORKS)):
        lines += [f"| `{key}` | `{name}` | {bandwidth:g} |" for name, bandwidth in links.items()]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page's text with its tables replaced."""
    block = f"<!-- gpus: written by docs/generate_plan.py -->\n{table()}\n<!-- end of gpus -->"
    replaced, count = re.subn(r"<!-- gpus: .*?<!-- end of gpus -->", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} places for the tables")
    return replaced


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE}")

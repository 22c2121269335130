"""How the contract suite starts each rollout engine. A new engine of the package gets an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.stand_ins import python_with_sglang

VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"


@dataclass(frozen=True)
class EngineCase:
    """What the suite needs to know of an engine.

    Attributes:
        overrides: Returns the overrides that choose it, from a directory for its files.
        filters: Whether its logprobs are exact with top-k and top-p at a temperature other than 1.
        missing: Why it cannot run here, or None.
    """

    overrides: Callable[[Path], list[str]]
    filters: bool = True
    missing: Callable[[], str | None] = lambda: None


def _sglang(directory: Path) -> list[str]:
    return [
        "generation.engine=sglang",
        f"generation.sglang.python={python_with_sglang(directory)}",
        "generation.sglang.enable_deterministic_inference=true",
    ]


def _vllm_missing() -> str | None:
    return None if VLLM.exists() else "scripts/install_vllm.sh has not installed vLLM"


CASES = {
    "embedded": EngineCase(lambda directory: ["generation.engine=embedded", "generation.batch_size=4"]),
    "transformers": EngineCase(
        lambda directory: [
            "generation.engine=transformers", "generation.num_engines=2", "generation.batch_size=4",
            "generation.refit_bucket_mb=0.05",
        ]
    ),
    "sglang": EngineCase(lambda directory: [*_sglang(directory), "generation.refit_bucket_mb=0.05"]),
    "vllm": EngineCase(
        lambda directory: [
            "generation.engine=vllm",
            f"generation.vllm.python={VLLM}",
            "generation.refit_bucket_mb=0.05",
        ],
        filters=False,
        missing=_vllm_missing,
    ),
}  # fmt: skip

"""The real data beside the checkout, `../shared/data`; a test that needs it skips, saying so, where it is absent."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def shared(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}, which is not beside this checkout")
    return path

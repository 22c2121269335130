"""Real data in `../shared/data`, next to the checkout; a test that needs it skips with a message if it is absent."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def shared(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}, which is not beside this checkout")
    return path

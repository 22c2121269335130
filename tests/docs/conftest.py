import pytest

from tests.end_to_end.launch import Forks


@pytest.fixture(scope="session")
def forks():
    return Forks()

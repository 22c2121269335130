from functools import partial

import pytest

from rl_megatron.logprobs import vocab_parallel_logprobs


@pytest.fixture
def logprobs_of(backend):
    """`vocab_parallel_logprobs` by each backend in turn."""
    return partial(vocab_parallel_logprobs, backend=backend)

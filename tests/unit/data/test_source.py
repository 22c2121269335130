"""Errors for data that a source does not provide name the configuration keys."""

from types import SimpleNamespace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.sources import DataSource


@pytest.mark.parametrize(
    ("read", "words"),
    [(lambda source: source.texts(), "set tokenizer.path"), (lambda source: source.heldout(None), "lacks heldout")],
    ids=["texts", "heldout"],
)
def test_what_a_source_does_not_provide_is_refused_by_name(read, words):
    with pytest.raises(ConfigError, match=rf"data.source=mine .*{words}"):
        read(DataSource(None, SimpleNamespace(source="mine")))

"""The registry of data sources; `data.source` selects one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rl_megatron.config.data_sources import register_source_config
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.schema import DataConfig, StageConfig
from rl_megatron.data.sources.mixed import MixedSource, split_mixture
from rl_megatron.data.sources.source import DataSource

SourceT = TypeVar("SourceT", bound=type[DataSource[Any]])

SOURCES: Registry[type[DataSource[Any]]] = Registry("data source")


def register_source(config: type[DataConfig]) -> Callable[[SourceT], SourceT]:
    """Return a class decorator that registers a `DataSource` for the data sections that `config` declares.

    Args:
        config: A subclass of `DataConfig`, decorated with `@section`. The default of its key `source` is the source's
            name. `config` is registered too, unless it already is.

    Raises:
        TypeError: `config` is not declared with `@section`, or has no name.
        ValueError: Another source has this name already.
    """
    name = register_source_config(config).source

    def add(source: SourceT) -> SourceT:
        SOURCES.register(name)(source)
        return source

    return add


def build_source(stage: StageConfig) -> DataSource[Any]:
    """Return the data source of a stage."""
    if stage.data.mix:
        return MixedSource(stage, [build_source(component_stage) for _, component_stage in split_mixture(stage)])
    return SOURCES[stage.data.source](stage, stage.data)

"""Convert weights from and to Hugging Face directories with a progress bar, for `rl-megatron convert`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from rl_megatron.checkpoint.directory import list_adapter_sections, read_manifest
from rl_megatron.checkpoint.hf_directory import MAX_SHARD_BYTES, check_export, check_import
from rl_megatron.config.checkpoint_metadata import MANIFEST, describe_missing_checkpoint
from rl_megatron.config.commands import format_command, format_override
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.peft import DEFAULT_ADAPTER

_SUFFIXES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def import_directory(source: str, target: str, base: str | None) -> None:
    """Convert a Hugging Face directory to a checkpoint, and print how to use it.

    With `base`, convert adapters in peft's format, which belong to the checkpoint `base`.
    """
    check_import(Path(source), Path(target), None if base is None else Path(base))
    from rl_megatron.checkpoint import hf_convert, unused_rows  # here, because they import torch and megatron-core

    console = _make_console()
    if base is not None:
        manifest = hf_convert.import_peft(Path(source), Path(base), Path(target))
        ranks = {section["adapter_name"]: section["r"] for section in list_adapter_sections(manifest)}
        console.print(f"{target}: {_describe_adapters(ranks)}. To use the model with it:")
    else:
        with show_progress(f"import {source}", console) as report:
            manifest = hf_convert.import_weights(Path(source), Path(target), report)
        unused = unused_rows.find_unused_rows(Path(source))
        if unused is not None:
            console.print(f"{source}: {unused}")
        console.print(f"{target}: a checkpoint of {manifest['model']['num_layers']} layers. To start from it:")
    output = format_override("output_dir", f"outputs/{Path(target).name}")
    start = format_override("init_from", target), "data.path=path/to/data", output
    console.print(f"  {format_command('train', 'model=init_from', *start)}")


def export_checkpoint(
    source: str,
    target: str,
    max_shard_size: str | None,
    merge: bool,
    adapter: str | None = None,
    cut_vocabulary: bool = False,
) -> None:
    """Convert a checkpoint to a Hugging Face directory, or adapters to peft's format, and print the result.

    Args:
        source: The checkpoint to read.
        target: The directory to write.
        max_shard_size: The maximum size of a file of weights, such as "5GB"; None for the default.
        merge: Whether adapters are merged into their base.
        adapter: The name of the adapter to write; None for all adapters.
        cut_vocabulary: Whether to leave out the rows of the embedding and the head that belong to no token.
    """
    if Path(source).is_dir() and not (Path(source) / MANIFEST).is_file():
        remedy = describe_missing_checkpoint(
            Path(source), lambda checkpoint: format_command("convert", "export", checkpoint, target)
        )
        raise ConfigError(f"{source} {remedy}")
    limit = MAX_SHARD_BYTES if max_shard_size is None else parse_size(max_shard_size)
    is_adapter = check_export(Path(source), Path(target), adapter)
    if merge and not is_adapter:
        raise ConfigError(f"--merge is for an adapter, but checkpoint {source} holds a whole model; leave out --merge")
    if cut_vocabulary and is_adapter and not merge:
        raise ConfigError(
            f"--cut-vocabulary is for whole models, but checkpoint {source} holds an adapter; add --merge, or leave "
            "out --cut-vocabulary"
        )
    from rl_megatron.checkpoint import hf_convert, unused_rows  # here, because they import torch and megatron-core

    console = _make_console()
    if is_adapter and not merge:
        configs = hf_convert.export_peft(Path(source), Path(target), adapter)
        console.print(
            f"{target}: {_describe_adapters({name: config['r'] for name, config in configs.items()})}, in peft's format"
        )
        return
    with show_progress(f"export {source}", console) as report:
        config = hf_convert.export_weights(Path(source), Path(target), limit, report, cut_vocabulary=cut_vocabulary)
    console.print(f"{target}: {config['architectures'][0]}, as transformers loads it")
    if read_manifest(Path(source)).get("head", "lm") == "lm":
        unused = unused_rows.find_unused_rows(Path(target))
        if unused is not None:
            console.print(f"{target}: {unused}; --cut-vocabulary leaves them out of the files")


def _describe_adapters(ranks: Mapping[str, int]) -> str:
    """Describe adapters; `ranks` has the LoRA rank of each adapter by name."""
    if list(ranks) == [DEFAULT_ADAPTER]:
        return f"an adapter of rank {ranks[DEFAULT_ADAPTER]}"
    return "adapters " + ", ".join(f"{name} of rank {rank}" for name, rank in ranks.items())


def _make_console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)  # does not wrap lines, so that they can be copied


def parse_size(size: str) -> int:
    """Return the number of bytes of a size: 5,000,000,000 for "5GB", and 2,147,483,648 for "2GiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", size.strip().upper())
    if match is None or match[2] not in _SUFFIXES or not float(match[1]) * _SUFFIXES[match[2]] >= 1:
        raise ConfigError(f"--max-shard-size {size}: give a size such as 500MB, 5GB or 2GiB")
    return int(float(match[1]) * _SUFFIXES[match[2]])


@contextmanager
def show_progress(title: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if the output is a terminal, and yield the function that updates it."""
    console = console or Console()
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

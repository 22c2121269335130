"""Conversion of a Hugging Face directory to a checkpoint and back, in one process, without a GPU and without a model.

Only a few rows of a tensor are in memory at a time. Both directions only move rows according to the family's weight
table, so a round trip returns every tensor bit for bit. All input is checked before anything is written. The result
gets its final name once it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron import disk
from rl_megatron.checkpoint.adapters import find_base, holds_adapter, read_adapters
from rl_megatron.checkpoint.directory import check_digests, publish, read_manifest, read_model_section
from rl_megatron.checkpoint.hf_directory import (
    INDEX,
    MAX_SHARD_BYTES,
    choose_adapters,
    read_json,
    refuse_adapter_with_head,
    refuse_existing,
)
from rl_megatron.checkpoint.hf_weights import choose_block_height, open_hugging_face, read_block, require_vocab_size
from rl_megatron.checkpoint.peft_convert import export_adapters, import_adapters
from rl_megatron.checkpoint.safetensors_files import WeightReader, WeightWriter
from rl_megatron.checkpoint.tensors import StoredTensor, TensorWriter, find_model_tensors, read_parts
from rl_megatron.config.checkpoint_metadata import (
    HUGGING_FACE,
    find_hugging_face_files,
    find_imported_tokenizer,
    find_run_tokenizer,
)
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import num_experts
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.model.families import family_of_model, read_model, same_weights, text_config
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.score import build_score_table, describe_classifier
from rl_megatron.model.families.table import Rows, Shape, WeightTable
from rl_megatron.model.shards import PADDED, split_name, split_part

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in total)

_DTYPE_KEYS = ("dtype", "torch_dtype")  # config.json's key for the dtype, in transformers 5 and in transformers 4
# Files that are copied with the weights: configuration, tokenizer, templates, licence.
_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def import_peft(source: Path, base: Path, checkpoint: Path) -> dict[str, Any]:
    """Convert a directory of adapters in peft's format to a checkpoint, and return the checkpoint's manifest.

    `base` is the checkpoint of the model that the adapters were trained on. `checkpoint` must not exist. Nothing is
    written if the input is wrong.
    """
    with _open_partial(checkpoint) as partial:
        manifest = import_adapters(source, base, partial)
        carried = find_hugging_face_files(base)
        if carried is not None:
            shutil.copytree(carried, partial / HUGGING_FACE)
        publish(partial, checkpoint, manifest)
    return manifest


def export_peft(
    checkpoint: Path, target: Path, adapter: str | None = None, *, verify: bool = True
) -> dict[str, dict[str, Any]]:
    """Convert a checkpoint of adapters to a directory that peft loads, and return adapter_config.json by adapter name.

    Nothing is written if the checkpoint is wrong.

    Args:
        checkpoint: The checkpoint.
        target: The path of the new directory, which must not exist.
        adapter: The adapter to write, directly into `target`. None writes all adapters: "default" into `target`, and
            each other one into a subdirectory of its name.
        verify: Whether the checkpoint's files are compared with their digests.
    """
    manifest = read_manifest(checkpoint)
    refuse_adapter_with_head(checkpoint, manifest)
    if verify:
        check_digests(checkpoint, manifest)
    model = read_model_section(checkpoint, manifest)
    names = choose_adapters(checkpoint, manifest, adapter)
    adapters = read_adapters(checkpoint, manifest, model, model.vocab_size or manifest["vocab_size"]).by_name
    with _open_partial(target) as partial:
        named = {exported_name: adapters[name] for name, exported_name in names.items()}
        configs = export_adapters(named, checkpoint, partial)
        partial.rename(target)
    return configs


def import_weights(source: Path, checkpoint: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Convert the Hugging Face directory `source` to a checkpoint that any layout can load, and return its manifest.

    Weights keep their dtype. The checkpoint also stores the directory's other files (configuration, tokenizer,
    licence), which an export copies back. Nothing is written if the input is wrong.
    """
    weights = open_hugging_face(source)
    with WeightReader(weights.locations) as reader, _open_partial(checkpoint) as partial:
        _write_checkpoint(reader, weights.table, weights.model, partial, progress)
        _copy_side_files(source, partial / HUGGING_FACE)
        manifest = {"step": 0, "model": asdict(weights.model), "head": "lm", "source": str(source.resolve())}
        manifest["vocab_size"] = weights.vocab_size
        if weights.tokenizer is not None:
            manifest["tokenizer"] = weights.tokenizer.digest
        publish(partial, checkpoint, manifest)
    return manifest


def export_weights(
    checkpoint: Path,
    target: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
    *,
    verify: bool = True,
    cut_vocabulary: bool = False,
) -> dict[str, Any]:
    """Convert a checkpoint to a Hugging Face directory, and return its config.json.

    A reward model becomes a sequence classifier with one label. All adapters of a checkpoint are merged into their
    base. Weights keep the checkpoint's dtype. If the checkpoint, or the run that wrote it, started from a Hugging Face
    directory, that directory's configuration and tokenizer are used. Otherwise the tokenizer is the run's, and the
    configuration is that of the first family that can express the model. Nothing is written if the checkpoint is wrong.

    Args:
        checkpoint: The checkpoint.
        target: The path of the new directory, which must not exist.
        max_shard_bytes: The most bytes of weights in a file. A larger tensor has its own file.
        progress: Called with the bytes written so far and the total.
        verify: Whether the checkpoint's files are compared with their digests.
        cut_vocabulary: Whether to leave out the rows of the embedding and the head that belong to no token.
    """
    manifest = read_manifest(checkpoint)
    refuse_adapter_with_head(checkpoint, manifest)
    if verify:
        check_digests(checkpoint, manifest)
    adapters, num_tokens = None, manifest.get("vocab_size")
    if holds_adapter(manifest):
        base = find_base(checkpoint, manifest)
        model, *_ = _describe(base, read_manifest(base))
        adapters = read_adapters(checkpoint, manifest, model, model.vocab_size or manifest["vocab_size"])
        checkpoint, manifest = base, read_manifest(base)
        if verify:
            check_digests(checkpoint, manifest)
    _, config, table = _describe(checkpoint, manifest)
    if cut_vocabulary:
        config, table = _cut_unused_rows(config, table, num_tokens, checkpoint)
    stored = _check_tensors(checkpoint, table)
    if adapters is not None and adapters.use_dora:
        keys = {split_name(f"{linear}.weight")[0] for linear in adapters.linears}
        adapted = {key: tensor for key, tensor in stored.items() if key in keys}
        adapters = adapters.with_factors(_read_hugging_face_blocks(table, adapted))
    dtypes = {rows.hf_name: stored[split_name(rows.name)[0]].dtype for rows in table.rows}
    dtype = next(dtype for name, dtype in dtypes.items() if name not in table.fp32)
    with _open_partial(target) as partial:
        writer = WeightWriter(partial, table.hf_shapes, dtypes.__getitem__, max_shard_bytes)
        try:
            for rows, offset, block in _read_hugging_face_blocks(table, stored, progress):
                merged = block if adapters is None else adapters.merge_block(rows.hf_name, offset, block)
                _write_block(writer, rows, offset, merged)
            writer.finish()
        finally:
            writer.close()
        config = _write_side_files(checkpoint, partial, config, dtype)
        partial.rename(target)
    return config


# --- import ---


def _write_checkpoint(
    reader: WeightReader, table: WeightTable, model: ModelConfig, directory: Path, progress: Progress
) -> None:
    writer, done = TensorWriter(directory), 0
    total = sum(reader.locations[name].num_bytes for name in table.hf_shapes)
    try:
        for name, shape in table.shapes.items():
            key, expert = split_name(name)
            for first, block in _read_blocks(reader, table, name, shape):
                offset = (first, *(0 for _ in shape[1:]))
                if expert is None:
                    writer.write(key, shape, offset, block)
                else:  # megatron-core stores experts stacked along a first axis
                    writer.write(key, (num_experts(model), *shape), (expert, *offset), block[None])
                done += block.nbytes
                progress(done, total)
        writer.finish()
    finally:
        writer.close()


def _read_blocks(reader: WeightReader, table: WeightTable, name: str, shape: Shape) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first row, rows) of a Megatron tensor, block by block."""
    sources = table.by_name[name]
    dtype = reader.locations[sources[0].hf_name].dtype
    height = choose_block_height(shape[1:], dtype)
    for first in range(0, shape[0], height):
        last = min(first + height, shape[0])
        block = torch.empty(last - first, *shape[1:], dtype=dtype)
        for rows in sources:
            start, end = max(rows.row, first), min(rows.row + rows.count, last)
            if start < end:
                read_block(reader, rows, start, block[start - first : end - first])
        yield first, block


# --- export ---


def _describe(checkpoint: Path, manifest: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any], WeightTable]:
    """Return the checkpoint's model, its config.json and its weight table."""
    directory = find_run_tokenizer(checkpoint)
    tokenizer = None if directory is None else load_tokenizer(directory)
    model, head = read_model_section(checkpoint, manifest), manifest.get("head", "lm")
    carried, what = find_hugging_face_files(checkpoint), f"checkpoint {checkpoint}"
    return model, *describe_for_hugging_face(model, head, carried, tokenizer, manifest.get("vocab_size"), what)


def describe_for_hugging_face(
    model: ModelConfig,
    head: str,
    carried: Path | None,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    what: str,
) -> tuple[dict[str, object], WeightTable]:
    """Return the config.json and the weight table of a model.

    Args:
        model: The model.
        head: Its head, "lm" or "score".
        carried: The directory with the Hugging Face files (configuration, tokenizer) that the model started from, or
            None.
        tokenizer: The run's tokenizer, or None if it is not known.
        vocab_size: The size of the vocabulary, or None if it is not known. It is used if `tokenizer` is None.
        what: How messages name the checkpoint or run that has the model, such as "the run".
    """
    family, config, table = _describe_language_model(model, carried, tokenizer, vocab_size, what)
    if head == "score":
        return describe_classifier(config, family), build_score_table(table, model.hidden_size)
    return config, table


def _describe_language_model(
    model: ModelConfig, carried: Path | None, tokenizer: Tokenizer | None, vocab_size: int | None, what: str
) -> tuple[Family, dict[str, object], WeightTable]:
    """Return the family, and the config.json and weight table that the model has with the head of a language model."""
    if carried is not None:
        config = read_json(carried / "config.json")
        family, read = read_model(config, str(carried / "config.json"))
        if not same_weights(read, model):
            raise ConfigError(
                f"{what} holds another model than {carried / 'config.json'} describes; export it from the output_dir "
                "of the run that wrote it"
            )
        return family, config, family.table(read, require_vocab_size(read, carried / "config.json"))
    rows = model.vocab_size or (vocab_size if tokenizer is None else tokenizer.vocab_size)
    if rows is None:
        raise ConfigError(
            f"{what} does not state its vocabulary size (model.vocab_size=null), and its run's tokenizer was not "
            "found; leave the checkpoint in its run's output_dir, at checkpoints/STAGE"
        )
    family = family_of_model(model, rows)
    config = family.write_config(model, rows)
    if tokenizer is not None:
        config |= {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return family, config, family.table(model, rows)


def _cut_unused_rows(
    config: dict[str, Any], table: WeightTable, num_tokens: int | None, checkpoint: Path
) -> tuple[dict[str, Any], WeightTable]:
    """Return the config.json and the weight table with only the first `num_tokens` rows of embedding and head."""
    padded = [name for name in PADDED if table.shapes.get(name, (1,))[0] > 1]  # a score head has one row
    rows = table.shapes[padded[0]][0]
    if num_tokens is None or num_tokens == rows:
        raise ConfigError(
            f"--cut-vocabulary: checkpoint {checkpoint} has no row to cut: each of its {rows} rows has a token, or its "
            "tokenizer is not known; leave out --cut-vocabulary"
        )
    generation = find_hugging_face_files(checkpoint)
    generation = None if generation is None else generation / "generation_config.json"
    files = {"config.json": config}
    if generation is not None and generation.is_file():
        files[generation.name] = read_json(generation)
    for file, values in files.items():
        for key, value in values.items():
            ids = value if isinstance(value, list) else [value]
            if key.endswith("_token_id") and any(isinstance(token, int) and token >= num_tokens for token in ids):
                raise ConfigError(
                    f"--cut-vocabulary: {file} of checkpoint {checkpoint} has {key}={value}, and the tokenizer has "
                    f"{num_tokens} tokens; correct {key}, or leave out --cut-vocabulary"
                )
    return config | {"vocab_size": num_tokens}, table.with_first_rows(padded, num_tokens)


def _check_tensors(checkpoint: Path, table: WeightTable) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors, after checking that their names and shapes are those of the table."""
    stored = find_model_tensors(checkpoint)
    names = {split_name(name)[0] for name in table.shapes}
    for what, wrong in (("lacks", names - stored.keys()), ("has", stored.keys() - names)):
        if wrong:
            raise ConfigError(f"checkpoint {checkpoint} {what} {sorted(wrong)[0]}, unlike the model in its manifest")
    for name, shape in table.shapes.items():
        key, expert = split_name(name)
        stored_shape = stored[key].shape if expert is None else stored[key].shape[1:]
        has_tokens = key in PADDED and shape[0] > 1  # a score head has one row
        padded = has_tokens and stored_shape[0] >= shape[0] and stored_shape[1:] == shape[1:]
        if stored_shape != shape and not padded:
            raise ConfigError(
                f"checkpoint {checkpoint}: {name} has shape {stored_shape}; the model in its manifest has {shape}"
            )
    return stored


def _read_hugging_face_blocks(
    table: WeightTable, stored: Mapping[str, StoredTensor], progress: Progress = lambda done, total: None
) -> Iterator[tuple[Rows, Shape, Tensor]]:
    """Yield the tensors `stored` in blocks, each with its place in one Hugging Face tensor, as `split_piece` does.

    `progress` is called with the bytes read so far and the total.
    """
    names: dict[str, dict[int | None, str]] = {}
    for name in table.shapes:
        key, expert = split_name(name)
        if key in stored:
            names.setdefault(key, {})[expert] = name
    done, total = 0, sum(stored[key].num_bytes for key in names)
    for key, by_expert in names.items():
        for part, data in read_parts(stored[key]):
            if None in by_expert:
                yield from split_part(by_expert[None], part.offset, data, table)
            else:
                for number, expert_data in enumerate(data, start=part.offset[0]):
                    yield from split_part(by_expert[number], part.offset[1:], expert_data, table)
            done += data.nbytes
            progress(done, total)


def _write_block(writer: WeightWriter, rows: Rows, offset: Shape, block: Tensor) -> None:
    row, column = (*offset, 0)[:2]
    if rows.slab is None:
        writer.write(rows.hf_name, row, column, block)
    else:
        writer.write_slab(rows.hf_name, rows.slab, row, column, block)


def _write_side_files(checkpoint: Path, target: Path, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    carried, tokenizer = find_hugging_face_files(checkpoint), find_run_tokenizer(checkpoint)
    if tokenizer is not None and find_imported_tokenizer(checkpoint) is None:
        shutil.copytree(tokenizer, target, dirs_exist_ok=True)
    if carried is not None:
        shutil.copytree(carried, target, dirs_exist_ok=True)
    else:
        ids = {key: config[key] for key in ("eos_token_id", "pad_token_id") if key in config}
        (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in _DTYPE_KEYS if key in config] or _DTYPE_KEYS
    config = config | dict.fromkeys(keys, name)
    if carried is None or config != read_json(carried / "config.json"):  # an equal copy can stay
        _write_json(target / "config.json", config)
    return config


# --- both ---


def _copy_side_files(source: Path, target: Path) -> None:
    target.mkdir()
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(INDEX.removeprefix("model.safetensors")):
                shutil.copyfile(file, target / file.name)
    config = read_json(source / "config.json")
    text = text_config(config, str(source / "config.json"))
    if text != config:  # the model reads images, but the checkpoint holds only its text model
        _write_json(target / "config.json", text)
        for name in _IMAGE_FILES:
            (target / name).unlink(missing_ok=True)


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def _open_partial(final: Path) -> Iterator[Path]:
    """Provide a new directory, which the caller fills and renames to `final`. If it is not renamed, it is deleted."""
    refuse_existing(final)
    partial = final.absolute().with_name(f"{final.name}.incomplete")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # a conversion that was killed may have left it
        partial.mkdir(parents=True)
        yield partial
    except (OSError, RuntimeError) as error:
        cause = disk.find_system_error(error)
        if cause is None:
            raise
        raise ConfigError(f"{final} was not written: {cause}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

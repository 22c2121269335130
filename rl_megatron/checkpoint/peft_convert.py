"""Conversion of a checkpoint of adapters to a directory that peft loads, and back, bit for bit.

As in peft's own directories, the adapter "default" is in the directory itself, and each other adapter is in a
subdirectory of its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.checkpoint.adapters import StoredAdapter, describe_adapters, identify_base
from rl_megatron.checkpoint.directory import read_manifest, read_model_section
from rl_megatron.checkpoint.hf_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_adapter_directories, read_json
from rl_megatron.checkpoint.peft_format import PEFT_PREFIX, build_peft_config
from rl_megatron.checkpoint.tensors import TensorWriter
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import DEFAULT_ADAPTER, LoraConfig, check_together
from rl_megatron.model.lora.modules import find_whole_tensors
from rl_megatron.model.lora.targets import MAGNITUDE, find_adapted_linears, list_adapter_shapes

_SHOWN = 3  # how many tensors a message names
# Keys of adapter_config.json that are read into the section `peft`.
_READ = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "use_dora", "modules_to_save",
)  # fmt: skip
# Keys that must have one of these values, because no other value is supported.
_ABSENT: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "trainable_token_indices": (None,),
}


def export_adapters(
    adapters: Mapping[str, StoredAdapter], checkpoint: Path, partial: Path
) -> dict[str, dict[str, object]]:
    """Write adapters into the directory `partial` as peft does, and return each adapter_config.json by adapter name.

    The keys of `adapters` are the names in the export; "default" is written into the directory itself. The
    configurations name the base of `checkpoint`.
    """
    configs = {}
    for name, adapter in adapters.items():
        directory = partial if name == DEFAULT_ADAPTER else partial / name
        directory.mkdir(exist_ok=True)
        configs[name] = _export(adapter, checkpoint, directory)
    return configs


def _export(adapter: StoredAdapter, checkpoint: Path, directory: Path) -> dict[str, object]:
    named = adapter.tensors | adapter.whole
    tensors = {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in named.items()}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = build_peft_config(adapter.config, adapter.linears, _find_hugging_face_base(checkpoint))
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return config


def _find_hugging_face_base(checkpoint: Path) -> str | None:
    """Return the Hugging Face directory that an adapter's base was imported from, or None if it is unknown."""
    recorded = read_manifest(checkpoint)["base"]
    if not recorded or not Path(recorded["path"]).is_dir():
        return None
    return read_manifest(Path(recorded["path"])).get("source")


def import_adapters(source: Path, base: Path, partial: Path) -> dict[str, Any]:
    """Write a peft directory's adapters as a checkpoint into the directory `partial`, and return its manifest.

    `base` is the checkpoint of the model that the adapters were trained on.
    """
    manifest = read_manifest(base)
    model = read_model_section(base, manifest)
    rows = model.vocab_size or manifest["vocab_size"]
    directories = find_adapter_directories(source)
    configs = {name: _read_config(directory, name) for name, directory in directories.items()}
    check_together([*configs.values()])
    adapters = [_read(directories[name], config, model, rows) for name, config in configs.items()]
    writer = TensorWriter(partial)
    try:
        for key, tensor in (keyed for adapter in adapters for keyed in adapter.list_tensors()):
            writer.write(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        writer.finish()
    finally:
        writer.close()
    copied = {key: manifest[key] for key in ("model", "vocab_size", "tokenizer") if key in manifest}
    entries = describe_adapters([*configs.values()], identify_base(base)) | {"source": str(source.resolve())}
    return {"step": 0, "head": "lm", **copied, **entries}


def _read(source: Path, config: LoraConfig, model: ModelConfig, rows: int) -> StoredAdapter:
    linears, whole = find_adapted_linears(config, model, rows), find_whole_tensors(config, model, rows)
    keys = {tensor.hf_name: key for key, tensor in whole.items()}
    shapes = list_adapter_shapes(linears, config) | {tensor.hf_name: tensor.shape for tensor in whole.values()}
    tensors = _read_tensors(source, shapes)
    modules = {name: tensors.pop(name) for name in keys}
    return StoredAdapter(config, linears, tensors, modules, keys)


def _read_config(source: Path, name: str) -> LoraConfig:
    where = source / ADAPTER_CONFIG
    values = read_json(where)
    for key, absent in _ABSENT.items():
        if values.get(key) not in absent:
            raise ConfigError(f"{where}: {key}={values.get(key)} is not supported; it must be {absent[-1]}")
    keys = {key: values[key] for key in _READ if values.get(key) not in (None, [])}  # for no modules
    try:
        return TypeAdapter(LoraConfig).validate_python({"adapter_name": name, **keys})
    except ValidationError as error:
        raise ConfigError(f"{where} is not the configuration of a LoRA adapter: {error}") from error


def _read_tensors(source: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    path = source / ADAPTER_WEIGHTS
    try:
        tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for what, names in (
        ("has tensors of modules that the base does not have", tensors.keys() - shapes.keys()),
        ("lacks tensors that adapter_config.json asks for", shapes.keys() - tensors.keys()),
    ):
        if names:
            raise ConfigError(f"{path} {what}: {', '.join(sorted(names)[:_SHOWN])}")
    first = next(iter(shapes))
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{path}: {name} has the shape {tuple(tensors[name].shape)}; the base needs {shape}")
        if not name.endswith(MAGNITUDE) and tensors[name].dtype != tensors[first].dtype:
            raise ConfigError(f"{path}: {name} has another dtype than {first}; only magnitudes may differ in dtype")
    return {name: tensors[name] for name in shapes}

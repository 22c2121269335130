"""Which modules are trained whole beside an adapter (`peft.modules_to_save`). This module does not need torch."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.lora.targets import build_weight_table

HEAD = "output_layer.weight"
_VOCABULARY_TENSORS = ("embedding.word_embeddings.weight", HEAD)
_WEIGHT = ".weight"


@dataclass(frozen=True)
class WholeTensor:
    """A tensor that is trained whole: its Hugging Face name, and its whole shape without padding."""

    hf_name: str
    shape: tuple[int, ...]


def find_whole_tensors(config: LoraConfig, model: ModelConfig, rows: int, head: str = "lm") -> dict[str, WholeTensor]:
    """Return the tensors of modules that are trained whole, by Megatron name.

    As in peft, a module is chosen if its Hugging Face name ends with one of `peft.modules_to_save`. A score head
    replaces the language-model head and is always trained, so it is not returned. `rows` is the number of the
    embedding's rows.
    """
    if not config.modules_to_save:
        return {}
    table = build_weight_table(model, rows)
    names = {hf: blocks[0].name for hf, blocks in table.by_hf_name.items() if hf.endswith(_WEIGHT)}
    tensors = {}
    for wanted in config.modules_to_save:
        matching = {hf: name for hf, name in names.items() if hf.removesuffix(_WEIGHT).endswith(wanted)}
        if not matching:
            modules = sorted({hf.removesuffix(_WEIGHT).rpartition(".")[2] for hf in names})
            raise ConfigError(
                f"peft.modules_to_save: {wanted!r} matches no module of the model{nearest(wanted, modules)}"
            )
        for hf, name in matching.items():
            _check(wanted, hf, name, model)
            if name != HEAD or head == "lm":
                tensors[name] = WholeTensor(hf, table.hf_shapes[hf])
    return tensors


def count_whole_elements(
    tensors: dict[str, WholeTensor], layers: set[int], is_first: bool, is_last: bool, vocabulary: int, hidden: int
) -> int:
    """Return how many elements of these tensors a rank of a pipeline stage holds.

    Args:
        tensors: What `find_whole_tensors` returns.
        layers: The layers of the stage, counted from 0.
        is_first: Whether it is the first stage.
        is_last: Whether it is the last stage.
        vocabulary: The number of vocabulary rows that the rank has.
        hidden: The hidden size.
    """
    total = 0
    for name, tensor in tensors.items():
        if name in _VOCABULARY_TENSORS:
            total += vocabulary * hidden * (is_first if name == _VOCABULARY_TENSORS[0] else is_last)
        elif name.startswith("decoder.layers."):
            total += tensor.shape[0] * (int(name.split(".")[2]) in layers)
        else:
            total += tensor.shape[0] * is_last
    return total


def _check(wanted: str, hf: str, name: str, model: ModelConfig) -> None:
    """Refuse a module that is neither the embedding, the head nor a norm, or an embedding that is also the head."""
    if name in _VOCABULARY_TENSORS:
        if model.tie_embeddings:
            raise ConfigError(
                f"peft.modules_to_save: {wanted!r} is the embedding, which model.tie_embeddings=true also makes the "
                "head, but peft would train only one of them; leave it out"
            )
    elif not name.endswith(("norm.weight", "norm_weight")):
        raise ConfigError(
            f"peft.modules_to_save: {wanted!r} chooses {hf.removesuffix(_WEIGHT)}, but only the embedding, the head "
            "and norms can be trained whole; name it in peft.target_modules, so that it gets an adapter"
        )

"""Conversions: which input is refused, what remains if one fails, and which files are copied beside the weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.checkpoint import hf_convert, hf_weights
from rl_megatron.checkpoint.directory import publish, read_manifest
from rl_megatron.checkpoint.hf_convert import export_weights, import_weights
from rl_megatron.checkpoint.hf_weights import find_tensors
from rl_megatron.checkpoint.tensors import TensorWriter
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.llama import LLAMA
from tests.full_disk import files_of_at_most
from tests.parallel.family_cases import assert_same_tensors, save_tokenizer, tensors

MODEL = ModelConfig(
    num_layers=1, hidden_size=8, ffn_hidden_size=12, num_attention_heads=2, num_query_groups=1, vocab_size=30,
    max_sequence_length=32, tie_embeddings=False,
)  # fmt: skip


def directory_of(path: Path, model: ModelConfig = MODEL, dtype: torch.dtype = torch.bfloat16, **config) -> Path:
    """Return a Hugging Face directory of a Llama, with a tokenizer of 20 tokens and files that are never read."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shapes = LLAMA.table(model, 30).hf_shapes
    save_file({name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()},
              path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    written = LLAMA.write_config(model, 30) | {"torch_dtype": "bfloat16"} | config
    (path / "config.json").write_text(json.dumps(written, indent=3))  # not as json.dumps would have it
    (path / "generation_config.json").write_text('{"temperature": 0.7}')
    (path / "LICENSE").write_text("free")
    (path / "pytorch_model.bin").write_bytes(b"weights in another format")
    save_tokenizer(path, 20)
    return path


@pytest.fixture
def source(tmp_path):
    return directory_of(tmp_path / "hf")


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("rows_at_once", [1, 5, None], ids=str)
def test_a_round_trip_gives_back_every_file(tmp_path, source, monkeypatch, rows_at_once):
    if rows_at_once is not None:
        monkeypatch.setattr(hf_weights, "BLOCK_BYTES", rows_at_once * MODEL.hidden_size * 2)
    done = []
    manifest = import_weights(source, tmp_path / "checkpoint", lambda *progress: done.append(progress))
    assert done[-1][0] == done[-1][1] == sum(place.num_bytes for place in find_tensors(source).values())
    assert (manifest["step"], manifest["head"], manifest["vocab_size"]) == (0, "lm", 20)
    assert read_manifest(tmp_path / "checkpoint")["tokenizer"] == manifest["tokenizer"]
    export_weights(tmp_path / "checkpoint", tmp_path / "again")
    assert left(tmp_path / "again") == left(source) - {"pytorch_model.bin"}
    for file in left(tmp_path / "again"):
        assert (tmp_path / "again" / file).read_bytes() == (source / file).read_bytes() or "safetensors" in file
    assert_same_tensors(tensors(tmp_path / "again"), tensors(source))


def test_a_tied_models_head_is_read_once_and_not_written(tmp_path):
    tied = directory_of(tmp_path / "hf", replace(MODEL, tie_embeddings=True))
    found = load_file(tied / "model.safetensors")
    save_file(found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}, tied / "model.safetensors")
    import_weights(tied, tmp_path / "checkpoint")
    export_weights(tmp_path / "checkpoint", tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "again"), found)
    found["lm_head.weight"] = found["model.embed_tokens.weight"] + 1
    save_file(found, tied / "model.safetensors")
    with pytest.raises(ConfigError, match="lm_head.weight differs from"):
        import_weights(tied, tmp_path / "other")
    assert left(tmp_path) == {"hf", "checkpoint", "again"}


def without(source: Path, file: str) -> None:
    (source / file).unlink()


def truncated(source: Path) -> None:
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def one_tensor_less(source: Path) -> None:
    found = load_file(source / "model.safetensors")
    del found["model.norm.weight"]
    save_file(found, source / "model.safetensors")


MISTAKES = {
    "no config": (lambda d: without(d, "config.json"), "config.json is missing"),
    "no weights": (lambda d: without(d, "model.safetensors"), "has neither model.safetensors nor"),
    "cut": (truncated, "model.safetensors is truncated"),
    "a tensor missing": (one_tensor_less, "lacks tensors .*: model.norm.weight"),
    "an architecture": (
        lambda d: (d / "config.json").write_text('{"architectures": ["X"]}'),
        "supported architectures: LlamaFor",
    ),
    "a large tokenizer": (lambda d: save_tokenizer(d, 31), "tokenizer has 31 tokens, but model.vocab_size=30"),
    "a broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "its tokenizer cannot be read"),
    "no end of text": (lambda d: (d / "tokenizer_config.json").write_text("{}"), "declares no eos_token"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_is_found_before_anything_is_written(tmp_path, source, mistake):
    do, message = MISTAKES[mistake]
    do(source)
    with pytest.raises(ConfigError, match=message):
        import_weights(source, tmp_path / "checkpoint")
    assert left(tmp_path) == {"hf"}


def test_a_model_without_a_tokenizer_can_be_converted(tmp_path, source):
    without(source, "tokenizer.json")
    manifest = import_weights(source, tmp_path / "checkpoint")
    assert manifest["vocab_size"] == 30 and "tokenizer" not in manifest
    export_weights(tmp_path / "checkpoint", tmp_path / "again")
    assert not (tmp_path / "again" / "tokenizer.json").exists()


def test_special_tokens_without_a_row_are_left_out(tmp_path, source):
    """Gemma 3's text models have such tokens, for images, which do not occur in text."""
    save_tokenizer(source, 30)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    marker = tokenizer["added_tokens"][0] | {"id": 30, "content": "<image>", "special": True}
    tokenizer["added_tokens"].append(marker)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert import_weights(source, tmp_path / "checkpoint")["vocab_size"] == 30
    export_weights(tmp_path / "checkpoint", tmp_path / "again")
    assert "<image>" in (tmp_path / "again" / "tokenizer.json").read_text()


def test_a_disk_that_fills_within_a_tensor_is_reported(tmp_path, source):
    import_weights(source, tmp_path / "whole")
    largest = max(file.stat().st_size for file in (tmp_path / "whole").glob("*.distcp"))
    for limit in range(largest // 8, largest, largest // 8):
        with files_of_at_most(limit), pytest.raises(ConfigError, match="File too large"):
            import_weights(source, tmp_path / "checkpoint")
    assert left(tmp_path) == {"hf", "whole"}


def test_an_existing_directory_is_not_changed(tmp_path, source):
    (tmp_path / "there").mkdir()
    import_weights(source, tmp_path / "checkpoint")
    for convert_into in (lambda: import_weights(source, tmp_path / "there"),
                         lambda: export_weights(tmp_path / "checkpoint", tmp_path / "there")):  # fmt: skip
        with pytest.raises(ConfigError, match="there exists already"):
            convert_into()
    assert left(tmp_path / "there") == set()


class DiskIsFull(OSError):
    pass


@pytest.mark.parametrize("failure", [DiskIsFull("no space left"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
def test_a_conversion_that_fails_leaves_nothing(tmp_path, source, monkeypatch, failure):
    import_weights(source, tmp_path / "checkpoint")
    expected = ConfigError if isinstance(failure, OSError) else KeyboardInterrupt
    calls = []

    def failing(*_):
        calls.append(1)
        if len(calls) > 3:
            raise failure

    monkeypatch.setattr(TensorWriter, "write", failing)
    with pytest.raises(expected):
        import_weights(source, tmp_path / "second")
    calls.clear()
    monkeypatch.setattr(hf_convert.WeightWriter, "write", failing)
    with pytest.raises(expected):
        export_weights(tmp_path / "checkpoint", tmp_path / "again")
    assert left(tmp_path) == {"hf", "checkpoint"}


def test_leftovers_of_a_killed_conversion_are_replaced(tmp_path, source):
    (tmp_path / "checkpoint.incomplete").mkdir()
    (tmp_path / "checkpoint.incomplete" / "half").write_text("")
    import_weights(source, tmp_path / "checkpoint")
    assert left(tmp_path) == {"hf", "checkpoint"} and not (tmp_path / "checkpoint" / "half").exists()


def republished(checkpoint: Path, model: dict | None = None, **changes) -> None:
    """Change the checkpoint's manifest, and compute the digests of its files again."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest = {key: value for key, value in manifest.items() if key not in ("files", "sha256")} | changes
    manifest["model"] |= model or {}
    (checkpoint / MANIFEST).unlink()
    publish(checkpoint.rename(checkpoint.with_name("moved")), checkpoint, manifest)


def flipped(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)


def described_as(checkpoint: Path, config: dict, model: dict) -> None:
    path = checkpoint / "hugging_face" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    republished(checkpoint, model)


UNUSABLE = {
    "another head": (lambda c: republished(c, head="score"), "output_layer.weight"),
    "a flipped bit": (flipped, "__0_0.distcp has changed since it was written"),
    "a file missing": (lambda c: (c / ".metadata").unlink(), ".metadata is missing"),
    "another model": (
        lambda c: described_as(c, {"rms_norm_eps": 0.5}, {}),
        "holds another model than .*config.json describes",
    ),
    "an unknown key": (lambda c: republished(c, {"num_layrs": 1}), "num_layrs"),
    "layers missing": (
        lambda c: described_as(c, {"num_hidden_layers": 2}, {"num_layers": 2}),
        "lacks decoder.layers.1",
    ),
    "another width": (
        lambda c: described_as(c, {"intermediate_size": 11}, {"ffn_hidden_size": 11}),
        r"has shape \(24, 8\); .* has \(22, 8\)",
    ),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_checkpoint_is_not_exported(tmp_path, source, what):
    import_weights(source, tmp_path / "checkpoint")
    do, message = UNUSABLE[what]
    do(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=message):
        export_weights(tmp_path / "checkpoint", tmp_path / "again")
    assert left(tmp_path) == {"hf", "checkpoint"}


def trained_from_nothing(run: Path, source: Path) -> Path:
    """The checkpoint of a run that did not start from an import. Its vocabulary is that of its tokenizer."""
    step = run / "checkpoints" / "sft" / "step-000001"
    import_weights(source, step)
    shutil.rmtree(step / "hugging_face")
    republished(step, {"vocab_size": None}, vocab_size=None)
    return step


def test_a_model_trained_from_scratch_has_its_runs_tokenizer_and_a_familys_config(tmp_path):
    run = tmp_path / "run"
    step = trained_from_nothing(run, directory_of(tmp_path / "hf"))
    with pytest.raises(ConfigError, match="does not state its vocabulary size.*leave the checkpoint in its run"):
        export_weights(step, tmp_path / "exported")
    republished(step, vocab_size=30)  # as a run saves it
    assert export_weights(step, tmp_path / "without tokenizer")["vocab_size"] == 30
    (run / "tokenizer").mkdir()
    save_tokenizer(run / "tokenizer", 30)
    config = export_weights(step, tmp_path / "exported")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 30
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and config["eos_token_id"] == 0
    assert json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"] == 0
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
    assert_same_tensors(tensors(tmp_path / "exported"), tensors(tmp_path / "hf"))


def test_the_config_states_the_dtype_of_the_weights(tmp_path):
    """The source's config states another dtype, and only this key changes."""
    source = directory_of(tmp_path / "hf", dtype=torch.float32)
    import_weights(source, tmp_path / "checkpoint")
    export_weights(tmp_path / "checkpoint", tmp_path / "again")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "again"))
    assert after == before | {"torch_dtype": "float32"}
    assert {tensor.dtype for tensor in tensors(tmp_path / "again").values()} == {torch.float32}

"""Models that read images, as they are published: their text models are imported, run in layouts and exported alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.hf_convert import export_weights, import_weights
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families import FAMILIES, read_model
from tests.parallel.family_cases import (
    CASES,
    WITH_IMAGES,
    architecture,
    assert_same_tensors,
    hf_model,
    model_with_images,
    save,
    save_as_published,
    save_tokenizer,
    tensors,
)
from tests.parallel.test_families import EXPERT, SEQUENCE, TENSOR, WHOLE, logits_and_checkpoint

FURTHER = ("mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj")  # the published files have tensors of such names
OF_IMAGES = ("preprocessor_config.json", "video_preprocessor_config.json")


@dataclass
class Published:
    """The directory of a case's model that reads images, and what transformers computes for a text."""

    source: Path
    model: ModelConfig
    batch: dict[str, torch.Tensor]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a function that saves the model of a case; each case is saved once."""
    made: dict[str, Published] = {}

    def of(case: str) -> Published:
        if case not in made:
            hf = model_with_images(case)
            further = {name: torch.ones(4, 4, 4) for name in FURTHER} if "qwen3_5" in case else {}
            source = save_as_published(hf, tmp_path_factory.mktemp("published") / "hf", **further)
            save_tokenizer(source, 51)
            for name in OF_IMAGES:
                (source / name).write_text("{}")
            ids = torch.randint(51, (3, 11), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                logits = hf(ids).logits
            batch = {"input_ids": ids, "input_lengths": torch.full((3,), 11)}
            _, model = read_model(json.loads((source / "config.json").read_text()), case)
            made[case] = Published(source, model, batch, logits)
        return made[case]

    return of


LAYOUTS = [(case, WHOLE) for case in WITH_IMAGES]
LAYOUTS += [("qwen3_5", TENSOR), ("qwen3_5_moe", EXPERT), ("qwen3_5_moe", SEQUENCE)]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_logits_of_a_text_are_those_of_transformers(ranks, published, tmp_path, case, layout):
    hf, checkpoint = published(case), tmp_path / "checkpoint"
    import_weights(hf.source, checkpoint)
    given = (layout[1], hf.model, str(hf.source), str(checkpoint), hf.batch, str(tmp_path / "run"))
    logits, _ = ranks.run(layout[0], logits_and_checkpoint, *given)[0]
    assert (logits - hf.logits).abs().max() <= 1e-4
    assert hf.logits.std() > 0.3, "almost equal logits would hide errors"


@pytest.mark.parametrize("case", WITH_IMAGES)
def test_an_export_is_the_text_model_alone(published, tmp_path, case):
    """transformers loads every tensor of it, computes the same logits, and finds the tokenizer."""
    import transformers  # not at the top: it takes seconds, and ranks import this module

    hf, target = published(case), tmp_path / "hf"
    import_weights(hf.source, tmp_path / "checkpoint")
    export_weights(tmp_path / "checkpoint", target)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded).__name__ == architecture(case)
    with torch.no_grad():
        assert (loaded(hf.batch["input_ids"]).logits - hf.logits).abs().max() <= 1e-4
    assert not any((target / name).exists() for name in OF_IMAGES)
    assert (target / "tokenizer.json").read_bytes() == (hf.source / "tokenizer.json").read_bytes()
    config = json.loads((target / "config.json").read_text())
    assert "vision_config" not in config and read_model(config, case)[1] == hf.model


@pytest.mark.parametrize("case", WITH_IMAGES)
def test_the_names_that_transformers_writes_give_the_same_model(published, tmp_path, case):
    """It names every expert, and has the older prefixes for some models."""
    written = save(model_with_images(case), tmp_path / "written")
    differ = tensors(written).keys() - tensors(published(case).source).keys()
    assert bool(differ) == (case in ("qwen3_5_moe", "gemma3", "mistral")), differ
    for name, source in (("of transformers", written), ("published", published(case).source)):
        import_weights(source, tmp_path / name / "checkpoint")
        export_weights(tmp_path / name / "checkpoint", tmp_path / name / "exported")
    assert_same_tensors(*(tensors(tmp_path / name / "exported") for name in ("of transformers", "published")))


def test_tensors_that_are_left_out_are_counted_in_one_line(published, tmp_path, logged):
    source = published("qwen3_5_moe").source
    import_weights(source, tmp_path / "checkpoint")
    images = [name for name in tensors(source) if name.startswith("model.visual.")]
    lines = [line for line in logged if "left out" in line]
    assert lines == [
        f"{source}: tensors that are not part of the text model are left out: {len(images)} that read images, such as "
        f"{min(images)}; 2 others, such as {FURTHER[0]}"
    ]


@pytest.mark.parametrize("name", ["model.language_model.layers.0.new.weight", "model.new.weight"])
def test_an_unknown_tensor_is_refused_by_its_name(tmp_path, name):
    source = save_as_published(model_with_images("qwen3_5"), tmp_path / "hf", **{name: torch.ones(2)})
    said = name.replace("language_model.", "")
    with pytest.raises(ConfigError, match=f"has tensors that its config.json does not ask for: {said}"):
        import_weights(source, tmp_path / "checkpoint")


def test_a_stack_of_another_shape_is_refused_by_its_name(tmp_path):
    model = model_with_images("qwen3_5_moe")
    stack = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    source = save_as_published(model, tmp_path / "hf", **{stack: torch.ones(4, 23, 20)})
    with pytest.raises(ConfigError, match=f"{stack} has shape .4, 23, 20.; it must be .experts, rows, columns"):
        import_weights(source, tmp_path / "checkpoint")
    source = save_as_published(model, tmp_path / "fewer", **{stack: torch.ones(3, 24, 20)})
    with pytest.raises(ConfigError, match="lacks tensors that its config.json asks for: .*experts.3.gate_proj.weight"):
        import_weights(source, tmp_path / "checkpoint")


def test_keys_that_a_published_config_lacks_have_the_defaults_of_transformers():
    import transformers  # not at the top: it takes seconds, and ranks import this module

    for case in WITH_IMAGES:
        with_images = FAMILIES[architecture(case)].with_images
        defaults = getattr(transformers, f"{WITH_IMAGES[case][0]}Config")().text_config.to_dict()
        assert with_images.text_type == defaults["model_type"]
        assert with_images.defaults.items() <= defaults.items()
    bare = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    bare |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # Gemma 3 4B's
    _, model = read_model({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": bare}, "file")
    filled = transformers.Gemma3TextConfig(**bare, architectures=["Gemma3ForCausalLM"]).to_dict()
    assert model == read_model(filled, "file")[1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_model_says_whether_its_head_is_tied_as_in_transformers(tied):
    config = model_with_images("qwen3_5").config.to_dict()
    text = {key: value for key, value in config["text_config"].items() if key not in ("id2label", "label2id")}
    config |= {"text_config": text | {"tie_word_embeddings": not tied}, "tie_word_embeddings": tied}
    assert read_model(config | {"architectures": ["Qwen3_5ForConditionalGeneration"]}, "file")[1].tie_embeddings == tied


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": None}, "file: text_config=None is not an object"),
        ({"text_config": {"model_type": "ministral3"}}, "text_config.model_type='ministral3' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "the text models of .*Qwen3VLForConditional"),
    ],
)
def test_what_cannot_be_read_of_a_config_is_named(changes, said):
    text = hf_model("mistral").config.to_dict()
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "vision_config": {"a": 1}}
    assert read_model(config, "file")[1] == read_model(text | {"architectures": ["MistralForCausalLM"]}, "file")[1]
    with pytest.raises(ConfigError, match=said):
        read_model(config | changes, "file")


def test_every_model_with_images_has_a_case():
    with_images = {family.architecture for family in FAMILIES.values() if family.with_images}
    assert {architecture(case) for case in WITH_IMAGES} == with_images
    assert CASES.keys() >= WITH_IMAGES.keys()

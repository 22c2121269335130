"""Every family: the logits equal those of transformers in every layout, and exported tensors equal imported ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.hf_convert import export_weights, import_weights
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.model.families import FAMILIES, family_of_model, read_model
from rl_megatron.model.shards import pieces
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.exporter import digest_weights
from tests.parallel.family_cases import (
    CASES,
    SHAPE,
    architecture,
    assert_same_tensors,
    hf_model,
    model_with_images,
    save,
    tensors,
)

VOCAB_SIZE = SHAPE["vocab_size"]
WHOLE, TENSOR, PIPELINE = (1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2})
INTERLEAVED = (2, {"pipeline": 2, "virtual_pipeline": 2})
SEQUENCE, EXPERT = (2, {"tensor": 2, "sequence": True}), (2, {"expert": 2})


# Experts that are split over as many ranks as attention, over fewer and over more.
EXPERT_TENSOR = [
    (2, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
    (2, {"expert_tensor": 2}),
    (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
]


def layouts(case: str) -> list:
    if case in ("mixtral", "qwen3_moe"):
        return [WHOLE, SEQUENCE, PIPELINE, EXPERT, *EXPERT_TENSOR]
    if "num_experts_per_tok" in CASES[case][1]:
        return [WHOLE, SEQUENCE, PIPELINE, EXPERT]
    return [WHOLE, TENSOR, PIPELINE] + ([INTERLEAVED] if case == "llama" else [])


# Every case has one process and another layout, and every layout has two cases. The nightly tier has all pairs.
COVERING = {
    "llama": [PIPELINE, INTERLEAVED],
    "llama tied, rope scaled": [TENSOR],
    "mistral": [PIPELINE],
    "qwen2": [TENSOR],
    "qwen3": [TENSOR],
    "mixtral": [EXPERT, EXPERT_TENSOR[0], EXPERT_TENSOR[1]],
    "qwen3_moe": [SEQUENCE, EXPERT_TENSOR[1], EXPERT_TENSOR[2]],
    "qwen3_moe normalised": [EXPERT],
    "gemma3": [TENSOR, PIPELINE],
    "glm4": [TENSOR],
    "glm4_moe": [SEQUENCE, EXPERT],
    "deepseek_v3": [SEQUENCE, PIPELINE],
    "gpt_oss": [SEQUENCE, EXPERT],
    "qwen3_5": [TENSOR, PIPELINE],
    "qwen3_5_moe": [SEQUENCE, EXPERT],
}
PAIRS = [
    pytest.param(
        case, layout, marks=() if layout in (WHOLE, *COVERING[case]) else pytest.mark.nightly, id=f"{case}-{layout}"
    )
    for case in CASES
    for layout in layouts(case)
]


@dataclass
class Imported:
    """A case's Hugging Face directory, the checkpoint imported from it, and what transformers computes."""

    source: Path
    checkpoint: Path
    model: ModelConfig
    batch: dict[str, torch.Tensor]
    logits: torch.Tensor
    generated: torch.Tensor


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a function that imports the model of a case; each case is imported once."""
    made: dict[str, Imported] = {}

    def of(case: str) -> Imported:
        if case not in made:
            directory = tmp_path_factory.mktemp("family")
            hf = hf_model(case)
            source, checkpoint = save(hf, directory / "hf"), directory / "checkpoint"
            import_weights(source, checkpoint)
            ids = torch.randint(VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                logits, generated = hf(ids).logits, hf.generate(ids[:1], max_new_tokens=4, do_sample=False)
            batch = {"input_ids": ids, "input_lengths": torch.full((3,), 11)}
            _, model = read_model(hf.config.to_dict() | {"architectures": [architecture(case)]}, case)
            made[case] = Imported(source, checkpoint, model, batch, logits, generated)
        return made[case]

    return of


def build(parallel: dict, model: ModelConfig, precision: str = "fp32") -> MegatronPolicy:
    layout = topology.build(ParallelConfig(**parallel), start_device("cpu"), 0)
    return MegatronPolicy(model, layout, vocab_size=VOCAB_SIZE, precision=precision)


def logits_and_checkpoint(
    parallel: dict, model: ModelConfig, source: str, checkpoint: str, batch: dict, directory: str
):
    """Return all logits of the policy with the weights of `checkpoint`, and the path at which this layout saved it.

    Also check that a policy built from the Hugging Face directory `source` has the same weights, bit for bit.
    """
    policy = build(parallel, model)
    policy.load_checkpoint(checkpoint, weights_only=True)
    of_import = digest_weights(policy.model)
    direct = MegatronPolicy.from_hf(source, parallel=ParallelConfig(**parallel), device="cpu")
    assert digest_weights(direct.model) == of_import and direct.model_config == model
    policy = build(parallel, model)
    policy.load_checkpoint(checkpoint, weights_only=True)
    top = policy.get_topk_logits(BatchedDataDict(batch), k=VOCAB_SIZE)
    logits = torch.empty_like(top["topk_logits"]).scatter_(-1, top["topk_indices"], top["topk_logits"])
    return logits, policy.save_checkpoint(directory, 1)


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_logits_are_those_of_transformers_and_tensors_come_back(ranks, imported, tmp_path, case, layout):
    """A checkpoint is imported, used and saved in the layout, and exported again."""
    hf, run = imported(case), tmp_path / "run"
    given = (layout[1], hf.model, str(hf.source), str(hf.checkpoint), hf.batch, str(run / "checkpoints" / "sft"))
    logits, saved = ranks.run(layout[0], logits_and_checkpoint, *given)[0]
    assert (logits - hf.logits).abs().max() <= 1e-4
    assert hf.logits.std() > 0.3, "almost equal logits would hide errors"
    shutil.copytree(hf.checkpoint / "hugging_face", run / "hugging_face")  # as a run does
    export_weights(saved, tmp_path / "hf", max_shard_bytes=20_000)
    assert_same_tensors(tensors(tmp_path / "hf"), tensors(hf.source))


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_what_was_imported(imported, tmp_path, case):
    """Tensors and config files are the imported ones, and transformers generates the same tokens."""
    hf, target = imported(case), tmp_path / "hf"
    export_weights(hf.checkpoint, target, max_shard_bytes=20_000)
    assert_same_tensors(tensors(target), tensors(hf.source))
    for name in ("config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (hf.source / name).read_bytes()
    import transformers  # not at the top: it takes seconds, and ranks import this module

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    generated = loaded.generate(hf.batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, hf.generated)


def parameters(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    return sorted({(piece.name, piece.global_shape) for piece in pieces(build({}, model).model.model_chunks)})


@pytest.mark.parametrize("case", CASES)
def test_the_weight_table_has_every_parameter_of_the_model(ranks, imported, case):
    """Names and shapes equal those of a built model, which pads the embedding.

    The family found for the model is the one that read it.
    """
    model = imported(case).model
    family = family_of_model(model, VOCAB_SIZE)
    assert family.architecture == architecture(case)
    padded = {
        name: ((64, *shape[1:]) if name in ("embedding.word_embeddings.weight", "output_layer.weight") else shape)
        for name, shape in family.table(model, VOCAB_SIZE).shapes.items()
    }
    assert sorted(padded.items()) == ranks.run(1, parameters, model)[0]


def test_every_family_has_a_case():
    assert {architecture(case) for case in CASES} == set(FAMILIES)


def loaded_and_saved(model: ModelConfig, precision: str, checkpoint: str, directory: str) -> Path:
    policy = build({"tensor": 2}, model, precision)
    policy.load_checkpoint(checkpoint, weights_only=True)
    return policy.save_checkpoint(directory, 1)


@pytest.mark.parametrize(
    ("case", "precision"), [("llama tied, rope scaled", "bf16"), ("qwen2", "bf16"), ("qwen2", "fp32")]
)
def test_bf16_stays_bf16_and_becomes_fp32_in_a_run_of_fp32(ranks, imported, tmp_path, case, precision):
    """An import and a checkpoint of a run are exported with the values of the source; config.json has their dtype."""
    source, checkpoint = save(hf_model(case).bfloat16(), tmp_path / "bf16"), tmp_path / "checkpoint"
    import_weights(source, checkpoint)
    given = (imported(case).model, precision, str(checkpoint), str(tmp_path / "run/checkpoints/a"))
    saved = ranks.run(2, loaded_and_saved, *given)[0]
    shutil.copytree(checkpoint / "hugging_face", tmp_path / "run" / "hugging_face")
    for location, dtype in ((checkpoint, "bfloat16"), (saved, {"bf16": "bfloat16", "fp32": "float32"}[precision])):
        exported = tmp_path / f"hf {location.name}"
        export_weights(location, exported)
        wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors(source).items()}
        assert_same_tensors(tensors(exported), wanted)
        config = json.loads((source / "config.json").read_text())
        assert json.loads((exported / "config.json").read_text()) == config | {"dtype": dtype}


def test_the_text_of_a_model_that_reads_images_is_imported_with_the_names_that_transformers_gives_it(tmp_path):
    import transformers  # not at the top: it takes seconds, and ranks import this module

    save(model_with_images("qwen3_5"), tmp_path / "images")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "images")
    source = save(model, tmp_path / "text")
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in tensors(source))
    import_weights(source, tmp_path / "checkpoint")
    export_weights(tmp_path / "checkpoint", tmp_path / "exported")
    assert_same_tensors(tensors(tmp_path / "exported"), {name: x.detach() for name, x in model.state_dict().items()})

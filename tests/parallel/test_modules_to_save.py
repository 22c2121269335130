"""Modules that are trained whole beside an adapter: gradients in every layout, peft's files, and the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_megatron.certify.measurement import compare, run_workload
from rl_megatron.certify.single_process import run_in_one_process
from rl_megatron.certify.workload import build_small_batching
from rl_megatron.checkpoint.directory import Damaged
from rl_megatron.checkpoint.hf_convert import export_peft, export_weights, import_peft, import_weights
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.losses import NLLLoss
from rl_megatron.model.lora.originals import find_whole_parameters
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan.closed_forms import mean_training_bytes
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.family_cases import assert_same_tensors, hf_model, save, tensors
from tests.parallel.grid import Layout
from tests.parallel.layouts import MODEL, OPTIMIZER, build_policy
from tests.parallel.test_adapter_refit import difference
from tests.parallel.test_grid import QUICK_OF_FEW
from tests.parallel.test_layouts import random_batch
from tests.parallel.test_lora import LORA, OBJECTIVES, SEQUENCE, VOCAB_SIZE, WHOLE, step_with_adapters
from tests.parallel.test_lora import merged_logits as logits_in_one_process
from tests.parallel.test_transformers_engine import LLAMA, serving
from tests.unit.model.test_sharded_shape import VOCAB_SIZE as SMALL_VOCAB_SIZE
from tests.unit.model.test_sharded_shape import allocated

SAVED = replace(LORA, modules_to_save=("embed_tokens", "lm_head", "norm"))
NORMS = replace(LORA, modules_to_save=("norm",))
UNTIED = replace(LLAMA, tie_embeddings=False)
PIPELINE = (2, {"pipeline": 2, "virtual_pipeline": 2})


def lora_of(layout: Layout):
    return NORMS if layout.factors.tied else SAVED


def measured(layout: Layout):
    workload = replace(layout.workload(), objectives=OBJECTIVES, peft=lora_of(layout))
    where = topology.build(layout.parallel, start_device("cpu"), workload.seed)
    batching = {
        name: build_small_batching(
            layout.factors.batching, layout.factors.sequences, objective.group_size, layout.parallel
        )
        for name, objective in workload.objectives.items()
    }
    return run_workload(workload, where, batching)


@pytest.mark.parametrize("layout", QUICK_OF_FEW)
def test_a_layout_gives_the_gradients_of_one_process(ranks, layout):
    wanted = ranks.reference(run_in_one_process, replace(layout.reference, objectives=OBJECTIVES, peft=lora_of(layout)))
    found = ranks.run(layout.factors.ranks, measured, layout)[0]
    for name in wanted:
        whole = {tensor for tensor in found[name].gradients if ".lora." not in tensor}
        assert "decoder.final_layernorm.weight" in whole
        assert ("output_layer.weight" in whole) is not layout.factors.tied
        assert not [difference for difference in compare(found[name], wanted[name]) if not difference.holds]


@pytest.mark.parametrize(
    ("case", "layout"), [("llama", PIPELINE), ("qwen3", SEQUENCE), ("gemma3", WHOLE), ("mixtral", SEQUENCE)], ids=str
)
def test_the_checkpoint_is_pefts_and_comes_back(ranks, tmp_path, case, layout):
    """Modules are trained in the layout, exported, loaded by peft, merged, and imported again."""
    import peft

    hf, ids = hf_model(case), torch.randint(VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(0))
    lora = NORMS if hf.config.tie_word_embeddings else SAVED
    base = tmp_path / "base"
    import_weights(save(hf, tmp_path / "hf"), base)
    trained = ranks.run(layout[0], step_with_adapters, layout[1], str(base), lora, ids, str(tmp_path / "run"))[0]
    assert trained.digests[0] == trained.digests[1], "the base has changed"

    export_peft(trained.checkpoint, tmp_path / "adapter")
    found, original = tensors(tmp_path / "adapter"), tensors(tmp_path / "hf")
    whole = {name.removeprefix("base_model.model."): tensor for name, tensor in found.items() if ".lora_" not in name}
    assert "model.norm.weight" in whole and ("lm_head.weight" in whole) is (lora is SAVED)
    assert all((tensor - original[name]).abs().max() > 1e-4 for name, tensor in whole.items())
    assert_same_tensors(trained.adapter, found)
    assert_same_tensors(trained.base, original)

    export_weights(trained.checkpoint, tmp_path / "merged")
    merged = tensors(tmp_path / "merged")
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())
    assert all((merged[name] - trained.sent[name]).abs().max() <= 1e-6 for name in merged)
    with torch.no_grad():
        wanted = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter").eval()(ids).logits
    limit = 1e-5 * max(1.0, float(wanted.abs().max()))
    assert (trained.logits - wanted).abs().max() <= limit
    assert (ranks.run(1, logits_in_one_process, {}, str(trained.checkpoint), ids)[0] - wanted).abs().max() <= limit

    import_peft(tmp_path / "adapter", base, tmp_path / "imported")
    export_peft(tmp_path / "imported", tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "again"), found)
    largest = max((tmp_path / "imported").rglob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    with pytest.raises(Damaged):
        export_peft(tmp_path / "imported", tmp_path / "from damaged")
    assert not (tmp_path / "from damaged").exists()


def resumed(parallel: dict, directory: str, precision: str) -> dict[str, torch.Tensor]:
    """Train, save, load in this layout and train on; also return the reference's logprobs."""
    new = replace(SAVED, init_lora_weights=True)
    batches = [random_batch(4, 12, seed) for seed in range(3)]
    base = build_policy(parallel, UNTIED, precision=precision).save_checkpoint(Path(directory) / "base", 1)
    straight, other = (
        build_policy(parallel, UNTIED, precision=precision, peft=new, initialise=False) for _ in range(2)
    )
    straight.load_checkpoint(base, weights_only=True)
    found = {"start": straight.get_logprobs(batches[0])["logprobs"]}
    straight.freeze_reference()
    straight.train(batches[0], NLLLoss(), gbs=4)
    whole = find_whole_parameters(straight.model.model_chunks)
    found["moved"] = torch.stack([(now.detach().float() - original.float()).abs().max() for now, original in whole])
    other.load_checkpoint(straight.save_checkpoint(Path(directory) / "run", 1))
    for batch in batches[1:]:
        straight.train(batch, NLLLoss(), gbs=4)
        other.train(batch, NLLLoss(), gbs=4)
    found["reference"] = straight.get_reference_policy_logprobs(batches[0])["reference_logprobs"]
    found |= {name: p.get_logprobs(batches[0])["logprobs"] for name, p in (("straight", straight), ("other", other))}
    with other.model.adapters_off():
        found["off"] = other.get_logprobs(batches[0])["logprobs"]
    return found


@pytest.mark.parametrize(("layout", "precision"), [(WHOLE, "fp32"), (SEQUENCE, "fp32"), (SEQUENCE, "bf16")], ids=str)
def test_the_reference_has_the_originals_and_a_resumed_run_goes_on(ranks, tmp_path, layout, precision):
    found = ranks.run(layout[0], resumed, layout[1], str(tmp_path), precision)[0]
    assert torch.equal(found["straight"], found["other"])
    assert torch.equal(found["reference"], found["start"]) and torch.equal(found["off"], found["start"])
    assert (found["straight"] - found["start"]).abs().max() > 1e-3
    assert 0 < found["moved"].max() < 2 * OPTIMIZER.lr, "the first step starts from the loaded weights"


def sent_alone() -> list[float]:
    with serving({}, refit="adapter", peft=SAVED, model=UNTIED) as (policy, engine):
        found = [difference(policy, engine)]
        policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
        engine.sync()
        return [*found, difference(policy, engine)]


def test_an_engine_of_transformers_gets_the_modules_with_the_adapter(ranks):
    assert max(ranks.run(1, sent_alone)[0]) <= 1e-5


def refusals() -> dict[str, str]:
    said = {}
    for module in ("lm_haed", "embed_tokens", "q_proj"):
        with pytest.raises(ConfigError) as error:
            build_policy({}, LLAMA, peft=replace(LORA, modules_to_save=(module,)))
        said[module] = str(error.value)
    return said


def test_modules_that_cannot_be_trained_whole_are_refused(ranks):
    said = ranks.run(1, refusals)[0]
    assert "'lm_haed' matches no module of the model" in said["lm_haed"]
    assert "model.tie_embeddings=true" in said["embed_tokens"]
    assert "only the embedding, the head and norms can be trained whole" in said["q_proj"]


def alone(directory: str) -> str:
    """Load the checkpoint of an adapter whose base was never saved, without its base."""
    checkpoint = build_policy({}, LLAMA, peft=LORA).save_checkpoint(Path(directory), 1)
    with pytest.raises(ConfigError) as error:
        MegatronPolicy.from_checkpoint(checkpoint, device="cpu", peft=LORA)
    return str(error.value)


def test_an_adapter_does_not_make_a_policy_without_its_base(ranks, tmp_path):
    assert "whose base was never saved; load the base first" in ranks.run(1, alone, str(tmp_path))[0]


@pytest.mark.parametrize("head", ["lm", "score"])
def test_the_closed_form_counts_the_modules_and_their_originals(ranks, head):
    model, degrees = replace(MODEL, tie_embeddings=False), {"pipeline": 2}
    shape = ShardedShape(model, ParallelConfig(**degrees), 2, SMALL_VOCAB_SIZE, head, lora=SAVED)
    wanted = [mean_training_bytes(shape, stage, precision="bf16", distributed=False) for stage in range(2)]
    assert ranks.run(2, allocated, model, degrees, head, OPTIMIZER, "bf16", SAVED) == wanted

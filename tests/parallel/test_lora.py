"""Adapters: the logits of peft, the gradients of one process in every layout, a frozen base, and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rl_megatron.batching.config import Batching
from rl_megatron.certify.measurement import compare, run_workload
from rl_megatron.certify.single_process import run_in_one_process
from rl_megatron.certify.workload import Objective, build_small_batching
from rl_megatron.checkpoint.hf_convert import export_peft, export_weights, import_peft, import_weights
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import head_size
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss, PreferenceLoss
from rl_megatron.model.lora import layers
from rl_megatron.model.lora.dropout import dropout
from rl_megatron.model.lora.targets import find_adapted_linears
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan.closed_forms import mean_training_bytes
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.exporter import digest_weights
from tests.parallel.family_cases import SHAPE, assert_same_tensors, hf_model, save, tensors
from tests.parallel.grid import Layout
from tests.parallel.layouts import EXPERTS, MODEL, OPTIMIZER, build_policy, gradients, worst_relative_error
from tests.parallel.test_grid import FEW
from tests.parallel.test_layouts import random_batch
from tests.parallel.test_transformers_engine import LLAMA
from tests.unit.model.test_sharded_shape import DELTA, allocated
from tests.unit.model.test_sharded_shape import VOCAB_SIZE as SMALL_VOCAB_SIZE

LORA = LoraConfig(r=3, lora_alpha=5.0, init_lora_weights=False)
DORA = replace(LORA, use_dora=True)
OBJECTIVES = {"clipped_pg": Objective("clipped_pg", {"reference_policy_kl_penalty": 0.05}), "dpo": Objective("dpo")}
VOCAB_SIZE = SHAPE["vocab_size"]


def measured(layout: Layout, lora: LoraConfig = LORA):
    workload = replace(layout.workload(), objectives=OBJECTIVES, peft=lora)
    where = topology.build(layout.parallel, start_device("cpu"), workload.seed)
    batching = {
        name: build_small_batching(
            layout.factors.batching, layout.factors.sequences, objective.group_size, layout.parallel
        )
        for name, objective in workload.objectives.items()
    }
    return run_workload(workload, where, batching)


@pytest.mark.parametrize("layout", FEW, ids=lambda layout: layout.name.replace(" ", "-"))
def test_a_layout_gives_the_adapters_gradients_of_one_process(ranks, layout):
    """Logprobs, the gradients of A and B, the weights after a step and the metrics are those of one process."""
    assert_gradients_of_one_process(ranks, layout, LORA)


def assert_gradients_of_one_process(ranks, layout: Layout, lora: LoraConfig) -> None:
    reference = replace(layout.reference, objectives=OBJECTIVES, peft=lora)
    wanted = ranks.reference(run_in_one_process, reference)
    found = ranks.run(layout.factors.ranks, measured, layout, lora)[0]
    for name in wanted:
        assert all(".lora." in tensor for tensor in found[name].gradients) and found[name].gradients
        failures = [difference for difference in compare(found[name], wanted[name]) if not difference.holds]
        assert not failures


@dataclass
class Trained:
    """What a policy with adapters that has taken a step leaves, and what it would send to engines."""

    logits: torch.Tensor
    checkpoint: Path
    digests: tuple[str, str]
    sent: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]


def logits_of(policy: MegatronPolicy, ids: torch.Tensor) -> torch.Tensor:
    batch = {"input_ids": ids, "input_lengths": torch.full((len(ids),), ids.size(1))}
    top = policy.get_topk_logits(BatchedDataDict(batch), k=VOCAB_SIZE)
    return torch.empty_like(top["topk_logits"]).scatter_(-1, top["topk_indices"], top["topk_logits"])


def step_with_adapters(parallel: dict, base: str, lora: LoraConfig, ids: torch.Tensor, directory: str) -> Trained:
    options = {"parallel": ParallelConfig(**parallel), "device": "cpu", "weights_only": True}
    policy = MegatronPolicy.from_checkpoint(base, peft=lora, optimizer=OPTIMIZER, **options)
    before = digest_weights(policy.model, frozen_only=True)
    batch = random_batch(4, 12, 0)
    policy.train(batch, NLLLoss(), gbs=4)
    after = digest_weights(policy.model, frozen_only=True)
    sources = policy.weights, policy.weights.make_adapter_exporter(), policy.weights.make_base_exporter()
    sent = [{name: tensor.clone() for name, tensor in source.stream()} for source in sources]
    return Trained(logits_of(policy, ids), policy.save_checkpoint(directory, 1), (before, after), *sent)


def merged_logits(parallel: dict, checkpoint: str, ids: torch.Tensor) -> torch.Tensor:
    options = {"parallel": ParallelConfig(**parallel), "device": "cpu", "weights_only": True}
    return logits_of(MegatronPolicy.from_checkpoint(checkpoint, **options), ids)


# peft takes the adapters of these families' dense and shared MLPs for those of their experts.
OF_ATTENTION = {
    "deepseek_v3": replace(LORA, target_modules=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    "glm4_moe": replace(LORA, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
}
WHOLE, SEQUENCE, EXPERT = (1, {}), (2, {"tensor": 2, "sequence": True}), (2, {"expert": 2})
EXPERT_TENSOR = (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2})
FAMILIES = [
    ("llama", (2, {"pipeline": 2, "virtual_pipeline": 2})),
    ("qwen2", (2, {"tensor": 2})),
    ("qwen3", SEQUENCE),
    ("gemma3", WHOLE),
    ("mixtral", EXPERT),
    ("mixtral", (2, {"expert_tensor": 2})),
    ("qwen3_moe", SEQUENCE),
    ("qwen3_moe", EXPERT_TENSOR),
    ("glm4", WHOLE),
    ("glm4_moe", SEQUENCE),
    ("deepseek_v3", SEQUENCE),
    ("gpt_oss", SEQUENCE),
    ("qwen3_5", SEQUENCE),
]


@pytest.mark.parametrize(("case", "layout"), FAMILIES, ids=str)
def test_logits_with_an_adapter_are_those_of_peft_and_the_adapter_comes_back(ranks, tmp_path, case, layout):
    """An adapter is trained in the layout, exported, loaded by peft, merged, and imported again."""
    assert_logits_of_peft(ranks, tmp_path, case, layout, OF_ATTENTION.get(case, LORA))


def assert_logits_of_peft(ranks, tmp_path: Path, case: str, layout: tuple, lora: LoraConfig) -> None:
    import peft

    hf, ids = hf_model(case), torch.randint(VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(0))
    base = tmp_path / "base"
    import_weights(save(hf, tmp_path / "hf"), base)
    run = str(tmp_path / "run")
    trained = ranks.run(layout[0], step_with_adapters, layout[1], str(base), lora, ids, run)[0]
    assert trained.digests[0] == trained.digests[1], "the base has changed"

    export_peft(trained.checkpoint, tmp_path / "adapter")
    with torch.no_grad():
        without = hf(ids).logits
        wanted = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter").eval()(ids).logits
    assert (wanted - without).abs().max() > 0.05, "an adapter without effect would hide errors"
    assert (trained.logits - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))

    assert_same_tensors(trained.adapter, tensors(tmp_path / "adapter"))
    assert_same_tensors(trained.base, tensors(tmp_path / "hf"))

    export_weights(trained.checkpoint, tmp_path / "merged")
    merged = tensors(tmp_path / "merged")
    assert merged.keys() == trained.sent.keys()
    assert all((merged[name] - trained.sent[name]).abs().max() <= 1e-6 for name in merged)
    with torch.no_grad():
        of_merged = type(hf).from_pretrained(tmp_path / "merged")(ids).logits
    assert (of_merged - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
    found = ranks.run(layout[0], merged_logits, layout[1], str(trained.checkpoint), ids)[0]
    assert (found - trained.logits).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))

    import_peft(tmp_path / "adapter", base, tmp_path / "imported")
    export_peft(tmp_path / "imported", tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "again"), tensors(tmp_path / "adapter"))


def resumed(parallel: dict, directory: str, lora: LoraConfig) -> list:
    """Train, save, load in this layout and train on; return the weights after the same steps without a save."""
    straight = build_policy(parallel, peft=lora)
    batches = [random_batch(4, 12, seed) for seed in range(3)]
    straight.train(batches[0], NLLLoss(), gbs=4)
    path = straight.save_checkpoint(directory, 1)
    other = build_policy(parallel, peft=lora)
    other.load_checkpoint(path)
    for batch in batches[1:]:
        straight.train(batch, NLLLoss(), gbs=4)
        other.train(batch, NLLLoss(), gbs=4)
    return [policy.get_logprobs(batches[0])["logprobs"] for policy in (straight, other)]


@pytest.mark.parametrize(("layout", "lora"), [(WHOLE, LORA), ((2, {"tensor": 2}), DORA)], ids=["LoRA", "DoRA"])
def test_a_resumed_adapter_trains_on_as_if_it_had_not_stopped(ranks, tmp_path, layout, lora):
    straight, other = ranks.run(layout[0], resumed, layout[1], str(tmp_path), lora)[0]
    assert torch.equal(straight, other)


def adapted_reward_model(parallel: dict, directory: str) -> dict[str, torch.Tensor | str]:
    """Train a whole reward model, adapters of it, and return both heads, and what the adapters' checkpoint refuses."""
    where, batch = Path(directory), random_batch(4, 12, 0)
    whole = build_policy(parallel, LLAMA, head="score")
    whole.train(batch, PreferenceLoss(), gbs=4)
    base = whole.save_checkpoint(where / "whole", 1)
    found: dict[str, torch.Tensor | str] = {"whole": whole.score(batch)["scores"]}
    adapted = build_policy(parallel, LLAMA, head="score", peft=replace(LORA, init_lora_weights=True))
    adapted.load_checkpoint(base, weights_only=True)
    found["new"] = adapted.score(batch)["scores"]
    adapted.train(batch, PreferenceLoss(), gbs=4)
    path = adapted.save_checkpoint(where / "adapter", 1)
    found["trained"] = adapted.score(batch)["scores"]
    merged = build_policy(parallel, LLAMA, head="score")
    merged.load_checkpoint(path, weights_only=True)
    found["merged"] = merged.score(batch)["scores"]
    for name, export in (("weights", export_weights), ("peft", export_peft)):
        with pytest.raises(ConfigError) as refused:
            export(path, where / name)
        found[name] = str(refused.value)
    tensors = next(file for file in sorted(path.glob("*.distcp")) if file.stat().st_size)
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(ConfigError) as refused:
        merged.load_checkpoint(path, weights_only=True)
    return found | {"damaged": str(refused.value)}


def test_adapters_of_a_reward_model_start_from_its_head_and_keep_theirs(ranks, tmp_path):
    found = ranks.run(1, adapted_reward_model, {}, str(tmp_path))[0]
    assert torch.equal(found["new"], found["whole"])
    assert (found["trained"] - found["whole"]).abs().max() > 1e-4
    torch.testing.assert_close(found["merged"], found["trained"], atol=1e-5, rtol=0)
    assert "holds an adapter with a score head" in found["weights"] and found["weights"] == found["peft"]
    assert "is damaged" in found["damaged"]


def reference_of(parallel: dict, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Return logprobs of the policy at the start, of its reference after a step, and of the policy then."""
    found = {}
    for name, is_new in (("new", True), ("trained", False)):
        policy = build_policy(parallel, peft=replace(lora, init_lora_weights=is_new))
        batch = random_batch(4, 12, 0)
        start = policy.get_logprobs(batch)["logprobs"]
        policy.freeze_reference()
        policy.train(batch, NLLLoss(), gbs=4)
        reference = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        found[name] = (start, reference, policy.get_logprobs(batch)["logprobs"])
        with policy.model.adapters_off():
            found[f"{name} base"] = policy.get_logprobs(batch)["logprobs"]
    return found


@pytest.mark.parametrize(("layout", "lora"), [(WHOLE, LORA), (SEQUENCE, DORA)], ids=["LoRA", "DoRA"])
def test_the_reference_is_the_model_with_the_adapters_of_the_start(ranks, layout, lora):
    found = ranks.run(layout[0], reference_of, layout[1], lora)[0]
    for name in ("new", "trained"):
        start, reference, now = found[name]
        assert torch.equal(reference, start)
        assert (now - start).abs().max() > 1e-3
    assert torch.equal(found["new base"], found["new"][0])
    assert (found["trained base"] - found["trained"][0]).abs().max() > 1e-3


def gradients_with_dropout(parallel: dict, recompute: str = "none") -> dict[str, torch.Tensor]:
    """Return the gradients of a batch of microbatches of one sequence."""
    model = replace(MODEL, recompute=recompute)
    policy = build_policy(
        parallel, model=model, peft=replace(LORA, lora_dropout=0.5), batching=Batching("padded", 1)
    )  # fmt: skip
    policy.accumulate_gradients(random_batch(4, 16, 0), NLLLoss())
    return gradients(policy)


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        ({}, "full"),
        ({"tensor": 2}, "none"),
        ({"tensor": 2, "sequence": True}, "full"),
        ({"pipeline": 2}, "full"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "none"),
    ],
    ids=str,
)
def test_every_layout_drops_what_one_process_drops(ranks, parallel, recompute):
    """With the same microbatches; here on two ranks, which are data-parallel if nothing else is."""
    (wanted,) = ranks.run(1, gradients_with_dropout, {})
    error, name = worst_relative_error(ranks.run(2, gradients_with_dropout, parallel, recompute)[0], wanted)
    assert error <= 1e-4, name


def seeds_of_adapters(steps: int = 0, parallel: dict | None = None) -> list[int]:
    """Return the seed of what each adapter drops of each microbatch, with some steps on the same batch before."""
    found, kept = [], layers.dropout

    def record(x, p, seed, *share):
        found.append(seed)
        return kept(x, p, seed, *share)

    layers.dropout = record
    policy = build_policy(parallel or {}, peft=replace(LORA, lora_dropout=0.5), batching=Batching("padded", 1))
    for _ in range(steps):
        policy.train(random_batch(4, 16, 0), NLLLoss(), gbs=4)
    policy.accumulate_gradients(random_batch(4, 16, 0), NLLLoss())
    layers.dropout = kept
    return found


def test_every_adapter_drops_other_numbers_of_every_microbatch(ranks):
    (seeds,) = ranks.run(1, seeds_of_adapters)
    assert len(seeds) > 4 * MODEL.num_layers and len(set(seeds)) == len(seeds)
    (of_two_steps,) = ranks.run(1, seeds_of_adapters, 1)
    assert set(seeds) < set(of_two_steps) and len(set(of_two_steps)) == len(of_two_steps) == 2 * len(seeds)


def changes_of_generators(model: ModelConfig) -> list[bool]:
    """Return whether a step with dropout changes torch's generator, and the states of megatron-core's."""
    policy, found = build_policy({}, model=model, peft=replace(LORA, lora_dropout=0.5)), []
    tracker = get_cuda_rng_tracker()
    state, states = torch.get_rng_state(), tracker.get_states()
    policy.train(random_batch(4, 16, 0), NLLLoss(), gbs=4)
    found.append(not torch.equal(torch.get_rng_state(), state))
    after = tracker.get_states()
    found.append(after.keys() != states.keys() or any(not torch.equal(after[name], states[name]) for name in states))
    return found


@pytest.mark.parametrize(
    "model", [MODEL, replace(EXPERTS, router_aux_loss=0.5, router_aux_loss_scope="global")], ids=["dense", "experts"]
)
def test_a_step_with_dropout_leaves_the_generators_as_they_were(ranks, model):
    assert ranks.run(1, changes_of_generators, model)[0] == [False, False]


def test_context_parallel_ranks_drop_other_numbers(ranks):
    first, second = ranks.run(2, seeds_of_adapters, 0, {"context": 2})
    assert len(first) == len(second) > 4 * MODEL.num_layers and not set(first) & set(second)


def test_what_is_not_dropped_is_scaled_so_that_the_mean_stays():
    kept = dropout(torch.ones(1000), 0.2, seed=1)
    assert {*kept.tolist()} == {0.0, 1.25} and kept.mean().item() == pytest.approx(1.0, abs=0.1)


def losses_with_dropout(parallel: dict) -> dict[str, list[float]]:
    """Return the loss of a backward pass and of an evaluation, without dropout and with it."""
    found = {}
    for name, share in (("without", 0.0), ("with", 0.5)):
        policy, batch = build_policy(parallel, peft=replace(LORA, lora_dropout=share)), random_batch(4, 12, 0)
        trained = policy.accumulate_gradients(batch, NLLLoss())["loss"]
        found[name] = [trained, policy.train(batch, NLLLoss(), gbs=4, eval_mode=True)["loss"]]
    return found


def test_dropout_acts_while_training_only(ranks):
    (found,) = ranks.run(1, losses_with_dropout, {})
    assert len({*found["without"], found["with"][1]}) == 1
    assert len({*found["with"]}) == 2


def fused_gate_and_up(tensor: int) -> str:
    model = replace(MODEL, qk_norm=False, qkv_bias=True, sandwich_norms=True, rope_interleaved=True)
    with pytest.raises(ConfigError) as error:
        build_policy({"tensor": tensor}, model, peft=LORA)
    return str(error.value)


def test_an_adapter_of_fused_gate_and_up_is_refused_under_tensor_parallelism(ranks):
    for message in ranks.run(2, fused_gate_and_up, 2):
        assert "gate_up_proj is one module for gate and up, but parallel.tensor=2 splits" in message
        assert "peft.exclude_modules=[gate_up_proj]" in message


def refusals(directory: str) -> dict[str, str]:
    """Return the messages about adapters that cannot be used."""
    said = {}

    def refused(what: str, call) -> None:
        with pytest.raises(ConfigError) as error:
            call()
        said[what] = str(error.value)

    for what, changes in {
        "name": {"target_modules": ("q_prj",)},
        "regex": {"target_modules": "q_proj"},
        "exclude": {"exclude_modules": ("lm_head",)},
        "rank": {"r": 17},
        "layer": {"target_modules": ("layers.1.self_attn.q_proj",)},
    }.items():
        refused(what, lambda changes=changes: build_policy({}, peft=replace(LORA, **changes)))
    refused("experts", lambda: build_policy({}, EXPERTS, peft=DORA))
    bases = [build_policy({}, seed=seed).save_checkpoint(f"{directory}/{seed}", 1) for seed in (1, 2)]
    policy = build_policy({}, peft=LORA)
    policy.load_checkpoint(bases[0], weights_only=True)
    adapter = policy.save_checkpoint(f"{directory}/adapter", 1)
    other = build_policy({}, peft=LORA)
    other.load_checkpoint(bases[1], weights_only=True)
    refused("base", lambda: other.load_checkpoint(adapter))
    refused("shape", lambda: build_policy({}, peft=replace(LORA, lora_alpha=1.0)).load_checkpoint(adapter))
    refused("no adapter", lambda: build_policy({}, peft=LORA).load_checkpoint(bases[0]))
    return said


def test_adapters_of_the_gated_delta_rule_in_a_model_of_no_family():
    """Each layer has linears of its own kind, of which the one with rows in another order takes no adapter."""
    model = replace(DELTA, attention_output_gate=False)
    linears = find_adapted_linears(LORA, model, 7)
    of_delta_rule, of_attention = (
        linears[f"decoder.layers.{layer}.self_attention.linear_proj"][0].in_features for layer in (0, 1)
    )
    assert of_delta_rule == (model.linear_num_value_heads or 0) * (model.linear_value_head_dim or 0)
    assert of_attention == model.num_attention_heads * head_size(model)
    assert "decoder.layers.0.self_attention.linear_in_proj" in linears
    with pytest.raises(ConfigError, match="in_proj_qkv takes no adapter, because"):
        find_adapted_linears(replace(LORA, target_modules=("in_proj_qkv", "q_proj")), model, 7)


def test_adapters_that_do_not_fit_are_refused(ranks, tmp_path):
    said = ranks.run(1, refusals, str(tmp_path))[0]
    assert "'q_prj' matches no linear layer of the model; did you mean 'q_proj'?" in said["name"]
    assert "so write the list [q_proj]" in said["regex"]
    assert "peft.exclude_modules: 'lm_head' matches no linear layer" in said["exclude"]
    assert "peft.r=17 exceeds a dimension of model.layers.0.self_attn.k_proj" in said["rank"]
    assert "gives layer 0 no adapter" in said["layer"]
    assert "gate_proj is a linear of an expert, and peft has no DoRA for experts" in said["experts"]
    assert "an adapter fits only the base that it was trained on" in said["base"]
    assert "peft.lora_alpha: checkpoint 5.0, run 1.0" in said["shape"]
    assert "holds no adapter" in said["no adapter"]


@pytest.mark.parametrize(
    ("model", "degrees", "world_size", "adapters"),
    [
        (MODEL, {"pipeline": 2}, 2, LORA),
        (EXPERTS, {"tensor": 2, "sequence": True, "expert": 2}, 2, LORA),
        (EXPERTS, {"expert_tensor": 2}, 2, LORA),
        (MODEL, {"tensor": 2, "sequence": True}, 2, DORA),
    ],
    ids=["pipeline", "experts", "matrices of experts", "DoRA"],
)
def test_adapters_save_the_memory_that_the_closed_form_says(ranks, model, degrees, world_size, adapters):
    """Weights, gradients and optimizer state with and without adapters are as long as the closed forms say."""
    for lora in (None, adapters):
        shape = ShardedShape(model, ParallelConfig(**degrees), world_size, SMALL_VOCAB_SIZE, lora=lora)
        stages = [rank * shape.parallel.pipeline // world_size for rank in range(world_size)]
        wanted = [mean_training_bytes(shape, stage, precision="bf16", distributed=False) for stage in stages]
        assert ranks.run(world_size, allocated, model, degrees, "lm", OPTIMIZER, "bf16", lora) == wanted

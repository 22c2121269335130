"""Adapters with several names: a new one is trained beside frozen ones, in layouts, with peft's files and logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.directory import read_manifest
from rl_megatron.checkpoint.hf_convert import export_peft, export_weights, import_peft, import_weights
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.losses import NLLLoss, PreferenceLoss
from rl_megatron.model.lora.targets import parse_peft_name
from rl_megatron.model.shards import pieces
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.exporter import digest_weights
from tests.parallel.family_cases import SHAPE, assert_same_tensors, hf_model, save, tensors
from tests.parallel.layouts import EXPERTS, MODEL, OPTIMIZER, build_policy, gradients, worst_relative_error
from tests.parallel.test_layouts import random_batch
from tests.parallel.test_lora import DORA, LORA, SEQUENCE, logits_of, merged_logits
from tests.parallel.test_transformers_engine import LLAMA

STYLE = replace(LORA, adapter_name="style", r=2, lora_alpha=3.0, target_modules=("q_proj", "o_proj", "up_proj"))
SAFETY = replace(LORA, adapter_name="safety", r=4, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj"))
VOCAB_SIZE = SHAPE["vocab_size"]


def numbers(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {piece.name: piece.tensor.clone() for piece in pieces(policy.model.model_chunks)}


@dataclass
class Trained:
    """What a policy that trained an adapter beside those of a checkpoint leaves."""

    logits: torch.Tensor
    checkpoint: Path
    digests: tuple[str, str]
    sent: dict[str, torch.Tensor]
    optimizer_state: list[str]


def trained_beside(parallel: dict, start: str, lora, ids: torch.Tensor, directory: str) -> Trained:
    options = {"parallel": ParallelConfig(**parallel), "device": "cpu", "weights_only": True}
    policy = MegatronPolicy.from_checkpoint(start, peft=lora, optimizer=OPTIMIZER, **options)
    before = digest_weights(policy.model, frozen_only=True)
    policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    digests = before, digest_weights(policy.model, frozen_only=True)
    sent = {name: tensor.clone() for name, tensor in policy.weights.stream()}
    path = policy.save_checkpoint(directory, 1)
    state = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    stored = [key for key in state if key.startswith("optimizer.")]
    return Trained(logits_of(policy, ids), path, digests, sent, stored)


def peft_logits(hf, directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of peft with the adapter of a directory and those of its subdirectories, all of them active."""
    import peft

    model = peft.PeftModel.from_pretrained(hf, directory)
    others = sorted(file.parent for file in directory.glob("*/adapter_config.json"))
    for other in others:
        model.load_adapter(other, adapter_name=other.name)
    model.base_model.set_adapter(["default", *(other.name for other in others)])
    with torch.no_grad():
        logits = model.eval()(ids).logits
    model.unload()
    return logits


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_logits_are_those_of_peft_with_all_adapters_and_these_come_back(ranks, tmp_path, case):
    """A second adapter is trained beside a first, a third beside both, and then the second one again."""
    hf, ids = hf_model(case), torch.randint(VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(0))
    safety, style = SAFETY, STYLE
    if case == "mixtral":
        # peft wants several adapters of experts to have the same modules. It stacks those of gate and up with twice the
        # rank and alpha, which keeps their scale without rsLoRA only.
        changes = {"target_modules": LORA.target_modules, "use_rslora": False}
        safety, style = replace(safety, **changes), replace(style, **changes)
    base = tmp_path / "base"
    import_weights(save(hf, tmp_path / "hf"), base)
    found, start = [], base
    for number, lora in enumerate((LORA, style, safety, style)):
        run = str(tmp_path / str(number))
        found.append(ranks.run(2, trained_beside, SEQUENCE[1], str(start), lora, ids, run)[0])
        start = found[-1].checkpoint
        assert found[-1].digests[0] == found[-1].digests[1], "something that is frozen has changed"
        trained = ".lora." if lora is LORA else f".lora-{lora.adapter_name}."
        states = [key for key in found[-1].optimizer_state if ".lora" in key]
        assert states and all(trained in key for key in states)
    last = found[-1]
    manifest = read_manifest(last.checkpoint)
    assert [manifest["peft"]["adapter_name"], *(each["adapter_name"] for each in manifest["frozen_adapters"])] == [
        "style", "safety", "default",
    ]  # fmt: skip

    for number, trained in enumerate(found):
        export_peft(trained.checkpoint, tmp_path / f"adapters {number}")
    every = tmp_path / "adapters 3"
    assert {path.name for path in every.iterdir() if path.is_dir()} == {"style", "safety"}
    for name in (".", "safety"):
        assert_same_tensors(tensors(every / name), tensors(tmp_path / "adapters 2" / name))
    wanted = [peft_logits(hf, tmp_path / f"adapters {number}", ids) for number in range(4)]
    for number, trained in enumerate(found):
        limit = 1e-5 * max(1.0, float(wanted[number].abs().max()))
        assert (trained.logits - wanted[number]).abs().max() <= limit
        if number:
            assert (wanted[number] - wanted[number - 1]).abs().max() > 0.01, "an adapter without effect hides errors"

    limit = 1e-5 * max(1.0, float(wanted[3].abs().max()))
    export_weights(last.checkpoint, tmp_path / "merged")
    merged = tensors(tmp_path / "merged")
    assert merged.keys() == last.sent.keys()
    assert all((merged[name] - last.sent[name]).abs().max() <= 1e-6 for name in merged)
    assert (ranks.run(1, merged_logits, {}, str(last.checkpoint), ids)[0] - last.logits).abs().max() <= limit

    export_peft(last.checkpoint, tmp_path / "alone", "safety")
    assert_same_tensors(tensors(tmp_path / "alone"), tensors(every / "safety"))
    import_peft(every, base, tmp_path / "imported")
    export_peft(tmp_path / "imported", tmp_path / "again")
    for name in (".", "style", "safety"):
        assert_same_tensors(tensors(tmp_path / "again" / name), tensors(every / name))
    assert (ranks.run(1, merged_logits, {}, str(tmp_path / "imported"), ids)[0] - last.logits).abs().max() <= limit


def a_first_adapter(model, directory: str) -> Path:
    """Return the checkpoint of an adapter that has taken a step. Its base lies beside it."""
    where = Path(directory)
    base = build_policy({}, model).save_checkpoint(where / "base", 1)
    policy = build_policy({}, model, peft=replace(LORA, lora_dropout=0.5))
    policy.load_checkpoint(base, weights_only=True)
    policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    return policy.save_checkpoint(where / "first", 1)


@pytest.fixture(scope="module")
def first(ranks, tmp_path_factory) -> Path:
    return ranks.run(1, a_first_adapter, MODEL, str(tmp_path_factory.mktemp("dense")))[0]


@pytest.fixture(scope="module")
def first_of_experts(ranks, tmp_path_factory) -> Path:
    return ranks.run(1, a_first_adapter, EXPERTS, str(tmp_path_factory.mktemp("experts")))[0]


def policy_beside(parallel: dict, start: str, lora=STYLE, model=MODEL, **options) -> MegatronPolicy:
    policy = build_policy(parallel, model, peft=lora, **options)
    policy.load_checkpoint(start, weights_only=True)
    return policy


def gradients_beside(parallel: dict, start: str, model, options: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients on rank 0, after checking that no frozen number changes in a step."""
    policy, batch = policy_beside(parallel, start, model=model, **options), random_batch(8, 12, 1)
    metrics, before = policy.accumulate_gradients(batch, NLLLoss()), numbers(policy)
    found = gradients(policy)
    policy.train(batch, NLLLoss(), gbs=8)
    for name, tensor in numbers(policy).items():
        assert torch.equal(tensor, before[name]) is not (".lora-style." in name), name
    return metrics["loss"], found


@pytest.mark.parametrize(
    ("world_size", "parallel", "options"),
    [
        (2, {"tensor": 2, "sequence": True}, {}),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, {"micro_batch_size": 2}),
        (4, {"context": 2}, {"micro_batch_size": 2}),
    ],
    ids=["tensor 2", "interleaved pipeline 2", "data 2 context 2"],
)
def test_a_layout_gives_the_gradients_of_one_process(ranks, first, world_size, parallel, options):
    """Only the new adapter has gradients, and only its numbers change. The dropout of a frozen one does not act."""
    assert_gradients_of_one_process(ranks, first, MODEL, world_size, parallel, options)


def test_experts_split_over_ranks_give_the_gradients_of_one_process(ranks, first_of_experts):
    parallel = {"tensor": 2, "sequence": True, "expert": 2}
    assert_gradients_of_one_process(ranks, first_of_experts, EXPERTS, 2, parallel, {})


def assert_gradients_of_one_process(ranks, start: Path, model, world_size: int, parallel: dict, options: dict) -> None:
    wanted_loss, wanted = ranks.reference(gradients_beside, {}, str(start), model, {})
    loss, found = ranks.run(world_size, gradients_beside, parallel, str(start), model, options)[0]
    assert found and all(".lora-style." in name for name in found)
    assert abs(loss - wanted_loss) <= 1e-5
    error, name = worst_relative_error(found, wanted)
    assert error <= 1e-4, name


def resumed_beside(parallel: dict, start: str, directory: str, options: dict) -> list[torch.Tensor]:
    """Train, save, load in this layout and train on; return the logprobs with and without the save."""
    straight = policy_beside(parallel, start, **options)
    batches = [random_batch(4, 12, seed) for seed in range(3)]
    straight.train(batches[0], NLLLoss(), gbs=4)
    path = straight.save_checkpoint(directory, 1)
    other = build_policy(parallel, peft=STYLE, **options)
    other.load_checkpoint(path)
    for policy in (straight, other):
        for batch in batches[1:]:
            policy.train(batch, NLLLoss(), gbs=4)
    return [policy.get_logprobs(batches[0])["logprobs"] for policy in (straight, other)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_adapter_trains_on_bitwise_beside_a_frozen_one(ranks, tmp_path, first, precision):
    arguments = {"tensor": 2}, str(first), str(tmp_path), {"precision": precision}
    straight, other = ranks.run(2, resumed_beside, *arguments)[0]
    assert torch.equal(straight, other)


def references(parallel: dict, start: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return logprobs of the policy at the start, its reference after a step, the policy then, and the base."""
    found, batch = {}, random_batch(4, 12, 0)
    for name, lora in {"new": replace(STYLE, init_lora_weights=True), "continued": LORA}.items():
        policy = policy_beside(parallel, start, lora)
        at_start = policy.get_logprobs(batch)["logprobs"]
        policy.freeze_reference()
        policy.train(batch, NLLLoss(), gbs=4)
        reference = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        now = policy.get_logprobs(batch)["logprobs"]
        with policy.model.adapters_off():
            found[name] = at_start, reference, now, policy.get_logprobs(batch)["logprobs"]
        copied = {piece.name: piece.tensor for piece in pieces(policy.model.frozen_copy().model_chunks)}
        assert_same_tensors(copied, numbers(policy))
        start = str(policy.save_checkpoint(Path(start).parent / f"reference {name}", 1))
    return found


def test_the_reference_has_the_frozen_adapters_and_the_trained_one_of_the_start(ranks, first):
    """A policy with a new adapter is compared with the frozen ones; if one goes on, also with that of the start."""
    found = ranks.run(2, references, SEQUENCE[1], str(first))[0]
    for at_start, reference, now, base in found.values():
        assert torch.equal(reference, at_start)
        assert (now - at_start).abs().max() > 1e-3
        assert (base - at_start).abs().max() > 1e-3
    assert torch.equal(found["new"][3], found["continued"][3])
    torch.testing.assert_close(found["new"][2], found["continued"][0], atol=1e-5, rtol=0)


def sent_before_and_after(start: str) -> list[dict[str, torch.Tensor]]:
    """Return the weights that a policy sends whose plan was read before it got the frozen adapter, or after."""
    found = []
    for reads_plan in (True, False):
        policy = build_policy({}, peft=STYLE)
        if reads_plan:
            assert policy.weights.plan.buckets
        policy.load_checkpoint(start, weights_only=True)
        found.append({name: tensor.clone() for name, tensor in policy.weights.stream()})
    return found


def test_weights_are_sent_with_adapters_that_came_after_the_plan(ranks, first):
    assert_same_tensors(*ranks.run(1, sent_before_and_after, str(first))[0])


def starts() -> list[dict[str, torch.Tensor]]:
    """Return A of adapters with the names `default` and `style`, by the names that peft gives its tensors."""
    found = []
    for name in ("default", "style"):
        policy = build_policy({}, peft=replace(LORA, init_lora_weights=True, adapter_name=name))
        of_adapter = {key: tensor for key, tensor in numbers(policy).items() if key.endswith("lora_A.weight")}
        found.append({parse_peft_name(key): tensor for key, tensor in of_adapter.items()})
    return found


def test_adapters_with_different_names_start_from_different_numbers(ranks):
    """Otherwise a new adapter would begin with the A that the frozen one began with."""
    default, style = ranks.run(1, starts)[0]
    assert default and default.keys() == style.keys()
    assert not any(torch.equal(default[name], style[name]) for name in default)


def scores_beside(directory: str) -> list[torch.Tensor]:
    """Return scores of a reward model with an adapter, of one with a new adapter beside it, and both trained later."""
    batch, found, start = random_batch(4, 12, 0), [], None
    for number, lora in enumerate((None, LORA, replace(STYLE, init_lora_weights=True))):
        policy = build_policy({}, LLAMA, head="score", peft=lora)
        if start is not None:
            policy.load_checkpoint(start, weights_only=True)
        found.append(policy.score(batch)["scores"])
        policy.train(batch, PreferenceLoss(), gbs=4)
        found.append(policy.score(batch)["scores"])
        start = policy.save_checkpoint(f"{directory}/{number}", 1)
    merged = build_policy({}, LLAMA, head="score")
    merged.load_checkpoint(start, weights_only=True)
    return [*found, merged.score(batch)["scores"]]


def test_a_new_adapter_of_a_reward_model_starts_from_its_head(ranks, tmp_path):
    *_, before, start, trained, merged = ranks.run(1, scores_beside, str(tmp_path))[0]
    torch.testing.assert_close(start, before, atol=1e-6, rtol=0)
    assert (trained - start).abs().max() > 1e-4
    torch.testing.assert_close(merged, trained, atol=1e-5, rtol=0)


def refusals(start: str, directory: str) -> dict[str, str]:
    """Return the messages about adapters that do not go together."""
    said = {}

    def refused(what: str, call) -> None:
        with pytest.raises(ConfigError) as error:
            call()
        said[what] = str(error.value)

    refused("DoRA", lambda: policy_beside({}, start, replace(STYLE, use_dora=True)))
    refused("modules", lambda: policy_beside({}, start, replace(STYLE, modules_to_save=("norm",))))
    refused("resumed", lambda: build_policy({}, peft=replace(STYLE, adapter_name="defualt")).load_checkpoint(start))
    refused("another", lambda: policy_beside({}, start, replace(LORA, r=2)))
    policy = policy_beside({}, start)
    refused("sent", policy.weights.make_adapter_exporter)
    base = Path(read_manifest(Path(start))["base"]["path"])
    refused("base", lambda: policy.load_checkpoint(base, weights_only=True))
    other = build_policy({}, seed=2).save_checkpoint(f"{directory}/other", 1)
    adapted = build_policy({}, peft=STYLE)
    adapted.load_checkpoint(other, weights_only=True)
    refused("other base", lambda: adapted.load_checkpoint(start, weights_only=True))
    magnitudes = build_policy({}, peft=DORA)
    magnitudes.load_checkpoint(base, weights_only=True)
    of_dora = magnitudes.save_checkpoint(f"{directory}/dora", 1)
    refused("frozen DoRA", lambda: policy_beside({}, str(of_dora)))
    return said


def test_adapters_that_do_not_go_together_are_refused(ranks, first, tmp_path):
    (said,) = ranks.run(1, refusals, str(first), str(tmp_path))
    assert "peft.use_dora=true of the adapter style does not go together with other adapters" in said["DoRA"]
    assert "peft.modules_to_save=[norm] of the adapter style does not go" in said["modules"]
    assert "peft.use_dora=true of the adapter default does not go" in said["frozen DoRA"]
    assert all("rl-megatron convert export --merge" in said[what] for what in ("DoRA", "modules", "frozen DoRA"))
    assert "holds no adapter peft.adapter_name=defualt; did you mean 'default'?" in said["resumed"]
    assert "another adapter named default (peft.r: checkpoint 3, run 2)" in said["another"]
    assert "the model has the adapters style, default, but an engine supports only one; set " in said["sent"]
    assert "other frozen adapters than the policy has from an earlier one: default (policy) and none" in said["base"]
    assert "an adapter fits only the base that it was trained on" in said["other base"]

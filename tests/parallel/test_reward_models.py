"""Reward models on the ranks: scores equal transformers' in every layout, and what becomes of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from rl_megatron.checkpoint.hf_convert import export_weights
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.reward_models import RewardModelArguments, ScoringModel
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.rewards.reward_models import RewardModel, RewardModels
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from tests.parallel.layouts import MODEL, VOCAB_SIZE, build_policy

QWEN2 = dataclasses.replace(MODEL, qk_norm=False)  # qwen2 has biases and no norms
TOLERANCE = 1e-5
LAYOUTS = {
    "one process": (1, {}),
    "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "data 2": (2, {}),
    "tensor 2 context 2": (4, {"tensor": 2, "context": 2}),
}
SEQUENCES = [
    torch.randint(1, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (9, 3, 17, 5, 1, 12, 8)
]


def save(directory: Path, seeds: tuple[int, ...]) -> list[Path]:
    """Save reward models with random weights as checkpoints, and export each; return the checkpoints."""
    saved = []
    for seed in seeds:
        policy = build_policy(
            {}, model=dataclasses.replace(QWEN2, tie_embeddings=seed % 2 == 0), head="score", seed=seed
        )
        saved.append(policy.save_checkpoint(directory / f"{seed}", 1))
        export_weights(saved[-1], directory / f"{seed}.hf")
    return saved


@pytest.fixture(scope="module")
def models(ranks, tmp_path_factory):
    """The directory of two reward models, 1 and 2, as checkpoints and as Hugging Face directories."""
    directory = tmp_path_factory.mktemp("models")
    ranks.run(1, save, directory, (1, 2))
    return directory


def expected(directory: Path, seed: int) -> list[float]:
    """Return the scores that transformers gives."""
    model = AutoModelForSequenceClassification.from_pretrained(directory / f"{seed}.hf", dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0, 0].item() for ids in SEQUENCES]


def results(parallel: dict, all_kwargs: list[dict], calls: int = 1) -> list[list[list[dict]]]:
    """Return the results of reward models for each of their kwargs and each call, as this rank gets them."""
    layout = topology.build(ParallelConfig(**parallel), start_device("cpu"), 1)
    stage = load_config(["data=arithmetic", "algorithm=grpo", "train.micro_batch_tokens=32"]).first
    tokenizer = SimpleNamespace(pad_id=0, vocab_size=VOCAB_SIZE)
    models = RewardModels(stage, layout, tokenizer, lambda name: Path(name))  # pyright: ignore[reportArgumentType]
    given = SEQUENCES if dist.get_rank() == 0 else []
    found = []
    for kwargs in all_kwargs:
        (model,) = models.load(RewardConfig(functions=({"name": "reward_model", "kwargs": kwargs},))).values()  # pyright: ignore[reportArgumentType]
        found.append([model.score(given) for _ in range(calls)])
    assert models.keeps_statistics == any("normalize" in kwargs for kwargs in all_kwargs)
    models.close()
    return found


def sources(directory: Path, seed: int) -> list[dict]:
    return [{"init_from": str(directory / f"{seed}" / "step-000001")}, {"hf": str(directory / f"{seed}.hf")}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_those_of_transformers(ranks, models, layout):
    world_size, parallel = LAYOUTS[layout]
    kwargs = [*sources(models, 1), *sources(models, 2)]
    for of_rank in ranks.run(world_size, results, parallel, kwargs):
        for (scored,), seed in zip(of_rank, (1, 1, 2, 2), strict=True):
            assert [each["score"] for each in scored] == pytest.approx(expected(models, seed), abs=TOLERANCE)


def test_ensembles_normalisation_and_clipping(ranks, models):
    first, second = expected(models, 1), expected(models, 2)
    one, two = ({"init_from": str(models / f"{seed}" / "step-000001")} for seed in (1, 2))
    kwargs = [
        {"models": [one, two | {"weight": 3.0, "mean": 0.5, "std": 2.0}]},
        {"models": [one, two], "combine": "min"},
        one | {"mean": -0.25, "std": 0.5, "clip": 0.75},
        two | {"normalize": "running"},
    ]
    mean, smallest, fixed, running = ranks.run(1, results, {}, kwargs, 2)[0]

    def scores(found):
        return [each["score"] for each in found]

    assert scores(mean[0]) == pytest.approx(
        [(a + 3 * (b - 0.5) / 2) / 4 for a, b in zip(first, second, strict=True)], abs=TOLERANCE
    )
    assert [each["spread"] for each in mean[0]] == pytest.approx(
        [abs(a - b) for a, b in zip(first, second, strict=True)], abs=TOLERANCE
    )
    assert scores(smallest[0]) == pytest.approx(list(map(min, first, second)), abs=TOLERANCE)
    assert scores(fixed[0]) == pytest.approx([min(max((a + 0.25) / 0.5, -0.75), 0.75) for a in first], abs=TOLERANCE)
    assert {0.75, -0.75} & set(scores(fixed[0])) and [each["raw"] for each in fixed[0]] == pytest.approx(
        first, abs=TOLERANCE
    )
    average = math.fsum(second) / len(second)
    std = math.sqrt(math.fsum((b - average) ** 2 for b in second) / len(second))
    for call in running:  # the second one has the same scores again
        assert scores(call) == pytest.approx([(b - average) / std for b in second], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("combine", ["mean", "min"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_score_that_is_not_finite_is_not_hidden_by_min_or_clip(broken, combine, place):
    of_models = [[1.0, 2.0], [1.0, 2.0]]
    of_models[place][0] = broken
    scorers = [SimpleNamespace(score=lambda sequences, found=found: found) for found in of_models]
    arguments = RewardModelArguments(models=(ScoringModel(hf="a"), ScoringModel(hf="b")), combine=combine, clip=5.0)
    first, second = RewardModel(arguments, scorers).score([[1], [2]])  # pyright: ignore[reportArgumentType]
    assert math.isnan(first["score"]) and second["score"] == 2.0


def test_an_export_of_a_reward_model_is_a_classifier_of_one_label(models):
    config = json.loads((models / "1.hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and len(config["id2label"]) == 1

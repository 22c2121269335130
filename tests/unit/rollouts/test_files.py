"""Files of rollouts: what training reads comes back to the bit, with what people want to see."""

import os
import subprocess
import sys

import pytest
import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.cli import main
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tasks.task import Problem
from rl_megatron.generation.completion_batch import SampledSequence, make_completion_batch
from rl_megatron.generation.interfaces import Completion, Sampling, WeightSpan
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rollouts.files import Draw, build_rows, rows_to_batch
from rl_megatron.rollouts.record import RolloutRecord
from rl_megatron.rollouts.rows import check_replay, read_rows, rollout_file, write_rows
from rl_megatron.topology.ranks import Ranks
from tests.synced_files import note_syncs
from tests.unit.algorithms.fakes import Characters

PROMPTS = ["1+1=", "2+2=", "2+2="]
COMPLETIONS = (
    Completion("a", tuple(map(ord, "2")), (-0.1,), (WeightSpan(4, 0, 1),), "stop"),
    Completion(
        "b", tuple(map(ord, "four")), (-0.3, -1e-7, -2.5, -0.7), (WeightSpan(3, 0, 3), WeightSpan(4, 3, 4)), "stop"
    ),
    Completion("c", tuple(map(ord, "44")), (-1.0, -1 / 3), (WeightSpan(4, 0, 2),), "length"),
)


def draw(experts=False):
    sampling = Sampling(4, 0.7, 5, 0.9)
    batch = make_completion_batch(
        [
            SampledSequence([*map(ord, prompt), *completion.ids], ((len(prompt), completion),), sampling)
            for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
        ]
    )
    batch["rewards"] = torch.tensor([1.0, 1 / 3, -2.0])
    if experts:
        shape = (3, batch["input_ids"].shape[1], 2, 2)
        recorded = torch.randint(0, 8, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(0))
        read = torch.arange(shape[1]) < batch["input_lengths"][:, None] - 1
        batch[ROUTED_EXPERTS] = torch.where(read[..., None, None], recorded, torch.tensor(-1, dtype=torch.int16))
    prompts = [
        EncodedPrompt([1], Problem(text, "2", location=f"data.jsonl:{i}"), None) for i, text in enumerate(PROMPTS)
    ]
    return Draw(2, batch, prompts, {"exact": [1.0, 0.5, None], "short": [None, None, 0.25]})


def test_the_scores_of_reward_functions_come_back_if_they_are_asked_for(tmp_path):
    drawn = draw()
    drawn.rollouts["sample_mask"][1] = 0.0
    back = rows_to_batch(written(tmp_path, drawn, {}), ["exact", "silent"])
    assert back.keys() - drawn.rollouts.keys() == {f"component_reward.{name}" for name in ("exact", "silent", "short")}
    assert back["component_reward.silent"].isnan().all()
    nan = float("nan")
    exact, short = (torch.tensor(values) for values in ([1.0, nan, nan], [nan, nan, 0.25]))
    torch.testing.assert_close(back["component_reward.exact"], exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back["component_reward.short"], short, rtol=0, atol=0, equal_nan=True)


def test_scores_of_other_reward_functions_than_the_configured_ones_are_refused(tmp_path):
    written(tmp_path, draw(), {})

    def read(*names):
        reward = RewardConfig(functions=tuple(RewardFunctionConfig(name=name) for name in names))
        config = TrajectoryConfig(replay=str(tmp_path / "files"))
        return RolloutRecord(config, tmp_path, Characters(), 1, Ranks(), reward=reward).replay(7, 2, 3)

    assert "component_reward.short" in read("short", "exact")
    for names in ([], ["exact"]):
        with pytest.raises(ConfigError, match=r"step-000007.parquet has scores of \['exact', 'short'\], but reward"):
            read(*names)


def test_each_row_of_a_step_of_several_rounds_has_its_own_advantages(tmp_path):
    record = RolloutRecord(TrajectoryConfig(save_every=1, save_prompts=None), tmp_path, Characters(), 1, Ranks())
    parts = []
    for round_ in range(2):
        drawn = draw()
        rollouts = Batch.from_whole(drawn.rollouts)
        record.add(round_, rollouts, drawn.prompts, RewardMetrics())
        rollouts["advantages"] = drawn.rollouts["token_mask"] * (rollouts.facts["draw_order"][:, None] + 0.5)
        parts.append(rollouts)
    record.write(7, Batch.join(parts).select(torch.arange(6) > 0), 4)
    found = read_rows(rollout_file(tmp_path, 7))
    assert [row["round"] for row in found] == [0, 0, 0, 1, 1, 1]
    assert [row["advantages"] and row["advantages"][0] for row in found] == [None, 1.5, 2.5, 3.5, 4.5, 5.5]


def draw_of_turns():
    """Two trajectories, of which the second one has two sequences."""
    drawn = draw()
    width = drawn.rollouts["input_ids"].shape[1]
    numbers, rewards = torch.full((3, width), -1), torch.zeros(3, width)
    for row, (turn, start, end, reward) in enumerate([(0, 4, 5, 0.5), (0, 4, 8, 0.0), (1, 4, 6, -1 / 3)]):
        numbers[row, start:end] = turn
        rewards[row, end - 1] = reward
    drawn.rollouts.update({"trajectory": torch.tensor([0, 1, 1]), "turn": numbers, "turn_rewards": rewards})
    return Draw(drawn.round, drawn.rollouts, drawn.prompts[:2], {"environment": [0.5, -1 / 3]})


def test_turns_and_the_sequences_of_a_trajectory_come_back_to_the_bit(tmp_path):
    drawn = draw_of_turns()
    found = written(tmp_path, drawn, {})
    assert [(row["number"], row["trajectory"], row["group"]) for row in found] == [(0, 0, 0), (1, 1, 1), (2, 1, 1)]
    assert found[0]["turns"] == [{"turn": 0, "start": 4, "end": 5, "reward": 0.5}]
    back = rows_to_batch(found)
    assert back.keys() == drawn.rollouts.keys()
    for key, value in drawn.rollouts.items():
        assert back[key].dtype == value.dtype and torch.equal(back[key], value), key


def test_turns_are_shown_one_by_one(tmp_path, capsys):
    drawn = draw()
    drawn.rollouts["turn"] = torch.full(drawn.rollouts["input_ids"].shape, -1)
    drawn.rollouts["turn"][1, 4:8] = torch.tensor([0, 0, -1, 1])
    keys = {"trajectory": torch.arange(3), "turn_rewards": torch.zeros(drawn.rollouts["input_ids"].shape)}
    drawn.rollouts.update(keys)
    texts = [row["turn_texts"] for row in written(tmp_path, drawn, {})]
    assert texts[1] == [{"turn": 0, "content": "fo"}, {"turn": None, "content": "u"}, {"turn": 1, "content": "r"}]
    assert main(["rollouts", str(tmp_path / "files"), "--prompt", "2+2"]) == 0
    lines = [line.strip("│ \n").split() for line in capsys.readouterr().out.splitlines()]
    parts = [["turn", "1", "fo"], ["answer", "u"], ["turn", "2", "r"], ["completion", "44"]]
    assert [line for line in lines if line[:1] in (["turn"], ["answer"], ["completion"])] == parts


def test_files_without_the_texts_of_turns_are_read(tmp_path):
    import pyarrow.parquet

    written(tmp_path, draw(), {})
    path = rollout_file(tmp_path / "files", 7)
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns("turn_texts"), path)
    assert [row["completion"] for row in read_rows(path)] == ["2", "four", "44"]
    assert main(["rollouts", str(tmp_path / "files")]) == 0


def written(tmp_path, drawn, advantages):
    path = rollout_file(tmp_path / "files", 7)
    found = build_rows(7, drawn, Characters(), samples_per_prompt=1, newest_version=4, advantages=advantages)
    write_rows(path, list(found))
    assert path.name == "step-000007.parquet"
    return read_rows(path)


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = note_syncs(monkeypatch)
    written(tmp_path, draw(), {})
    path = rollout_file(tmp_path / "files", 7)
    assert synced == [(f"{path}.{os.getpid()}.incomplete", path.stat().st_size)]


@pytest.mark.parametrize("experts", [False, True])
def test_a_batch_comes_back_to_the_bit(tmp_path, experts):
    drawn = draw(experts)
    back = rows_to_batch(written(tmp_path, drawn, {}))
    assert back.keys() == drawn.rollouts.keys()
    for key, value in drawn.rollouts.items():
        assert back[key].dtype == value.dtype and torch.equal(back[key], value), key


def test_rows_say_what_people_want_to_read(tmp_path):
    width = draw().rollouts["input_ids"].shape[1]
    first, second, third = written(tmp_path, draw(), {1: torch.arange(float(width))})
    assert (second["prompt"], second["completion"], second["location"]) == ("2+2=", "four", "data.jsonl:1")
    assert second["rewards"] == [{"turn": 0, "component": "exact", "value": 0.5}]
    assert second["versions"] == [
        {"version": 3, "start": 4, "end": 7}, {"version": 4, "start": 7, "end": 8},
    ]  # fmt: skip
    assert (second["age"], first["age"]) == (1, 0)
    assert second["advantages"] == [4.0, 5.0, 6.0, 7.0] and second["is_learned_from"]
    assert first["advantages"] is None and not first["is_learned_from"]
    assert (third["stopped"], third["round"], third["number"], third["group"]) == (False, 2, 2, 2)


def test_other_files_are_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    with pytest.raises(ConfigError, match=r"step-000001.parquet cannot be read as a file of rollouts"):
        read_rows(rollout_file(tmp_path, 1))
    other = tmp_path / "other.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"step": [1]}), other)
    with pytest.raises(ConfigError, match=r"other.parquet is not a file of rollouts: it has no column round"):
        read_rows(other)


def test_a_replay_needs_the_rollouts_of_every_step(tmp_path):
    for step in (1, 3):
        rollout_file(tmp_path, step).touch()
    check_replay(tmp_path, range(1, 2))
    check_replay(tmp_path, range(3, 4))
    with pytest.raises(ConfigError, match=r"has no rollouts of step 2 and of 1 further steps; .*rollout.save_every=1"):
        check_replay(tmp_path, range(1, 5))


def test_rollouts_are_shown_without_torch(tmp_path):
    written(tmp_path, draw(), {})
    program = (
        "import sys\nfrom rl_megatron.cli import main\n"
        f"assert main(['rollouts', {str(tmp_path / 'files')!r}]) == 0\n"
        "print(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "3 of 3 trajectories shown" in done.stdout and done.stdout.endswith("\n[]\n")

"""Which checkpoints a run reads, and the error if one of them is damaged."""

from dataclasses import asdict, replace

import pytest

from rl_megatron.checkpoint.directory import Damaged, name_checkpoint, publish, read_manifest
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.loading.load import load_config
from rl_megatron.runs import verify
from rl_megatron.runs.verify import add_remedy, refuse_damage
from rl_megatron.topology.ranks import Ranks


def save(directory, step, model):
    partial = directory / f"step-{step:06d}.incomplete"
    partial.mkdir(parents=True)
    (partial / "weights").write_text("12345")
    final = directory / name_checkpoint(step)
    publish(partial, final, {"step": step, "model": asdict(model)})
    return final


@pytest.fixture
def config():
    """Two stages of four steps each, the second with a critic."""
    sft, ppo = (load_config([f"algorithm={name}", "train.steps=4"]).first for name in ("sft", "ppo"))
    return replace(load_config([]), stages={"sft": sft, "ppo": ppo})


def test_only_checkpoints_that_a_run_loads_are_read(tmp_path, config, monkeypatch):
    verified = []
    monkeypatch.setattr(verify, "verify_checkpoint", lambda path, ranks: verified.append(path))

    def read(config=config):
        verified.clear()
        refuse_damage(config, tmp_path, Ranks())
        return [f"{path.parent.name}/{path.name}" for path in verified]

    sft, ppo = tmp_path / "checkpoints" / "sft", tmp_path / "checkpoints" / "ppo"
    model = config.first.model
    start = replace(config, init_from="before/step-000009")
    assert read() == [] and read(start) == ["before/step-000009"]
    save(sft, 2, model)
    assert read(start) == ["before/step-000009", "sft/step-000002"]
    save(sft, 4, model)
    assert read(start) == ["sft/step-000004"]
    save(ppo, 2, model), save(ppo.with_name("ppo.critic"), 2, model)
    assert read(start) == ["sft/step-000004", "ppo/step-000002", "ppo.critic/step-000002"]
    save(ppo, 4, model), save(ppo.with_name("ppo.critic"), 4, model)
    assert read(start) == []


def test_the_newest_undamaged_checkpoint_is_named(tmp_path, config):
    stage = tmp_path / "ppo"
    for step in (1, 2, 3, 4):
        save(stage, step, config.first.model)
    for step in (1, 2, 3):
        save(stage.with_name("ppo.critic"), step, config.first.model)

    def said(damaged, config=config):
        return str(add_remedy(Damaged("damaged"), damaged, config, read_manifest))

    newest = stage / "step-000004"
    assert (
        said(newest)
        == f"damaged: the newest undamaged checkpoint is {stage}/step-000003; remove {newest} to continue from there"
    )
    (stage.with_name("ppo.critic") / "step-000003" / "weights").write_text("1")
    (stage / "step-000002" / MANIFEST).write_text("{")
    assert f"the newest undamaged checkpoint is {stage}/step-000001; remove" in said(newest)
    assert said(stage.with_name("ppo.critic") / "step-000003").endswith(
        f"remove {stage}/step-000003 to continue from there"
    )
    assert said(stage / "step-000001") == (
        f"damaged: there is no undamaged checkpoint of stage 'ppo'; remove {stage}/step-000001 to restart the stage"
    )
    start = replace(config, init_from=str(newest))
    assert said(newest, start) == f"damaged: use init_from={stage}/step-000001, which is undamaged"

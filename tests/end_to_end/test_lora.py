"""A run whose last stage trains an adapter: its engine gets merged weights, its checkpoint has the adapter alone."""

import json

from rl_megatron.checkpoint.directory import read_manifest
from tests.end_to_end.launch import TINY, metrics
from tests.end_to_end.test_quickstart import SHORT

LORA = ("experiment=quickstart_lora", "parallel.tensor=2", *SHORT, "stages.grpo.train.steps=3", "output_dir=out")


def test_a_shortened_quickstart_with_an_adapter_passes_the_logprob_check_and_is_evaluated(tmp_path, forks):
    given = (*LORA, "stages.grpo.generation.engine=transformers")
    done = forks.run_ranks(tmp_path, "train", *given, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    lines = [line for line in metrics(tmp_path / "out", timed=True) if line["stage"] == "grpo"]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 3 and all(line["mismatch_max"] < 1e-5 for line in steps)
    checked = [line["gate_max"] for line in lines if "gate_max" in line]
    assert len(checked) >= 3 and max(checked) < 1e-5

    whole, adapter = (
        sorted((tmp_path / "out" / "checkpoints" / stage).glob("step-*"))[-1] for stage in ("sft", "grpo")
    )
    manifest = read_manifest(adapter)
    assert manifest["peft"]["r"] == 16 and manifest["base"]["path"] == str(whole.resolve())
    assert num_bytes(adapter) < num_bytes(whole) / 3

    exported = forks.run(tmp_path, "convert", "export", str(adapter), "exported")
    assert exported.status == 0 and "an adapter of rank 16, in peft's format" in exported.out
    merged = forks.run(tmp_path, "convert", "export", str(adapter), "merged", "--merge")
    assert merged.status == 0 and "as transformers loads it" in merged.out
    assert json.loads((tmp_path / "exported" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    again = forks.run(tmp_path, "convert", "import", "exported", "imported", "--base", str(whole))
    assert again.status == 0, again.err
    refused = forks.run(tmp_path, "convert", "import", "exported", "other")
    assert refused.status == 2 and "--base CHECKPOINT" in refused.err
    refused = forks.run(tmp_path, "convert", "export", str(whole), "other", "--merge")
    assert refused.status == 2 and "--merge is for an adapter" in refused.err
    refused = forks.run(tmp_path, "convert", "export", str(adapter), "other", "--cut-vocabulary")
    assert refused.status == 2 and "add --merge, or leave out --cut-vocabulary" in refused.err


def test_a_stage_trains_a_new_adapter_beside_that_of_the_stage_before(tmp_path, forks):
    """The engine and the logprob check compute with both, and `convert` reads and writes both or one."""
    two = (*LORA, "stages.sft.peft.adapter_name=style", "stages.sft.peft.r=4")
    for given, message in {
        ("stages.sft.peft.adapter_name=default",): "stages.grpo.peft differs from that of an earlier stage, whose "
        "adapter default it continues",
        ("stages.sft.peft.use_dora=true",): "peft.use_dora=true of the adapter style does not go together",
        ("stages.grpo.generation.engine=transformers", "stages.grpo.generation.refit=adapter"): "the model has the "
        "adapters style, default, but an engine supports only one; set generation.refit=collective",
        ("stages.sft.peft.adapter_name=my.style",): "adapter_name='my.style': must be a word of letters",
    }.items():
        refused = forks.run(tmp_path, "train", *two, "parallel.tensor=1", *given)
        assert refused.status == 2 and message in refused.err, refused.err
    done = forks.run_ranks(tmp_path, "train", *two, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    lines = [line for line in metrics(tmp_path / "out", timed=True) if line["stage"] == "grpo"]
    assert max(line["gate_max"] for line in lines if "gate_max" in line) < 1e-5

    base, style, both = (
        sorted((tmp_path / "out" / "checkpoints" / stage).glob("step-*"))[-1] for stage in ("pretrain", "sft", "grpo")
    )
    assert read_manifest(both)["base"]["path"] == str(base.resolve())
    for given, message in {
        (str(both), "all"): "adapters default of rank 16, style of rank 4, in peft's format",
        (str(both), "alone", "--adapter", "style"): "an adapter of rank 4, in peft's format",
        (str(style), "of sft"): "adapters style of rank 4, in peft's format",
    }.items():
        exported = forks.run(tmp_path, "convert", "export", *given)
        assert exported.status == 0 and message in exported.out, exported
    tensors = [
        (tmp_path / path / "adapter_model.safetensors").read_bytes() for path in ("all/style", "alone", "of sft/style")
    ]
    assert tensors[0] == tensors[1] == tensors[2], "the adapter of the stage before has changed"
    imported = forks.run(tmp_path, "convert", "import", "all", "imported", "--base", str(base))
    assert imported.status == 0 and "imported: adapters default of rank 16, style of rank 4." in imported.out
    for given, message in {
        (str(both), "other", "--adapter", "stile"): "did you mean 'style'?",
        (str(base), "other", "--adapter", "style"): "--adapter is for adapters, but checkpoint",
        (str(both), "other", "--adapter", "style", "--merge"): "not allowed with argument",
    }.items():
        refused = forks.run(tmp_path, "convert", "export", *given)
        assert refused.status == 2 and message in refused.err, refused


def num_bytes(checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))


def test_an_adapter_without_weights_or_with_a_wrong_name_is_refused_before_the_first_step(tmp_path, forks):
    for given, message in {
        "peft.r=4": "peft is set, but the stage has no weights to adapt; set init_from",
        "peft.target_modules=[q_prj]": "did you mean 'q_proj'?",
        "peft.r=1000": "peft.r=1000 exceeds a dimension of",
        "peft.dim=8": "unknown key 'peft.dim'; did you mean 'peft.r'?",
        "peft.rank=4": "unknown key 'peft.rank'",
    }.items():
        done = forks.run(tmp_path, "train", *TINY, "algorithm=sft", given, "output_dir=refused")
        assert done.status == 2 and message in done.err, done.err

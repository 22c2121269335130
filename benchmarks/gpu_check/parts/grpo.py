"""The quickstart's three stages with fewer steps, in bf16: the run ends well, and every metric is finite."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process
from rl_megatron.cli import main

STEPS = {False: (100, 8, 8), True: (2, 1, 2)}  # of pretraining, SFT and GRPO
SMALL = (
    "data.num_eval_examples=4", "data.num_demonstrations=32", "model.num_layers=1", "data.num_documents=200",
    "stages.grpo.algorithm.prompts_per_step=4", "stages.grpo.algorithm.samples_per_prompt=2",
    "stages.grpo.train.global_batch_size=8",
)  # fmt: skip


def rows(tiny: bool) -> list[str]:
    return ["seconds of a step of GRPO"]


def overrides(setting: Setting) -> list[str]:
    """Return the configuration of the run."""
    pretrain, sft, grpo = STEPS[setting.tiny]
    return [
        "experiment=quickstart", "precision=bf16", f"device={setting.device}", "resume=false",
        f"output_dir={setting.directory / 'run'}", f"stages.pretrain.train.steps={pretrain}",
        "stages.pretrain.train.eval_every=0", "stages.pretrain.train.save_every=0", f"stages.sft.train.steps={sft}",
        f"stages.grpo.train.steps={grpo}", "stages.grpo.train.save_every=0", "stages.grpo.train.fused_head=true",
        *(SMALL if setting.tiny else ()),
    ]  # fmt: skip


def run(setting: Setting, record: Record) -> None:
    status = in_new_process(main, ["train", *overrides(setting)])
    record.equal("exit status", status, 0)
    check_metrics(setting.directory / "run" / "metrics.jsonl", STEPS[setting.tiny][2], record)


def check_metrics(path: Path, steps: int, record: Record) -> None:
    """Check that all metrics of a run are finite, and that GRPO took its steps."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = {
        f"{name} of step {line.get('step')}"
        for line in lines
        for name, value in line.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    record.equal("metrics that are not finite", ", ".join(sorted(wrong)) or "none", "none")
    trained = [line for line in lines if line.get("kind") == "train" and line.get("stage") == "grpo"]
    record.equal("steps of GRPO", len(trained), steps)
    record.figure("seconds of a step of GRPO", statistics.median(line["seconds"] for line in trained), "s")

"""Logprobs and the fused head beside their lower bounds, by `python -m benchmarks.logprobs`."""

from __future__ import annotations

import json

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting
from benchmarks.logprobs import __main__ as logprobs
from benchmarks.logprobs.cases import Case

GOALS = {"logprob": 1.15, "entropy": 1.15, "inference": 1.15, "fused": 1.10}
_ERRORS = {"fused": 5e-2}  # the fused head's logits are rounded to bf16
_ERROR = 1e-4
_COMMON = ("--modes", *GOALS, "--dtypes", "bf16", "--tensor", "1")
FULL = (
    *_COMMON, "--tokens", "32768", "8192", "--vocab", "151936", "--hidden", "4096", "--shards", "1",
    "--repetitions", "7", "--time-limit", "55",
)  # fmt: skip
TINY = (*_COMMON, "--quick", "--repetitions", "1", "--tokens", "64", "--vocab", "1024", "--hidden", "32")


def arguments(tiny: bool, device: str) -> list[str]:
    return ["--device", device, *(TINY if tiny else FULL)]


def rows(tiny: bool) -> list[str]:
    device = "cpu" if tiny else "cuda"
    grid = logprobs.grid_of(logprobs.parser().parse_args(arguments(tiny, device)), device)
    return [f"time / {what}, {case.title}" for case in grid.cases(1) for what in ("floor", "fastest rival")]


def run(setting: Setting, record: Record) -> None:
    status = logprobs.main([*arguments(setting.tiny, setting.device), "--output", str(setting.directory)])
    record.equal("exit status of the benchmark", status, 0)
    found = json.loads((setting.directory / "logprobs.json").read_text())
    record.fact("bandwidth of copies", f"{found['environment']['copy_bytes_per_second'] / 1e9:,.0f} GB/s")
    left = rows(setting.tiny)
    for each in found["cases"]:
        case = Case(**each["case"])
        # On a GPU both backends are ours; the first is that of `backend="auto"`.
        ours = next(result for result in each["results"] if result["is_ours"])
        if ours["failed"]:
            record.equal(f"failure, {case.title}", ours["failed"], None)
            continue
        record.at_most(f"error of logprobs, {case.title}", ours["logprob_error"], _ERRORS.get(case.mode, _ERROR))
        goals = setting.on_gpu and not setting.tiny
        limit, spread = GOALS[case.mode] if goals else None, None
        if ours["seconds"] is not None:
            scale = ours["ratio_to_floor"] / ours["seconds"]
            spread = (scale * ours["fastest_seconds"], ours["ratio_to_floor"])
        record.figure(f"time / floor, {case.title}", ours["ratio_to_floor"], at_most=limit, spread=spread)
        left.remove(f"time / floor, {case.title}")
        rivals = {
            result["variant"]: ours["seconds"] / result["seconds"]
            for result in each["results"]
            if "rl_megatron" not in result["variant"] and result["seconds"] and result["logprob_error"] is not None
        }
        if rivals:
            fastest, ratio = max(rivals.items(), key=lambda rival: rival[1])
            limit = (1.05 if case.mode == "fused" else 1.0) if goals else None
            record.figure(f"time / fastest rival, {case.title}", ratio, at_most=limit)
            record.fact(f"fastest rival, {case.title}", fastest)
            left.remove(f"time / fastest rival, {case.title}")
        for result in each["results"]:
            if result["failed"]:
                record.fact(f"not raced, {case.title}: {result['variant']}", result["failed"])
    if left:
        record.cannot(left, "the benchmark's time was over, or the case failed")

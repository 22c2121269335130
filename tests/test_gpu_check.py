"""The check of a GPU in parts: every part runs on the CPU with tiny shapes, and its results are kept whatever happens.

A GPU runs the same code; what only a GPU can show is listed as not measured here.
"""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import bundle, collect, forks, measured, runner, setting, stand_in
from benchmarks.gpu_check.part import run_part
from benchmarks.gpu_check.parts import PARTS, Part, environment, nccl, syncs
from benchmarks.gpu_check.profiling import profile_of, union
from benchmarks.gpu_check.record import Record, write_json
from benchmarks.gpu_check.setting import ProcessFailed, Setting, in_new_process
from rl_megatron.config.loading.load import load_config
from tests import forked_engines
from tests.forkserver import fork_context

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "performance.md").read_text()


# --- parts, on the CPU ---


def _rows(name: str, tiny: bool) -> list[str]:
    import importlib

    return importlib.import_module(f"benchmarks.gpu_check.parts.{name}").rows(tiny)


def _in_fork(name: str, directory: Path, connection) -> None:
    """Run a part, whose processes are forks of this one: they start without imports."""
    torch.set_num_threads(1)
    forked_engines.uninstall()  # the part finds the engine that it kills by its command
    setting.CONTEXT = multiprocessing.get_context("fork")
    torch.multiprocessing.spawn = lambda function, args, nprocs: function(0, *args)  # of benchmarks.logprobs
    if name == "nccl":
        nccl.finish = _finish_nothing
    try:
        answer = run_part(name, Setting("cpu", True, directory / name), directory / f"{name}.json"), ""
    except BaseException:
        answer = 1, traceback.format_exc()
    connection.send(answer)


def _finish_nothing(arguments: list[str], ranks: int) -> int:
    """Compose the configuration, and write the metrics of a run: tests/end_to_end has such runs."""
    stages = load_config(arguments[1:]).stages
    if arguments[0] == "train":
        directory = Path(arguments[-1].removeprefix("output_dir="))
        directory.mkdir(parents=True)
        (stage,) = stages.values()
        line = json.dumps({"kind": "train", "stage": "grpo", "seconds": 1.0})
        (directory / "metrics.jsonl").write_text(f"{line}\n" * stage.train.steps)
    return 0


@pytest.mark.change
@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_on_the_cpu_and_reports_every_figure_or_why_not(name, tmp_path):
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=_in_fork, args=(name, tmp_path, theirs))
    process.start()
    theirs.close()
    status, error = ours.recv()
    process.join()
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert status == 0, error or found
    if name == "te":
        assert found["skipped"] == "Transformer Engine needs a GPU"
        return
    assert found["checks"] and all(check["holds"] for check in found["checks"])
    figures = [figure["name"] for figure in found["figures"]]
    assert sorted([*figures, *found["not_measured"]]) == sorted(_rows(name, tiny=True))
    assert all(figure["value"] >= 0 for figure in found["figures"])


def test_every_figure_of_a_gpu_is_on_the_page_as_not_measured_or_with_a_value():
    (table,) = re.findall(r"<!-- gpu figures -->\n(.*?)<!-- end of gpu figures -->", PAGE, re.DOTALL)
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert [(part, figure) for part, figure, *_ in lines] == [
        (name, figure) for name in PARTS for figure in _rows(name, tiny=False)
    ]
    assert all(value for _, _, value, *_ in lines)


def test_every_part_is_on_the_page():
    for part in PARTS.values():
        assert f"| `{part.name}` | {part.meaning} |" in PAGE


def test_the_environment_imports_all_that_the_package_needs():
    required = re.search(r"install_requires=\[(.*?)\n    \]", (REPOSITORY / "setup.py").read_text(), re.DOTALL)
    names = re.findall(r'^ +"([A-Za-z0-9_-]+)', required[1], re.MULTILINE)
    assert set(names) <= {distribution or module for module, distribution in environment.MODULES.items()}


# --- bundles ---

# What a machine of the kind that bundles are for has, as far as the package and its tests need it, in unknown versions.
IMAGE = {
    "absl-py", "anyio", "certifi", "charset-normalizer", "click", "cloudpickle", "contourpy", "cycler", "einops",
    "filelock", "fonttools", "fsspec", "grpcio", "h11", "hf-xet", "huggingface-hub", "idna", "iniconfig", "jaxtyping",
    "jinja2", "kiwisolver", "markdown", "markdown-it-py", "markupsafe", "matplotlib", "mdurl", "mpmath", "networkx",
    "numpy", "packaging", "pillow", "pluggy", "protobuf", "psutil", "pygments", "pyparsing", "pytest",
    "python-dateutil", "pyyaml", "regex", "requests", "rich", "safetensors", "setuptools", "shellingham", "six",
    "sympy", "tensorboard", "tensorboard-data-server", "tokenizers", "torch", "tqdm", "transformers", "triton",
    "typer", "typing-extensions", "urllib3", "wadler-lindig", "werkzeug",
}  # fmt: skip
CARRIED_ANYWAY = {"cloudpickle", "einops", "jaxtyping", "wadler-lindig"}  # their versions matter
RIVALS = {"cut-cross-entropy", "liger-kernel"}


def test_a_bundle_has_what_the_package_needs_and_the_machine_lacks():
    required = re.search(r"install_requires=\[(.*?)\n    \]", (REPOSITORY / "setup.py").read_text(), re.DOTALL)
    todo, needed = [*re.findall(r'^ +"([A-Za-z0-9_-]+)', required[1], re.MULTILINE), "beartype"], set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in needed | IMAGE:
            continue
        needed.add(name)
        of_name = [Requirement(line) for line in metadata.requires(name) or ()]
        machine = {"python_version": bundle.PYTHON, "extra": ""}
        todo += [each.name for each in of_name if each.marker is None or each.marker.evaluate(machine)]
    wheels = {canonicalize_name(wheel.partition("==")[0]) for wheel in bundle.requirements()}
    assert wheels == needed | CARRIED_ANYWAY | RIVALS


def test_the_stand_in_checks_the_files_that_the_command_wrote(tmp_path):
    assert stand_in.problems_of(tmp_path)
    (tmp_path / "report.md").touch()
    parts = {"smoke": {"status": "passed"}, "nccl": {"status": "skipped"}, "grpo": {"status": "timed out"}}
    write_json(tmp_path / "results.json", {"parts": parts})
    assert stand_in.problems_of(tmp_path) == ["grpo: timed out"]
    (tmp_path / "a directory").mkdir()
    assert stand_in.problems_of(tmp_path)[:2] == ["a directory is not a plain file", "the name 'a directory'"]
    for number in range(6):
        (tmp_path / f"{number}.txt").touch()
    assert any(problem.startswith("9 files") for problem in stand_in.problems_of(tmp_path))


def test_versions_of_wheels_are_those_of_the_machines_python():
    found = dict(wheel.split("==") for wheel in bundle.requirements())
    assert found["megatron-core"] == "0.19.2" and found["liger_kernel"]
    assert dict(wheel.split("==") for wheel in bundle.requirements(python="3.11"))["megatron-core"] == "0.16.1"


def test_two_wheels_of_one_distribution_are_refused(tmp_path):
    for version in ("1.0", "2.0"):
        (tmp_path / f"pydantic_core-{version}-py3-none-any.whl").touch()
    with pytest.raises(bundle.BundleError, match="two wheels of pydantic-core"):
        bundle.check_wheels(tmp_path)


def test_a_bundle_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "wheel").write_bytes(b"0" * 100)
    assert bundle.check_size(tmp_path)[1] == 100
    with pytest.raises(bundle.BundleError, match="they may have 0"):
        bundle.check_size(tmp_path, most=99)


def test_the_command_of_a_bundle_is_short_and_can_be_parsed():
    assert len(bundle.COMMAND) < 2000
    assert subprocess.run(["bash", "-n", "-c", bundle.COMMAND]).returncode == 0


def test_an_expected_value_of_another_shape_is_computed_again(tmp_path, capsys):
    with gzip.open(tmp_path / setting.EXPECTED, "wb") as file:
        torch.save({setting.key_of("peak", 16): 3.0}, file)
    of_bundle = Setting("cuda", False, tmp_path, tmp_path)
    assert of_bundle.expected(setting.key_of("peak", 16), lambda: 4.0) == 3.0
    assert of_bundle.expected(setting.key_of("peak", 32), lambda: 4.0) == 4.0
    assert "'peak [" in (said := capsys.readouterr().out) and "is stale" in said


def test_collected_figures_replace_earlier_ones_and_no_others(tmp_path):
    page, kept, results = tmp_path / "page.md", tmp_path / "kept", tmp_path / "results"
    page.write_text(f"before\n{collect.BEGIN}| a |\n|---|\n{collect.END}after\n")
    texts = []
    for card, value, part in (("Card A", 2.0, "environment"), ("Card B", 5.0, "grpo")):
        record = Record(results / "part.json")
        record.figure(_rows(part, tiny=False)[0], value, "units", prediction=(4.0, 6.0))
        about = {"card": card, "device": "cuda", "tiny": False, "status": "passed", "started": "2030-01-02T03:04"}
        write_json(results / "results.json", {"parts": {part: record.to_json() | about | {"seconds": 1.0}}})
        collect.collect(results, page, kept)
        texts.append(page.read_text())
    assert f"{collect.BEGIN}All values were measured on this card and day: Card A, 2030-01-02.\n\n| part |" in texts[0]
    assert "| 2 units |  | 4 to 6 (wrong) |  |\n" in texts[0]
    text = texts[1]
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| 2 units |  | 4 to 6 (wrong) |  | Card A, 2030-01-02 |" in text
    assert "| 5 units |  | 4 to 6 |  | Card B, 2030-01-02 |" in text and collect.NOT_MEASURED in text
    assert sorted(path.name for path in kept.iterdir()) == ["2030-01-02-card-a.json", "2030-01-02-card-b.json"]


# --- counting ---


def _sync() -> None:
    """Warn as torch does of a wait."""
    warnings.warn(f"{measured.WARNING} (Triggered internally at CUDAFunctions.cpp:249.)", UserWarning, stacklevel=1)


def test_every_wait_that_torch_warns_of_is_counted_at_its_line_in_spite_of_filters():
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        with measured.Waits(torch.device("cpu")) as waits:
            for _ in range(3):
                _sync()
            _sync()
            warnings.warn("another warning, which stays ignored", stacklevel=1)
        warnings.filterwarnings("always", "yet another")
        with measured.Waits(torch.device("cpu")):
            warnings.warn("yet another", stacklevel=1)
        assert warnings.filters[0][0] == "always" and shown == ["yet another"]
    source = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "Triggered internally" in text)
    assert waits.places == {f"{__file__}:{line}": 4}


def test_a_wait_that_was_not_planned_fails(tmp_path):
    record = Record(tmp_path / "result.json")
    file, experts = "rl_megatron/losses/base.py:1", f"{syncs.OF_EXPERTS}token_dispatcher.py:2"
    for phase, places, holds in (
        ("train", {file: 2, experts: 99}, True),
        ("train", {file: 3}, False),
        ("logprobs", {file: 2}, False),
        ("generate", {file: 2}, True),
        ("generate", {file: 3}, False),
    ):
        syncs.check_allowed(record, "waits", phase, "padded", places)
        assert record.checks[-1].holds == holds, (phase, places)


def test_memory_of_phases_is_the_sum_of_live_tensors_on_the_cpu():
    with measured.DeviceCounter(torch.device("cpu")) as counter:
        with counter.phase("build") as build:
            kept = torch.zeros(1000)
        with counter.phase("train") as train:
            temporary = torch.zeros(3000)
            del temporary
        with counter.phase("save") as save:
            pass
    assert save[0].use().peak_bytes == 4000
    assert (build[0].start_bytes, build[0].end_bytes, train[0].end_bytes) == (0, 4000, 4000)
    assert train[0].use().peak_bytes == 16000
    assert kept.sum() == 0


def test_spans_that_overlap_count_once():
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4 and union([]) == 0


def test_a_profile_counts_operators_and_their_time():
    found = profile_of(lambda: [torch.ones(4).exp_() for _ in range(5)], torch.device("cpu"))
    assert found.kernels >= 10 and 0 < found.busy_seconds < 5


# --- results ---


def test_numbers_that_are_not_finite_fail_and_can_be_written(tmp_path):
    record = Record(tmp_path / "result.json")
    record.at_most("error", math.nan, 1.0)
    record.at_least("count", math.nan, 1.0)
    record.figure("ratio", math.inf, at_most=2.0)
    assert not any(check.holds for check in record.checks)
    found = json.loads((tmp_path / "result.json").read_text())
    assert [check["value"] for check in found["checks"]] == ["nan", "nan", "inf"]


def test_a_file_stays_as_it_was_if_it_cannot_be_written(tmp_path, monkeypatch):
    def write_half(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("the disk is full")

    path = tmp_path / "results.json"
    write_json(path, {"parts": {}})
    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="disk is full"):
        write_json(path, {"parts": {"environment": {}}})
    assert json.loads(path.read_text()) == {"parts": {}}


SLEEP = f"60.{os.getpid()}"  # no other worker's processes have this argument
SCRIPTS = {
    "environment": "record.fact('GPU', 'one'); record.figure('speed', 2.5, 'GB/s'); record.at_most('error', 1, 2)",
    "tests": "record.equal('failed tests', 3, 0)",
    "smoke": "record.figure('error', 0.5); raise RuntimeError('it broke')",
    "syncs": f"record.at_most('first', 1, 2); subprocess.Popen(['sleep', '{SLEEP}']); time.sleep(60)",
    "memory": "record.skip('there is one GPU')",
    "decode": "record.figure('first', 1.0); time.sleep(60)",
    "grpo": "record.fact('started', str(torch.cuda.is_initialized()))",
}


@pytest.fixture
def scripts(monkeypatch):
    """Let parts be short scripts, of which one hangs; return what runs some of them."""

    def run_script(name, setting, result):
        record = Record(result)
        record.save()
        try:
            exec(SCRIPTS[name], globals() | {"record": record})
        except Exception:
            traceback.print_exc()
            record.fail(traceback.format_exc())
        return 1 if record.error is not None or any(not check.holds for check in record.checks) else 0

    monkeypatch.setattr(runner, "run_part", run_script)
    monkeypatch.setitem(PARTS, "syncs", Part("syncs", "it hangs", 2, 2, 1, alone=False))
    monkeypatch.setitem(PARTS, "decode", Part("decode", "it hangs too", 60, 60, 1))

    def run(names, directory, seconds=100.0):
        call = runner.Call(
            "cuda", False, directory, directory.with_name("work"), ends=time.monotonic() + seconds, card="Card"
        )
        return runner.run_parts(names, call)

    return run


def _results(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text())["parts"]


def _sleepers() -> int:
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = 0
    for entry in entries:
        try:
            found += (entry / "cmdline").read_bytes() == f"sleep\0{SLEEP}\0".encode()
        except OSError:
            continue
    return found


@pytest.mark.change
def test_all_results_are_kept_if_parts_fail_hang_or_are_skipped(scripts, tmp_path):
    began, sleepers, output = time.monotonic(), _sleepers(), tmp_path / "output"
    assert not scripts(["environment", "tests", "smoke", "syncs", "memory"], output)
    assert time.monotonic() - began < 40
    assert _sleepers() == sleepers, "the child of a part that was ended still runs"
    parts = _results(output)
    assert {name: part["status"] for name, part in parts.items()} == {
        "environment": "passed", "tests": "failed", "smoke": "failed", "syncs": "timed out", "memory": "skipped",
    }  # fmt: skip
    assert parts["tests"]["error"] is None and "it broke" in parts["smoke"]["error"]
    assert parts["smoke"]["figures"][0]["value"] == 0.5 and parts["syncs"]["checks"][0]["name"] == "first"
    text = (output / "report.md").read_text()
    for line in (
        "GPU: one", "| environment | passed | ", " | 1 of 1 |", "| environment | speed | 2.5 GB/s |",
        "| tests | failed tests | 3 | equal to 0 |", "RuntimeError: it broke", "it was ended after 2 s",
        "| memory | the part | there is one GPU |",
    ):  # fmt: skip
        assert line in text, line
    names = [path.name for path in output.iterdir()]
    assert len(names) <= 8 and "it broke" in (output / "failures.txt").read_text()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


def test_a_part_that_runs_again_replaces_its_result_and_no_other(scripts, tmp_path, monkeypatch):
    output = tmp_path / "output"
    assert not scripts(["tests", "environment"], output)
    monkeypatch.setitem(SCRIPTS, "tests", "record.equal('failed tests', 0, 0)")
    assert scripts(["tests"], output)
    found = {name: part["status"] for name, part in _results(output).items()}
    assert found == {"environment": "passed", "tests": "passed"}


@pytest.mark.change
def test_parts_end_with_the_time_of_all_parts(scripts, tmp_path):
    output = tmp_path / "output"
    assert not scripts(["decode", "grpo"], output, seconds=2.0)
    found = {name: part["status"] for name, part in _results(output).items()}
    assert found == {"decode": "timed out", "grpo": "not begun"}


def test_parts_are_forks_that_have_not_used_a_gpu(scripts, tmp_path):
    assert scripts(["grpo"], tmp_path / "output")
    assert _results(tmp_path / "output")["grpo"]["facts"] == {"started": "False"}


@pytest.mark.change
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_results_are_complete_if_the_command_is_ended_half_way(number, scripts, tmp_path, monkeypatch):
    output, sleepers = tmp_path / "output", _sleepers()
    hangs = f"record.figure('first', 1.0); subprocess.Popen(['sleep', '{SLEEP}']); time.sleep(60)"
    monkeypatch.setitem(SCRIPTS, "decode", hangs)
    monkeypatch.setattr(runner, "SECONDS_BETWEEN_WRITES", 0.1)
    process = multiprocessing.get_context("fork").Process(
        target=scripts, args=(["environment", "decode", "grpo"], output)
    )
    process.start()
    while not (output / "results.json").exists() or not _results(output)["decode"]["figures"]:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    status, parts = "stopped" if number == signal.SIGTERM else "running", _results(output)
    found = {name: part["status"] for name, part in parts.items()}
    assert found == {"environment": "passed", "decode": status, "grpo": "not begun"}
    assert parts["decode"]["figures"][0]["value"] == 1.0
    assert f"| decode | {status} |" in (output / "report.md").read_text()
    assert len(list(output.iterdir())) <= 8
    until = time.monotonic() + 10
    while _sleepers() > sleepers and time.monotonic() < until:
        time.sleep(0.1)
    assert _sleepers() == sleepers, "the child of a part still runs"


@pytest.mark.change
def test_parts_are_commands_if_forks_cannot_use_the_gpu(tmp_path):
    output = tmp_path / "output"
    call = runner.Call("cpu", True, output, tmp_path / "work", tmp_path / "bundle", is_forked=False)
    assert runner.run_parts(["environment"], call), (output / "failures.txt").read_text()
    assert _results(output)["environment"]["status"] == "passed"


def test_a_part_gets_its_processes_from_its_leader_even_if_it_uses_threads(tmp_path):
    # The process that starts parts has used no thread, unlike this one.
    process = fork_context().Process(target=_start_a_part_that_starts_processes, args=(tmp_path / "log",))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()


def _start_a_part_that_starts_processes(log: Path) -> None:
    process = forks.start(_start_processes, log, {"OMP_NUM_THREADS": "2"})
    while (status := process.poll()) is None:
        time.sleep(0.01)
    sys.exit(status)


def _start_processes() -> int:
    assert _product_of_ones(1000)[0] == 1e9
    assert in_new_process(_product_of_ones, 1000, sees_gpus=False) == (1e9, "")
    with pytest.raises(ProcessFailed, match="ended with status 7"):
        in_new_process(os._exit, 7)
    with pytest.raises(ProcessFailed, match="math domain error"):
        in_new_process(math.sqrt, -1.0)
    return 0


def _product_of_ones(size: int) -> tuple[float, str | None]:
    product = torch.ones(size, size) @ torch.ones(size, size)
    return product.double().sum().item(), os.environ.get("CUDA_VISIBLE_DEVICES")


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def test_the_limits_of_parts_are_those_that_are_promised():
    assert all(part.seconds <= 480 for part in PARTS.values()) and runner.TOTAL_SECONDS <= 1500


def test_a_function_that_raises_in_its_process_is_reported(monkeypatch):
    monkeypatch.setattr(setting, "CONTEXT", multiprocessing.get_context("fork"))
    assert in_new_process(math.sqrt, 4.0) == 2.0
    assert in_new_process(os.getenv, "CUDA_VISIBLE_DEVICES", sees_gpus=False) == ""
    assert "CUDA_VISIBLE_DEVICES" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"]
    assert torch.equal(in_new_process(_ones, 3), torch.ones(3))
    with pytest.raises(ProcessFailed, match="math domain error"):
        in_new_process(math.sqrt, -1.0)
    with pytest.raises(ProcessFailed, match="ended with status 7"):
        in_new_process(os._exit, 7)


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", "cpu", "speed"])
    assert ended.value.code == 2 and "invalid choice: 'speed'" in capsys.readouterr().err

"""docs/figures.md shows the stored results, the README's numbers are among them, and a measurement can be continued."""

from __future__ import annotations

import json
import re
import sys

import pytest

from benchmarks import generation, grpo_step, packing, train_step
from benchmarks.logprobs.__main__ import parser as logprobs_parser
from docs import generate_figures
from docs.generate_figures import FIGURES, PAGE, PICTURES, RESULTS, Bar, Figure, read_bars
from tests.forkserver import REPOSITORY

README = " ".join((REPOSITORY / "README.md").read_text().split())


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_the_page_shows_the_stored_results_with_their_pictures(results):
    assert PAGE.read_text() == generate_figures.render_page(results), "run `python docs/generate_figures.py --render`"
    assert results["figures"].keys() == {figure.name for figure in FIGURES}
    for name in results["figures"]:
        assert (PICTURES / f"{name}.png").is_file()


def test_the_numbers_of_the_readme_are_stored_results(results):
    bars = {name: {bar.name: bar.value for bar in read_bars(results, name)} for name in results["figures"]}
    steps = bars["train_step"].values()
    assert f"took {min(steps):.2f} to {max(steps):.2f} times as long as a bare megatron-core step" in README
    ours, theirs = bars["logprobs"]["rl_megatron torch"], bars["logprobs"]["megatron-core cross entropy"]
    assert f"took {ours:.0f} ms forward and backward; megatron-core's cross entropy took {theirs:.0f} ms" in README
    assert f"padding to full packs wastes {bars['packing']['balanced']:.1f} % of the tokens" in README
    for stage, accuracy in bars["quickstart"].items():
        assert re.search(rf"│ {stage} +│ +{accuracy:.4f} │", README), stage


@pytest.mark.parametrize("command", [command for figure in FIGURES for command in figure.commands], ids=" ".join)
def test_the_benchmarks_accept_the_commands(command):
    parsers = {
        "benchmarks/train_step.py": train_step, "benchmarks/generation.py": generation,
        "benchmarks/grpo_step.py": grpo_step, "benchmarks/packing.py": packing,
    }  # fmt: skip
    for program, module in parsers.items():
        if program in command:
            assert module.parser().parse_args(command[command.index(program) + 1 :]).output
            return
    if "benchmarks.logprobs" in command:
        assert logprobs_parser().parse_args(command[command.index("benchmarks.logprobs") + 1 :]).output
    else:
        assert "experiment=quickstart" in command


def test_a_measurement_that_failed_is_continued_after_the_results_that_exist(tmp_path, capfd):
    program = tmp_path / "measure.py"
    program.write_text(
        "import pathlib, sys\n"
        "name = pathlib.Path(sys.argv[-1])\n"
        "name.write_text('half of')\n"
        f"sys.exit('second' in name.name and not pathlib.Path({str(tmp_path / 'free')!r}).exists())\n"
    )
    commands = tuple((sys.executable, str(program), "--output", f"{name}.json") for name in ("first", "second"))
    figure = Figure("none", "Title", "Text", "ms", ".0f", commands, lambda raw: [Bar("one", 1.0)])
    with pytest.raises(SystemExit, match="repeat this one to continue"):
        generate_figures.measure([figure], tmp_path, None)
    assert (tmp_path / "first.json").exists() and not (tmp_path / "second.json").exists()
    (tmp_path / "free").touch()
    capfd.readouterr()
    generate_figures.measure([figure], tmp_path, None)
    assert (tmp_path / "second.json").exists()
    assert "2 of 2" in (said := capfd.readouterr().out) and "1 of 2" not in said


def test_data_that_is_absent_is_an_error_before_the_first_measurement(tmp_path, capsys):
    with pytest.raises(SystemExit):
        generate_figures.main(["--gsm8k", str(tmp_path)])
    assert "train.jsonl is not there" in capsys.readouterr().err

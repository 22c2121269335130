"""`rl-megatron eval`: mistakes that are answered before torch is imported."""

import pytest

from rl_megatron.cli import main

SETS = "eval.sets=[{name: a, task: arithmetic}]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=quickstart", "weights"], "eval experiment=quickstart: the weights come first"),
        (["weights", "init_from=others"], "init_from names other weights"),
        (["nowhere", SETS], "nowhere"),
        (["nowhere", SETS, "optimizer.lr=1"], "'optimizer.lr=1' has no effect on eval; leave it out"),
    ],
)
def test_mistakes_are_named(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments, "--output", "results"]) == 2
    assert message in "".join(capsys.readouterr())

"""`rl-megatron show-batch`: what it prints, the page that it writes, what it refuses, and what it does not import."""

import subprocess
import sys

from tests.forkserver import environment

DATA = (
    "data=arithmetic",
    "train.global_batch_size=4",
    "data.num_demonstrations=20",
    "tokenizer.vocab_size=260",
    "train.steps=3",
)


def test_it_needs_neither_megatron_core_nor_an_output_directory(tmp_path):
    program = (
        "import sys\nfrom rl_megatron.cli import main\n"
        f"status = main(['show-batch', *{DATA}, '--html', 'batch.html'])\n"
        "assert status == main(['show-batch', *sys.argv[1:]]) == 0\n"
        "assert not {'megatron', 'transformers'} & set(sys.modules), 'slow imports'\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, *DATA, "--step", "2"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "stage sft (sft), step 1 of 3: written to batch.html" in shown.stdout
    assert "stage sft (sft), step 2 of 3" in shown.stdout and "«<eos>»⟧" in shown.stdout
    assert "step 1 of 3" in (tmp_path / "batch.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"batch.html"}


def test_a_stage_step_or_file_that_does_not_exist_is_refused(tmp_path, forks):
    for option, said in (
        (("--stage", "stf"), "--stage stf: the run has no such stage; did you mean 'sft'?"),
        (("--step", "9"), "--step 9: stage 'sft' has the steps 1 to 3"),
        (("--sequences", "0"), "--sequences 0: must be at least 1"),
        (("--html", "missing/page.html"), "--html missing/page.html cannot be written: No such file or directory"),
    ):
        refused = forks.run(tmp_path, "show-batch", *DATA, *option)
        assert refused.status == 2 and said in refused.err, refused.err

"""Check a page's commands up to the first step of the runs that they would start, and run its blocks in order."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from rl_megatron.config.checkpoint_metadata import HUGGING_FACE, MANIFEST
from tests.docs import inputs, tables
from tests.docs.collector import Block, Command, blocks, commands
from tests.docs.forked import TIMEOUT, Fork, run_block, run_script
from tests.docs.learning import check_learning, watching
from tests.docs.small_runs import load_small_configs, small
from tests.end_to_end.launch import Finished, Forks
from tests.forkserver import REPOSITORY, environment

_IN_THE_REPOSITORY = re.compile(r"(scripts|tests|benchmarks|docs|examples|configs|\.ci)/.*")
_TRAINS = re.compile(r"(?<!def )\b(policy|trainer)\.train\(|\brl_megatron\.(train|sft|dpo|grpo)\(")
_STEP = re.compile(r"(?P<stage>.*checkpoints/\w+)/step-\d{6}")


def page_commands(page: str) -> list[Command]:
    """Return all commands of a page's bash blocks."""
    return [command for block in blocks(page) if block.language in ("bash", "sh") for command in commands(block)]


def runs_in_order(page: str) -> bool:
    """Return whether the page's blocks are run one after the other."""
    return any(fnmatch(page, pattern) for pattern in tables.RUN_IN_ORDER)


def covering_test(page: str) -> Path | None:
    """Return the test that runs the page's commands instead of these, or None."""
    found = (test for pattern, test in tables.RUN_BY_OTHER_TESTS.items() if fnmatch(page, pattern))
    return next((REPOSITORY / test for test in found), None)


def is_known(command: Command) -> bool:
    """Return whether a command starts `rl-megatron` or a file of its page, or tables.py says what becomes of it."""
    if command.arguments is not None or command.words[0] in tables.SHELL or script_of(command) is not None:
        return True
    if covering_test(command.page) is not None:
        return True
    return any(re.match(pattern, command.text) for pattern in tables.NOT_RUN)


def missing_files(command: Command) -> list[str]:
    """Return the paths of the repository in a command that do not exist."""
    return [word for word in command.words if _IN_THE_REPOSITORY.fullmatch(word) and not (REPOSITORY / word).exists()]


def failures_before_the_first_step(found: list[Command], directory: Path, files: list[Block]) -> list[str]:
    """Return one message for each command that fails before its first step. To be called in a fork.

    Args:
        found: Commands of one page that start `rl-megatron`.
        directory: The directory of this process, which is empty. What the commands read is made in it.
        files: The blocks of the page, of which those with a title are written there.
    """
    for block in files:
        write_titled(block, directory)
    make_inputs([command for command in found if "import" not in (command.arguments or ())], directory)
    failures = []
    for command in found:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                _check(command)
        except (Exception, SystemExit) as error:
            failures.append(f"{command.place}: {command.text}\n    {type(error).__name__}: {error} {said.getvalue()}")
    return failures


def _check(command: Command) -> None:
    """Do what the command does up to the first step, but for the start of ranks and the reading of weights."""
    from rl_megatron.cli import evaluate, generate, main
    from rl_megatron.cli.parser import COMPOSED, build_parser
    from rl_megatron.cli.show_batch import show_batch
    from rl_megatron.cli.sweep import expand_sweep
    from rl_megatron.config.loading.load import load_config
    from rl_megatron.runs import preflight
    from rl_megatron.topology import degrees

    assert command.arguments is not None
    try:
        parsed, rest = build_parser().parse_known_args(list(command.arguments))
    except SystemExit as end:
        if end.code == 0:  # --help, --version
            return
        raise
    assert not any(word.startswith("-") for word in rest), f"unknown options in {rest}"
    if parsed.command not in COMPOSED:
        assert not rest, f"{parsed.command} takes no {rest}"
        return
    overrides = parsed.overrides + rest
    if parsed.command == "eval":
        overrides = evaluate.add_weights(parsed.weights, overrides)
    begun = [Path(word.partition("=")[2]) for word in overrides if word.startswith("init_from=")]
    for checkpoint in begun:
        if not (checkpoint / "config.json").is_file():  # it is no Hugging Face directory
            inputs.checkpoint_without_weights(checkpoint)
            inputs.tokenizer(checkpoint / HUGGING_FACE)
    if any(word.endswith("generation.engine=vllm") for word in overrides):
        inputs.python_of_vllm(Path(".venv-vllm/bin/python"))
    for word in overrides:
        key, _, path = word.partition("=")
        if key == "tokenizer.path" and not Path(path).exists():
            inputs.tokenizer(Path(path))
    if parsed.command == "train" and parsed.multirun:
        expand_sweep(overrides, parsed.config_dir, parsed.config_name)
        return
    if parsed.hydra_help:
        return
    if parsed.command == "plan":
        # Plans for several nodes run many layers of several ranks, which tests/unit/plan/test_command.py does once.
        shorter = ["--closed-forms"] if parsed.nodes > 1 and not parsed.closed_forms else []
        assert main([*command.arguments, *shorter]) == 0
        return
    if parsed.command == "balance":
        assert main(list(command.arguments)) == 0
        return
    if parsed.command == "doctor":
        assert main(list(command.arguments)) in (0, 1)  # what it finds is this machine's
        return
    config = load_config(overrides, parsed.config_dir, parsed.config_name)
    if parsed.print_config or parsed.cfg or parsed.info:
        return
    if parsed.command in ("generate", "eval"):
        parsed.overrides = overrides
        config = generate.prepare_run(small(config), parsed)
    for checkpoint in begun:
        if (checkpoint / MANIFEST).is_file():
            inputs.checkpoint_without_weights(checkpoint, config.first.model)
    if command.ranks is not None:
        degrees.validate(config.first.parallel, command.ranks)
    degrees.validate_model(config.first.model, config.first.parallel)
    if parsed.command == "certify":
        for stage in config.stages.values():
            preflight.check_loss(stage)
    elif parsed.command == "show-batch":
        show_batch(small(config), parsed)
    elif parsed.command == "generate":
        generate.prepare(config, parsed)
    elif parsed.command == "eval":
        evaluate.prepare(config, parsed)
    else:
        preflight.check(small(config), Path(config.output_dir))


def make_inputs(found: list[Command], directory: Path) -> None:
    """Make the files of INPUTS that the commands name."""
    text = "\n".join(command.text for command in found)
    for path, make in tables.INPUTS.items():
        if re.search(rf"{re.escape(path)}(?![\w.-])", text):
            make(directory / path)


def write_titled(block: Block, directory: Path) -> None:
    """Write a block that has a title as the file of this name."""
    if block.title is not None:
        file = directory / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)


def run_page(page: str, directory: Path, forks: Forks) -> None:
    """Run a page's blocks in order, in one directory: files are written, commands and Python blocks run.

    Raises:
        AssertionError: a command ended with another status than 0, or a Python block raised; names it.
    """
    make_inputs(page_commands(page), directory)
    with Fork(forks.context, directory) as python:
        for block in blocks(page):
            write_titled(block, directory)
            if block.language in ("bash", "sh"):
                for command in commands(block):
                    _run(command, directory, forks)
            elif is_run(block):
                run_python(python, block, directory)


def run_python(python: Fork, block: Block, directory: Path) -> None:
    """Run a Python block in a fork whose directory this is, and check that it learns if it trains.

    Raises:
        AssertionError: The block raised, or trains without learning; names it.
    """
    python.call(run_block, block)
    trains = _TRAINS.search(block.text) is not None
    check_learning(not_run_key(block), directory, tables.TOO_SHORT_TO_LEARN, trains)


def is_run(block: Block) -> bool:
    """Return whether a block is Python to be run as it stands."""
    if block.language != "python" or block.title is not None or covering_test(block.page):
        return False
    return not_run_key(block) not in tables.PYTHON_NOT_RUN


def not_run_key(block: Block) -> str:
    """Return the block's key in PYTHON_NOT_RUN."""
    return f"{block.page}:{block.text.partition(chr(10))[0]}"


def script_of(command: Command) -> tuple[str, ...] | None:
    """Return the Python file that a command runs, with its arguments, if the file is a titled block of its page."""
    if command.words[0] not in ("python", "torchrun"):
        return None
    titles = {block.title for block in blocks(command.page)}
    return next((command.words[i:] for i, word in enumerate(command.words) if word in titles), None)


def _run(command: Command, directory: Path, forks: Forks) -> None:
    """Run a command as a reader would, with small steps, unless tables.py says why not."""
    if command.words[0] == "sbatch" or any(re.search(pattern, command.text) for pattern in tables.TOO_LONG_TO_RUN):
        return
    script = script_of(command)
    if command.arguments is not None:
        arguments = [_with_last_step(word, directory) for word in command.arguments]
        before = watching(directory, load_small_configs)
        ended = forks.run_ranks(directory, *arguments, ranks=command.ranks or 1, before=before)
    elif script is not None:
        before = watching(directory)
        ended = forks.run_ranks(directory, *script, ranks=command.ranks or 1, program=run_script, before=before)
    elif command.words[0] in tables.SHELL:
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=directory,
            env=environment(),
            timeout=TIMEOUT,
            capture_output=True,
            text=True,
        )
        ended = [Finished(done.returncode, done.stdout, done.stderr)]
    else:
        return
    failed = next((rank for rank in ended if rank.status), None)
    assert failed is None, f"{command.place}: {command.text} ended with status {failed.status}:\n{failed.err}"
    check_learning(f"{command.page}:{command.text}", directory, tables.TOO_SHORT_TO_LEARN, is_training(command))


def is_training(command: Command) -> bool:
    """Return whether a command starts a run that trains."""
    arguments = command.arguments or ()
    return "train" in arguments[:1] and not any(word.startswith("--") for word in arguments)


def _with_last_step(word: str, directory: Path) -> str:
    """Return the word with the last checkpoint of its stage in place of one that only the whole run would have."""
    step = _STEP.search(word)
    if step is None:
        return word
    path = word.rpartition("=")[2]
    stage = directory / path[: path.rindex("/step-")]
    if (stage / step[0].rpartition("/")[2]).exists() or not stage.is_dir():
        return word
    steps = sorted(child.name for child in stage.glob("step-??????"))
    return re.sub(r"step-\d{6}", steps[-1], word) if steps else word

"""The package's language: docstrings open with a verb, one word has one meaning, and old phrases do not return.

docs/extending.md ("Names") and docs/glossary.md explain the words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rl_megatron"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("rl_megatron/**/*.py*", "tests/**/*.py", "benchmarks/**/*.py", "docs/**/*.md", "docs/**/*.py",
                    "examples/**/*", "configs/**/*.yaml", "scripts/*", "*.md", "setup.py", "pyproject.toml")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix != ".pyc" and path not in (Path(__file__), ROOT / "CHANGELOG.md")
)  # fmt: skip

# A new verb is added here. Words that are usually nouns ("Step", "Shape") are left out.
VERBS = frozenset(
    """
    Accept Acknowledge Add Allocate Answer Append Apply Ask Attend Begin Broadcast Build Call Check Choose Clear Close
    Collect Combine Compare Complete Compute Connect Continue Convert Copy Count Create Cut Decode Define Delete
    Describe Do Draw Drop Encode End Estimate Evaluate Execute Fill Find Finish Forget Free Freeze Gather Generate
    Give Ignore Import Initialise Initialize Insert Join Keep Kill Launch Leave Let List Load Lock Log Make Map Mark
    Mask Merge Move Normalise Open Pack Parse Plan Plot Prepare Print Propagate Provide Put Raise Read Rebuild Receive
    Record Redirect Reduce Refuse Register Release Remove Rename Render Replace Report Request Require Reset Resolve
    Restart Restore Return Round Run Sample Save Scale Scatter Select Send Serve Set Shorten Show Shut Silence Skip
    Sort Split Spread Start Stop Store Stream Subtract Sum Sync Take Time Train Truncate Turn Undo Unload Unwrap Update
    Use Validate Verify Wait Warn Wrap Write Yield
    """.split()
)

# Words that once had several meanings → the identifiers that may hold them: (path in the package, pattern, meaning).
_ROWS = (
    ("logprobs/", r".*", "rows of a matrix of logits or hidden states"),
    ("plan/fake_cuda/stand_ins.py", r".*", "rows of a matrix of logits"),
    ("weight_sync/", r".*", "rows of a weight matrix"),
    ("model/families/", r".*", "rows of a weight matrix"),
    ("data/readers.py", r".*", "rows of a table"),
    ("model/lora/", r".*", "rows of a weight matrix"),
    ("model/shards.py", r"rows|row|hf_row|Rows|_INIT_ROWS", "rows of a weight matrix"),
    ("checkpoint/", r"(hf_|embedding_|read_|\.with_first_)?rows?|row_bytes|Rows", "rows of a weight matrix"),
    ("", r"\w*unused_rows|UnusedRows", "rows of a weight matrix"),
    ("", r"add_row", "rich's method"),
    ("model/", r"RowParallelLinear", "megatron-core's class"),
    ("losses/", r"teacher_rows", "rows of the teacher's logits"),
    ("rollouts/files.py", r".*", "rows of a table"),
    ("rollouts/rows.py", r".*", "rows of a table"),
    ("rollouts/record.py", r".*", "rows of a table"),
    ("cli/rollouts.py", r".*", "rows of a table"),
    ("observability/html_report.py", r"rows", "rows of a table"),
)
_CHUNKS = (
    ("", r"_?\w*model_chunks?\w*", "a pipeline stage's part of the model"),
    ("", r"\.chunk", "torch's method"),
    ("checkpoint/tensors.py", r"\.chunks|ChunkStorageMetadata", "torch's names"),
    ("compat/", r"chunks?", "NeMo RL's method and argument"),
    ("logprobs/linear.py", r"chunk_tokens", "the argument's name in other libraries"),
    ("service/", r"chunks?|TextChunk", "the API's: a part of a prompt"),
)
AMBIGUOUS = {
    "row": _ROWS, "rows": _ROWS, "chunk": _CHUNKS, "chunks": _CHUNKS,
    "unit": (
        ("config/metrics.py", r"unit", "a metric's unit"), ("algorithms/", r"unit", "a metric's unit"),
        ("observability/", r"unit", "a metric's unit"),
        ("model/build.py", r"gated_linear_unit", "megatron-core's"),
    ),
    "units": (), "room": (), "rooms": (), "measure": (), "measures": (), "agreement": (), "filler": (),
    "platform": (("checkpoint/save.py", r"platform", "Python's module"), ("generation/", r"platform", "sys.platform"),
                 ("workers/linux.py", r"\.?platform", "sys.platform"),
                 ("workers/program_limits.py", r"\.platform", "sys.platform")),
    "inputs": (("compat/", r".*", "NeMo RL's names"), ("config/advantages.py", r".*", "what an estimator gets"),
               ("algorithms/advantage_estimators.py", r".*", "what an estimator gets"),
               ("service/", r"inputs|loss_fn_inputs", "the API's: the tensors that a loss reads")),
    "contents": (),
    "origin": (("config/loading/hints.py", r"get_origin", "typing's"), ("compat/", r"origin", "importlib's attribute"),
               ("doctor/versions.py", r"origin", "importlib's attribute")),
}  # fmt: skip

PHRASES = (
    r"\bhand(s|ed|ing)?[ _-]over\b", r"HandOver", r"\bResidence\b", r"FreshEngine", r"\brooms\b", r"\bstory\b",
    r"\bfillers?\b", r"rows_per_unit", r"rows_per_item", r"\bwithout weight\b", r"weighing nothing",
    r"speaks? of token", r"which is none", r"what is no `", r"what is in between", r"past the gate", r"who disagree",
    r"lost each other", r"has its say", r"\bpart ways\b", r"the gravest", r"keeps? it company", r"comes? to hear of",
    r"is learnt from an engine",
)  # fmt: skip


def functions() -> Iterator[tuple[str, str]]:
    """(place, first word) of every documented function of the package."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0]}", text.split()[0]


@cache
def identifiers(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, name) of all names that the module uses, those of attributes with a leading dot."""
    return tuple(_identifiers(path))


def _identifiers(path: Path) -> Iterator[tuple[int, str]]:
    yield 0, path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.Name(id=name) | ast.arg(arg=name):
                yield line, name
            case ast.Attribute(attr=name):
                yield line, f".{name}"
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield line, name


def words(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def test_docstrings_of_functions_open_with_an_imperative_verb():
    found = list(functions())
    others = [place for place, first in found if first.rstrip(".,:;") not in VERBS]
    assert not others, "\n".join(others)


@pytest.mark.parametrize("word", AMBIGUOUS)
def test_a_word_has_one_meaning(word):
    wrong = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in MODULES
        for line, name in identifiers(path)
        if word in words(name)
        and not any(
            path.relative_to(PACKAGE).as_posix().startswith(place) and re.fullmatch(rf"\.?({pattern})", name)
            for place, pattern, _ in AMBIGUOUS[word]
        )
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.change
@pytest.mark.parametrize("phrase", PHRASES)
def test_an_old_phrase_does_not_return(phrase):
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert not wrong, "\n".join(wrong)

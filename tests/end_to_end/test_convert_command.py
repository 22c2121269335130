"""`rl-megatron convert` on the command line, and a run between an import and an export."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
import torch

from rl_megatron.api.model import StartingModel
from rl_megatron.checkpoint.directory import read_manifest
from rl_megatron.model.families import FAMILIES
from tests.end_to_end.launch import TINY, checkpoints
from tests.forkserver import REPOSITORY, environment
from tests.parallel.family_cases import hf_model, model_with_images, save, save_as_published, tensors

# The keys of TINY without those of the model, which is imported.
TRAINING = tuple(
    override for override in TINY if not override.startswith(("model.", "tokenizer.", "train.steps", "output_dir"))
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Return a directory like those on the Hub: a Qwen2 model, with a tokenizer like those that runs train."""
    from rl_megatron.data.run_tokenizer import train_bpe

    directory = save(hf_model("qwen2", vocab_size=270, max_position_embeddings=48), tmp_path_factory.mktemp("qwen"))
    train_bpe(["1+2=3\n" * 9], 260).save(directory)
    return directory


def test_help_is_shown_without_importing_torch(tmp_path):
    began = time.perf_counter()
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rl_megatron", "convert", "export", "--help"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "--max-shard-size" in shown.stdout and "must not exist" in shown.stdout
    assert "| torch\n" not in shown.stderr and time.perf_counter() - began < 30


def test_a_model_is_imported_trained_and_exported(tmp_path, forks, qwen):
    imported = forks.run(tmp_path, "convert", "import", str(qwen), "imported")
    assert imported.status == 0, imported.err
    assert "model=init_from init_from=imported data.path=path/to/data output_dir" in imported.out
    assert re.search(
        r"1[0-9] of the 270 rows of the embedding have no token; together they have probability 0.\d+ ", imported.out
    )
    begun = ("train", "model=init_from", "init_from=imported", "output_dir=run", *TRAINING)
    trained = forks.run_ranks(tmp_path, *begun, "train.steps=2", "parallel.tensor=2", ranks=2)
    assert all(rank.status == 0 for rank in trained), trained[0].err
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()
    (step,) = checkpoints(tmp_path / "run", "sft")
    arguments = ("export", f"run/checkpoints/sft/{step}", "exported", "--max-shard-size", "20KB")
    exported = forks.run(tmp_path, "convert", *arguments)
    assert exported.status == 0, exported.err
    before, after = tensors(qwen), tensors(tmp_path / "exported")
    assert before.keys() == after.keys() and len(list((tmp_path / "exported").glob("*.safetensors"))) > 1
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) == len(before), "two steps did not change every tensor"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (qwen / name).read_bytes()
    assert "of the 270 rows of the embedding have no token; together they have probability" in exported.out
    assert "--cut-vocabulary leaves them out of the files" in exported.out
    cut = forks.run(tmp_path, "convert", "export", arguments[1], "cut", "--cut-vocabulary")
    assert cut.status == 0 and "no token" not in cut.out, cut
    manifest = json.loads((tmp_path / "imported" / "manifest.json").read_text())
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["vocab_size"] == manifest["vocab_size"] < 270


def test_a_published_model_that_reads_images_is_used_as_it_is(tmp_path, forks):
    """It generates what its exported text model does, and is imported and trained."""
    from rl_megatron.data.run_tokenizer import train_bpe

    save_as_published(model_with_images("qwen3_5_moe", vocab_size=270, max_position_embeddings=48), tmp_path / "images")
    train_bpe(["1+2=3\n" * 9], 260).save(tmp_path / "images")
    for arguments in (("import", "images", "imported"), ("export", "imported", "text")):
        converted = forks.run(tmp_path, "convert", *arguments)
        assert converted.status == 0, converted.err
        assert "of the 270 rows of the embedding have no token; together they have probability" in converted.out
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2="}\n')
    for name in ("images", "text"):
        options = ("--prompts", "prompts.jsonl", "--output", f"{name}.jsonl", "--seed", "1")
        generated = forks.run(tmp_path, "generate", f"init_from={name}", *options, "generation.max_new_tokens=6")
        assert generated.status == 0, generated.err
    assert (tmp_path / "images.jsonl").read_bytes() == (tmp_path / "text.jsonl").read_bytes()
    begun = ("train", "model=init_from", "init_from=imported", "output_dir=run", *TRAINING, "train.steps=1")
    trained = forks.run(tmp_path, *begun)
    assert trained.status == 0, trained.err
    assert json.loads((tmp_path / "run/hugging_face/config.json").read_text())["model_type"] == "qwen3_5_moe_text"


def test_a_run_from_python_starts_from_a_published_model_that_reads_images(tmp_path):
    source = save_as_published(model_with_images("gemma3"), tmp_path / "images")
    found = StartingModel.find(source, tmp_path / "run")
    checkpoint = found.import_into(tmp_path / "run", "cpu")
    assert read_manifest(checkpoint)["model"] == found.settings["model"]


PAGE = (REPOSITORY / "docs" / "hugging_face.md").read_text()


def test_the_page_has_every_family_and_its_links_are_valid():
    assert set(re.findall(r"\| `(\w+ForCausalLM)` \|", PAGE)) == set(FAMILIES)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (REPOSITORY / "docs" / target).exists(), target


def test_a_model_that_was_not_imported_is_exported(tmp_path, forks):
    trained = forks.run(tmp_path, "train", *TINY, "train.steps=1", "precision=bf16")
    assert trained.status == 0, trained.err
    exported = forks.run(tmp_path, "convert", "export", "out/checkpoints/sft/step-000001", "exported")
    assert exported.status == 0, exported.err
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import", "absent", "there"), ["absent/config.json", "is missing"]),
        (("export", "absent", "there"), ["checkpoint absent does not exist"]),
        (("export", "absent", "there", "--max-shard-size", "5 bananas"), ["--max-shard-size 5 bananas", "5GB"]),
        (("export", "absent", "there", "--max-shard-size", "0"), ["--max-shard-size 0"]),
    ],
)
def test_a_mistake_gives_one_line(tmp_path, forks, arguments, words):
    refused = forks.run(tmp_path, "convert", *arguments)
    assert refused.status == 2 and refused.err.count("\n") == 1, refused.err
    assert refused.err.startswith("error: ") and all(word in refused.err for word in words), refused.err
    assert not (tmp_path / "there").exists()


def test_a_run_with_another_tokenizer_than_the_models_is_refused(tmp_path, forks, qwen):
    """The run writes nothing. The second tokenizer has more tokens than the model's embedding has rows, too."""
    assert forks.run(tmp_path, "convert", "import", str(qwen), "imported").status == 0
    begun = ("train", "model=init_from", "init_from=imported", "output_dir=run", *TRAINING)
    from rl_megatron.data.run_tokenizer import train_bpe

    for number, size in enumerate((258, 290)):
        text = "".join(f"{a}+{b}={a + b};" for a in range(40) for b in range(40))
        train_bpe([text], size, digits=False).save(tmp_path / f"tokenizer{number}")
        refused = forks.run(tmp_path, *begun, f"tokenizer.path=tokenizer{number}")
        assert refused.status == 2 and "another tokenizer" in refused.err, refused.err
    assert not (tmp_path / "run").exists()
    assert json.loads((tmp_path / "imported" / "manifest.json").read_text())["vocab_size"] <= 260

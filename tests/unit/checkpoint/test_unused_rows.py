"""Rows of the embedding without a token: their probability is measured, and an export can leave them out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from rl_megatron.checkpoint import unused_rows
from rl_megatron.checkpoint.hf_convert import export_weights, import_peft, import_weights
from rl_megatron.checkpoint.hf_weights import open_hugging_face
from rl_megatron.checkpoint.unused_rows import UnusedRows, example_tokens, find_unused_rows
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.run_tokenizer import load_tokenizer, train_bpe
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.family_cases import assert_same_tensors, hf_model, save, tensors

ROWS = 290
TIED, UNTIED = "qwen2", "llama"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return a function that saves the model of a case with a tokenizer of fewer tokens than its embedding has rows."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            made[case] = save(hf_model(case, vocab_size=ROWS), tmp_path_factory.mktemp("rows") / "hf")
            train_bpe(["1+2=3\n" * 9], 260).save(made[case])
        return made[case]

    return of


def example_ids(directory: Path) -> list[int]:
    return example_tokens(load_tokenizer(directory))


def logits_of_transformers(directory: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([ids])).logits[0]


def training_logprobs(directory: str, ids: list[int]) -> torch.Tensor:
    policy = MegatronPolicy.from_hf(directory, device="cpu")
    batch = {"input_ids": torch.tensor([ids]), "input_lengths": torch.tensor([len(ids)])}
    return policy.get_logprobs(BatchedDataDict(batch))["logprobs"][0, 1:]


def next_token_logprobs(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.change
def test_the_probability_is_that_of_transformers_and_what_training_does_not_give_away(directories, ranks):
    source = directories(UNTIED)
    ids, tokens = example_ids(source), open_hugging_face(source).vocab_size
    assert len(set(ids)) > 10 and len(ids) == 64
    found = find_unused_rows(source)
    assert found is not None and (found.count, found.rows) == (ROWS - tokens, ROWS) and found.count > 20
    measured = torch.tensor(found.probabilities)
    logits = logits_of_transformers(source, ids)
    exponents = (logits.double() - logits.double().max()).exp()
    expected = exponents[:, tokens:].sum(-1) / exponents.sum(-1)
    assert (measured - expected).abs().max() < 1e-6 and expected.max() > 0.05
    training = ranks.run(1, training_logprobs, str(source), ids)[0]
    share = (next_token_logprobs(logits, ids) - training).exp()  # training spreads all probability over the tokens
    assert (measured[:-1] - (1 - share)).abs().max() < 1e-4


def test_the_line_has_the_count_the_mean_and_the_largest_probability():
    line = str(UnusedRows(3, 20, (0.25, 0.5)))
    assert line == (
        "3 of the 20 rows of the embedding have no token; together they have probability 0.375 (mean of 2 positions of "
        "a text, at most 0.5); training leaves them out of every softmax, but transformers and inference servers do not"
    )


@pytest.mark.change
@pytest.mark.parametrize("case", [TIED, UNTIED])
def test_a_cut_vocabulary_gives_the_logits_of_the_full_one_and_the_logprobs_of_training(
    directories, ranks, tmp_path, case
):
    source = directories(case)
    import_weights(source, tmp_path / "checkpoint")
    tokens = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["vocab_size"]
    ids = example_ids(source)
    export_weights(tmp_path / "checkpoint", tmp_path / "full")
    export_weights(tmp_path / "checkpoint", tmp_path / "cut", cut_vocabulary=True)
    full, cut = (logits_of_transformers(tmp_path / name, ids) for name in ("full", "cut"))
    assert full.size(-1) == ROWS and cut.size(-1) == tokens < ROWS - 20
    assert torch.equal(full[:, :tokens], cut) or (full[:, :tokens] - cut).abs().max() < 1e-6
    training = ranks.run(1, training_logprobs, str(source), ids)[0]
    assert (next_token_logprobs(cut, ids) - training).abs().max() < 1e-4
    assert (next_token_logprobs(full, ids) - training).abs().max() > 1e-3, "the rows have too little probability"


def test_a_cut_vocabulary_has_the_tokenizers_size_and_is_imported_again(directories, tmp_path):
    from transformers import AutoTokenizer

    import_weights(directories(UNTIED), tmp_path / "checkpoint")
    export_weights(tmp_path / "checkpoint", tmp_path / "cut", cut_vocabulary=True)
    tokens = len(AutoTokenizer.from_pretrained(tmp_path / "cut"))
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    original = json.loads((directories(UNTIED) / "config.json").read_text())
    assert config == original | {"vocab_size": tokens}
    assert find_unused_rows(tmp_path / "cut") is None
    assert import_weights(tmp_path / "cut", tmp_path / "again")["model"]["vocab_size"] == tokens
    export_weights(tmp_path / "again", tmp_path / "exported")
    assert_same_tensors(tensors(tmp_path / "exported"), tensors(tmp_path / "cut"))
    with pytest.raises(ConfigError, match=f"no row to cut: each of its {tokens} rows has a token"):
        export_weights(tmp_path / "again", tmp_path / "refused", cut_vocabulary=True)
    assert not (tmp_path / "refused").exists()


def test_the_vocabulary_of_a_base_with_an_adapter_merged_is_cut(directories, tmp_path):
    """A head that was trained whole is cut as well."""
    import peft

    source = directories(UNTIED)
    import_weights(source, tmp_path / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(hf_model(UNTIED, vocab_size=ROWS), config)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "modules_to_save" in name:
                tensor += torch.randn_like(tensor)
    adapted.save_pretrained(tmp_path / "adapter")
    import_peft(tmp_path / "adapter", tmp_path / "base", tmp_path / "checkpoint")
    export_weights(tmp_path / "checkpoint", tmp_path / "cut", cut_vocabulary=True)
    ids = example_ids(source)
    with torch.no_grad():
        expected = adapted(torch.tensor([ids])).logits[0]
    logits = logits_of_transformers(tmp_path / "cut", ids)
    assert logits.size(-1) < ROWS - 20
    assert (logits - expected[:, : logits.size(-1)]).abs().max() < 1e-4


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_of_a_row_that_would_be_cut_is_refused(directories, tmp_path, file):
    source = shutil.copytree(directories(UNTIED), tmp_path / "hf")
    values = json.loads((source / file).read_text()) | {"eos_token_id": [1, ROWS - 1]}
    (source / file).write_text(json.dumps(values))
    import_weights(source, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=rf"--cut-vocabulary: {file} .* has eos_token_id=\[1, 289\]"):
        export_weights(tmp_path / "checkpoint", tmp_path / "refused", cut_vocabulary=True)


def test_a_model_without_a_tokenizer_has_no_row_without_a_token(directories, tmp_path):
    source = shutil.copytree(directories(UNTIED), tmp_path / "hf", ignore=lambda *_: ["tokenizer.json"])
    assert find_unused_rows(source) is None


def test_what_is_not_measured_is_said_with_the_reason(directories, monkeypatch):
    source = directories(UNTIED)
    unused = find_unused_rows(source, runs_model=False)
    assert "not measured, because only rl-megatron convert measures it" in str(unused)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert "not measured, because it needs 0.0 GB of memory, and 0.0 GB are available" in str(find_unused_rows(source))
    monkeypatch.setattr(unused_rows, "MOST_PARAMETERS", 1000)
    assert "parameters, more than 1,000; training leaves" in str(find_unused_rows(source))

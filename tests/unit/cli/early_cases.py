"""Commands with a mistake in a path or a file, and what is answered: {name: (arguments, pattern of the line)}.

`python -m tests.unit.cli.early_cases DIRECTORY` runs them all in one process that refuses to import torch,
megatron-core and transformers, and prints for each its exit status and its line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

from rl_megatron.cli import main
from rl_megatron.data.run_tokenizer import train_bpe

_SFT = ("train", "algorithm=sft", "data=gsm8k")
_GRPO = ("train", "algorithm=grpo", "data=arithmetic")
_GENERATE = ("generate", "init_from=tiny", "--prompts", "good.jsonl", "--output", "out.jsonl")

CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "data.path is missing": ((*_SFT, "data.path=absent"), "data.path: there is nothing at .*absent"),
    "a line is not JSON": ((*_SFT, "data.path=bad.jsonl"), r"bad.jsonl:2 is not JSON"),
    "a field is missing": ((*_SFT, "data.path=short.jsonl"), r"short.jsonl:\d+: .*'answer'"),
    "a directory has no training data": (
        ("train", "algorithm=pretrain", "data.source=text", "data.path=tokenizer", "data.split=train"),
        "data.split=train: tokenizer has no such split",
    ),
    "data.path is not set": (("train", "algorithm=grpo"), "data.path is not set, .*data.dataset_name.*data=arithmetic"),
    "a pair lacks a side": (
        ("train", "algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=pairs.jsonl"),
        r"pairs.jsonl:1: the pair has no 'rejected'",
    ),
    "an answer lacks its label": (
        ("train", "algorithm=kto", "loss=kto", "data.path=good.jsonl"),
        r"good.jsonl:1: the record has no 'label', which is true for",
    ),
    "the task's file is missing": ((*_GRPO, "data.source=task", "data.task={name: gsm8k, path: absent}"), "nothing at"),
    "the task has no such option": (
        (*_GRPO, "data=arithmetic", "data.task.max_opernad=3"),
        "did you mean 'max_operand'",
    ),
    "tokenizer.path is missing": (
        ("train", "data=arithmetic", "tokenizer.path=absent"),
        "there is no tokenizer at abs",
    ),
    "a replay lacks steps": (
        (*_GRPO, "rollout.replay=absent", "train.steps=3"),
        "rollout.replay=absent has no rollouts of step 1 and of 2 further steps; replay a run that",
    ),
    "the layout does not fit the ranks": (
        (*_GRPO, "parallel.tensor=2"),
        "parallel.tensor=2 .* does not divide the world size 1; .* would fit",
    ),
    "the layout does not fit the model": (
        ("train", "data=arithmetic", "parallel.context=3"),
        r"parallel.context=3 = 3 does not divide the world size 1; .* would fit, or start a multiple of 3 ranks",
    ),
    "generate has a layout that does not fit": ((*_GENERATE, "parallel.tensor=2"), "does not divide the world size 1"),
    "tokenizer.path is a name on the Hub": (
        ("train", "data=arithmetic", "tokenizer.path=Qwen/Qwen3-0.6B"),
        "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` first, and write Qwen3-0.6B$",
    ),
    "init_from is a name on the Hub": (
        ("train", "data=arithmetic", "model=init_from", "init_from=Qwen/Qwen3-0.6B"),
        "does not exist; .* run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` first, and write init_from=Qwen3",
    ),
    "init_from is a name on the Hub, without its model": (
        ("train", "data=arithmetic", "init_from=Qwen/Qwen3-0.6B"),
        "checkpoint Qwen/Qwen3-0.6B does not exist; .*run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` first",
    ),
    "the directory to import is a name on the Hub": (
        ("convert", "import", "Qwen/Qwen3-0.6B", "new"),
        "Qwen/Qwen3-0.6B/config.json is missing; .*run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` first",
    ),
    "the directory to import is mistyped": (
        ("convert", "import", "tokenizer/absent", "new"),
        "tokenizer/absent/config.json is missing; give a Hugging Face directory$",
    ),
    "tokenizer.json is broken": (
        ("train", "data=arithmetic", "tokenizer.path=tokenizer"),
        "cannot be read as a tokeni",
    ),
    "output_dir is a file": (("train", "algorithm=sft", "output_dir=bad.jsonl"), "output_dir=bad.jsonl is a file"),
    "metrics.jsonl is a directory": (("train", "algorithm=sft", "output_dir=odd"), "odd/metrics.jsonl is a directory"),
    "init_from is missing": (("train", "data=arithmetic", "init_from=absent"), "checkpoint absent does not exist"),
    "the model of a missing checkpoint": (
        ("train", "data=arithmetic", "model=init_from", "init_from=absent"),
        "init_from=absent does not exist; name the directory of a checkpoint, as in outputs/RUN/checkpoints/",
    ),
    "two degrees do not fit the ranks": (
        ("train", "data=arithmetic", "parallel.tensor=2", "parallel.context=2"),
        "= 4 does not divide the world size 1; start a multiple of 4 ranks",
    ),
    "init_from is no checkpoint": (
        ("train", "data=arithmetic", "init_from=tokenizer"),
        "tokenizer has no manifest.json",
    ),
    "the metric sink is unknown": (("train", "algorithm=sft", "metric_sinks=[jsnl]"), "did you mean 'jsonl'"),
    "a loss setting is out of range": ((*_GRPO, "loss.ratio_clip_c=0.5"), "loss: ratio_clip_c=0.5 must exceed 1"),
    "a loss setting is mistyped": ((*_GRPO, "loss.ratio_clip_maxx=0.5"), "did you mean 'loss.ratio_clip_max'"),
    "a loss setting of a stage is mistyped": (
        ("train", "experiment=quickstart", "stages.grpo.loss.ratio_clip_maxx=0.5"),
        "stages.grpo.loss: .*did you mean 'ratio_clip_max'",
    ),
    "the loss's file is missing": ((*_GRPO, "loss.name=absent.py:Loss"), "loss.name: there is no file .*absent.py"),
    "the task's class is missing": (
        (*_GRPO, "data.task.name=mine.py:Tsk"),
        "data.task.name=.*mine.py has no 'Tsk'; did you mean 'Task'",
    ),
    "the task lacks a method": ((*_GRPO, "data.task.name=mine.py:Task"), "task .* has no method heldout_problems"),
    "the task is no name": ((*_GRPO, "data.task.name=7"), r"needs data.task.name \(it is 7\)"),
    "the estimator takes its inputs one by one": (
        (*_GRPO, "algorithm.advantage_estimator=mine.py:old"),
        r"algorithm.advantage_estimator=.*mine.py:old takes \(rewards\); an advantage estimator takes one argument",
    ),
    "the reward's file is missing": (
        (*_GRPO, "reward.functions=[{path: absent.py, name: f}]"),
        r"reward.functions\[0\].name: there is no file .*absent.py",
    ),
    "the reward function is mistyped": (
        (*_GRPO, "reward.functions=[{path: mine.py, name: wrnog}]"),
        r"reward.functions\[0\].name=.*mine.py has no 'wrnog'; did you mean 'wrong'",
    ),
    "the reward function needs a field that there is not": (
        (*_GRPO, "reward.functions=[{name: mine.py:wrong}]"),
        r"reward.functions\[0\].*: wrong needs the parameter 'x', but a record has no such field .*fields: first, oper",
    ),
    "the reward function has no such argument": (
        (*_GRPO, "reward.functions=[{name: length_penalty, kwargs: {max_tokns: 3}}]"),
        "max_tokns",
    ),
    "there is no reward": (
        ("train", "algorithm=grpo", "data.path=short.jsonl", "data.prompt_template='{question}'"),
        "reward.functions is empty",
    ),
    "the function of the weights is mistyped": (
        (
            "train",
            "algorithm=sft",
            "data.mix=[{path: good.jsonl}]",
            "data.prompt_template='{question}'",
            "data.mix_weights=mine.py:weigths",
        ),  # fmt: skip
        "data.mix_weights=.*mine.py has no 'weigths'",
    ),
    "reward workers have nothing to do": (
        (*_SFT, "data.path=bad.jsonl", "reward.num_workers=2"),
        "reward.num_workers has no effect: no stage of this run samples completions",
    ),
    "the file raises": (
        (*_GRPO, "loss.name=raises.py:Loss"),
        r"loss.name: importing .* raised ValueError: no \(.*:1\)",
    ),
    "the directory to import is missing": (("convert", "import", "absent", "new"), "absent/config.json is missing"),
    "the directory to import has no weights": (
        ("convert", "import", "llama", "new"),
        "llama has neither model.safetensors nor model.safetensors.index.json",
    ),
    "the directory to import into cannot be made": (
        ("convert", "import", "whole", "bad.jsonl/new"),
        "bad.jsonl/new cannot be made, because .*bad.jsonl is a file",
    ),
    "the checkpoint to inspect is missing": (("inspect", "absent"), "absent is not a checkpoint .* and contains none"),
    "the step to inspect is missing": (
        ("inspect", "absent/step-000001"),
        "checkpoint absent/step-000001 does not exist",
    ),
    "pretraining data has no text": (
        ("train", "algorithm=pretrain", "data.path=pairs.jsonl"),
        r"pairs.jsonl:1: pretraining reads the field 'text', .*its fields: question, chosen\); .*data.columns={text: q",
    ),
    "the task's question has another name": (
        (*_GRPO, "data.source=task", "data.task={name: gsm8k, path: pairs.jsonl}"),
        r"pairs.jsonl:1: the record has no field 'answer' \(its fields: question, chosen\); set data.task.answer_field",
    ),
    "the checkpoint to export is missing": (("convert", "export", "absent", "new"), "checkpoint absent does not exist"),
    "generate has no weights": (
        ("generate", "--prompts", "good.jsonl", "--output", "out.jsonl"),
        "init_from is not set, but generate needs trained weights",
    ),
    "the weights to generate with are missing": (
        ("generate", "init_from=absent", *_GENERATE[2:]),
        "checkpoint absent does not exist",
    ),
    "the directory to generate with has no weights": (
        ("generate", "init_from=llama", "tokenizer.path=tiny", *_GENERATE[2:]),
        "llama has neither model.safetensors nor",
    ),
    "a setting has no effect on generate": (
        (*_GENERATE, "optimizer.lr=1"),
        "override 'optimizer.lr=1' has no effect on generate; leave it out",
    ),
    "generate reads --prompts": ((*_GENERATE, "data.path=x"), "has no effect on generate; set --prompts"),
    "there is no such stage to generate with": ((*_GENERATE, "--stage", "stf"), "--stage stf: .*did you mean 'sft'"),
    "no samples are asked for": ((*_GENERATE, "-n", "0"), "--samples-per-prompt 0: must be at least 1"),
    "the seed is negative": ((*_GENERATE, "--seed=-1"), "--seed -1: must be at least 0"),
    "greedy samples would be the same": ((*_GENERATE, "-n", "2", "--greedy"), "greedy samples of a prompt are all the"),
    "the prompts are missing": ((*_GENERATE, "--prompts", "absent"), "--prompts: there is nothing at .*absent"),
    "a prompt is not JSON": ((*_GENERATE, "--prompts", "bad.jsonl"), "bad.jsonl:2 is not JSON"),
    "a prompt is too long": (
        (*_GENERATE, "--prompts", "ids.jsonl", "generation.max_new_tokens=6"),
        r"ids.jsonl:2: this prompt has 4 tokens, but model.max_sequence_length=9 without .*max_new_tokens=6 is 3",
    ),
    "the output is a directory": ((*_GENERATE, "--output", "llama"), "--output llama is a directory"),
    "the output is another file": (
        (*_GENERATE, "--prompts", "ids.jsonl", "generation.max_new_tokens=4", "--output", "bad.jsonl"),
        "--output bad.jsonl exists, and bad.jsonl.settings.json beside it cannot be read",
    ),
    "certify checks losses": (
        ("certify", *_GRPO[1:], "loss.name=raises.py:Loss"),
        "importing .* raised Value",
    ),
}


def write_files(directory: Path) -> None:
    """Write the files that the cases read."""
    good = json.dumps({"question": "1+1=", "answer": "2 #### 2"})
    (directory / "bad.jsonl").write_text(f"{good}\n{{oops\n")
    (directory / "short.jsonl").write_text(f'{good}\n{{"question": "1+1="}}\n' * 8)
    (directory / "good.jsonl").write_text(f"{good}\n" * 8)
    (directory / "ids.jsonl").write_text('{"prompt_ids": [2]}\n{"prompt_ids": [2, 3, 4, 5]}\n')
    (directory / "pairs.jsonl").write_text('{"question": "1+1=", "chosen": "2"}\n')
    (directory / "mine.py").write_text(
        "class Task:\n    def train_problems(self): ...\n\ndef wrong(x): ...\n\ndef old(rewards): ...\n"
    )
    (directory / "raises.py").write_text("raise ValueError('no')\n")
    (directory / "odd" / "metrics.jsonl").mkdir(parents=True)
    (directory / "llama").mkdir()
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 9, "rms_norm_eps": 1e-5}
    (directory / "llama" / "config.json").write_text(json.dumps(llama))
    write_hugging_face(directory / "tiny", llama | {"vocab_size": 260})
    (directory / "whole").mkdir()
    (directory / "whole" / "config.json").write_text(json.dumps(llama))
    (directory / "whole" / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "tokenizer.json").write_text("{}")
    (directory / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


def write_hugging_face(directory: Path, config: dict) -> None:
    """Write a Hugging Face directory whose weights are an empty file."""
    train_bpe(["1+1=2\n"], 260).save(directory)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_text("")


def run_all(directory: Path) -> dict[str, list]:
    """Return for each case [exit status or what was imported, line]."""
    write_files(directory)
    os.chdir(directory)
    sys.meta_path.insert(0, _Refusing())
    answers = {}
    for name, (arguments, _) in CASES.items():
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                status = main(list(arguments))
            except _Imported as imported:
                status = str(imported)
        answers[name] = [status, said.getvalue()]
    return answers


class _Imported(Exception):
    """Raised for an import that a case must not make. It ends the case, which might otherwise train."""


class _Refusing(MetaPathFinder):
    """A finder that refuses the heavy modules."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in ("torch", "megatron", "transformers"):
            raise _Imported(f"{fullname} is imported")


if __name__ == "__main__":
    print(json.dumps(run_all(Path(sys.argv[1]))))

"""SFT, rollouts and evaluation give the model the same prompt; stages that do not are named before the first step."""

import json
from dataclasses import replace

import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import build_tokenizer
from rl_megatron.data.same_prompts import find_different_prompts
from rl_megatron.data.tasks import Problem
from rl_megatron.data.training_data import RolloutPrompts, build_dataset, encode_prompts
from rl_megatron.evaluation.heldout import build_evaluation
from tests.unit.algorithms.fakes import Echo, ScoredHere, rollouts_of, sampling
from tests.unit.data.chat_families import write_tokenizer

CHAT = ("data.format=chat", "data.system_prompt='Be brief.'")


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """The overrides of a chat model on problems like GSM8K's."""
    directory = tmp_path_factory.mktemp("gsm8k")
    for name, size in (("train", 8), ("test", 4)):
        rows = [{"question": f"{name} {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(size)]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = write_tokenizer("qwen3", directory / "tokenizer")
    return (f"data.path={directory}", f"tokenizer.path={tokenizer}", "data.num_eval_examples=4", "train.steps=2")


TASK = ("algorithm=grpo", "data.source=task", "data.task.name=gsm8k", "algorithm.prompts_per_step=8")
PROMPTS = ("algorithm=grpo", "data.source=prompts", "algorithm.prompts_per_step=8", "data.eval_split=test")


class Engine:
    """An engine that keeps the prompts that it is asked for."""

    def complete(self, requests):
        self.prompts, self.sampling = [list(request.prompt) for request in requests], requests[0].sampling
        raise InterruptedError


def prompts_of(batch):
    """Return what is before the first token that is learned, of every sequence."""
    sequences = zip(batch["input_ids"].tolist(), batch["token_mask"].tolist(), strict=True)
    return {tuple(ids[: mask.index(1)]) for ids, mask in sequences}


@pytest.mark.parametrize("of_problems", [TASK, PROMPTS], ids=["task", "prompts"])
@pytest.mark.parametrize("keys", [(), CHAT, ('data.prompt_template="<|im_start|>{question}"',)])
def test_sft_and_grpo_send_the_same_prompt_ids(gsm8k, of_problems, keys):
    sft = load_config(["algorithm=sft", "data=files", *gsm8k, *keys, "data.prompt_template=null", *keys]).first
    grpo = load_config([*of_problems[:1], "data=files", *of_problems[1:], *gsm8k, *keys]).first
    tokenizer = build_tokenizer(sft)
    batch = build_dataset(sft, tokenizer).batch(range(8))
    engine, scorer = Engine(), ScoredHere(Echo())
    _, _, sampler = sampling(grpo, engine, scorer, tokenizer)
    with pytest.raises(InterruptedError):
        sampler.draw(1)
    assert {tuple(prompt) for prompt in engine.prompts} == prompts_of(batch) and len(prompts_of(batch)) == 8
    heldout = build_evaluation(sft, tokenizer).batch
    evaluation = build_evaluation(grpo, tokenizer).with_rollouts(rollouts_of(scorer, tokenizer))
    with pytest.raises(InterruptedError):
        evaluation.evaluate(None, engine)
    assert {tuple(prompt) for prompt in engine.prompts} == prompts_of(heldout) and len(prompts_of(heldout)) == 4
    assert engine.sampling.stop_ids == (tokenizer.eos_id,), "eos ends the turns of this template"


def test_stages_with_different_prompts_are_named(gsm8k, tmp_path):
    experiment = {
        "sft": {"algorithm": {"name": "sft"}, "data": {"source": "prompt_answer"}},
        "grpo": {"algorithm": {"name": "grpo"}, "data": {"source": "task", "task": {"name": "gsm8k"}}},
    }

    def messages(**templates):
        stages = {
            name: stage | {"data": stage["data"] | {"prompt_template": templates.get(name)}}
            for name, stage in experiment.items()
        }
        (tmp_path / "experiment").mkdir(exist_ok=True)
        (tmp_path / "experiment" / "two.yaml").write_text(
            "# @package _global_\ndefaults: [override /data: files]\n" + json.dumps({"stages": stages})[1:-1]
        )
        config = load_config(["experiment=two", *gsm8k], str(tmp_path))
        return list(find_different_prompts(config.stages, build_tokenizer(config.first)))

    assert messages() == messages(sft="Q: {question}", grpo="Q: {question}") == []
    (message,) = messages(sft="Q: {question}")
    assert "stages 'sft' and 'grpo'" in message and "train.jsonl:1" in message
    assert "'Q: train 0 + 0?' and 'train 0 + 0?\\n'" in message
    assert "stages.sft.data.prompt_template='Q: {question}', stages.grpo.data.prompt_template=None" in message


def test_prompts_that_leave_no_space_for_a_completion(gsm8k, logged):
    def prompts(*overrides):
        stage = load_config([*TASK[:1], "data=files", *TASK[1:], *gsm8k, *overrides]).first
        tokenizer = build_tokenizer(stage)
        return RolloutPrompts(stage, stage.algorithm, tokenizer), tokenizer

    whole, _ = prompts("generation.max_new_tokens=8")
    longest, few = whole.longest, ["algorithm.prompts_per_step=1", "generation.max_new_tokens=8"]
    few.append(f"model.max_sequence_length={longest + 7}")
    with pytest.raises(ValueError, match=r"train.jsonl:\d: this prompt has .*max_new_tokens=8.*too_long=drop"):
        prompts(*few)
    kept, _ = prompts(*few, "data.too_long=truncate")
    assert kept.longest == longest - 1
    assert any("prompts exceed" in message and "truncated" in message for message in logged)
    ends = {tuple(prompt.ids) for prompt in whole.at(1)}
    assert all(any(tuple(prompt.ids) == ids[-len(prompt.ids) :] for ids in ends) for prompt in kept.at(1))


PAIR = """
class Words:
    def train_problems(self):
        return [{"prompt": "A word.", "answer": answer, "level": level} for answer, level in (("cat", 1), ("dog", 2))]
    def heldout_problems(self):
        return [("a", "b")]
    def reward(self, problem, completion):
        return float(completion == problem.answer)
"""


def test_problems_with_the_same_prompt_keep_their_answers_and_messages(gsm8k, tmp_path):
    (tmp_path / "words.py").write_text(PAIR)
    overrides = ["algorithm=grpo", "data=files", "data.source=task", f"data.task.name={tmp_path}/words.py:Words"]
    stage = load_config([*overrides, *gsm8k[1:], "algorithm.prompts_per_step=2"]).first
    tokenizer = build_tokenizer(stage)
    drawn = RolloutPrompts(stage, stage.algorithm, tokenizer).at(1)
    assert sorted((each.problem.answer, each.problem.record["level"]) for each in drawn) == [("cat", 1), ("dog", 2)]
    messages = [{"messages": [{"role": "user", "content": content}]} for content in ("Hi.", "Hello.")]
    problems = [Problem("a conversation", "", fields) for fields in messages]
    chat = replace(stage, data=replace(stage.data, format="chat"))
    first, second = encode_prompts(chat, problems, Renderer(chat.data, tokenizer)).prompts
    assert "Hi." in tokenizer.decode(first.ids) and "Hello." in tokenizer.decode(second.ids)


def test_conversations_of_a_mixture_end_their_turns_beside_plain_prompts(gsm8k, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi."}]}) + "\n")
    (tmp_path / "plain.jsonl").write_text(json.dumps({"prompt": "1 + 1 ="}) + "\n")
    mix = "data.mix=[{path: chats.jsonl}, {path: plain.jsonl}]"
    keys = ["algorithm.prompts_per_step=2", "data.eval_path=plain.jsonl", "data.heldout_fraction=0"]
    stage = load_config(["algorithm=grpo", mix, *gsm8k[1:], *keys]).first
    tokenizer = build_tokenizer(stage)
    assert RolloutPrompts(stage, stage.algorithm, tokenizer).end_of_turn_ids == (tokenizer.eos_id,)

"""A reward model of answers in Qwen3's chat format: training, evaluation, scoring, serving and the export agree."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.chat_template_utils import get_training_chat_template

from rl_megatron.batching.config import Batching
from rl_megatron.checkpoint.hf_convert import export_weights
from rl_megatron.config.data_sources import PreferenceConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.data.datasets import PreferenceDataset
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from rl_megatron.evaluation.heldout import HeldoutPairs
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.losses import PreferenceLoss
from rl_megatron.rewards.functions import RewardModelServer
from rl_megatron.rewards.reward_function import RewardFunction
from rl_megatron.rewards.reward_models import RewardModels, SequenceScorer
from tests.http_server import HttpServer
from tests.parallel.layouts import MODEL, build_policy
from tests.unit.data.chat_families import assistant, template_of, user, write_tokenizer
from tests.unit.rollouts.engines import samples_of

TOLERANCE = 1e-5
QWEN3 = replace(MODEL, num_layers=2, qkv_bias=False, max_sequence_length=160)
AFTER = "{% if not add_generation_prompt %}That was all.\n{% endif %}"
WORDS = "Rome sunny sum add two numbers weather 2 3 4 5 8 Thank you".split()
KINDS = ("no markers", "markers", "text after the turn", "cut")  # of the answers' ends; 32 held-out pairs of each
# What the server gets. The text of an answer that was cut within a character or a word may have other tokens.
SENT = dict.fromkeys(KINDS, ("string",)) | {"cut": ("tokens",)}


def records(seed: int, number: int) -> list[Record]:
    """Return pairs of random answers, of which the chosen one begins with "Yes", and the rejected one with "No"."""
    draws, pairs = random.Random(seed), []
    for line in range(number):
        words = [[draws.choice(WORDS) for _ in range(draws.randint(8, 14))] for _ in range(3)]
        answers = {"chosen": " ".join(["Yes", *words[1]]), "rejected": " ".join(["No", *words[2]])}
        pairs.append(Record({"prompt": [user(" ".join(words[0]))], **answers}, f"pairs.jsonl:{line + 1}"))
    return pairs


def answers(directory: Path) -> dict[str, tuple[Any, list[Any]]]:
    """Return for each kind of ends the batch of held-out pairs, and the same answers as samples of rollouts."""
    tokenizer, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    found = {}
    for number, kind in enumerate(KINDS):
        template = get_training_chat_template(theirs) if kind == "markers" else template_of("qwen3")
        assert template is not None
        if kind == "text after the turn":
            template += AFTER
        rendered = Renderer(PreferenceConfig(chat_template=template), tokenizer)
        prompts, written, pairs = [], [], records(100 + number, 32)
        for record in pairs:
            asked = record.values["prompt"]
            prompt = rendered.encode_prompt(record)
            for side in ("chosen", "rejected"):
                messages = [*asked, assistant(record.values[side])]
                whole = theirs.apply_chat_template(messages, chat_template=template, return_dict=False)
                written.append([*whole[len(prompt) :], tokenizer.eos_id])
                prompts.append(rendered.build_prompt(Problem("", ""), record, prompt))
        sampling = Sampling(100, stop_ids=(tokenizer.eos_id, *rendered.end_of_turn_ids))
        if kind == "cut":
            longest = max(len(prompt.ids) for prompt in prompts) + 16
            made = [
                sample
                for prompt, ids in zip(prompts, written, strict=True)
                for sample in samples_of(
                    [ids], [prompt], tokenizer, replace(sampling, max_new_tokens=longest - len(prompt.ids))
                )
            ]
            assert sum(sample.truncated for sample in made) > 20
        else:
            longest, made = 1000, samples_of(written, prompts, tokenizer, sampling)
            assert not any(sample.truncated for sample in made)
        dataset = PreferenceDataset(pairs, rendered, longest, too_long="truncate")
        found[kind] = dataset.batch(range(len(dataset))), made
    return found


def train_and_score(home: Path) -> dict[str, dict[str, Any]]:
    """Train a reward model, save and export it; return by kind of ends its margin and scores, and those as a reward."""
    tokenizer = load_tokenizer(home / "tokenizer")
    policy = build_policy({}, model=QWEN3, vocab_size=tokenizer.vocab_size, head="score", micro_batch_size=32)
    dataset = PreferenceDataset(records(0, 32), Renderer(PreferenceConfig(), tokenizer), 1000)
    batch = dataset.batch(range(len(dataset)))
    reports = [policy.train(batch, PreferenceLoss(), gbs=batch.size) for _ in range(6)]
    assert reports[-1]["loss"] < 0.5 * reports[0]["loss"], reports
    checkpoint = policy.save_checkpoint(home / "checkpoints" / "reward_model", 6)
    export_weights(checkpoint, home / "exported")

    stage = load_config(["data=arithmetic", "algorithm=grpo"]).first
    models = RewardModels(stage, policy.topology, tokenizer, Path)  # pyright: ignore[reportArgumentType]
    function: Any = {"name": "reward_model", "kwargs": {"init_from": str(checkpoint)}}
    (model,) = models.load(RewardConfig(functions=(function,))).values()
    found = {}
    for kind, (heldout, samples) in answers(home / "tokenizer").items():
        found[kind] = {
            "margin": HeldoutPairs(heldout).evaluate(policy)[0]["preference_margin"],
            "scores": policy.score(heldout)["scores"].tolist(),
            "trained": policy.train(heldout, PreferenceLoss(), gbs=heldout.size, eval_mode=True),
            "rewards": [each["score"] for each in model.score([sample.sequence_ids for sample in samples])],
        }
    models.close()
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run's directory with the tokenizer."""
    directory = tmp_path_factory.mktemp("run")
    write_tokenizer("qwen3", directory / "tokenizer")
    return directory


@pytest.fixture(scope="module")
def scored(ranks, home):
    return ranks.run(1, train_and_score, home)[0]


@pytest.fixture(scope="module")
def server(scored, home):
    """The address of a server with the exported classifier, which reads text or tokens as vLLM does."""
    model = AutoModelForSequenceClassification.from_pretrained(home / "exported", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "exported")
    lock = threading.Lock()

    class Scoring(BaseHTTPRequestHandler):
        def do_POST(self):
            text = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
            ids = tokenizer(text)["input_ids"] if isinstance(text, str) else text
            with lock, torch.no_grad():
                score = model(torch.tensor([ids])).logits[0].tolist()
            answer = json.dumps({"data": [{"data": score}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format, *arguments):
            pass

    running = HttpServer(("127.0.0.1", 0), Scoring)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/pooling"
    running.shutdown()
    running.server_close()


def served(address: str, samples: list[Any], sends: str) -> list[float]:
    async def scores() -> list[float]:
        function = RewardFunction(RewardModelServer, "reward_model", {"url": address, "model": "m", "sends": sends})
        return [(await function.call(sample))["score"] for sample in samples]

    return asyncio.run(scores())


def margin(scores: list[float]) -> float:
    return sum(scores[::2]) / len(scores[::2]) - sum(scores[1::2]) / len(scores[1::2])


def test_one_answer_has_one_score_wherever_it_is_read(scored, server, home):
    model = AutoModelForSequenceClassification.from_pretrained(home / "exported", dtype=torch.float32).eval()
    num_answers = 0
    for kind, (batch, samples) in answers(home / "tokenizer").items():
        found = scored[kind]
        rows = zip(batch["input_ids"], batch["input_lengths"], strict=True)
        with torch.no_grad():
            exported = [model(ids[None, :length]).logits[0, 0].item() for ids, length in rows]
        assert found["margin"] > 0.5, "the model has learned which answers are chosen"
        everywhere = {"policy.score": found["scores"], "reward": found["rewards"], "exported": exported}
        everywhere |= {f"sends {sends}": served(server, samples, sends) for sends in SENT[kind]}
        for place, scores in everywhere.items():
            assert scores == pytest.approx(found["scores"], abs=TOLERANCE), (kind, place)
            assert margin(scores) == pytest.approx(found["margin"], abs=TOLERANCE), (kind, place)
        trained = found["trained"]["rewards_chosen_mean"] - found["trained"]["rewards_rejected_mean"]
        assert trained == pytest.approx(found["margin"], abs=TOLERANCE), kind
        num_answers += len(samples)
    assert num_answers == 256


def score_and_count(home: Path, share_prefixes: bool) -> tuple[list[float], int]:
    """Return the scores of eight answers to one prompt, and how many tokens the model computed."""
    tokenizer, counted = load_tokenizer(home / "tokenizer"), []
    batching = Batching("packed", tokens=1024, share_prefixes=share_prefixes)
    policy = build_policy({}, model=QWEN3, vocab_size=tokenizer.vocab_size, head="score", batching=batching)
    (model,) = policy.model.model_chunks
    model.register_forward_hook(lambda _, arguments, output: counted.append(output.shape[:2].numel()))
    answers_to_one = [[*range(1, 41), *range(number, number + 5)] for number in range(50, 58)]
    return SequenceScorer(policy, tokenizer, "resident").score(answers_to_one), sum(counted)


def test_a_reward_model_computes_a_common_prompt_once(ranks, home):
    (wanted, num_tokens), (scores, fewer) = (ranks.run(1, score_and_count, home, each)[0] for each in (False, True))
    assert scores == pytest.approx(wanted, abs=TOLERANCE) and len(set(scores)) == 8
    assert (num_tokens, fewer) == (8 * 45, 39 + 8 * 6)  # the last common token has another next one in each answer

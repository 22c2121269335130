"""`show-batch` shows what training sees: the tokens and the mask of a step, its microbatches and its prompts."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from rich.console import Console

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import padded_lengths
from rl_megatron.batching.step_microbatches import plan_microbatches, plan_step
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.run_tokenizer import build_tokenizer
from rl_megatron.data.training_data import build_dataset
from rl_megatron.observability.batch_view import (
    ShownSequence,
    Token,
    draw_pack,
    mark_tokens,
    print_batch,
    render_batch_page,
    show_text,
)
from rl_megatron.observability.step_view import view_heldout, view_step
from rl_megatron.runs.stage import Stage
from rl_megatron.topology.degrees import ConfiguredLayout
from tests.unit.algorithms.fakes import sampling

STEP = 3
SMALL = (
    "tokenizer.vocab_size=260",
    "train.global_batch_size=8",
    "train.steps=5",
    "data.num_eval_examples=2",
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Name → (a stage on twenty records of different lengths, its tokenizer)."""
    directory = tmp_path_factory.mktemp("records")
    records = [{"question": f"{'very ' * (n % 5)}hard {n} <eos>?", "answer": f" {n}\t€ " + "x" * n} for n in range(20)]
    pairs = [{"question": f"q{n}", "chosen": f"good {n}", "rejected": "bad" * (n + 1)} for n in range(20)]
    for name, content in (("sft", records), ("dpo", pairs)):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    chosen = {
        "sft": ("data=gsm8k", f"data.path={directory}/sft.jsonl", "data.heldout_fraction=0.2"),
        "dpo": ("data=gsm8k_pairs", f"data.path={directory}/dpo.jsonl", "data.heldout_fraction=0.2", "loss=dpo"),
        "grpo": (
            "data=arithmetic",
            "algorithm.prompts_per_step=4",
            "algorithm.samples_per_prompt=2",
            "data.task.max_operand=9",
            "data.num_documents=20",
        ),
    }
    return {name: _stage(f"algorithm={name}", *overrides, *SMALL) for name, overrides in chosen.items()}


def _stage(*overrides):
    stage = load_config(list(overrides)).first
    return stage, build_tokenizer(stage)


def batched(stage, kind, **parallel):
    """The stage with another batching and other parallel degrees."""
    train = replace(stage.train, batching=kind, micro_batch_tokens=512)
    return replace(stage, train=train, parallel=replace(stage.parallel, **parallel))


def sequences(view):
    return [sequence for group in view.groups for sequence in group.sequences]


def trained_batch(stage, tokenizer):
    """The batch that the training loop gets at `STEP`."""
    training = SimpleNamespace(
        config=stage, steps=lambda: iter(range(1, STEP + 1)), batch_number=int, use_loader=lambda loader: None
    )
    return dict(Stage.whole_batches(training, build_dataset(stage, tokenizer)))[STEP]


def shown_in_order(view):
    """The ids and the masks of a view's sequences, in the order of the batch."""
    found = sorted((int(s.title.split(",")[0].split()[1]), s.tokens) for s in sequences(view) if s.tokens)
    return [([token.id for token in tokens], [token.trained for token in tokens]) for _, tokens in found]


@pytest.mark.parametrize("kind", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize("data", ["sft", "dpo"])
def test_the_batch_is_the_one_that_training_gets_at_that_step(stages, data, kind):
    stage, tokenizer = batched(stages[data][0], kind), stages[data][1]
    batch = trained_batch(stage, tokenizer)
    lengths = batch["input_lengths"].tolist()
    wanted = [
        (ids[:length], [entry > 0 for entry in mask[:length]])
        for ids, mask, length in zip(batch["input_ids"].tolist(), batch["token_mask"].tolist(), lengths, strict=True)
    ]
    view = view_step(data, stage, tokenizer, STEP, ranks=1)
    assert shown_in_order(view) == wanted
    assert all(re.search(rf", \S+/{data}.jsonl:\d+$", shown.title) for shown in sequences(view) if shown.tokens)
    assert shown_in_order(view_step(data, stage, tokenizer, STEP - 1, ranks=1)) != wanted


@pytest.mark.parametrize("kind", ["dynamic", "packed"])
def test_the_microbatches_are_those_of_every_data_parallel_rank(stages, kind):
    stage, tokenizer = batched(stages["dpo"][0], kind, context=2), stages["dpo"][1]
    view, batch = view_step("dpo", stage, tokenizer, STEP, ranks=6), trained_batch(stage, tokenizer)
    layout = ConfiguredLayout.from_config(stage.parallel, 6)
    shown = iter(view.groups)
    for rank in range(layout.data):
        cost = SequenceCost.from_model(stage.model, tokenizer.vocab_size)
        whole = Batch.from_whole(batch)
        step = plan_step(whole, 0, whole.size, Batching.from_config(stage.train), layout, rank, 2, cost)
        for microbatch in plan_microbatches(whole, step).microbatches:
            group = next(shown)
            assert f"rank {rank}" in group.title and len(group.sequences) == microbatch.batch.size
            widths = [len(sequence.tokens) + sequence.padding for sequence in group.sequences]
            if kind == "packed":
                assert widths == padded_lengths(microbatch.lengths, layout)
                assert [tokens + padding for _, tokens, padding in group.pack] == widths
            else:
                assert set(widths) == {microbatch.shape(layout)[1]} and not group.pack
    assert next(shown, None) is None
    assert {title.split(", ")[1] for title in (s.title for s in sequences(view) if s.tokens)} == {"chosen", "rejected"}


def test_a_pack_of_pairs_that_share_their_prompts_shows_the_segments(stages):
    stage, tokenizer = batched(stages["dpo"][0], "packed"), stages["dpo"][1]
    stage = replace(stage, train=replace(stage.train, share_prefixes="auto"))
    view = view_step("dpo", stage, tokenizer, STEP, ranks=1)
    (group,) = view.groups
    tokens = {title.partition(",")[0]: (num_tokens, padding) for title, num_tokens, padding in group.pack}
    lengths = {sequence.title.partition(",")[0]: len(sequence.tokens) for sequence in group.sequences}
    for pair in range(len(lengths) // 2):
        shared, padding = tokens[f"sequence {2 * pair}+{2 * pair + 1}"]
        assert shared > 1 and not padding
        for name in (f"sequence {2 * pair}", f"sequence {2 * pair + 1}"):
            assert tokens[name][0] == lengths[name] - shared
    efficiency = sum(lengths.values()) / sum(num_tokens for num_tokens, _ in tokens.values())
    assert dict(view.facts)["efficiency"].startswith(f"{efficiency:.2f} tokens per token position that")
    assert f" {sum(map(sum, tokens.values())):,} token positions" in group.title


def test_prompts_are_those_that_the_engine_gets(stages):
    stage, tokenizer = stages["grpo"]
    got = []

    class Engine:
        def complete(self, requests):
            got.append(([list(request.prompt) for request in requests], requests[0].sampling))
            raise InterruptedError

    scorer = SimpleNamespace(start=lambda: None)
    _, _, sampler = sampling(stage, Engine(), scorer, tokenizer)
    with pytest.raises(InterruptedError):
        sampler.draw(STEP)
    ((prompts, chosen),) = got
    view = view_step("grpo", stage, tokenizer, STEP, ranks=1)
    shown = [[token.id for token in sequence.tokens] for sequence in sequences(view) for _ in range(2)]
    assert shown == prompts and not view.has_mask
    facts = dict(view.facts)
    assert "2 completions each, 8 in all" in facts["prompts"]
    assert f"at most {chosen.max_new_tokens} tokens" in facts["completions"]
    assert facts["stop tokens"] == f"'<eos>' ({tokenizer.eos_id})"
    assert sequences(view)[0].note.startswith("reference answer: ")
    assert "stop strings" not in facts
    stopping = replace(stage, generation=replace(stage.generation, stop_strings=("\n\n", "END")))
    assert dict(view_step("grpo", stopping, tokenizer, STEP, ranks=1).facts)["stop strings"] == r"'\n\n', 'END'"


def test_held_out_data_is_that_of_the_evaluation(stages):
    assert len(sequences(view_heldout("sft", *stages["sft"], ranks=1))) == 2
    view = view_heldout("grpo", *stages["grpo"], ranks=1)
    assert len(sequences(view)) == 2 and "answered greedily" in dict(view.facts)["prompts"]


def test_what_cannot_be_shown_is_refused(stages):
    stage, tokenizer = stages["sft"]
    with pytest.raises(ConfigError, match=r"--step 6: stage 'sft' has the steps 1 to 5"):
        view_step("sft", stage, tokenizer, 6, ranks=1)
    stage = batched(stage, "padded", context=2)
    with pytest.raises(ConfigError, match="does not divide the world size 3"):
        view_step("sft", stage, tokenizer, 1, ranks=3)


# --- tokens as text ---


def test_texts_of_tokens_are_the_text_together(stages):
    _, tokenizer = stages["sft"]
    text = "a €😀 b\n"
    ids = [*tokenizer.encode(text), tokenizer.eos_id]
    texts = tokenizer.decode_tokens(ids)
    assert "".join(texts) == text + "<eos>" and len(texts) == len(ids)
    assert texts.count("") == 5, "€ is three tokens of one byte, and 😀 is four"
    assert tokenizer.decode_tokens(tokenizer.encode("€")[:2]) == ["<0xE2>", "<0x82>"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a b", "a b"), (" a ", "·a·"), ("a  \nb", "a··↵\nb"), ("\t\n\n", "⇥↵\n↵\n"), ("\x1b[0m", r"\x1b[0m")],
)
def test_whitespace_and_control_characters_are_visible(text, shown):
    assert show_text(text) == shown


def test_brackets_mark_every_trained_span_and_special_tokens():
    """A conversation has one span for each answer."""
    turns = [("<s>", 0, 1), ("hi", 0, 0), (" there", 1, 0), ("<e>", 1, 1), ("how", 0, 0), (" so", 1, 0), ("<e>", 1, 1)]
    tokens = [
        Token(number, text, bool(trained), bool(special)) for number, (text, trained, special) in enumerate(turns)
    ]
    assert mark_tokens(tokens) == "«<s>»hi⟦·there«<e>»⟧how⟦·so«<e>»⟧"
    assert ShownSequence("", tokens).num_trained == 4


def printed(view, **console):
    file = io.StringIO()
    print_batch(Console(file=file, highlight=False, **console), view, show_ids=True)
    return file.getvalue()


def test_a_pipe_gets_plain_text_and_a_terminal_lines_of_its_width(stages):
    stage, tokenizer = batched(stages["sft"][0], "packed"), stages["sft"][1]
    view = view_step("sft", stage, tokenizer, STEP, ranks=1)
    plain = printed(view)
    first = view.groups[0].sequences[0]
    assert mark_tokens(first.tokens) in plain and "\x1b" not in plain and "€" in plain
    assert " ".join(str(token.id) for token in first.tokens) in plain
    assert draw_pack(view.groups[0]) in plain
    coloured = printed(view, force_terminal=True, width=80, color_system="standard")
    assert "\x1b[30;42m" in coloured
    assert max(map(len, printed(view, force_terminal=True, width=80, color_system=None).splitlines())) <= 80
    short = view.shorten(3)
    assert len(sequences(short)) == 3 and "5 more: --sequences 8 shows all" in printed(short)


class Tokens(HTMLParser):
    """Collects the (id, classes, text) of each token, and refuses what a browser would load."""

    def __init__(self, page):
        super().__init__()
        self.tokens, self._open = [], 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        assert not {"src", "href"} & values.keys() and tag not in ("script", "link", "img")
        if "data-id" in values:
            self.tokens.append([int(values["data-id"]), set((values.get("class") or "").split()), ""])
            self._open = 1
        elif self._open:
            self._open += 1

    def handle_endtag(self, tag):
        self._open = max(0, self._open - 1)

    def handle_data(self, data):
        if self._open:
            self.tokens[-1][2] += data


@pytest.mark.parametrize("data", ["sft", "dpo"])
def test_the_page_has_every_token_with_its_mask_and_loads_nothing(stages, data):
    stage, tokenizer = batched(stages[data][0], "packed"), stages[data][1]
    view = view_step(data, stage, tokenizer, STEP, ranks=1)
    page = render_batch_page(view)
    shown = [token for sequence in sequences(view) for token in sequence.tokens]
    found = Tokens(page).tokens
    assert [token_id for token_id, _, _ in found] == [token.id for token in shown]
    assert [("trained" in classes, "special" in classes) for _, classes, _ in found] == [
        (token.trained, token.special) for token in shown
    ]
    for (_, _, text), token in zip(found, shown, strict=True):
        assert text.replace("↵\n", "\n").replace("⇥", "\t").replace("·", " ") == token.text
    assert all(f"{number}" in page for number in range(8)) and "prefers-color-scheme: dark" in page
    assert "url(" not in page and "@import" not in page

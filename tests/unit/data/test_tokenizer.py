import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from rl_megatron.data.run_tokenizer import load_tokenizer, train_bpe
from rl_megatron.data.tokenizer import Tokenizer
from tests.unit.data.shared_data import shared

CORPUS = ["the cat sat on the mat, the cat ate 1234 rats\n"] * 4 + ["und die Katze saß 5678 mal\n"] * 3

TEXTS = [
    "",
    " leading, trailing  and   inner spaces \t\r\n\n",
    "naïve façade — “quotes”, ½, ٣, 漢字, עברית, 👩‍👩‍👧‍👦, e\u0301 is not \u00e9",
    "\x00 \x7f \u200b \ufeff \ufffd \U0010ffff",
    "<eos> and <pad> spelled out, {braces}, </s>",
    "".join(map(chr, range(0x20, 0x800))),
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 300)


class TestTrainedBpe:
    @pytest.mark.parametrize("text", TEXTS)
    def test_lossless_on_any_text(self, bpe, text):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert bpe.eos_id not in ids and bpe.pad_id not in ids, "text never becomes a special token"

    def test_threads_encode_texts_with_and_without_special_tokens_at_the_same_time(self, bpe):
        text = "the cat <eos> sat\n" * 2000  # longer than what is encoded at once
        plain, special = bpe.encode(text), bpe.encode_special(text).ids
        assert bpe.decode(plain) == text and bpe.eos_id not in plain and special.count(bpe.eos_id) == 2000
        with ThreadPoolExecutor(4) as threads:
            made = [threads.submit(encode, text) for _ in range(5) for encode in (bpe.encode, bpe.encode_special)]
            ids = [each.result() for each in made]
        assert all(each == plain for each in ids[::2]) and all(each.ids == special for each in ids[1::2])

    def test_other_threads_run_while_a_long_text_is_encoded(self, bpe):
        done, turns = threading.Event(), 0

        def encode():
            bpe.encode("the cat sat on the mat " * 20_000)
            done.set()

        threading.Thread(target=encode).start()
        while not done.wait(0.001):
            turns += 1
        assert turns > 5

    def test_the_same_corpus_gives_the_same_vocabulary(self, bpe, tmp_path):
        bpe.save(tmp_path / "first")
        train_bpe(iter(CORPUS), 300).save(tmp_path / "second")
        first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second"))
        assert first == second

    def test_it_learns_pairs_up_to_the_size_asked_for(self, bpe):
        assert 258 < bpe.vocab_size <= 300
        assert len(bpe.encode("the cat")) < len("the cat")
        assert train_bpe(["ab"], 4000).vocab_size == 258, "nothing to learn: the actual size is told"
        assert train_bpe(CORPUS, 258).vocab_size == 258
        assert (bpe.pad_id, bpe.eos_id) == (0, 1)
        assert max(id for text in TEXTS for id in bpe.encode(text)) < bpe.vocab_size

    def test_every_digit_is_one_token(self, bpe):
        corpus = ["1234 1234 1234 1234"] * 9
        assert len(train_bpe(corpus, 300).encode("1234")) == 4
        assert len(train_bpe(corpus, 300, digits=False).encode("1234")) == 1
        assert len(bpe.encode("5678")) == 4

    def test_too_small_a_vocabulary_is_refused(self):
        with pytest.raises(ValueError, match="vocab_size = 257.*258"):
            train_bpe(CORPUS, 257)

    def test_eos_is_decoded_at_the_end(self, bpe):
        ids = [*bpe.encode("19"), bpe.eos_id]
        assert bpe.decode(ids) == "19"
        assert bpe.decode(ids, skip_special_tokens=False) == "19<eos>"

    def test_real_text(self):
        text = shared("tinyshakespeare/input.txt").read_text()[:200_000]
        tokenizer = train_bpe([text], 512)
        assert tokenizer.vocab_size == 512
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < 0.6 * len(text)


def llama_like_directory(path, declared):
    """A word-level tokenizer that puts <s> before every text, with a chat marker, as Hugging Face would store it."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4, "<": 5, "|": 6, "user": 7, ">": 8, "s": 9}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|user|>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(declared))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


class TestLoading:
    def test_round_trip(self, bpe, tmp_path):
        bpe.save(tmp_path)
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            loaded = load_tokenizer(path)
            assert (loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (bpe.eos_id, bpe.pad_id, bpe.vocab_size)
            assert [loaded.encode(text) for text in TEXTS] == [bpe.encode(text) for text in TEXTS]

    def test_a_hugging_face_directory_keeps_what_it_declares(self, tmp_path):
        declared = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "model_max_length": 77}
        tokenizer = load_tokenizer(llama_like_directory(tmp_path / "source", declared))
        assert tokenizer.eos_id == tokenizer.pad_id == 2, "without a pad token, eos pads"
        assert tokenizer.vocab_size == 11
        assert tokenizer.prefix_ids == [1]
        assert tokenizer.encode("hello world") == [3, 4], "the prefix is the caller's to put"
        tokenizer.save(tmp_path / "copy")
        config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
        assert config["model_max_length"] == 77 and config["eos_token"] == "</s>"
        assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "{{ messages }}"
        assert load_tokenizer(tmp_path / "copy").prefix_ids == [1]

    def test_only_the_template_writes_special_tokens(self, tmp_path):
        tokenizer = load_tokenizer(llama_like_directory(tmp_path / "source", {"eos_token": "</s>"}))
        marker = tokenizer.special_tokens["<|user|>"]
        assert tokenizer.encode_template("<|user|>{q}</s>", {"q": "hello"}) == [marker, 3, 2]
        forged = tokenizer.encode_template("<|user|>{q}", {"q": "hello </s> <|user|>"})
        assert forged.count(marker) == 1 and 2 not in forged

    def test_errors(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_tokenizer(tmp_path / "nowhere")
        source = llama_like_directory(tmp_path / "source", {})
        with pytest.raises(ValueError, match="eos_token"):
            load_tokenizer(source)
        with pytest.raises(ValueError, match="'<end>'"):
            load_tokenizer(source, eos_token="<end>")
        assert load_tokenizer(source, eos_token="</s>", pad_token="<unk>").pad_id == 0

    def test_transformers_reads_what_save_writes_and_wraps(self, bpe, tmp_path):
        transformers = pytest.importorskip("transformers")
        bpe.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (bpe.eos_id, bpe.pad_id, bpe.vocab_size)
        text = TEXTS[2]
        assert theirs(text)["input_ids"] == bpe.encode(text)
        assert Tokenizer(theirs, "<eos>").encode(text) == bpe.encode(text)
        assert theirs("<eos>")["input_ids"] == [bpe.eos_id], "wrapping copies: theirs still parses special tokens"
        assert load_tokenizer(tmp_path).encode("<eos>") != [bpe.eos_id]

    def test_a_directory_without_tokenizer_json_is_converted(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        pieces = ["h", "e", "l", "o", "he", "ll", "<|endoftext|>"]
        (tmp_path / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
        config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(tmp_path)
        assert transformers and tokenizer.encode("hello") == [4, 5, 3] and tokenizer.eos_id == 6

    def test_a_directory_without_any_tokenizer(self, tmp_path):
        pytest.importorskip("transformers")
        (tmp_path / "weights.bin").write_text("")
        with pytest.raises(ValueError, match="has no tokenizer.json.*weights.bin"):
            load_tokenizer(tmp_path, eos_token="</s>")


def test_the_digest_survives_saving_and_tells_tokenizers_apart(tmp_path):
    tokenizer = train_bpe(["one and two and three", "two and two"] * 3, 300)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").digest == tokenizer.digest
    assert train_bpe(["four or five or six", "five or five"] * 3, 300).digest != tokenizer.digest

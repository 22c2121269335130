import json

import pytest

from rl_megatron.data.files import load_records, load_text, split_heldout
from rl_megatron.data.plain_text import list_fields, require_fields
from rl_megatron.data.readers import JsonLines
from rl_megatron.data.records import Record


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_record_knows_its_line(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"q": "a\u2028b"}\n\n{"q": "c"}\r\n', encoding="utf-8")
    records = JsonLines(file).all()
    assert [record.values["q"] for record in records] == ["a\u2028b", "c"]
    assert [record.location for record in records] == [f"{file}:1", f"{file}:3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"q": 1}\n{"q": \n', r"data.jsonl:2 is not JSON \("),
        (b'{"q": "a"\r\n', r"data.jsonl:1 is not JSON \(Expecting ',' delimiter, column 10\)"),
        (b'{"q": 1}\n[1]\n', "data.jsonl:2 is a list"),
        (b'{"q": 1}\n{"q": "\xff"}\n', "data.jsonl:2 is not UTF-8"),
        (rb'{"q": "a", "b": ["\ud83d"]}', r"data.jsonl:1: field 'b' has half of a surrogate pair, \\ud83d; write"),
        (b"\n\n", "has no records"),
    ],
)
def test_errors_in_a_file_name_the_line(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        JsonLines(file).all()


def test_null_and_nan_are_missing_fields_and_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"q": "\\ud83d\\ude00", "a": null, "b": NaN, "m": [{"role": "user", "content": null}]}\n'
        b'{"q": "\xef\xbb\xbf", "extra_info": {"a": null}}\n'
    )
    first, second = (record.values for record in JsonLines(file).all())
    assert first == {"q": "\U0001f600", "m": [{"role": "user"}]}
    assert second == {"q": "\ufeff", "extra_info": {"a": None}}, "only the beginning of a file has such a mark"
    file.write_bytes(b"\xef\xbb\xbffirst\nsecond\n")
    assert load_text(file, 0.0)[0] == "first\nsecond\n"


def test_a_missing_path_names_its_key(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path: there is nothing at .*absent"):
        load_records(tmp_path / "absent")


def test_a_directory_has_its_own_split(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"n": 1}, {"n": 2}])
    write_jsonl(tmp_path / "test.jsonl", [{"n": 3}])
    train, heldout = load_records(tmp_path)
    assert [record.values["n"] for record in train + heldout] == [1, 2, 3] and len(heldout) == 1


def test_a_fixed_fraction_of_a_single_file_is_held_out(tmp_path):
    file = write_jsonl(tmp_path / "all.jsonl", [{"n": n} for n in range(40)])
    train, heldout = load_records(file, heldout_fraction=0.25)
    numbers = [record.values["n"] for record in heldout]
    assert len(numbers) == 10 and numbers == sorted(numbers) != list(range(30, 40))
    assert sorted(numbers + [record.values["n"] for record in train]) == list(range(40))
    assert load_records(file, heldout_fraction=0.25)[1] == heldout


def test_splits_have_two_sides():
    assert split_heldout([1, 2], 0) == ([1, 2], [])
    assert len(split_heldout(list(range(100)), 0.001)[1]) == 1
    with pytest.raises(ValueError, match="fraction=0.5 leaves nothing to train on: the data has 1 record; lower"):
        split_heldout([1], 0.5)
    groups = [[n] * (1 + n % 3) for n in range(40)]
    few, more = (split_heldout(groups, 0.1, wanted, len)[1] for wanted in (0, 20))
    assert len(few) == 4 and 20 <= sum(map(len, more)) <= 22 and all(group in more for group in few)
    assert split_heldout(groups, 0.1, 4, len)[1] == few, "the fraction gives enough"
    with pytest.raises(ValueError, match="num_eval_examples leaves nothing to train on: the data has 79 records; "):
        split_heldout(groups, 0.1, 90, len)
    for fraction in (-0.1, 1.0):
        with pytest.raises(ValueError, match="heldout_fraction"):
            split_heldout([1, 2], fraction)


def test_text_is_cut_at_a_line_and_keeps_every_character(tmp_path):
    file = tmp_path / "text.txt"
    content = "".join(f"line {number} ü\r\n" for number in range(100))
    file.write_bytes(content.encode("utf-8"))
    train, heldout = load_text(file, heldout_fraction=0.2)
    assert train + heldout == content
    assert heldout.startswith("line ") and 0.18 * len(content) < len(heldout) <= 0.2 * len(content)
    assert load_text(file, heldout_fraction=0) == (content, "")


@pytest.mark.parametrize(
    ("text", "fraction", "heldout"),
    [
        ("abcdefghij", 0.3, "hij"),
        ("ab\n", 0.01, "\n"),
        ("ab", 0.5, "b"),
        ("ab\ncd\nef\ngh\n", 0.5, "ef\ngh\n"),
        ("ab\ncd\nef\ngh\n", 0.6, "ef\ngh\n"),
    ],
)
def test_text_is_cut_at_the_first_line_that_starts_at_or_after_the_fraction(tmp_path, text, fraction, heldout):
    (tmp_path / "t.txt").write_text(text)
    assert load_text(tmp_path / "t.txt", fraction) == (text.removesuffix(heldout), heldout)


@pytest.mark.parametrize(
    ("content", "message"), [(b" \n", "is empty"), (b"ab\xff", "not UTF-8.*byte 2"), (b"a", "nothing to")]
)
def test_text_errors(tmp_path, content, message):
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path / "t.txt", 0.5)


def test_templates():
    assert list_fields("{question}\nSay {{it}}: {steps[0]} {answer!s:>4}") == ["question", "steps", "answer"]
    for broken in ("{question", "{}", "{0}"):
        with pytest.raises(ValueError, match="template"):
            list_fields(broken)
    records = [Record({"question": 1, "answer": 2}, "f:1"), Record({"qestion": 1, "answer": 2}, "f:2")]
    with pytest.raises(ValueError, match=r"f:2: .*'question'; did you mean 'qestion'\? Known: answer, qestion"):
        require_fields(records, "{question}")

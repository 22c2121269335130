"""Tasks of files for evaluations: what is a right answer, and how completions are read."""

import json

import pytest

from rl_megatron.data.tasks import GPQA, IFEval, Mathematics, MultipleChoice
from rl_megatron.data.tasks.ifeval import INSTRUCTIONS, follows


def written(tmp_path, *records):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_mathematical_answers_are_compared_as_such(tmp_path):
    sums = {"problem": "What is 1/2 + 1/4?", "answer": r"\frac{3}{4}"}, {"problem": "2+2?", "answer": 4}
    path = written(tmp_path, *sums)
    task = Mathematics(path, heldout_fraction=0.0)
    task.check_files()
    first, second = task.train_problems()
    assert first.prompt == "What is 1/2 + 1/4?\nPut your final answer within \\boxed{}.\n"
    assert task.reward(first, r"It is \boxed{0.75}.") == 1.0 and task.reward(first, r"\boxed{\frac{4}{3}}") == 0.0
    assert task.reward(second, r"\boxed{4}") == 1.0 and task.reward(second, "I do not know") == 0.0
    assert task.final_answer(r"\boxed{0.5}") == task.final_answer(r"so \boxed{0.50}")
    assert task.final_answer("I do not know") is None


def test_a_completion_that_takes_too_long_to_read_has_no_answer(tmp_path, monkeypatch):
    def too_slow(text, seconds):
        raise TimeoutError

    monkeypatch.setattr("rl_megatron.data.tasks.math.read_answer", too_slow)
    assert Mathematics(written(tmp_path, {"problem": "1?", "answer": 1})).final_answer("1") is None


@pytest.mark.parametrize("answer", [2, "2", "C", "c", "Paris"])
def test_the_right_choice_is_a_number_a_letter_or_a_text(tmp_path, answer):
    record = {"question": "Capital of France?", "choices": ["Rome", "Bonn", "Paris"], "answer": answer}
    path = written(tmp_path, record)
    (problem,) = MultipleChoice(path, heldout_fraction=0.0).train_problems()
    assert problem.answer == "C"
    assert problem.prompt.startswith("Capital of France?\nA. Rome\nB. Bonn\nC. Paris\nAnswer with the letter")


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("Answer: C", "C"), ("The answer is (b).", "B"), (r"so \boxed{D}", "D"), (r"\boxed{\text{A}}", "A"), ("C", "C"),
        ("(B) Bonn", "B"), ("D. It is", "D"), ("answer: A. No, the answer is B", "B"), ("**Answer:** **C**", "C"),
        ("Rome, because", None), ("", None), ("Answer: none of them", None),
        ("Answer: B. That is the answer I would give.", "B"), ("Answer: B\n\nThe answer A would be wrong", "B"),
        ("A common rule says so", None), (r"Answer: $\mathbf{C}$", "C"),
    ],
)  # fmt: skip
def test_a_completion_gives_a_letter(completion, letter):
    assert MultipleChoice("unused").final_answer(completion) == letter


def test_choices_that_cannot_be_used_are_named(tmp_path):
    path = written(tmp_path, {"question": "?", "choices": ["a", "b"], "answer": "c"})
    with pytest.raises(ValueError, match=r"problems.jsonl:1: the answer 'c' is neither the number"):
        MultipleChoice(path).check_files()
    path = written(tmp_path, {"question": "?", "choices": "ab", "answer": 0})
    with pytest.raises(ValueError, match=r"problems.jsonl:1: 'choices' is not a list of 2 to 26 choices"):
        MultipleChoice(path).check_files()
    with pytest.raises(ValueError, match=r"no field 'Question'.*set data.task.question_field"):
        GPQA(path).check_files()


def test_the_choices_of_gpqa_have_an_order_of_their_own(tmp_path):
    records = [
        {"Question": f"question {n}", "Correct Answer": "right"} | {f"Incorrect Answer {k}": f"w{k}" for k in (1, 2, 3)}
        for n in range(20)
    ]
    path = written(tmp_path, *records)
    first, again = (GPQA(path, heldout_fraction=0.0).train_problems() for _ in range(2))
    assert [problem.answer for problem in first] == [problem.answer for problem in again]
    assert {problem.answer for problem in first} == set("ABCD")
    for problem in first:
        assert f"{problem.answer}. right\n" in problem.prompt


FOLLOWED = [
    ("keywords:existence", {"keywords": ["red", "blue"]}, "Red and blue.", "Redder and blue."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a or a", "a or b"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a or b", "a or a"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "badly done", "It is bad."),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Eel", "ell"),
    (
        "length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"},
        "Mr. X came. Why?", "A. b. C! D? Ed.",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one well-known three", "one two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "First.\n\nThen, so.", "First.\n\nSo then.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Dear A.\nP.S. Write!", "Dear A. Write!"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one*"),
    (
        "detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2", "SECTION 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>> text", "<< >> text"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. I did.", "I did."),
    ("startend:end_checker", {"end_phrase": "That is all."}, "Yes. That is all.", "That is all. Yes."),
    ("startend:quotation", {}, '"quoted"', '"quoted'),
    (
        "change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
        "VERY BIG", "VERY big",
    ),
    ("change_case:english_capital", {}, "THIS IS A LONG ENGLISH SENTENCE.", "This is a sentence."),
    ("change_case:english_lowercase", {}, "this is a long english sentence.", "This is a sentence."),
    ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz.", "This is an English sentence."),
    ("punctuation:no_comma", {}, "one two", "one, two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "good", "bad"), FOLLOWED, ids=[each[0] for each in FOLLOWED])
def test_instructions_are_followed_or_not(name, options, good, bad):
    assert follows(name, good, options) and not follows(name, bad, options) and not follows(name, " \n", options)


def test_every_instruction_is_tested():
    assert {name for name, *_ in FOLLOWED} == set(INSTRUCTIONS)


def test_all_instructions_count_or_the_share_of_them(tmp_path):
    record = {
        "prompt": "Write without commas, in quotes.",
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{"num_words": None}, {}],
    }  # fmt: skip
    path = written(tmp_path, record)
    for partial, reward in ((False, 0.0), (True, 0.5)):
        task = IFEval(path, heldout_fraction=0.0, partial=partial)
        (problem,) = task.train_problems()
        assert task.reward(problem, '"all"') == 1.0 and task.reward(problem, "some") == reward
    with pytest.raises(ValueError, match=r"problems.jsonl:1: the instruction 'x:y' is not one of IFEval's"):
        IFEval(written(tmp_path, record | {"instruction_id_list": ["x:y", "a:b"]})).check_files()

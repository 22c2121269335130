import json
import re
from decimal import Decimal

import pytest

from rl_megatron.data.tasks import TASKS, GeneratedTask, Problem, Task, build_task
from rl_megatron.data.tasks.arithmetic import MAX_HELDOUT_PAIRS, Arithmetic
from rl_megatron.data.tasks.gsm8k import GSM8K, extract_answer
from tests.unit.data.shared_data import shared


def operands(text):
    first, second = re.match(r"(\d+)[+-](\d+)=", text).groups()
    return tuple(sorted((int(first), int(second))))


def equation_holds(text):
    left, _, right = text.partition("=")
    return eval(left) == int(right)


class TestRegistry:
    def test_tasks_are_built_by_name(self):
        task = build_task("arithmetic", max_operand=9, operators=["+"])
        assert task == Arithmetic(max_operand=9, operators=("+",))
        assert isinstance(task, GeneratedTask) and isinstance(build_task("gsm8k", path="somewhere"), Task)
        assert all(task.name == name for name, task in TASKS.items())

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("arithmetics", {}, "did you mean 'arithmetic'.*gsm8k"),
            ("arithmetic", {"max_operands": 3}, "did you mean 'max_operand'"),
            ("gsm8k", {}, "needs the option 'path'"),
            ("arithmetic", {"max_operand": 0}, "max_operand = 0"),
            ("arithmetic", {"operators": "*"}, "operators"),
            ("arithmetic", {"operators": "++"}, "each once"),
            ("arithmetic", {"operators": ()}, "operators"),
            ("arithmetic", {"heldout_fraction": 0.0}, "heldout_fraction"),
        ],
    )
    def test_mistakes_are_named(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            build_task(name, **options)


class TestArithmetic:
    @pytest.mark.parametrize("max_operand", [1, 9, 99])
    def test_held_out_pairs_appear_in_nothing_that_is_trained_on(self, max_operand):
        task = Arithmetic(max_operand=max_operand, heldout_fraction=0.3)
        heldout = {operands(problem.prompt) for problem in task.heldout_problems()}
        assert heldout == task.heldout_pairs and heldout
        for seed in range(3):
            trained = (
                [problem.prompt for problem in task.train_problems(500, seed)]
                + task.pretraining_documents(500, seed)
                + [demonstration.prompt for demonstration in task.demonstrations(500, seed)]
            )
            assert not heldout & set(map(operands, trained))

    def test_every_other_pair_can_appear(self):
        task = Arithmetic(max_operand=4)
        seen = {operands(document) for document in task.pretraining_documents(2000)}
        assert len(seen | task.heldout_pairs) == 15

    def test_answers_are_right(self):
        task = Arithmetic(max_operand=99)
        texts = task.pretraining_documents(300)
        texts += [demonstration.prompt + demonstration.answer for demonstration in task.demonstrations(300)]
        texts += [problem.prompt + problem.answer for problem in task.heldout_problems(300)]
        assert all(map(equation_holds, texts))
        assert any("=-" in text for text in texts) and {re.search(r"[+-]", text)[0] for text in texts} == {"+", "-"}

    def test_the_same_arguments_give_the_same_problems(self):
        first, second = Arithmetic(max_operand=50), Arithmetic(max_operand=50)
        assert first.train_problems(50, 1) == second.train_problems(50, 1) != second.train_problems(50, 2)
        assert first.heldout_problems(50, 1) == second.heldout_problems(50, 1) != second.heldout_problems(50, 2)
        assert first.heldout_pairs == second.heldout_pairs != Arithmetic(max_operand=50, split_seed=1).heldout_pairs

    def test_held_out_problems_differ_and_end(self):
        task = Arithmetic(max_operand=9)
        prompts = [problem.prompt for problem in task.heldout_problems()]
        assert len(set(prompts)) == len(prompts)
        with pytest.raises(ValueError, match=f"holds {len(prompts)} problems out"):
            task.heldout_problems(len(prompts) + 1)
        with pytest.raises(ValueError, match="count"):
            task.train_problems()

    def test_large_operands_cost_little(self):
        task = Arithmetic(max_operand=10**9)
        assert len(task.heldout_pairs) == MAX_HELDOUT_PAIRS
        assert all(0 <= low <= high <= 10**9 for low, high in task.heldout_pairs)

    def test_reward(self):
        task, problem = Arithmetic(), Problem("3-12=", "-9")
        assert [task.reward(problem, text) for text in ("-9", " -9\n", "9", "-9.", "-9 -9", "")] == [1, 1, 0, 0, 0, 0]
        assert isinstance(task.reward(problem, "-9"), float)


class TestGsm8k:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("so it is\n#### 18", "18"),
            ("#### 1,234,567", "1234567"),
            ("####$18.50", "18.50"),
            ("#### -3.", "-3"),
            ("#### -$4", "-4"),
            ("#### $-4", "-4"),
            ("#### \N{MINUS SIGN} 7", "-7"),
            ("#### $ 7", "7"),
            ("#### .5", "0.5"),
            ("#### 18 dollars", "18"),
            ("#### 40%", "40"),
            ("#### 3\n#### 4\n", "4"),
            ("#### 18<eos>", "18"),
            ("18", None),
            ("#### 18\n#### none", None),
            ("####", None),
            ("#### about 18", None),
            ("#### 1/2", None),
            ("#### 5k", None),
            ("#### 3e5", None),
            ("#### 1,23", None),
            ("#### 1.2.3", None),
            ("#### --4", None),
        ],
    )
    def test_the_number_after_the_last_marker(self, text, answer):
        assert extract_answer(text) == (None if answer is None else Decimal(answer))

    def test_reward_compares_numbers(self):
        task, problem = GSM8K(path="unread"), Problem("?", "1234")
        completions = ("#### 1,234.00", "#### 1234", "#### 1235", "1234")
        assert [task.reward(problem, completion) for completion in completions] == [1, 1, 0, 0]

    def test_a_single_file(self, tmp_path):
        file = tmp_path / "problems.jsonl"
        rows = [{"question": f"{n}?", "answer": f"well\n#### {n}"} for n in range(20)]
        file.write_text("\n".join(map(json.dumps, rows)))
        task = GSM8K(path=str(file), heldout_fraction=0.2)
        train, heldout = task.train_problems(), task.heldout_problems()
        assert (len(train), len(heldout)) == (16, 4)
        assert not {problem.prompt for problem in train} & {problem.prompt for problem in heldout}
        assert train[0].prompt == f"{train[0].answer}?\n" and train[0].record["answer"].startswith("well")
        assert task.train_problems(5, seed=1) == task.train_problems(5, seed=1) != task.train_problems(5, seed=2)
        assert task.demonstrations(5, seed=1)[0].answer == task.train_problems(5, seed=1)[0].record["answer"]
        with pytest.raises(ValueError, match="gsm8k has 4 of these problems"):
            task.heldout_problems(5)

    def test_records_may_have_other_names_of_fields(self, tmp_path):
        file = tmp_path / "problems.jsonl"
        rows = [{"problem": f"{n}?", "solution": f"well #### {n}", "level": n} for n in range(20)]
        file.write_text("\n".join(map(json.dumps, rows)))
        task = GSM8K(path=str(file), question_field="problem", answer_field="solution")
        usual = tmp_path / "usual.jsonl"
        names = {"problem": "question", "solution": "answer", "level": "level"}
        usual.write_text("\n".join(json.dumps({names[key]: row[key] for key in row}) for row in rows))
        found, wanted = task.demonstrations(), GSM8K(path=str(usual)).demonstrations()
        assert [(each.prompt, each.answer) for each in found] == [(each.prompt, each.answer) for each in wanted]
        assert found[0].record.items() >= wanted[0].record.items()
        with pytest.raises(
            ValueError, match=r"problems.jsonl:\d+: .*no field 'question' .*problem, solution, level.*_field"
        ):
            GSM8K(path=str(file)).train_problems()

    @pytest.mark.parametrize("answer", ["no marker", "#### none", 18])
    def test_an_answer_without_a_number_names_its_line(self, tmp_path, answer):
        file = tmp_path / "problems.jsonl"
        rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": answer}]
        file.write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=r"problems.jsonl:2: the answer does not end in '#### N'"):
            GSM8K(path=str(file)).train_problems()

    def test_the_real_data_rewards_its_own_solutions(self):
        task = GSM8K(path=str(shared("gsm8k")))
        problems = task.heldout_problems()
        assert (len(task.train_problems()), len(problems)) == (7473, 1319)
        assert all(task.reward(problem, problem.record["answer"]) == 1.0 for problem in problems)
        shifted = zip(problems, problems[1:] + problems[:1], strict=True)
        wrong = sum(task.reward(problem, other.record["answer"]) for problem, other in shifted)
        assert wrong < 0.05 * len(problems)

    def test_rewards_agree_with_the_judgement_of_real_models_solutions(self):
        """The published solutions end in `A: N`, each judged right or wrong by its authors."""
        agree = total = 0
        with open(shared("gsm8k/model_solutions.jsonl"), encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                problem = Problem(row["question"], str(extract_answer(row["ground_truth"].replace("A: ", "#### "))))
                for judged in (value for value in row.values() if isinstance(value, dict)):
                    reward = GSM8K(path="unread").reward(problem, judged["solution"].replace("A: ", "#### "))
                    agree += reward == float(judged["is_correct"])
                    total += 1
        assert total > 5000 and agree / total > 0.99

"""Teachers that are chosen by the data set: what does not fit the mixture is refused, and the message says why."""

import pytest

MIX = "data.mix=[{path: a.jsonl, name: sums}, {path: b.jsonl, name: chat}]"
TOP_K = ("algorithm=distillation", "loss=distillation")
FILES = (*TOP_K, "data=files", "data.path=null", MIX)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            (*FILES,
             "algorithm.teachers=[{path: x, data_sets: [sums]}, {path: y, data_sets: [talk]}]"),
            "data_sets has 'talk', but data.mix has only ['sums', 'chat']",
        ),
        (
            (*FILES, "algorithm.teachers=[{path: x, data_sets: [sums]}]"),
            "no teacher teaches the data set 'chat'",
        ),
        (
            (*TOP_K, "data=arithmetic",
             "algorithm.teachers=[{path: x, data_sets: [sums]}]"),
            "data_sets has 'sums', but data.mix has only []",
        ),
        (
            ("algorithm=opd", "loss=clipped_pg", "loss.reference_policy_kl_penalty=0", "data=files", "data.path=null",
             "data.prompt_template='{question}'", MIX, "algorithm.teachers=[{path: x, data_sets: [sums]}]"),
            "no teacher teaches the data set 'chat' of data.mix",
        ),
    ],
    ids=["unknown", "untaught", "no mixture", "on-policy"],
)  # fmt: skip
def test_data_sets_that_do_not_fit_the_mixture_are_refused(refused, overrides, words):
    assert words in refused(*overrides)

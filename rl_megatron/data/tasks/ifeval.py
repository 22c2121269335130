"""The task `ifeval`, which reads IFEval's files: prompts with instructions that a program can check.

`INSTRUCTIONS` maps each instruction to a function that checks whether an answer follows it.
Source: Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", arXiv:2311.07911.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.data.records import Record
from rl_megatron.data.tasks.file_task import FileTask
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Problem

Options = Mapping[str, Any]  # an instruction's arguments, as the data set has them
Check = Callable[[str, Options], bool]

_RESPONSES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_SENTENCE_END = re.compile(r"[.!?…]+[\"')\]]*(?=\s|$)")
_ABBREVIATIONS = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|Inc|Ltd|Co)\.(?=\s)")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def follows(name: str, answer: str, options: Options) -> bool:
    """Return whether an answer follows the instruction with this name."""
    return bool(answer.strip()) and INSTRUCTIONS[name](answer, options)


def _satisfies(count: int, number: int, relation: str) -> bool:
    """Return whether `count` has the `relation` ("at least" or "less than") to `number`."""
    return count < number if relation == "less than" else count >= number


def _count_occurrences(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _count_sentences(text: str) -> int:
    return len(_SENTENCE_END.findall(_ABBREVIATIONS.sub("", text)))


def _has_keywords(answer: str, options: Options) -> bool:
    return all(_count_occurrences(answer, word) for word in options["keywords"])


def _has_keyword_frequency(answer: str, options: Options) -> bool:
    return _satisfies(_count_occurrences(answer, options["keyword"]), options["frequency"], options["relation"])


def _has_no_forbidden_words(answer: str, options: Options) -> bool:
    return not any(_count_occurrences(answer, word) for word in options["forbidden_words"])


def _has_letter_frequency(answer: str, options: Options) -> bool:
    count = Counter(answer.lower())[options["letter"].lower()]
    return _satisfies(count, options["let_frequency"], options["let_relation"])


def _is_in_language(answer: str, options: Options) -> bool:
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # langdetect draws samples of the text
    try:
        return detect(answer) == options["language"]
    except LangDetectException:  # a text without letters counts as any language
        return True


def _has_number_of_sentences(answer: str, options: Options) -> bool:
    return _satisfies(_count_sentences(answer), options["num_sentences"], options["relation"])


def _has_number_of_words(answer: str, options: Options) -> bool:
    return _satisfies(len(_WORD.findall(answer)), options["num_words"], options["relation"])


def _has_number_of_paragraphs(answer: str, options: Options) -> bool:
    # Three asterisks divide paragraphs.
    parts = re.split(r"\s?\*\*\*\s?", answer)
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(part.strip() for part in inner) and sum(map(bool, map(str.strip, parts))) == options["num_paragraphs"]


def _has_first_word_of_paragraph(answer: str, options: Options) -> bool:
    # An empty line divides paragraphs.
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", answer) if part.strip()]
    number = options["nth_paragraph"]
    if len(paragraphs) != options["num_paragraphs"] or not 1 <= number <= len(paragraphs):
        return False
    first = paragraphs[number - 1].split()[0].strip("'\"").rstrip(".,?!'\"")
    return first.lower() == options["first_word"].lower()


def _has_placeholders(answer: str, options: Options) -> bool:
    return len(re.findall(r"\[.*?\]", answer)) >= options["num_placeholders"]


def _has_postscript(answer: str, options: Options) -> bool:
    marker = re.escape(options["postscript_marker"].strip()).replace(r"\.", r"\.\s?")
    return re.search(rf"^\s*{marker}.*\S|\s{marker}.*\S", answer, re.IGNORECASE | re.MULTILINE) is not None


def _has_bullets(answer: str, options: Options) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*]|-\s).*$", answer, re.MULTILINE)) == options["num_bullets"]


def _is_one_of_three_responses(answer: str, options: Options) -> bool:
    return any(response in answer.lower() for response in _RESPONSES)


def _has_highlights(answer: str, options: Options) -> bool:
    # One or two asterisks on each side highlight a section.
    double = [text for text in re.findall(r"\*\*([^\n*]+)\*\*", answer) if text.strip()]
    without = re.sub(r"\*\*[^\n*]+\*\*", "", answer)
    single = [text for text in re.findall(r"\*([^\n*]+)\*", without) if text.strip()]
    return len(double) + len(single) >= options["num_highlights"]


def _has_sections(answer: str, options: Options) -> bool:
    marker = re.escape(options["section_spliter"].strip())
    return len(re.findall(rf"{marker}\s?\d+", answer)) >= options["num_sections"]


def _is_json(answer: str, options: Options) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", answer.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text.strip())
    except ValueError:
        return False
    return True


def _has_title(answer: str, options: Options) -> bool:
    return any(text.strip("<> ") for text in re.findall(r"<<[^\n]+>>", answer))


def _has_two_responses(answer: str, options: Options) -> bool:
    # Six asterisks divide the two responses, which must differ.
    parts = [part.strip() for part in answer.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(answer: str, options: Options) -> bool:
    return answer.strip().lower().startswith(options["prompt_to_repeat"].strip().lower())


def _ends_with(answer: str, options: Options) -> bool:
    return answer.strip().strip('"').lower().endswith(options["end_phrase"].strip().lower())


def _is_in_quotation_marks(answer: str, options: Options) -> bool:
    text = answer.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _has_capital_words(answer: str, options: Options) -> bool:
    words = [word for word in _WORD.findall(answer) if word.isupper()]
    return _satisfies(len(words), options["capital_frequency"], options["capital_relation"])


def _is_all_capital(answer: str, options: Options) -> bool:
    return answer.isupper() and _is_in_language(answer.lower(), {"language": "en"})


def _is_all_lowercase(answer: str, options: Options) -> bool:
    return answer.islower() and _is_in_language(answer, {"language": "en"})


def _has_no_comma(answer: str, options: Options) -> bool:
    return "," not in answer


INSTRUCTIONS: dict[str, Check] = {
    "keywords:existence": _has_keywords,
    "keywords:frequency": _has_keyword_frequency,
    "keywords:forbidden_words": _has_no_forbidden_words,
    "keywords:letter_frequency": _has_letter_frequency,
    "language:response_language": _is_in_language,
    "length_constraints:number_sentences": _has_number_of_sentences,
    "length_constraints:number_words": _has_number_of_words,
    "length_constraints:number_paragraphs": _has_number_of_paragraphs,
    "length_constraints:nth_paragraph_first_word": _has_first_word_of_paragraph,
    "detectable_content:number_placeholders": _has_placeholders,
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": _has_bullets,
    "detectable_format:constrained_response": _is_one_of_three_responses,
    "detectable_format:number_highlighted_sections": _has_highlights,
    "detectable_format:multiple_sections": _has_sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _has_two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_in_quotation_marks,
    "change_case:capital_word_frequency": _has_capital_words,
    "change_case:english_capital": _is_all_capital,
    "change_case:english_lowercase": _is_all_lowercase,
    "punctuation:no_comma": _has_no_comma,
}
NEED_LANGDETECT = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")


@register_task("ifeval")
@dataclass(frozen=True)
class IFEval(FileTask):
    """Prompts from local files with the fields `prompt`, `instruction_id_list` and `kwargs`.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
        partial: Whether the reward is the share of followed instructions, instead of 1 if all are followed and else 0.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: A line is malformed, or an instruction is unknown or needs langdetect, which is not installed. The
            message names file:line.
    """

    partial: bool = False

    def normalize(self, record: Record) -> Record:
        """Return the record, after checking that its instructions are known."""
        fields = ("prompt", "instruction_id_list", "kwargs")
        if missing := [name for name in fields if name not in record.values]:
            raise ValueError(f"{record.location}: the record has no field {missing[0]!r}, which IFEval's files have.")
        names, options = record.values["instruction_id_list"], record.values["kwargs"]
        if len(names) != len(options):
            raise ValueError(f"{record.location}: there are {len(names)} instructions, but {len(options)} 'kwargs'.")
        for name in names:
            if name not in INSTRUCTIONS:
                raise ValueError(f"{record.location}: the instruction {name!r} is not one of IFEval's.")
            if name in NEED_LANGDETECT and importlib.util.find_spec("langdetect") is None:
                raise ValueError(
                    f"{record.location}: the instruction {name!r} needs langdetect: pip install 'rl_megatron[rewards]'."
                )
        return record

    def problem(self, record: Record) -> Problem:
        """Return the prompt, which has no reference answer."""
        return Problem(record.values["prompt"], "", record.values, record.location)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion follows all instructions, otherwise 0.0; with `partial`, the share followed."""
        names, options = problem.record["instruction_id_list"], problem.record["kwargs"]
        followed = [
            follows(name, completion, {key: value for key, value in of_name.items() if value is not None})
            for name, of_name in zip(names, options, strict=True)
        ]
        return sum(followed) / len(followed) if self.partial and followed else float(all(followed))

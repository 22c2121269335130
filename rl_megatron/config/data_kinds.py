"""The kinds of data that sources provide and algorithms learn from.

A kind is a string, which error messages show. A plugin's data source may provide a new kind.
"""

from __future__ import annotations

DOCUMENTS = "documents"  # text; every token is predicted
ANSWERS = "prompts with answers"  # the tokens of the answer are predicted
PAIRS = "pairs of answers"  # a chosen and a rejected answer to one prompt
LABELLED = "answers with labels"  # each answer is desirable or undesirable
PROBLEMS = "problems with rewards"  # the policy answers, and a task rewards the answer

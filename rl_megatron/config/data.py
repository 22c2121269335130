"""The kinds of data that algorithms learn from, and the data sets of a mixture.

A kind is a string, which error messages show. A plugin's data source may provide a new kind.
"""

from __future__ import annotations

from pathlib import PurePath

from rl_megatron.config.loading.settings import NonNegativeFloat, section

DOCUMENTS = "documents"  # text; every token is predicted
ANSWERS = "prompts with answers"  # the tokens of the answer are predicted
PAIRS = "pairs of answers"  # a chosen and a rejected answer to one prompt
LABELLED = "answers with labels"  # each answer is desirable or undesirable
PROBLEMS = "problems with rewards"  # the policy answers, and a task rewards the answer


@section
class MixedData:
    """A data set of a mixture. Keys that the section `data` also has mean the same here."""

    path: str | tuple[str, ...] | None = None  # files, or a directory
    dataset_name: str | None = None  # a data set of the Hugging Face Hub, instead of path
    subset: str | None = None  # the subset of dataset_name
    split: str | None = None  # the split to train on; null: train
    weight: NonNegativeFloat = 1.0  # its share of the items of a batch, relative to the weights of the other data sets
    name: str | None = None  # its name in messages and for mix_weights; null: the name of its file or data set
    columns: dict[str, str] | None = None  # name that rl_megatron uses -> name in the records; null: data.columns

    @property
    def shown_name(self) -> str:
        """Return the name of the data set in messages."""
        source = self.dataset_name or (self.path if isinstance(self.path, str) else (self.path or ("",))[0])
        return self.name or PurePath(source).name.split(".")[0]

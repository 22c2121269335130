"""Data: tokenizers, tasks, data sources, and the datasets that turn files and tasks into batches."""

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset, PromptAnswerDataset, TextDataset
from rl_megatron.data.files import Record, load_records, load_text, read_jsonl, split_heldout
from rl_megatron.data.order import BatchSchedule, epoch_order
from rl_megatron.data.preferences import PreferenceDataset, load_preferences
from rl_megatron.data.sources import SOURCES, DataSource, build_source, register_source
from rl_megatron.data.tasks import TASKS, Demonstration, GeneratedTask, Problem, Task, build_task, register_task
from rl_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "SOURCES",
    "TASKS",
    "BatchSchedule",
    "BatchedDataDict",
    "DataSource",
    "Dataset",
    "Demonstration",
    "GeneratedTask",
    "PreferenceDataset",
    "Problem",
    "PromptAnswerDataset",
    "Record",
    "Task",
    "TextDataset",
    "Tokenizer",
    "build_source",
    "build_task",
    "epoch_order",
    "load_preferences",
    "load_records",
    "load_text",
    "load_tokenizer",
    "read_jsonl",
    "register_source",
    "register_task",
    "split_heldout",
    "train_bpe",
]

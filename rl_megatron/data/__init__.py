"""Data: tokenizers, tasks, data sources, and the datasets that turn files and tasks into batches.

Modules that only read files, templates and tasks do not import torch: mistakes in them are found before it is imported,
and the processes that run reward functions do without it.
"""

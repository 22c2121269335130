"""Readers of data files: JSON lines, Parquet, plain text and Hugging Face data sets. None of them imports torch."""

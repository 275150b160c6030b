"""A production stack for training Llama-style language models with pluggable normalisation."""

__version__ = "0.1.0"

"""Checkpoints and run folders: torch, safetensors and PyYAML only. ``load_model(CKPT) -> Llama``."""

from llmstack.checkpoint.environment import record_environment
from llmstack.checkpoint.format import BrokenCheckpoint, Checkpoint, read_checkpoint, write_checkpoint
from llmstack.checkpoint.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface_names,
    load_huggingface,
    to_huggingface_names,
)
from llmstack.checkpoint.metrics import MetricsFile, MetricsRow
from llmstack.checkpoint.resolve import Source, load_model, resolve, tokenizer_folder
from llmstack.checkpoint.run_folder import RunFolder

__all__ = [
    "BrokenCheckpoint",
    "Checkpoint",
    "MetricsFile",
    "MetricsRow",
    "RunFolder",
    "Source",
    "config_from_huggingface",
    "config_to_huggingface",
    "from_huggingface_names",
    "load_huggingface",
    "load_model",
    "read_checkpoint",
    "record_environment",
    "resolve",
    "to_huggingface_names",
    "tokenizer_folder",
    "write_checkpoint",
]

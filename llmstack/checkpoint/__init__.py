"""Checkpoints and run folders: torch, safetensors and PyYAML only. ``load_model(CKPT) -> Llama``."""

from llmstack.checkpoint.background import BackgroundWriter, host_copy
from llmstack.checkpoint.diagnostics import DiagnosticsFile, DiagnosticsRow
from llmstack.checkpoint.disk import checkpoint_bytes, require_disk_space
from llmstack.checkpoint.environment import record_environment
from llmstack.checkpoint.format import BrokenCheckpoint, Checkpoint, read_checkpoint, write_checkpoint
from llmstack.checkpoint.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface_names,
    load_huggingface,
    to_huggingface_names,
)
from llmstack.checkpoint.importing import import_checkpoint
from llmstack.checkpoint.metrics import MetricsFile, MetricsRow
from llmstack.checkpoint.ranks import ALONE, Ranks
from llmstack.checkpoint.remote import Mirror
from llmstack.checkpoint.resolve import Source, load_model, resolve, tokenizer_folder
from llmstack.checkpoint.run_folder import RunFolder

__all__ = [
    "ALONE",
    "BackgroundWriter",
    "BrokenCheckpoint",
    "Checkpoint",
    "DiagnosticsFile",
    "DiagnosticsRow",
    "MetricsFile",
    "MetricsRow",
    "Mirror",
    "Ranks",
    "RunFolder",
    "Source",
    "checkpoint_bytes",
    "config_from_huggingface",
    "config_to_huggingface",
    "from_huggingface_names",
    "host_copy",
    "import_checkpoint",
    "load_huggingface",
    "load_model",
    "read_checkpoint",
    "record_environment",
    "require_disk_space",
    "resolve",
    "to_huggingface_names",
    "tokenizer_folder",
    "write_checkpoint",
]

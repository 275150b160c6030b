"""What a ``CKPT`` argument means, and the model it stands for. The one place for both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import nn

from llmstack.checkpoint.format import MANIFEST, Checkpoint, checkpoint_step, read_checkpoint, sha256_of
from llmstack.checkpoint.gpt2 import is_gpt2
from llmstack.checkpoint.huggingface import INDEX_FILE, WEIGHTS_FILE, load_huggingface
from llmstack.checkpoint.remote import local_checkpoint
from llmstack.checkpoint.run_folder import CONFIG_FILE, RunFolder
from llmstack.checkpoint.tensors import TensorFiles, require_tensors
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.store import is_remote

_PICKLED_FILES = {".ckpt", ".bin", ".pt", ".pth", ".pkl"}
_DEEPSPEED_MARKS = ("*_model_states.pt", "zero_to_fp32.py", "latest")
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer.model", "vocab.json")


class NeedsUnpickling(UserError):
    """A checkpoint whose loading could run code; ``import_checkpoint`` takes it if it is trusted."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} is {what}: loading it needs unpickling, which can run code, and is refused; if you trust it, run "
            f"llmstack import {path} --out DIR --trust, and use DIR"
        )


class NeedsConversion(UserError):
    """A model whose tensors are laid out otherwise than ours; ``import_checkpoint`` converts it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} is {what}, which has to be converted: run llmstack import {path} --out DIR, and use DIR"
        )


@dataclass(frozen=True)
class Source:
    """A model on disk."""

    path: Path
    """The folder that holds the weights."""
    config: ModelConfig
    weights: TensorFiles
    """Under our names, read when asked for."""
    tokenizer: Path | None
    """Folder with the tokenizer's files, if there is one."""
    checkpoint: Checkpoint | None
    """With the training state, if it is one of ours."""

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hexadecimal) of architecture and weights: models with the same one give the same numbers."""
        if self.checkpoint is not None:
            files = {file.name: file.sha256 for file in self.checkpoint.files if file.role == "model"}
        else:
            files = {path.name: sha256_of(path) for path in self.weights.paths}
        content = json.dumps([self.config.to_dict(), files], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def resolve(ckpt: str | Path) -> Source:
    """A run folder (its newest good checkpoint), one checkpoint, or a stock Hugging Face Llama folder.

    A run or a checkpoint may also be given by its address (s3://…): it is copied into the cache. Nothing is ever
    unpickled and no code from the folder is run.

    Raises:
        UserError: none of these, or broken.
        NeedsUnpickling: (one of them) a Lightning or DeepSpeed checkpoint.
        NeedsConversion: (one of them) a Hugging Face GPT-2 folder.
    """
    path = local_checkpoint(str(ckpt)) if is_remote(ckpt) else Path(ckpt).expanduser()
    if not path.exists():
        raise UserError(f"no checkpoint {path}: there is no such file or folder")
    if path.is_file():
        raise _refusal_of_file(path)
    foreign = (path / "config.json").is_file()
    if (path / MANIFEST).is_file() or (checkpoint_step(path) is not None and not foreign):
        return _from_checkpoint(read_checkpoint(path))
    if (path / CONFIG_FILE).is_file() and not foreign:
        checkpoint = RunFolder(path).newest_checkpoint()
        if checkpoint is None:
            raise UserError(f"the run {path} has no checkpoint yet")
        return _from_checkpoint(checkpoint)
    if _is_deepspeed(path):
        raise NeedsUnpickling(path, "a DeepSpeed checkpoint")
    if foreign and is_gpt2(path):
        raise NeedsConversion(path, "a Hugging Face GPT-2 folder")
    if foreign:
        config, weights = load_huggingface(path)
        return Source(path, config, weights, tokenizer_beside(path), None)
    raise UserError(
        f"{path} is no checkpoint: neither a run folder ({CONFIG_FILE}), nor a checkpoint ({MANIFEST}), nor a Hugging "
        "Face Llama folder (config.json)"
    )


def load_model(
    ckpt: str | Path | Source, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Llama:
    """The model of ``ckpt`` (see ``resolve``), in evaluation mode.

    The weights exist once: each tensor is read, cast and placed before the next is.

    Args:
        ckpt: run folder, checkpoint, Hugging Face folder, or what ``resolve`` returned.
        dtype: of the parameters; none: as stored. Buffers stay fp32 always.
        device: where the model shall be.

    Raises:
        UserError: see ``resolve``; or tensors that do not fit the configuration.
    """
    source = ckpt if isinstance(ckpt, Source) else resolve(ckpt)
    with torch.device("meta"):
        model = Llama(source.config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    require_tensors(expected, source.weights.shapes(), source.path)
    parameters = {name for name, _ in model.named_parameters()}
    state = {name: source.weights.read(name, dtype if name in parameters else None, device) for name in expected}
    # Before the weights: a module's reset_parameters sets its derived buffers and its own weights, these still on meta.
    _place_derived_buffers(model, device)
    model.load_state_dict(state, strict=True, assign=True)
    if source.config.tie_word_embeddings:
        model.lm_head.weight = cast(nn.Parameter, model.embed_tokens.weight)
    return model.eval()


def tokenizer_folder(ckpt: str | Path | Source) -> Path | None:
    """Folder with the tokenizer's files that came with ``ckpt``; none if none did.

    Raises:
        UserError: see ``resolve``.
    """
    return (ckpt if isinstance(ckpt, Source) else resolve(ckpt)).tokenizer


def tokenizer_beside(folder: Path) -> Path | None:
    """``folder``, if there are a tokenizer's files beside the weights in it."""
    return folder if any((folder / name).is_file() for name in _TOKENIZER_MARKS) else None


def _from_checkpoint(checkpoint: Checkpoint) -> Source:
    config = ModelConfig.from_dict(checkpoint.config, str(checkpoint.path / MANIFEST))
    return Source(checkpoint.path, config, checkpoint.weights(), checkpoint.tokenizer_path, checkpoint)


def _place_derived_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Give memory and value to every buffer that is not saved (rotary frequencies, κ, dropout rates)."""
    for module in model.modules():
        derived = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in derived:
            module._buffers[name] = torch.empty_like(module.get_buffer(name), device=device)
        if derived:
            reset: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
            reset()


def _is_deepspeed(path: Path) -> bool:
    if any((path / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return False  # a trainer's folder, whose own safetensors lie beside DeepSpeed's files
    return any(any(path.glob(mark)) for mark in _DEEPSPEED_MARKS)


def _refusal_of_file(path: Path) -> UserError:
    if path.suffix.lower() in _PICKLED_FILES:
        return NeedsUnpickling(path, "a pickled checkpoint")
    return UserError(f"{path} is a file; give the folder of a run, a checkpoint or a Hugging Face Llama")

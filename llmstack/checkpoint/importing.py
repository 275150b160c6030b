"""Any checkpoint as one of ours, its weights in one fp32 file. What needs unpickling is taken only where it is trusted.

Lightning's and DeepSpeed's checkpoints of a training module hold the decoder's tensors under ``model.`` and say under
``llmstack_config`` what decoder it is (``ModelConfig.to_dict()``).
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.checkpoint.format import Checkpoint, read_checkpoint, write_checkpoint
from llmstack.checkpoint.gpt2 import load_gpt2
from llmstack.checkpoint.resolve import NeedsConversion, NeedsUnpickling, Source, resolve, tokenizer_beside
from llmstack.checkpoint.tensors import require_tensors
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig

CONFIG_KEY = "llmstack_config"
_PREFIX = "model."
_RANK_0_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""DeepSpeed's file with everything but the fp32 masters, at ZeRO 1 and 2, and at 3."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    "config.json",  # a tokenizer.json may leave its BOS and EOS to it
)


@dataclass(frozen=True)
class _Found:
    """A model that can be imported."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, torch.dtype], Tensor]
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    left_out: str | None = None
    """What does not come along and should be known."""


def import_checkpoint(
    path: str | Path, out: str | Path, trust: bool = False, report: Callable[[str], object] = lambda line: None
) -> Checkpoint:
    """Write what lies at ``path`` as the checkpoint ``out``: all weights in one fp32 file, no optimiser state.

    Each tensor is read as fp32 and held once.

    Args:
        path: whatever ``resolve`` takes, or a Hugging Face GPT-2 folder; with ``trust`` also a Lightning ``.ckpt`` or
            a DeepSpeed folder (ZeRO 1 to 3).
        out: the checkpoint's folder; absent or empty.
        trust: unpickle what needs it. That runs whatever code is in it.
        report: receives a line of progress as long work begins.

    Raises:
        UserError: no such model, not trusted, tensors that do not fit its configuration, or ``out`` is taken; nothing
            is written then.
    """
    path, out = Path(path).expanduser(), Path(out).expanduser()
    with failing_in_one_line(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an empty folder; choose another place")
    try:
        found = _from_source(resolve(path))
    except NeedsConversion:
        found = _from_gpt2(path)
    except NeedsUnpickling:
        if not trust:
            raise
        found = _unpickled(path)
    with torch.device("meta"):
        expected = Llama(found.config).state_dict()
    require_tensors({name: tuple(tensor.shape) for name, tensor in expected.items()}, found.shapes, path)
    if found.left_out is not None:
        report(f"left out: {found.left_out}")
    report(f"reading {len(expected)} tensors from {path}")
    weights = {name: found.read(name, tensor.dtype) for name, tensor in expected.items()}
    report(f"writing {out}")
    with _tokenizer_alone(found.tokenizer) as tokenizer:
        write_checkpoint(
            out,
            step=found.step,
            config=found.config.to_dict(),
            weights=weights,
            state=found.state,
            tokenizer=tokenizer,
        )
    return read_checkpoint(out, verify=False)


def _from_source(source: Source) -> _Found:
    step, state = (source.checkpoint.step, source.checkpoint.state) if source.checkpoint is not None else (0, {})
    return _Found(source.config, source.weights.shapes(), source.weights.read, step, state, source.tokenizer)


def _from_gpt2(path: Path) -> _Found:
    found = load_gpt2(path)
    left_out = None
    if found.attention_dropout:
        left_out = f"dropout of attention weights (attn_pdrop {found.attention_dropout}), which acts in training alone"
    return _Found(found.config, found.shapes, found.read, tokenizer=tokenizer_beside(path), left_out=left_out)


def _unpickled(path: Path) -> _Found:
    """A trusted Lightning or DeepSpeed checkpoint."""
    try:
        content, weights = _read_deepspeed(path) if path.is_dir() else _read_lightning(path)
    except UserError:
        raise
    except Exception as error:  # a pickle may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is not readable as a checkpoint of Lightning or DeepSpeed ({reason})") from error
    if not isinstance(content.get(CONFIG_KEY), dict):
        raise UserError(
            f"{path} does not say what model it is (no {CONFIG_KEY} in it); only checkpoints of llmstack's own module "
            "can be imported"
        )
    config = ModelConfig.from_dict(content[CONFIG_KEY], f"{path}: {CONFIG_KEY}")
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    return _Found(
        config,
        shapes={name: tuple(tensor.shape) for name, tensor in named.items()},
        read=lambda name, dtype: named[name].contiguous().to(dtype),
        # Lightning's counter of optimiser steps, or DeepSpeed's own.
        step=int(content.get("global_step", content.get("global_steps", 0))),
    )


def _read_lightning(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    content = _load(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{path} is no checkpoint of Lightning: there is no state_dict in it")
    return content, content["state_dict"]


def _read_deepspeed(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of rank 0, and the fp32 masters and persistent buffers put together from all ranks.

    The values are tensors or, at ZeRO 3, DeepSpeed's stand-ins, which ``contiguous`` turns into tensors.
    """
    latest = path / "latest"
    folder = (path / latest.read_text().strip() if latest.is_file() else path).absolute()
    states = next((folder / name for name in _RANK_0_STATES if (folder / name).is_file()), None)
    if states is None:
        raise UserError(f"{folder} holds no {' or '.join(_RANK_0_STATES)}")
    try:
        # Both talk: about what they find, and how far they are.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            weights = _fp32_weights(folder)
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs DeepSpeed to be read, but there is no {error.name} here") from error
    return _load(states), weights


def _fp32_weights(folder: Path) -> dict[str, Any]:
    from deepspeed.utils import zero_to_fp32

    files = zero_to_fp32.get_optim_files(str(folder))
    if "zero_stage" in _load(files[0])["optimizer_state_dict"]:
        return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder.parent, tag=folder.name, lazy_mode=True)
    # DeepSpeed's reader does not know its optimiser of stage 1 for bf16 with fp32 accumulation, which writes no stage
    # and otherwise what those of stages 1 and 2 write.
    states = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(str(folder)))
    groups = [_load(file)["optimizer_state_dict"]["single_partition_of_fp32_groups"] for file in files]
    return zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint(len(files), groups, states, False)


def _load(path: Path | str) -> Any:
    """Unpickle a trusted file; its tensors stay in the file until they are read."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


@contextlib.contextmanager
def _tokenizer_alone(folder: Path | None) -> Iterator[Path | None]:
    """A folder with the tokenizer's files and nothing else (a Hugging Face folder has the weights beside them)."""
    if folder is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(scratch) / name)
        yield Path(scratch)

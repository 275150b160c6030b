"""The disk space that the checkpoints of a run take, known before it starts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence

from llmstack.checkpoint.files import failing_in_one_line
from llmstack.checkpoint.run_folder import RunFolder
from llmstack.errors import UserError

_FP32_BYTES = 4
_ENTRY_BYTES = 160
"""What a file says about one tensor beside its name, and the step counter that an optimiser has for each."""
_FIXED_BYTES = 2**16
"""Manifest and file headers."""


def checkpoint_bytes(weights: Mapping[str, Sequence[int]], states_per_parameter: int = 2) -> int:
    """Size of one checkpoint without its tokenizer: a little above what is really written, never below.

    Args:
        weights: shape of each parameter by name; all are stored in fp32.
        states_per_parameter: fp32 tensors of that shape which the optimiser keeps (Adam: two moments).
    """
    elements = sum(math.prod(shape) for shape in weights.values())
    entries = sum(len(name) + _ENTRY_BYTES for name in weights)
    return elements * _FP32_BYTES * (1 + states_per_parameter) + entries * (2 + states_per_parameter) + _FIXED_BYTES


def require_disk_space(run: RunFolder, bytes_each: int, count: int) -> None:
    """Check that ``count`` checkpoints fit where the run lies (or will lie); what its own take now is theirs to use.

    Args:
        run: the run; its folder need not exist.
        bytes_each: size of one checkpoint.
        count: how many are on disk at once: those that are kept and the one being written.

    Raises:
        UserError: they do not fit.
    """
    with failing_in_one_line(run.path):
        place = next(path for path in (run.path.absolute(), *run.path.absolute().parents) if path.exists())
        own = sum(path.stat().st_size for path in run.checkpoints_path.rglob("*") if path.is_file())
        room = shutil.disk_usage(place).free + own
    needed = bytes_each * count
    if needed > room:
        raise UserError(
            f"{run.path}: {count} checkpoints of {_size(bytes_each)} take {_size(needed)}, but the disk has room for "
            f"{_size(room)}; keep fewer (run.keep_checkpoints, run.keep_every), or choose another run.dir"
        )


def _size(count: int) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.1f} {name}"

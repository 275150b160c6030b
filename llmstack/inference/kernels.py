"""The compiled products of ``kernels.cpp``, as ``torch.ops.llmstack``."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = {
    "AVX2": ["-mavx2", "-mfma"],
    "AVX512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
"""By what PyTorch finds the processor to be able to do."""


class NoKernels(RuntimeError):
    """The operations cannot be built here; the message says why."""


@functools.cache
def load_kernels() -> None:
    """Make the operations known, building them where this user has not built them yet (half a minute, once).

    The library has the name of all it depends on and is moved into its place when it is whole, so that processes that
    build it at the same time, are killed while they do, or share the folder with other machines do no harm.

    Raises:
        NoKernels: no C++ compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise NoKernels("there is no C++ compiler (on Debian: apt-get install g++)")
    flags = ["-std=c++20", "-O3", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared"]
    flags += _FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])
    identity = hashlib.sha256(repr((_SOURCE.read_bytes(), flags, torch.__version__)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = cache / "llmstack" / "kernels" / f"{identity}.so"
    if not library.is_file():
        _build(compiler, flags, library)
    torch.ops.load_library(library)
    for name in ("linear_bf16", "linear_int8", "linear_int4"):
        torch.library.register_fake(f"llmstack::{name}")(_shape)


def _build(compiler: str, flags: list[str], library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    library.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-isystem{path}" for path in include_paths()]
    links = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *flags, *includes, str(_SOURCE), "-o", str(built), *links]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise NoKernels(f"{compiler} cannot build {_SOURCE.name}: {done.stderr.strip()[-500:]}")
        built.replace(library)


def _shape(x: Tensor, weight: Tensor, *scale: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])

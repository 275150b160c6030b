"""Starting several ranks of a Python module, as a launcher would, for tests of what they do together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(module: str, *arguments: str, ranks: int = 2, timeout: float = 300, check: bool = True) -> list[str]:
    """Run ``python -m module arguments`` on each rank and return what each printed (stdout and stderr together).

    With ``check`` every rank has to exit with status 0; ``timeout`` (seconds) is that of all of them together.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        # Files, not pipes: nobody reads while the ranks run, and a full pipe would hold one up and with it the others.
        files = [stack.enter_context(TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, file in enumerate(files):
            place = {"WORLD_SIZE": str(ranks), "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, cwd=ROOT, env=common | place, stdout=file, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            processes.append(process)
        late = not _wait_for_all(processes, timeout)
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
        everything = "\n".join(f"rank {rank} printed:\n{output}" for rank, output in enumerate(outputs))
        assert not late, f"not done in {timeout} s: {' '.join(command)}\n{everything}"
        codes = [process.returncode for process in processes]
        assert not check or not any(codes), f"the ranks exited with {codes}: {' '.join(command)}\n{everything}"
    return outputs


def _wait_for_all(processes: list[subprocess.Popen[bytes]], timeout: float) -> bool:
    """Whether all of them ended in time."""
    end = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
    return True

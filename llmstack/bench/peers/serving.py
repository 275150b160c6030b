"""How a program of this folder answers. It lies beside them, so their interpreters find it."""

import json
import os
import sys
import time

import torch


def resident():
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(answer, device, before, began):
    """Say what it is after a first answer, then answer once for each line on standard input.

    Args:
        answer: -> seconds at which each token was there, ids.
        device: "cpu" or "cuda".
        before: bytes of memory before there was a model.
        began: when loading it began.
    """
    _, found = answer()
    about = {
        "ids": found,
        "memory": torch.cuda.max_memory_allocated() if device == "cuda" else resident() - before,
        "start_seconds": time.perf_counter() - began,
    }
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        print(json.dumps(answer()[0]), flush=True)

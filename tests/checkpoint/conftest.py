"""A small trained-looking model and processes that write, lock and die."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

from llmstack.model import Llama, ModelConfig

Build = Callable[..., Llama]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def build() -> Build:
    """A narrow model of a norm method whose every saved tensor has been moved off its initial value."""

    def make(method: str = "rmsnorm", **options: object) -> Llama:
        norm = options.pop("norm", {"method": method})
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
        config = ModelConfig(**{"vocab_size": 64, "max_position_embeddings": 64, **sizes, **options, "norm": norm})
        torch.manual_seed(0)
        model = Llama(config).eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * 0.1)
                else:
                    tensor.add_(7)
        return model

    return make


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Run a function in a forked process and return its number; whatever still runs at the end of the test is killed.

    A fork is a process like any other to locks, files and signals, without seconds of imports.
    """
    started: list[int] = []

    def run(work: Callable[[], None]) -> int:
        process = os.fork()
        if process == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

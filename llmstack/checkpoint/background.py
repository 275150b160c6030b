"""Writing beside the training: copies in host memory, and one thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor


class BackgroundWriter:
    """One piece of work at a time, in a thread that the interpreter waits for when it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the last work still goes on."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], None]) -> None:
        """Start ``work`` once the work before it has ended; if that one failed, raise its error and start nothing."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint-writer", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return when all work has ended; an error of it is raised here, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            # The traceback leads back to this frame, and to the tensors that were to be written.
            del error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory of its own, also of a tensor that is there already: training may go on changing it."""
    return tensor.detach().to("cpu", copy=True)

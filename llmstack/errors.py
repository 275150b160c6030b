"""How a command ends when it does not end well: an error that the user can mend, and an early stop."""


class UserError(ValueError):
    """What is wrong, where and what to do, in one line.

    The commands print its message without a traceback and exit with status 2; any other exception is a fault of ours.
    """


class Stopped(Exception):
    """Work that ended before its end: asked to by a signal, or because it could only go wrong.

    Args:
        message: where it stands and how to go on.
        status: exit status of the command; 128 + the signal, as a shell reports a process ended by it, or 1.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

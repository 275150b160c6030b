"""How a command ends when it does not end well: an error that the user can mend, and a stop on request."""


class UserError(ValueError):
    """What is wrong, where and what to do, in one line.

    The commands print its message without a traceback and exit with status 2; any other exception is a fault of ours.
    """


class Stopped(Exception):
    """Work that was asked to stop by a signal, and has saved what there was to save.

    Args:
        message: where it stands and how to go on.
        signal_number: the signal; the command exits with 128 + this, as a shell reports a process ended by it.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.status = 128 + signal_number

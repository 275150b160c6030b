"""The one error a user can mend: a wrong argument, file or configuration."""


class UserError(ValueError):
    """What is wrong, where and what to do, in one line.

    The commands print its message without a traceback and exit with status 2; any other exception is a fault of ours.
    """

"""The errors that programs raise on purpose. Any other error is a fault and keeps its traceback."""


class UserError(ValueError):
    """A mistake that the user can correct: the program prints one line and exits with status 2.

    Pydantic catches the ValueErrors of validators, and reports them with the key.
    """

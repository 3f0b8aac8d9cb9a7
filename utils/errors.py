"""The errors that programs raise on purpose. Any other error is a bug and keeps its traceback."""


class UserError(ValueError):
    """A mistake that the user can mend: the program ends with one line and exit status 2, without a traceback.

    It is a ValueError, because pydantic takes these for what is wrong with a value.
    """

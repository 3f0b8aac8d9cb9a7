"""What a program tells its user is an exception of its own: everything else is a bug."""


class UserError(ValueError):
    """A mistake that a person can mend, already agreed on by all ranks: one line, exit status 2, no traceback."""

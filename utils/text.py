"""Make text from elsewhere fit for one line of a message, or for a shell."""

import re
import shlex
from collections.abc import Iterable

_LONGEST_MISTAKE = 2000


def for_a_terminal(text: str) -> str:
    """Return the text as one line of limited length, with ? in place of control characters."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return line if len(line) <= _LONGEST_MISTAKE else f"{line[:_LONGEST_MISTAKE]}..."


def one_line(error: Exception) -> str:
    """Return the message of an error without line breaks, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def for_shell(words: Iterable[str]) -> str:
    """Return words as a person types them into a shell.

    shlex writes each single quote as five characters; double quotes are used where they suffice.
    """
    return " ".join(
        f'"{word}"' if "'" in word and not re.search(r'["$`!]|\\(?!\')', word) else shlex.quote(word) for word in words
    )


def in_words(seconds: float) -> str:
    """Return a time as text of at most seven characters, such as `3 min`, `2 h 05` or `3.5 d`."""
    if not seconds < 999 * 86_400:  # also if it is not a number
        return "> 999 d"
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d}" if hours < 48 else f"{hours / 24:.1f} d"

"""Show on the terminal, or in a pipe, what a model of text writes: one answer, or a chat."""

import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress

from training.prompts import Chat, Writer
from utils.errors import UserError
from utils.terminal import tell, write

_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_HELP = {
    "instruction": "Each line is an instruction. The model sees no earlier one.",
    "text": "The model continues the text so far with your line; after an empty line it goes on by itself.",
}


def write_answer(writer: Writer, prompt: str, pieces: Iterable[str], *, as_json: bool) -> None:
    """Print the pieces that a model writes after a prompt, while they come."""
    for piece in pieces:
        if sys.stdout.isatty():  # characters must not control it, nor change the direction of the text
            steers = [unicodedata.category(each) in ("Cc", "Cs") or each in _DIRECTIONS for each in piece]
            shown = ("?" if is_bad and each not in "\n\t" else each for each, is_bad in zip(piece, steers, strict=True))
            piece = "".join(shown)
        if not as_json:
            write(piece, end="")
    answer = writer.answer
    if as_json:
        told = {"prompt": prompt, "form": writer.reader.form, "answer": answer.text, "tokens": answer.tokens}
        write(json.dumps(told | {"ended_by": answer.reason}))
        return
    write("")
    if answer.reason == "context":
        tell(f"note: the context of {writer.reader.max_len:,} tokens is full")


def chat(writer: Writer, *, as_json: bool) -> None:
    """Answer the lines of standard input, each before the next one is read.

    On a terminal a mistake is a line, and Ctrl-C ends an answer. The end of the input ends the
    chat.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        tell(f"{_HELP[writer.reader.form]} Ctrl-C ends an answer, and Ctrl-D the chat.")
    turns = Chat(writer)
    for line in _typed() if is_terminal else _piped():
        if writer.reader.form == "instruction" and not line.strip():
            continue
        try:
            write_answer(writer, line, turns.turn(line), as_json=as_json)
        except UserError as error:
            if not is_terminal:
                raise
            tell(f"error: {error}")
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(flush=True)


def _typed() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and keys to edit the line
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print(flush=True)
            return


def _piped() -> Iterator[str]:
    try:
        for number, line in enumerate(sys.stdin.buffer if sys.stdin else ()):
            text = line.decode("utf-8", errors="surrogateescape")
            yield (text.removeprefix("\ufeff") if number == 0 else text).rstrip("\r\n")
    except OSError as error:
        raise UserError(
            f"standard input can't be read ({error.strerror}); pipe lines into it, or give prompt=<text>"
        ) from error

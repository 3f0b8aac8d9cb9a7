"""A chat prints each answer before it reads the next line, and mistakes of a line don't end it."""

import io
import json
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.training.scripted import END, Script, make_writer
from training.chat import chat, write_answer
from training.prompts import Writer
from utils.errors import UserError

Printed = Callable[[], tuple[str, str]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return lambda: (lambda read: (read.out, read.err))(capsys.readouterr())


def _pipe(contents: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(contents))


class _Terminal:
    """Gives lines to input(), and raises what stands among them."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = iter(lines)

    def isatty(self) -> bool:
        return True

    def input(self, shown: str = "") -> str:
        print(shown, end="")
        line = next(self.lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


def test_an_answer_is_printed(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets what the model wrote. A terminal gets no controls and no changes of direction."""
    text = "oui\u00a0? 你\u3000好 👨\u200d👩"
    writer = make_writer(Script(*f"{text}\u202e\x1b".encode(), END), max_new_tokens=60)
    writer.reader.max_len = 100
    tokens = writer.reader.read("ab", "prompt")
    write_answer(writer, "ab", writer.write(tokens), as_json=False)
    assert printed() == (f"{text}\u202e\x1b\n", "")
    write_answer(writer, "ab", writer.write(tokens), as_json=True)
    assert json.loads(printed()[0])["answer"] == f"{text}\u202e\x1b"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_answer(writer, "ab", writer.write(tokens), as_json=False)
    assert printed() == (f"{text}??\n", "")
    writer = make_writer(Script(*b"a"), max_new_tokens=99)
    write_answer(writer, "x" * 38, writer.write(writer.reader.read("x" * 38, "prompt")), as_json=False)
    assert printed() == ("aa\n", "note: the context of 40 tokens is full\n")


def test_lines_of_a_pipe_are_answered(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Script(*b"1", END)
    monkeypatch.setattr(sys, "stdin", _pipe("\ufeffab\r\n\nß\n\xff".encode()[:-2] + b"\xff"))
    chat(make_writer(model, "instruction"), as_json=False)
    assert printed() == ("1\n1\n1\n", "")
    assert [prompt[1:-1] for prompt in model.prompts] == [[97, 98], list("ß".encode()), [0xFF]]
    monkeypatch.setattr(sys, "stdin", _pipe(b"a\nb\n"))
    chat(make_writer(model, "instruction"), as_json=True)
    assert [json.loads(line)["prompt"] for line in printed()[0].splitlines()] == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", _pipe(b"a\n" + b"b" * 99))
    with pytest.raises(UserError, match="line 2 has 101 tokens"):
        chat(make_writer(model, "instruction"), as_json=False)


def test_a_terminal_goes_on_after_a_mistake_and_an_interrupt(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal("a", "b" * 99, "c", "d", KeyboardInterrupt)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", terminal.input)
    writer = make_writer(model := Script(*b"12", END))
    _interrupt(writer, monkeypatch, turn=2)
    chat(writer, as_json=False)
    out, err = printed()
    assert out == "> 12\n> > 1\n> 12\n> \n"
    assert err.splitlines()[1:] == [
        "error: line 2 has 100 tokens with the special ones, and the model was trained on 40 at most; shorten it"
    ]
    assert "Ctrl-D" in err and len(err.splitlines()) == 2
    texts = [bytes(token for token in prompt if token < 256).decode() for prompt in model.prompts]
    assert texts == ["a", "c", "c1\nd"], "what the model had written when it was interrupted belongs to the text"


def _interrupt(writer: Writer, monkeypatch: pytest.MonkeyPatch, *, turn: int) -> None:
    """Press Ctrl-C behind the first piece of an answer."""
    turns, write = iter(range(1, 100)), writer.write

    def interrupted(tokens: list[int]) -> Iterator[str]:
        number = next(turns)
        for piece in write(tokens):
            yield piece
            if number == turn:
                raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write", interrupted)

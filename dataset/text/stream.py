"""Turn tokens into text while they come, up to a text that ends it."""

from collections.abc import Callable, Sequence

# Up to three bytes at the end that are no whole character yet are decoded as this character.
_REPLACEMENT = "\ufffd"
_MOST_REPLACEMENTS = 3


class TextStream:
    """The text of tokens that come one after the other, in pieces of whole characters.

    The pieces make the text that `decode` gives for all tokens together, up to the first text of
    `stop`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        assert all(stop)
        self._decode, self._stop = decode, stop
        # The text of a token may depend on the one before it: some tokenizers leave out the blank
        # in front of a first word. So the tokens of the last piece are decoded again.
        self._context, self._new = list[int](), list[int]()
        self._num_told = 0  # characters of the text of both that were given out
        self._held = ""  # may be the beginning of a text of `stop`
        self.has_stopped = False

    def add(self, token: int) -> str:
        """Return the characters that are sure after this token."""
        if self.has_stopped:
            return ""
        self._new.append(token)
        text = self._decode([*self._context, *self._new])
        # So many characters at the end may change with the next token.
        num_open = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_REPLACEMENTS)
        num_sure = max(self._num_told, len(text) - num_open)
        piece, self._num_told = text[self._num_told : num_sure], num_sure
        if num_sure == len(text):
            # Tokens without text, such as special ones, must not hide the word before them.
            self._context = self._new if piece else [*self._context, *self._new]
            self._new = []
            self._num_told = len(self._decode(self._context))
        return self._pass_on(piece)

    def end(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.has_stopped:
            return ""
        text = self._decode([*self._context, *self._new])
        piece = self._pass_on(text[self._num_told :])
        rest, self._held = self._held, ""
        return piece if self.has_stopped else piece + rest

    def _pass_on(self, piece: str) -> str:
        """Return what can be told of a piece, and hold back what may begin a text of `stop`."""
        text = self._held + piece
        if found := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.has_stopped, self._held = True, ""
            return text[: min(found)]
        beginnings = (stop[:num] for stop in self._stop for num in range(1, len(stop)))
        num_held = max((len(each) for each in beginnings if text.endswith(each)), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

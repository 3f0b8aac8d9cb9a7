"""Let a model of text answer instructions and continue texts: a prompt, or a chat by lines."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from dataset.text.schema import Form, SpecialTokens, kind_of_data, open_text_split
from dataset.text.stream import TextStream
from dataset.text.tokenizer import Tokenizer, find_tokenizer
from models.text.generation import generate
from models.text.model import TextModel
from models.text.sampling import Draws, Sampling
from sharing.hub import is_address, path_of, with_file
from training.data import TextSizes, with_tokens_of
from training.splits import sizes_of_data
from training.trained import Trained
from utils.config import Float, Int, StrictModel
from utils.errors import UserError

Reason = Literal["end", "stop", "max_new_tokens", "context"]
"""What ended an answer: the model, a stop, or the limit of its length or of the context."""

# Text is continued by drawing, because the likeliest token soon repeats itself. Of an answer, the
# likeliest one is wanted.
_TEMPERATURES: dict[Form, float] = {"instruction": 0.0, "text": 0.8}


class PromptConfig(StrictModel):
    """config/solve.yaml says what each key means."""

    prompt: str | None
    prompt_form: Literal["auto", "instruction", "text"]
    max_new_tokens: Int = Field(gt=0)
    temperature: Float | None = Field(ge=0)
    top_k: Int | None = Field(gt=0)
    top_p: Float | None = Field(gt=0, le=1)
    stop: list[str]
    stop_tokens: list[Int]
    seed: Int = Field(ge=0)

    def sampling(self, form: Form) -> Sampling:
        temperature = _TEMPERATURES[form] if self.temperature is None else self.temperature
        return Sampling(temperature, self.top_k, self.top_p)


@dataclass
class Answer:
    """What the model wrote after a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None  # None: it has not ended
    ends_before_its_tokens: bool = False  # a text of `stop` was found, and is not part of the answer


def open_reader(trained: Trained, config: PromptConfig, data_path: str | None) -> "Reader":
    """Return what turns prompts into the tokens of a model, before its weights are read.

    The checkpoint says what the model reads. A tokenizer.json is looked for in the folder of the
    data and beside a file of weights.

    Args:
        data_path: data of the same tokenizer; None: those that the run was trained on.

    Raises:
        UserError: The tokenizer is missing, or is another than that of the data.
    """
    sizes = trained.sizes
    assert isinstance(sizes, TextSizes)
    if data_path is not None:
        found = sizes_of_data(data_path, trained.arch)
        assert isinstance(found, TextSizes)
        sizes = with_tokens_of(sizes, found, data_path, trained.data)
    paths = [data_path] if data_path is not None else _data_of(trained)
    folders = [folder for path in paths for folder in (Path(path), Path(path) / "train")]
    if trained.checkpoint is None:
        folders.extend(_beside(trained.name))
    special_tokens = SpecialTokens(**sizes.special_tokens) if sizes.special_tokens else None
    tokenizer = find_tokenizer(sizes.tokenizer, special_tokens, folders, trained.name)
    return Reader(tokenizer, sizes.max_len, _form(sizes, paths, config, trained), config)


def _beside(weights: str) -> list[Path]:
    """Return the folder of a file of weights, where its tokenizer.json may lie."""
    if not is_address(weights):
        return [Path(weights) if Path(weights).is_dir() else Path(weights).parent]
    try:
        return [path_of(f"{with_file(weights).rpartition('/')[0]}/tokenizer.json").parent]
    except UserError:  # the repository has none
        return []


def _data_of(trained: Trained) -> list[str]:
    """Return the folders of the data of a run; none for a file."""
    if trained.checkpoint is None or trained.config is None:
        return []
    return trained.config.train_paths


def _form(sizes: TextSizes, paths: Sequence[str], config: PromptConfig, trained: Trained) -> Form:
    if config.prompt_form != "auto":
        return config.prompt_form
    if sizes.form is not None:
        return sizes.form
    for path in paths:
        if kind_of_data(path) == "text":
            return open_text_split(path, "train").form
    raise UserError(
        f"{trained.name} does not say whether it was trained on instructions; give prompt_form=instruction, or "
        "prompt_form=text"
    )


class Reader:
    """Turns prompts into the tokens that a model of text was trained to read.

    Args:
        max_len: the most tokens that the model read of a sample.
        form: what most of its samples were.

    Raises:
        UserError: A stop token is none of the vocabulary, or a stop text is empty.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int, form: Form, config: PromptConfig) -> None:
        self.config, self.tokenizer, self.max_len, self.form = config, tokenizer, max_len, form
        for token in config.stop_tokens:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise UserError(
                    f"stop_tokens has {token}, but tokens are 0 to {self.tokenizer.vocab_size - 1}; give one of them"
                )
        if not all(config.stop):
            raise UserError("stop has an empty text, which is found at once; give a text")

    @property
    def special(self) -> SpecialTokens:
        return self.tokenizer.special_tokens

    def read(self, prompt: str, where: str) -> list[int]:
        """Return the tokens of a prompt with the special tokens of its form.

        Args:
            where: names the prompt in messages, such as "prompt" or "line 2".

        Raises:
            UserError: The tokenizer doesn't know a character, or the prompt leaves no room in the
                context.
        """
        tokens = [self.special.start, *self.tokens_of(prompt, where)]
        if self.form == "instruction":
            tokens.append(self.special.end_of_instruction)
        if len(tokens) > self.max_len:
            raise UserError(
                f"{where} has {len(tokens):,} tokens with the special ones, and the model was trained on "
                f"{self.max_len:,} at most; shorten it"
            )
        return tokens

    def end_of_text(self, tokens: Sequence[int], *, least: int) -> list[int]:
        """Return the tokens of a text, or the last of them if it leaves no room for an answer.

        A text without its beginning is like most samples of training, which begin within a
        document.

        Args:
            tokens: without the special ones.
            least: so many tokens are kept in any case.
        """
        room = max(self.max_len // 2, self.max_len - self.config.max_new_tokens)
        return [self.special.start, *tokens][-max(least, room) :]

    def tokens_of(self, text: str, where: str) -> list[int]:
        """Return the tokens of a text, without the special ones.

        Args:
            where: names the text in messages.

        Raises:
            UserError: The tokenizer doesn't know a character.
        """
        # A terminal and a pipe may give bytes that are no UTF-8. Python keeps them as surrogates.
        encoded = text.encode("utf-8", errors="surrogateescape")
        try:
            unknown = self.tokenizer.first_unknown(encoded)
            (tokens,) = self.tokenizer.encode([encoded])
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not UTF-8 at byte {error.start:,}, and the model's tokenizer reads characters; convert it"
            ) from error
        if unknown is not None:
            raise UserError(f"{where} has {unknown!r}, for which the model's tokenizer has no token; leave it out")
        return list(map(int, tokens))


class Writer:
    """A model of text that answers prompts.

    writer = Writer(model, reader)
    for piece in writer.write(reader.read("2 + 2 = ?", "prompt")):
        print(piece, end="", flush=True)
    """

    def __init__(self, model: TextModel, reader: Reader) -> None:
        self._model, self.reader = model, reader
        self._stop = [text.replace("\\n", "\n").replace("\\t", "\t") for text in reader.config.stop]
        self._numbers = itertools.count()
        self.answer = Answer()

    def write(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield what the model writes after a prompt, in pieces of whole characters.

        `answer` is complete after the last piece.

        Args:
            tokens: of `Reader.read`.
        """
        reader, config = self.reader, self.reader.config
        self.answer = answer = Answer()
        room = reader.max_len - len(tokens) + 1  # the last new token is not read
        stream = TextStream(reader.tokenizer.decode, self._stop)
        steps = generate(
            self._model,
            [tokens],
            stop_tokens={reader.special.end, *config.stop_tokens},
            most_new_tokens=min(config.max_new_tokens, room),
            vocab_size=reader.tokenizer.vocab_size,
            sampling=config.sampling(reader.form),
            draws=Draws(config.seed, [next(self._numbers)]),
            prefix_lens=None if reader.form == "instruction" else [1],  # as in training
        )
        for (token,) in steps:
            assert token is not None
            answer.tokens.append(token)
            if token in config.stop_tokens and token != reader.special.end:
                break
            yield self._add(stream.add(token))
            if stream.has_stopped:
                break
        yield self._add(stream.end())
        answer.ends_before_its_tokens = stream.has_stopped
        last = answer.tokens[-1]
        if last == reader.special.end:
            answer.reason = "end"
        elif stream.has_stopped or last in config.stop_tokens:
            answer.reason = "stop"
        else:
            answer.reason = "max_new_tokens" if config.max_new_tokens <= room else "context"

    def _add(self, piece: str) -> str:
        self.answer.text += piece
        return piece


class Chat:
    """The turns of a chat.

    A turn is a line of the user and the model's answer. The data have no conversations, so what the
    model reads at a turn is what it could have read in training. An instruction stands alone: the
    model sees no earlier turn. Text goes on: the model reads the text so far, and each line begins
    a new line of it; an empty one adds nothing. If the text is too long for the context, its
    beginning is left out. After the model has ended a text, the next line begins another one.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._num_lines = writer, 0
        self._tokens = list[int]()  # of the text so far, without the special ones

    def turn(self, line: str) -> Iterator[str]:
        """Yield the model's answer to a line, in pieces.

        Raises:
            UserError: As for `Reader.read`.
        """
        self._num_lines += 1
        reader = self._writer.reader
        where = f"line {self._num_lines}"
        tokens = reader.read(line, where)
        if reader.form == "instruction":
            yield from self._writer.write(tokens)
            return
        new = reader.tokens_of(f"\n{line}" if self._tokens and line else line, where)
        self._tokens += new
        try:
            yield from self._writer.write(reader.end_of_text(self._tokens, least=len(tokens)))
        finally:  # also if the user ended the answer
            answer = self._writer.answer
            if answer.reason == "end":
                self._tokens = []
            elif answer.ends_before_its_tokens:
                self._tokens += reader.tokens_of(answer.text, where)
            else:
                # The tokens themselves, because another turn may complete a character.
                left_out = {*reader.special.model_dump().values(), *reader.config.stop_tokens}
                self._tokens += [token for token in answer.tokens if token not in left_out]

"""Let a model of text answer instructions and continue texts: a prompt, or a chat by lines."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from training.data import TextSizes, with_tokens_of
from training.splits import sizes_of_data
from training.trained import Trained
from utils.config import Float, Int, StrictModel
from utils.errors import UserError
from utils.hub import is_address, path_of, with_file

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


@dataclass
class Answer:
    """What the model wrote after a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None  # None: it has not ended
    ends_before_its_tokens: bool = False  # a text of `stop` was found, and is not part of the answer


def open_reader(trained: Trained, config: PromptConfig, data_path: str | None) -> "Reader":
    """Return what turns prompts into the tokens of a model, before its weights are read.

    A tokenizer.json is looked for in the folder of the data and beside a file of weights. Without
    `data_path` the data are those that the run was trained on.
    """
    sizes, paths = trained.sizes, trained.config.train_paths if trained.config is not None else []
    found = sizes if data_path is None else sizes_of_data(data_path, trained.arch)
    assert isinstance(sizes, TextSizes) and isinstance(found, TextSizes)
    if data_path is not None:
        paths = [data_path]
        sizes = with_tokens_of(sizes, found, data_path, trained.data)
    folders = [folder for path in paths for folder in (Path(path), Path(path) / "train")]
    if trained.checkpoint is None:
        weights = Path(trained.name)
        if not is_address(trained.name):
            folders.append(weights if weights.is_dir() else weights.parent)
        else:
            with suppress(UserError):  # the repository has none
                folders.append(path_of(f"{with_file(trained.name).rpartition('/')[0]}/tokenizer.json").parent)
    special_tokens = SpecialTokens(**sizes.special_tokens) if sizes.special_tokens else None
    tokenizer = find_tokenizer(sizes.tokenizer, special_tokens, folders, trained.name)
    form = sizes.form if config.prompt_form == "auto" else config.prompt_form
    of_text = [path for path in paths if kind_of_data(path) == "text"]
    if form is None and of_text:
        form = open_text_split(of_text[0], "train").form
    if form is None:
        raise UserError(
            f"{trained.name} does not say whether it was trained on instructions; give prompt_form=instruction, or "
            "prompt_form=text"
        )
    return Reader(tokenizer, sizes.max_len, form, config)


class Reader:
    """Turns prompts into the tokens that a model of text was trained to read.

    Args:
        max_len: the most tokens that the model read of a sample.
        form: what most of its samples were.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int, form: Form, config: PromptConfig) -> None:
        self.config, self.tokenizer, self.max_len, self.form = config, tokenizer, max_len, form
        self.special = tokenizer.special_tokens
        for token in config.stop_tokens:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise UserError(
                    f"stop_tokens has {token}, but tokens are 0 to {self.tokenizer.vocab_size - 1}; give one of them"
                )
        if not all(config.stop):
            raise UserError("stop has an empty text, which is found at once; give a text")

    def read(self, prompt: str, where: str) -> list[int]:
        """Return the tokens of a prompt with the special tokens of its form."""
        tokens = [self.special.start, *self.tokens_of(prompt, where)]
        if self.form == "instruction":
            tokens.append(self.special.end_of_instruction)
        if len(tokens) > self.max_len:
            raise UserError(
                f"{where} has {len(tokens):,} tokens with the special ones, and the model was trained on "
                f"{self.max_len:,} at most; shorten it"
            )
        return tokens

    def tokens_of(self, text: str, where: str) -> list[int]:
        """Return the tokens of a text without the special ones."""
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
    """A model of text that answers prompts, each with draws of its own."""

    def __init__(self, model: TextModel, reader: Reader) -> None:
        self._model, self.reader = model, reader
        self._stop = [text.replace("\\n", "\n").replace("\\t", "\t") for text in reader.config.stop]
        self._num_prompts = 0
        self.answer = Answer()

    def write(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield what the model writes after the tokens of a prompt, in pieces of whole characters.

        `answer` is complete after the last piece.
        """
        reader, config = self.reader, self.reader.config
        self.answer = answer = Answer()
        room = reader.max_len - len(tokens) + 1  # the last new token is not read
        stream = TextStream(reader.tokenizer.decode, self._stop)
        temperature = _TEMPERATURES[reader.form] if config.temperature is None else config.temperature
        steps = generate(
            self._model,
            [tokens],
            stop_tokens={reader.special.end},
            most_new_tokens=min(config.max_new_tokens, room),
            vocab_size=reader.tokenizer.vocab_size,
            sampling=Sampling(temperature, config.top_k, config.top_p),
            draws=Draws(config.seed, [self._num_prompts]),
            prefix_lens=None if reader.form == "instruction" else [1],  # as in training
        )
        self._num_prompts += 1
        for (token,) in steps:
            assert token is not None
            answer.tokens.append(token)
            if token in config.stop_tokens and token != reader.special.end:
                break
            piece = stream.add(token)
            answer.text += piece
            yield piece
            if stream.has_stopped:
                break
        piece = stream.end()
        answer.text += piece
        yield piece
        answer.ends_before_its_tokens = stream.has_stopped
        last = answer.tokens[-1]
        if last == reader.special.end:
            answer.reason = "end"
        elif stream.has_stopped or last in config.stop_tokens:
            answer.reason = "stop"
        else:
            answer.reason = "max_new_tokens" if config.max_new_tokens <= room else "context"


class Chat:
    """The turns of a chat (docs/solving.md): a line of the user, and the model's answer.

    An instruction stands alone. Text goes on, without its beginning if it gets too long.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._num_lines = writer, 0
        self._tokens = list[int]()  # of the text so far, without the special ones

    def turn(self, line: str) -> Iterator[str]:
        """Yield the model's answer to a line, in pieces, or raise UserError as `Reader.read`."""
        self._num_lines += 1
        reader, where = self._writer.reader, f"line {self._num_lines}"
        tokens = reader.read(line, where)
        if reader.form == "instruction":
            yield from self._writer.write(tokens)
            return
        self._tokens += reader.tokens_of(f"\n{line}" if self._tokens and line else line, where)
        room = max(len(tokens), reader.max_len // 2, reader.max_len - reader.config.max_new_tokens)
        try:
            yield from self._writer.write([reader.special.start, *self._tokens][-room:])
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

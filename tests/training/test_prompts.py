"""Prompts become the tokens of training, and answers end where they should."""

from typing import Any

import pytest
import torch

from dataset.text.schema import Form
from dataset.text.tokenizer import ByteTokenizer
from models.text.config import HRMTextConfig
from models.text.generation import generate
from models.text.model import TextModel
from models.text.sampling import Sampling
from tests.models.text.helpers import make_config
from tests.training.scripted import END, END_OF_INSTRUCTION, MAX_LEN, START, Script, make_writer
from training.prompts import Chat, Writer
from utils.errors import UserError


def _written(writer: Writer, prompt: str = "abc") -> str:
    text = "".join(writer.write(writer.reader.read(prompt, "prompt")))
    assert text == writer.answer.text
    return text


def test_prompts_have_the_special_tokens_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_writer(Script(0)).reader.read("ab", "prompt") == [START, 97, 98]
    assert make_writer(Script(0), "instruction").reader.read("ab", "prompt") == [START, 97, 98, END_OF_INSTRUCTION]
    assert make_writer(Script(0)).reader.read("\udcff", "prompt") == [START, 0xFF], "a byte that is no UTF-8"
    monkeypatch.setattr(ByteTokenizer, "first_unknown", lambda *_: "é")
    with pytest.raises(UserError, match="prompt has 'é', for which"):
        make_writer(Script(0)).reader.read("aé", "prompt")


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({}, "h\tb\n\nc", "end"),
        ({"max_new_tokens": 2}, "h\t", "max_new_tokens"),
        ({"max_new_tokens": 7}, "h\tb\n\nc", "end"),
        ({"stop": ["x", r"\n\n"]}, "h\tb", "stop"),
        ({"stop": [r"\t"]}, "h", "stop"),
        ({"stop": ["b?"]}, "h\tb\n\nc", "end"),
        ({"stop_tokens": [ord("b")]}, "h\t", "stop"),
        ({"stop_tokens": [END]}, "h\tb\n\nc", "end"),
    ],
    ids=str,
)
def test_an_answer_ends_with_the_first_stop(options: dict[str, Any], text: str, reason: str) -> None:
    writer = make_writer(Script(*b"h\tb\n\nc", END, *b"more"), **options)
    assert (_written(writer), writer.answer.reason) == (text, reason)
    with pytest.raises(UserError, match="stop has an empty text"):
        make_writer(Script(0), **options | {"stop": [""]})


def test_an_answer_fills_the_context_and_no_more() -> None:
    writer = make_writer(Script(*b"ab"), max_new_tokens=1000)
    assert len(_written(writer, "x" * (MAX_LEN - 3))) == 3 and writer.answer.reason == "context"
    assert len(_written(writer, "x" * (MAX_LEN - 1))) == 1 and writer.answer.reason == "context"
    writer = make_writer(Script(*b"ab"), max_new_tokens=3)
    assert len(_written(writer, "x" * (MAX_LEN - 3))) == 3 and writer.answer.reason == "max_new_tokens"
    with pytest.raises(UserError, match=r"prompt has 41 tokens .* trained on 40 at most; shorten it"):
        writer.reader.read("x" * MAX_LEN, "prompt")


def test_a_text_is_read_causally_and_an_instruction_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are drawn, and of an instruction the likeliest answer is taken, unless it is said."""
    seen = list[Any]()

    def noted(*args: Any, **options: Any) -> Any:
        seen.append((options["prefix_lens"], options["sampling"]))
        return generate(*args, **options)

    monkeypatch.setattr("training.prompts.generate", noted)
    _written(make_writer(Script(*b"a"), "text", temperature=None))
    _written(make_writer(Script(*b"a"), "instruction", temperature=None))
    _written(make_writer(Script(*b"a"), "text", temperature=0.3, top_k=5, top_p=0.9))
    assert seen == [([1], Sampling(0.8)), (None, Sampling(0.0)), ([1], Sampling(0.3, 5, 0.9))]


def test_samples_depend_on_the_seed_and_the_number_of_the_prompt() -> None:
    model = TextModel(make_config(HRMTextConfig), vocab_size=512)
    model.init_weights(torch.Generator().manual_seed(0))

    def texts(seed: int) -> list[list[int]]:
        writer = make_writer(model, temperature=1.0, seed=seed, stop_tokens=[])
        found = []
        for _ in range(2):
            _written(writer)
            found.append(writer.answer.tokens)
        return found

    assert texts(1) == texts(1) != texts(2)
    assert texts(1)[0] != texts(1)[1]
    assert max(token for text in texts(1) for token in text) < 259, "tokens of the rounded vocabulary are never drawn"


def _chat(model: Script, lines: list[str], form: Form = "text", **options: Any) -> list[str]:
    chat = Chat(make_writer(model, form, **options))
    return ["".join(chat.turn(line)) for line in lines]


def _texts(model: Script) -> list[str]:
    return [bytes(token for token in prompt if token < 256).decode() for prompt in model.prompts]


def test_a_text_goes_on_from_line_to_line() -> None:
    """A stop text is no part of it. A text that ended is left behind, and the context is kept."""
    model = Script(*b"12")
    assert _chat(model, ["ab", "c", ""], max_new_tokens=2) == ["12", "12", "12"]
    assert _texts(model) == ["ab", "ab12\nc", "ab12\nc12"]
    assert all(prompt[0] == START for prompt in model.prompts)
    stops: list[dict[str, Any]] = [{"stop": [";"]}, {"stop_tokens": [ord(";")]}]
    for stop in stops:
        model = Script(*b"12;4")
        assert _chat(model, ["ab", "c"], **stop) == ["12", "12"]
        assert _texts(model) == ["ab", "ab12\nc"]
    _chat(model := Script(*b"1", END), ["ab", "c"])
    assert _texts(model) == ["ab", "c"]
    _chat(model := Script(*b"1234567890"), ["a" * 30, "b", "c" * 38], max_new_tokens=10)
    assert _texts(model) == ["a" * 30, "a" * 18 + "1234567890\nb", "\n" + "c" * 38]
    _chat(model := Script(*b"1;"), ["a" * 15, "b" * 10], max_new_tokens=30, stop=[";"])
    assert _texts(model) == ["a" * 15, "a" * 8 + "1\n" + "b" * 10], "half of the context is kept at least"


def test_a_character_that_the_end_of_a_turn_cut_is_completed_in_the_next() -> None:
    model = Script(*"ß".encode())
    assert _chat(model, ["ab", "", ""], max_new_tokens=3) == ["ß\ufffd"] * 3
    assert model.prompts[1] == [START, *b"ab", *"ß".encode(), "ß".encode()[0]]


def test_each_instruction_stands_alone() -> None:
    model = Script(*b"1", END)
    assert _chat(model, ["ab", "c"], "instruction") == ["1", "1"]
    assert model.prompts == [[START, 97, 98, END_OF_INSTRUCTION], [START, 99, END_OF_INSTRUCTION]]
    with pytest.raises(UserError, match="line 2 has 52 tokens"):
        _chat(Script(*b"1"), ["a", "b" * 50], "instruction")

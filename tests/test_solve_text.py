"""solve.py with a model of text: answers, chats, files of weights and mistakes."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import solve as program
from dataset.text.schema import open_text_split
from models.text.config import HRMTextConfig
from models.text.generation import generate
from models.text.model import TextModel
from sharing.export import export, parse_settings
from sharing.exported import ExportedText, open_model
from sharing.weights_file import open_weights
from tests.in_process import SINGLE
from tests.text_runs import MAX_LEN, write_data, write_run
from training.trained import open_trained, read_config_of_new_run, weights_from
from utils.errors import UserError

PROMPT = "2 + 2"
START, END_OF_INSTRUCTION, END = 256, 257, 258
SHA = "ab" * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_data(folder / "problems", "instruction")
    write_data(folder / "book", "text")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    """Return the model of <folder>/run. It has learnt nothing."""
    return write_run(folder / "run", folder / "problems", "arch=hrm_text")


Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: TextModel) -> Call:
    def run_main(*typed: str, stdin: bytes = b"") -> str:
        monkeypatch.setattr(sys, "argv", ["solve.py", "device=cpu", *typed])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        program.main(SINGLE)
        return capsys.readouterr().out

    return run_main


def test_an_instruction_is_answered(folder: Path, model: TextModel, call: Call) -> None:
    prompt = [START, *PROMPT.encode(), END_OF_INSTRUCTION]
    steps = generate(model, [prompt], stop_tokens=(), most_new_tokens=8, vocab_size=END + 1)
    tokens = [token for (token,) in steps if token is not None]
    assert len(set(tokens)) > 2 and max(tokens) < START, "the test needs an answer of several bytes"
    typed = (f"checkpoint={folder / 'run'}", f"prompt={PROMPT}", "max_new_tokens=8")
    text = bytes(tokens).decode(errors="replace")
    assert call(*typed) == f"{text}\n"
    expected = {"prompt": PROMPT, "form": "instruction", "answer": text, "tokens": tokens}
    assert json.loads(call(*typed, "--json")) == expected | {"ended_by": "max_new_tokens"}
    stopped = json.loads(call(*typed, f"stop_tokens=[{tokens[2]}]", "--json"))
    assert stopped["tokens"] == tokens[: tokens.index(tokens[2]) + 1] and stopped["ended_by"] == "stop"
    as_text = json.loads(call(*typed, "temperature=0", "prompt_form=text", "--json"))
    assert as_text["form"] == "text" and as_text["answer"] != text


def test_a_chat_answers_line_by_line(folder: Path, call: Call) -> None:
    typed = (f"checkpoint={folder / 'run'}", "max_new_tokens=8", "--json")
    answers = [json.loads(line) for line in call(*typed, "prompt=-", stdin=b"2 + 2\n\nab\n").splitlines()]
    assert [answer["prompt"] for answer in answers] == ["2 + 2", "ab"]
    for answer in answers:
        assert answer["answer"] == json.loads(call(*typed, f"prompt={answer['prompt']}"))["answer"]


def test_mistakes_are_named_before_the_weights_are_read(
    folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.trained.Trained.load_model", lambda *_: pytest.fail("the weights were read"))
    too_long = f"prompt has 52 tokens with the special ones, and the model was trained on {MAX_LEN}"
    for typed, message in (
        ([f"prompt={'x' * 50}"], too_long),
        (["prompt=a", "stop_tokens=[259]"], "stop_tokens has 259, but tokens are 0 to 258"),
        (["prompt=a", "temperature=-1"], "temperature"),
        (["puzzle=1"], "is a model of text; give prompt=<text>, or prompt=- for a chat"),
        (["prompt=a", "puzzle=1"], "prompt= and puzzle= exclude each other"),
        (["prompt=a", "num_steps=16"], "num_steps=16 is for puzzles, but "),
    ):
        with pytest.raises(UserError) as caught:
            call(f"checkpoint={folder / 'run'}", *typed)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path, call: Call) -> None:
    """The checkpoint says which tokenizer made the tokens that its model reads."""
    write_run(tmp_path / "run", folder / "problems", sizes={"tokenizer": SHA})
    typed = (f"checkpoint={tmp_path / 'run'}", "prompt=a")
    with pytest.raises(
        UserError, match=r"reads tokens of the tokenizer.json abababababab .* which is not in .*problems"
    ):
        call(*typed)
    with pytest.raises(UserError, match=r"book has other tokens \(bytes.* trained \(abababababab"):
        call(*typed, f"data_path={folder / 'book'}")
    assert call(f"checkpoint={folder / 'run'}", "prompt=a", f"data_path={folder / 'book'}"), "the same bytes"


def test_a_run_that_does_not_say_its_form_takes_that_of_its_data(folder: Path, tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "run", folder / "book", "target_only=false", sizes={"form": None})
    typed = (f"checkpoint={tmp_path / 'run'}", "prompt=a", "--json")
    assert json.loads(call(*typed))["form"] == "text"
    file = tmp_path / "model.safetensors"
    _export(tmp_path / "run", "-o", file)
    described = open_model(str(file)).described
    assert isinstance(described, ExportedText) and not described.target_only
    with pytest.raises(UserError, match="give prompt_form=instruction, or prompt_form=text"):
        call(f"checkpoint={file}", "prompt=a")
    assert call(f"checkpoint={file}", "prompt=a", f"data_path={folder / 'book'}")


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_an_exported_model_answers_without_its_data(folder: Path, tmp_path: Path, model: TextModel, call: Call) -> None:
    file = tmp_path / "model.safetensors"
    assert f"python solve.py checkpoint={file} prompt=..." in _export(folder / "run", "-o", file)
    described = open_model(str(file)).described
    assert isinstance(described, ExportedText)
    assert (described.tokenizer, described.form, described.max_len) == ("bytes", "instruction", MAX_LEN)
    _same(open_weights(str(file)).read(), model.state_dict())
    typed = (f"prompt={PROMPT}", "--json")
    assert call(f"checkpoint={file}", *typed) == call(f"checkpoint={folder / 'run'}", *typed)


def test_a_model_goes_to_transformers_and_back_without_losing_a_bit(
    folder: Path, tmp_path: Path, model: TextModel, call: Call
) -> None:
    theirs, back = tmp_path / "hf", tmp_path / "back.safetensors"
    _export(folder / "run", "--format", "transformers", "-o", theirs)
    assert {file.name for file in theirs.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((theirs / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["num_hidden_layers"]) == (START, END, 1)
    _export(theirs, "-o", back)
    _same(open_weights(str(back)).read(), model.state_dict())
    typed = (f"prompt={PROMPT}", "--json", "prompt_form=instruction", f"data_path={folder / 'problems'}")
    expected = call(f"checkpoint={folder / 'run'}", *typed)
    for where in (theirs, theirs / "model.safetensors", back):
        assert call(f"checkpoint={where}", *typed) == expected
    trained = open_trained(theirs, SINGLE)
    of_data = trained.on(open_text_split(folder / "problems", "test"))
    assert of_data.sizes == trained.sizes, "evaluate.py takes the data"
    _same(trained.load_model(SINGLE).state_dict(), model.state_dict())
    started = read_config_of_new_run([f"init_from={theirs}", f"data_path={folder / 'book'}"])
    of_run: Any = open_trained(folder / "run", SINGLE).arch
    ours = started["arch"] | {"forward_dtype": of_run.forward_dtype}
    assert type(of_run)(**ours).stacks == of_run.stacks and ours["L_cycles"] == of_run.L_cycles
    with pytest.raises(UserError, match=r"does not say which tokenizer .* give data_path="):
        call(f"checkpoint={theirs}", f"prompt={PROMPT}")
    with pytest.raises(UserError, match=r"hf exists; remove it"):
        _export(folder / "run", "--format", "transformers", "-o", theirs)


def test_weights_of_another_tokenizer_start_no_run(folder: Path, tmp_path: Path, model: TextModel) -> None:
    own = model.state_dict()
    write_run(tmp_path / "run", folder / "problems", "arch=hrm_text", sizes={"tokenizer": SHA})
    printed = _export(tmp_path / "run", "-o", tmp_path / "other.safetensors")
    assert f"data_path={folder / 'problems'} prompt=..." in printed, "its tokenizer is beside the data"
    _export(folder / "run", "--format", "transformers", "-o", tmp_path / "hf")
    for source in (tmp_path / "run", tmp_path / "other.safetensors"):
        with pytest.raises(UserError, match=r"reads tokens of abababababab, but those of the data are of bytes"):
            weights_from(str(source), own, None, SINGLE, "bytes")
    for source in (folder / "run", tmp_path / "hf"):  # published files don't say their tokenizer
        weights_from(str(source), own, None, SINGLE, "bytes")


@pytest.mark.parametrize("same", ["num_layers: 1", "init_type: fixed_normal, init_std: 0.5"])
def test_an_override_of_the_h_stack_that_computes_the_same_is_written(folder: Path, tmp_path: Path, same: str) -> None:
    options = {"attention": "causal", "norm_eps": 1e-5, "rope_theta": 500.0, "H_cycles": 3, "L_cycles": 2}
    typed = ["arch=hrm_text", f"arch.H_override={{{same}}}", *(f"arch.{key}={value}" for key, value in options.items())]
    model = write_run(tmp_path / "run", folder / "book", *typed)
    _export(tmp_path / "run", "--format", "transformers", "-o", tmp_path / "hf")
    described = open_model(str(tmp_path / "hf")).described
    assert isinstance(described, ExportedText) and isinstance(described.arch, HRMTextConfig)
    assert described.arch.embedding_scale == model.config.embedding_scale and described.max_len == MAX_LEN
    assert {key: getattr(described.arch, key) for key in options} == options


@pytest.mark.parametrize(
    "wrong", ["arch=gpt", "arch.norm_type=post", "arch.pos_encodings=none", "arch.H_override={num_layers: 3}"]
)
def test_what_transformers_does_not_compute_is_not_written(folder: Path, tmp_path: Path, wrong: str) -> None:
    write_run(tmp_path / "run", folder / "book", "arch=hrm_text", wrong)
    with pytest.raises(UserError, match=f"transformers has no model (for|with) {wrong.partition('{')[0]}"):
        _export(tmp_path / "run", "--format", "transformers", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _export(*typed: str | Path) -> str:
    return export(parse_settings([str(word) for word in typed]))

"""Every program refuses an impossible file name with one line and status 2."""

from pathlib import Path

import pytest

import dataset.build_sudoku_dataset
import dataset.validate
import sharing.export
from utils.arguments import Parser, typed_path
from utils.errors import UserError

TOO_LONG = "a" * 300


def test_a_name_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, arguments in (
        (dataset.validate.main, TOO_LONG),
        (sharing.export.main, f"{TOO_LONG} --format hrm -o out"),
        (dataset.build_sudoku_dataset.main, f"--output-dir out --source-dir {TOO_LONG}"),
    ):
        assert command(arguments.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
        assert TOO_LONG in err and "too long" in err, err
    assert not list(tmp_path.iterdir()), "the refused program left a file behind"


def test_every_possible_path_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program itself checks later whether the path exists. A tilde is the home directory."""
    for path in (tmp_path, tmp_path / "missing", Path("relative")):
        assert typed_path(str(path)) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = _parser().parse_args(["checkpoint=~/RUN", "--output-file=~/x"])
    assert (parsed.path, parsed.output_file) == (tmp_path / "RUN", tmp_path / "x")


# ---- options as the other commands take their keys ---------------------------------------------


def _parser() -> Parser:
    parser = Parser("x.py", "X.", path_keys=("checkpoint", "run"))
    parser.add_argument("path", type=typed_path)
    parser.add_argument("-o", "--output-file", type=typed_path)
    parser.add_argument("--png", action="store_true")
    parser.add_argument("--num", type=int, default=3)
    parser.add_argument_group("more").add_argument("--dirs", nargs="+")
    return parser


def test_an_option_is_also_a_key() -> None:
    expected = {"path": Path("RUN"), "output_file": Path("F"), "png": True, "num": 5, "dirs": None}
    for typed in (
        "RUN --output-file F --png --num 5",
        "run=RUN output-file=F png=True num=5",
        "--checkpoint RUN --num=5 output_file=F --png",
        "RUN --output_file F --num=5 png=true",
    ):
        assert vars(_parser().parse_args(typed.split())) == expected, typed


def test_a_value_with_an_equals_sign_is_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    parsed = _parser().parse_args(["a=b", "-o", "num=3", "png=false"])
    assert (parsed.path, parsed.output_file, parsed.png) == (Path("a=b"), Path("num=3"), False)
    for typed in ("dirs=[a,b]", "dirs=a b", "dirs=[a, b]"):
        assert _parser().parse_args(["RUN", typed]).dirs == ["a", "b"], typed
    assert _parser().parse_args(["--num=5", "--", "num=3"]).path == Path("num=3")


def test_a_mistake_names_the_option() -> None:
    for typed, message in (
        ("RUN ouput_file=F", "unrecognized arguments: ouput_file=F (did you mean --output-file?); --help"),
        ("chekpoint=RUN", "unrecognized arguments: chekpoint=RUN (did you mean checkpoint=...?)"),
        ("RUN png=maybe", "png is 'maybe'; write png=true, or leave it out"),
        ("RUN num=x", "argument --num: invalid int value: 'x'"),
    ):
        with pytest.raises(UserError) as caught:
            _parser().parse_args(typed.split())
        assert message in str(caught.value)

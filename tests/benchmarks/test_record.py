"""The program of the table of records: it trains, scores, and refuses what breaks the rules."""

import shutil
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import Track, num_allowed
from dataset.schema import open_split

RUN = ["experiment=demo", "max_steps=2", "eval_every_n_steps=2", "global_batch_size=4", "wandb.mode=disabled"]


def test_training_answers_are_those_of_the_track(data: Path, tmp_path: Path) -> None:
    track = Track(str(data), "", minutes=1)
    assert num_allowed(str(data), track) == sum(open_split(data, "train").num_examples(None).values())
    for name, taken in (("other", "test"), ("leak", "train")):
        for split in ("train", "test"):
            shutil.copytree(data / taken, tmp_path / name / split)
    with pytest.raises(SystemExit, match="has answers that"):
        num_allowed(str(tmp_path / "other"), track)
    with pytest.raises(SystemExit, match="symmetries of test puzzles"):
        num_allowed(str(data), Track(str(tmp_path / "leak"), "", minutes=1))


@pytest.mark.slow
def test_a_record_is_trained_in_two_runs_and_scored(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "_git", lambda *words: "" if "status" in words else "c0ffee")
    monkeypatch.setattr(record, "RUNS", tmp_path)
    monkeypatch.setitem(record.TRACKS, "sudoku-extreme", Track(str(data), "", minutes=5))
    typed = ["record", "sudoku-extreme", "--told", "nothing", "--", *RUN, f"data_path={data}"]
    monkeypatch.setattr("sys.argv", [*typed, "then", *RUN, f"data_path={data}", "max_steps=4"])
    record.main()
    titles, _, row = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[-3:])
    found = dict(zip(titles, row, strict=True))
    assert all(0 <= float(each) <= 1 for each in found["scores"].split()) and len(found["minutes"].split()) == 3
    assert found["parameters"] == "3,440" and found["commit"] == "c0ffee" and found["told"] == "nothing"
    first, _, last = sorted((tmp_path / "sudoku-extreme").iterdir())
    assert sorted(each.name for each in last.iterdir()) == ["0", "1", "evaluation", "row.json"]
    (first / "row.json").write_text((first / "row.json").read_text().replace(found["scores"].split()[0], "kept", 1))
    (last / "row.json").unlink()
    record.main()
    assert capsys.readouterr().out.splitlines()[-1].split(" | ")[1] == " ".join(["kept", *found["scores"].split()[1:]])
    monkeypatch.setitem(record.TRACKS, "sudoku-extreme", Track(str(data), "f00", minutes=5))
    with pytest.raises(SystemExit, match="not those of the track"):
        record.main()

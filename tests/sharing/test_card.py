"""A folder that shares a model loads as it, trains as its run did, and says what is known."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

from sharing.export import main
from sharing.published import Weights
from tests import runs
from tests.hub_stand_in import Hub, hub
from tests.models.helpers import build_puzzle_arch
from tests.runs import REPOSITORY
from tests.sharing.test_export import mistake, save_step
from tests.text_runs import write_data, write_run
from training.config import PretrainConfig
from training.trained import open_trained
from utils.command_line import read_config, validate
from utils.config import flatten
from utils.errors import UserError
from utils.hub import upload
from utils.ranks.world import World

_SIZES = {"seq_len": 36, "vocab_size": 8, "num_puzzle_identifiers": 1}
_TRAINING = ["experiment=demo", "lr=0.002", "arch.L_cycles=3", "arch.forward_dtype=float32"]
_TYPED = [*_TRAINING, "data_path=/home/me/sudoku-6x6", "project_name=secret"]


def _save(run: Path, *typed: str) -> Weights:
    """Save step 7 of a run of the demo's model, and return its weights."""
    config = read_config("pretrain", [*_TYPED, f"checkpoint_path={run}", *typed])
    model = build_puzzle_arch(validate(PretrainConfig, config).arch, **_SIZES)
    model.init_weights(torch.Generator().manual_seed(0))
    weights = dict(model.state_dict())
    save_step(run, 7, config["arch"], weights, config=config, task=_SIZES)
    return weights


def _results(run: Path, name: str, data: str, exact: float) -> None:
    metrics = {"exact_accuracy": exact, "lm_loss": 0.5, "q_halt_accuracy": 0.9}
    metrics |= {"trajectories/exact_accuracy": 0.97, "restarts/exact_accuracy": 0.96, "tta/exact_accuracy": 0.98}
    settings = {"num_steps": 16, "vote_with": ["/home/me/a", "b"], "trajectories": 2, "restarts": 1, "noise": 0.3}
    results = {
        "checkpoint": str(run),
        "data": f"/home/me/{data}/test",
        "num_examples": {"all": 500},
        "settings": settings | {"tta": 8, "checkpoint": "/home/me/run"},
        "metrics": {f"eval/all/{key}": value for key, value in metrics.items()},
        "intervals": {
            f"eval/all/{key}": [value - 0.01, value + 0.01] for key, value in metrics.items() if "accuracy" in key
        },
    }
    folder = run / "eval_outputs" / name
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))


def _card(folder: Path) -> tuple[dict[str, Any], str]:
    nothing, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    assert nothing == ""
    return yaml.safe_load(metadata), text


@pytest.mark.parametrize("begin", ["init_from", "load_checkpoint"])
def test_a_folder_is_a_checkpoint_and_has_the_recipe_of_the_run(tmp_path: Path, begin: str) -> None:
    secret = ["wandb.entity=somebody", f"{begin}=/home/me/other", "freeze=blocks", "puzzle_table=mean"]
    secret += ["started_in=/home/me", "data_paths=[/home/me/a]", "data_paths_test=[/home/me/b]"]
    weights = _save(tmp_path / "run", "parallel=fsdp", "dist.num_threads=3", *secret)
    folder = tmp_path / "shared"
    assert main([str(tmp_path / "run"), "-o", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors", "recipe.yaml"]
    model = open_trained(str(folder), World.single()).load_puzzle_model(World.single())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    recipe = folder / "recipe.yaml"
    assert "python pretrain.py experiment=shared/recipe.yaml" in recipe.read_text()
    again = read_config("pretrain", [f"experiment={recipe}"])
    expected = dict(flatten(read_config("pretrain", _TRAINING)))
    differing = {key for key, value in flatten(again) if expected.get(key) != value}
    # The recipe leaves out the demo's project name and its mode of Weights & Biases.
    assert differing == {"data_path", "data_paths", "data_paths_test", "project_name", "wandb.mode"}
    written = b"".join(file.read_bytes() for file in folder.iterdir()).decode(errors="replace")
    for private in ("/home", "somebody", "secret", "me/other", str(tmp_path), "run:", "/run"):
        assert private not in written, f"the folder tells {private}"
    assert "\nData: a.\n" in written
    assert "It started from other weights." in written and "which this recipe" in recipe.read_text()


def test_the_card_has_every_evaluation_of_this_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _save(run, "init_from=hf://me/base")
    _results(run, "step_00000007", "sudoku-6x6", 0.9)
    _results(run, "step_00000007_other", "a/test + /b/sudoku-9x9", 0.25)
    _results(run, "step_00000003", "sudoku-6x6", 0.1)
    assert main([str(run), "-o", str(tmp_path / "shared")]) == 0
    metadata, text = _card(tmp_path / "shared")
    assert metadata["tags"] == ["recursive-reasoning", "se_mixer", "sudoku"]
    (entry,) = metadata["model-index"]
    found = [
        (each["dataset"]["name"], metric["name"], metric["value"])
        for each in entry["results"]
        for metric in each["metrics"]
    ]
    typed = "num_steps=16 vote_with=2 other checkpoints"
    assert found == [
        (data, f"all/{metric}", value)
        for data, exact in (("sudoku-6x6", 0.9), ("a, sudoku-9x9", 0.25))
        for metric, value in (
            (f"exact_accuracy {typed}", exact),
            (f"trajectories/exact_accuracy {typed} trajectories=2 noise=0.3", 0.97),
            (f"restarts/exact_accuracy {typed} restarts=1 noise=0.3", 0.96),
            (f"tta/exact_accuracy {typed} tta=8", 0.98),
        )
    ]
    assert f"| sudoku-6x6 | 500 | {typed} | all/exact_accuracy | 0.9000 | 0.8900 to 0.9100 |" in text
    assert f"| sudoku-6x6 | 500 | {typed} tta=8 | all/tta/exact_accuracy | 0.9800 | 0.9700 to 0.9900 |" in text
    assert f"| a, sudoku-9x9 | 500 | {typed} | all/exact_accuracy | 0.2500 | 0.2400 to 0.2600 |" in text
    assert "0.1000" not in text and "q_halt" not in text and "lm_loss" not in text
    assert "It has 3,440 parameters." in text and "- train: SHA-256 f" in text
    assert "\ninit_from: hf://me/base\n" in (tmp_path / "shared/recipe.yaml").read_text()


def test_the_card_of_a_model_of_text_has_its_loss(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_data(tmp_path / "book", "text")
    (tmp_path / "book/tokenizer.json").write_text("{}")
    write_run(run, tmp_path / "book", "arch=hrm_text")
    _results(run, "step_00000001", "book", 0.5)
    for folder, form in (("shared", "native"), ("hf", "transformers")):
        assert main([str(run), "-o", str(tmp_path / folder), "--format", form]) == 0
        assert (tmp_path / folder / "tokenizer.json").exists(), form
    metadata, text = _card(tmp_path / "shared")
    assert metadata["model-index"][0]["results"][0]["task"]["type"] == "text-generation"
    assert "| book |  | num_steps=16 vote_with=2 other checkpoints | all/lm_loss | 0.5000 |  |" in text
    assert "checkpoint=shared prompt=..." in text and "1 steps of 768 tokens" in text


@pytest.mark.parametrize("evaluated", [False, True])
def test_without_a_metric_to_show_the_card_has_what_training_logged(tmp_path: Path, evaluated: bool) -> None:
    run = tmp_path / "run"
    _save(run)
    if evaluated:
        _results(run, "step_00000007", "sudoku-6x6", 0.9)
        file = run / "eval_outputs/step_00000007/results.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"metrics": {"eval/all/q_halt_accuracy": 0.9}}))
    rows = [
        {"step": 6, "time_s": 100.0, "eval/all/exact_accuracy": 0.1},
        {"step": 7, "time_s": 360.0, "eval/all/exact_accuracy": 0.75, "eval/all/num_examples": 9.0, "train/lm_loss": 3},
        {"step": 8, "time_s": 9000.0, "eval/all/exact_accuracy": 0.1},  # after the step that is shared
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(run), "-o", str(tmp_path / "shared")]) == 0
    metadata, text = _card(tmp_path / "shared")
    assert "model-index" not in metadata and "typed" not in text
    assert "| all/exact_accuracy | 0.7500 |" in text and "0.1000" not in text and "lm_loss" not in text
    assert "Training took 7 steps of 32 sequences, and 6 minutes" in text and "num_examples" not in text


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    _save(run)
    (tmp_path / "there").mkdir()
    for typed, expected in {
        (): r"-o \(or --push\) is missing",
        ("-o", tmp_path / "there"): "exists; remove it",
        ("-o", tmp_path / "x" / "y"): "can't write .*No such file",
        ("-o", tmp_path / "x", "--private"): "--private contradicts",
        ("-o", tmp_path / "x.pt"): "has to end in .safetensors",
        ("--push", "me/six/7"): "me/six/7 names no repository",
    }.items():
        assert re.search(expected, mistake(capsys, run, *typed)), typed
    _results(run, "step_00000007", "sudoku-6x6", 0.9)
    (run / "eval_outputs/step_00000007/results.json").write_text("{")
    assert "holds no results of evaluate.py" in mistake(capsys, run, "-o", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ---- the Hub -----------------------------------------------------------------------------------


def _python(served: Hub, home: Path, *arguments: object) -> runs.Ended:
    # A process of its own, because huggingface_hub reads its variables once.
    variables = {"HF_HOME": str(home)} | served.environment
    words = [*(f"{name}={value}" for name, value in variables.items()), "python", *map(str, arguments)]
    return runs.command(shlex.join(words), REPOSITORY)


def test_a_pushed_model_is_found_on_the_hub(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _save(run)
    with hub() as served:
        push = ("-m", "sharing.export", run, "--push")
        pushed = _python(served, tmp_path, *push, "me/six", "--private", "-o", tmp_path / "kept")
        assert pushed.status == 0, pushed.stderr
        assert "  python solve.py checkpoint=hf://me/six puzzle=..." in pushed.stdout.splitlines()
        repository = served.repositories["me/six"]
        assert repository.private and repository.messages == ["Upload se_mixer on sudoku-6x6 after step 7"]
        assert repository.files == {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir()}
        assert b"checkpoint=hf://me/six" in repository.files["README.md"]
        solved = _python(served, tmp_path, "solve.py", "checkpoint=hf://me/six", f"puzzle={'0' * 35}1", "device=cpu")
        assert "step 4" in solved.stdout, solved.stderr
        refused = _python(served, tmp_path, *push, "you/six")
        assert refused.status == 2 and served.repositories.keys() == {"me/six"} and refused.stdout == ""
        assert refused.stderr.count("\n") == 1
        assert refused.stderr.startswith("error: you/six can't be uploaded (403")


def test_a_private_model_stays_out_of_a_public_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (api := Mock()).repo_info.return_value.private = False
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    upload(tmp_path, "me/six", private=False, message="")
    assert api.create_repo.call_args.kwargs == {"private": False, "exist_ok": True}
    with pytest.raises(UserError, match="me/six exists and is public"):
        upload(tmp_path, "me/six", private=True, message="")
    assert api.upload_folder.call_count == 1


def test_an_upload_needs_a_login(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "nobody is logged in" in mistake(capsys, tmp_path / "run", "--push", "me/six")

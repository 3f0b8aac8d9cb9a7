"""python -m benchmarks.gpu survives what its parts do, goes on where it was, and reports it."""

import json
import shlex
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor

from benchmarks.gpu import levers
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.attention import CHOSEN, HEAD_DIM, NUM_HEADS, make_heads
from benchmarks.gpu.attention import measure as measure_attention
from benchmarks.gpu.driver import (
    CUT_OFF,
    DONE,
    FAILED,
    NO_TIME,
    STATE,
    TOO_LONG,
    WITHOUT_DATA,
    Driver,
    Record,
    last_error,
    read_records,
    set_aside,
)
from benchmarks.gpu.environment import environment
from benchmarks.gpu.kernels import Event, bound, summary, work
from benchmarks.gpu.levers import lacks
from benchmarks.gpu.levers import measure as measure_lever
from benchmarks.gpu.marked_steps import MarkedTrainer
from benchmarks.gpu.origin import Origin, commit
from benchmarks.gpu.packing import draw_sequences
from benchmarks.gpu.packing import measure as measure_packing
from benchmarks.gpu.parts import LEVERS, LOG, RECIPES, RESULT, Part, Settings, all_parts, overrides
from benchmarks.gpu.report import markdown, write_report
from benchmarks.gpu.switched_steps import SWITCHES
from benchmarks.gpu.waits import count_waits
from benchmarks.our_steps import OurTrainer
from models.attention import Attention, rotary_tables
from tests.runs import REPOSITORY
from training.config import PretrainConfig
from utils.command_line import read_config, validate


def _settings(output: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {"minutes": 1.0, "sudoku": output / "sudoku", "source_dir": None, "rehearse": True}
    return Settings(output=output, **values | changes)


def _part(key: str, shell: str, **changes: Any) -> Part:
    values: dict[str, Any] = {"share": 0.5, "least_s": 0.0}
    return Part(key, "stand-in", key, ["bash", "-c", shell], **values | changes)


def _result(output: Path, key: str, value: str = '{"n": 1}') -> str:
    return f"echo {shlex.quote(value)} > {shlex.quote(str(output / key / RESULT))}"


_HERE = Origin("abc", "H100, torch 2.11")


def _run(
    parts: list[Part], output: Path, seconds: float = 1000.0, first: str | None = None, origin: Origin = _HERE
) -> Driver:
    driver = Driver(parts, output, origin, lambda line: None, lambda driver: None)
    driver.grace_s = 0.2
    driver.run(seconds, first)
    return driver


def _states(driver: Driver) -> dict[str, str]:
    return {key: record.status for key, record in driver.records.items()}


# ---- the driver --------------------------------------------------------------------------------


def test_no_part_ends_another(tmp_path: Path) -> None:
    """Parts fail, crash and hang; one that hangs ignores SIGTERM and has a child."""
    child = tmp_path / "child"
    hangs = f"{_result(tmp_path, 'hangs')}; trap '' TERM; sleep 77 & echo $! > {child}; wait"
    parts = [
        _part("fails", "echo 'RuntimeError: no kernel image is available'; echo bye; exit 3"),
        _part("crashes", "kill -SEGV $$"),
        _part("hangs", hangs, share=0.0015),
        _part("fits", _result(tmp_path, "fits")),
        _part("without", "exit 0", needs="fails"),
        _part("long", "exit 0", least_s=2000),
    ]
    driver = _run(parts, tmp_path)
    assert _states(driver) == {
        **{"fails": FAILED, "crashes": FAILED, "hangs": TOO_LONG},
        **{"fits": DONE, "without": WITHOUT_DATA, "long": NO_TIME},
    }
    assert driver.records["fails"].note == "status 3: RuntimeError: no kernel image is available"
    assert driver.records["crashes"].note.startswith("signal SIGSEGV")
    assert parts[2].read(tmp_path / "hangs") == {"n": 1}, "what a part has found before it was ended counts"
    with suppress(psutil.NoSuchProcess):  # unless it is gone already
        psutil.Process(int(child.read_text())).wait(10)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Start no process. A part whose command says `hangs` takes all of its time.

    Returns:
        For each part the limits with which it was started.
    """
    found: dict[str, list[float]] = {}

    def run(command: list[str], folder: Path, limit_s: float, *_: object) -> int | None:
        found.setdefault(folder.name, []).append(limit_s)
        return None if "hangs" in command else 0

    monkeypatch.setattr("benchmarks.gpu.driver.run_process", run)
    return found


def test_the_next_call_does_what_is_left(tmp_path: Path, limits: dict[str, list[float]]) -> None:
    """The second part is cut off, because it may take more time than there is."""
    parts = [_part("a", ""), _part("b", "hangs", share=1.1), _part("c", "")]
    assert _states(_run(parts, tmp_path)) == {"a": DONE, "b": CUT_OFF, "c": DONE}
    parts[1] = _part("b", "")
    assert _states(_run(parts, tmp_path)) == {"a": DONE, "b": DONE, "c": DONE}
    assert {key: len(times) for key, times in limits.items()} == {"a": 1, "b": 2, "c": 1}
    _run(parts, tmp_path, first="b")
    assert {key: len(times) for key, times in limits.items()} == {"a": 1, "b": 3, "c": 2}, "--from measures again"


def test_from_builds_the_data_first_that_its_parts_need(tmp_path: Path, limits: dict[str, list[float]]) -> None:
    parts = [_part("other", ""), _part("data", ""), _part("steps", "", needs="data")]
    assert _states(_run(parts, tmp_path, first="steps")) == {"data": DONE, "steps": DONE}
    _run(parts, tmp_path, first="steps")
    assert {key: len(times) for key, times in limits.items()} == {"data": 1, "steps": 2}


def test_a_later_call_can_bring_the_dataset(tmp_path: Path) -> None:
    """A dataset that was generated before must not count as the one that is built now."""
    generated = all_parts(_settings(tmp_path, sudoku=None))
    brought = all_parts(_settings(tmp_path, sudoku=None, source_dir=tmp_path))
    folders = []
    for parts in (generated, brought):
        (data,) = [part for part in parts if part.key.startswith("data-sudoku")]
        assert data.key in {part.needs for part in parts}
        folders.append((data.key, data.command[data.command.index("--output-dir") + 1]))
    assert len({key for key, _ in folders}) == len({folder for _, folder in folders}) == 2


def test_a_part_that_took_too_long_is_tried_again_after_the_others(
    tmp_path: Path, limits: dict[str, list[float]]
) -> None:
    """Compiling takes longest at first. Three short calls would never measure such a part."""
    parts = [_part("a", "hangs", share=0.3), _part("b", "", share=0.9)]
    took_300_s = json.dumps({"a": asdict(Record(TOO_LONG, 300.0, commit=_HERE.commit))})
    for seconds, times in ((250, []), (1000, [pytest.approx(600, abs=30)])):
        limits.clear()
        (tmp_path / STATE).write_text(took_300_s)
        _run(parts, tmp_path, seconds)
        assert list(limits.items()) == [("b", limits["b"]), *([("a", times)] if times else [])]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Start no process, and let another clock run. A part's command says how long it takes.

    Returns:
        For each part the seconds of its attempts.
    """
    found: dict[str, list[float]] = {}
    clock = [0.0]

    def run(command: list[str], folder: Path, limit_s: float, *_: object) -> int | None:
        needs_s = float(command[-1])
        found.setdefault(folder.name, []).append(min(needs_s, limit_s))
        clock[0] += found[folder.name][-1]
        return 0 if needs_s <= limit_s else None

    monkeypatch.setattr("benchmarks.gpu.driver.run_process", run)
    monkeypatch.setattr("benchmarks.gpu.driver.time", SimpleNamespace(monotonic=lambda: clock[0]))
    return found


def test_a_second_chance_that_is_cut_off_is_still_one(tmp_path: Path, attempts: dict[str, list[float]]) -> None:
    """In the second call only 200 s are left for it, and in the third call nothing is."""
    parts = [_part("slow", "300", share=0.12)]
    states = []
    for number, others_take_s in enumerate((10, 800, 850, 100)):
        parts.append(_part(f"other-{number}", str(others_take_s), share=0.9))
        driver = _run(parts, tmp_path)
        states.append((driver.records["slow"].status, driver.records["slow"].seconds))
        assert len(attempts[f"other-{number}"]) == 1, "it goes before what had its time"
    assert states == [(TOO_LONG, 120), (CUT_OFF, 200), (CUT_OFF, 200), (DONE, 300)]
    assert attempts["slow"] == [120, 200, 300], "a shorter attempt would lose what the longer one has found"


def test_what_had_less_than_its_own_time_keeps_its_place(tmp_path: Path, attempts: dict[str, list[float]]) -> None:
    parts = [
        _part("first", "950", share=1.0),
        _part("cut", "150", share=0.2),
        _part("last", "900", share=0.9, least_s=1.0),
    ]
    assert _states(_run(parts, tmp_path)) == {"first": DONE, "cut": CUT_OFF, "last": NO_TIME}
    assert _states(_run(parts, tmp_path)) == {"first": DONE, "cut": DONE, "last": CUT_OFF}
    assert attempts["cut"] == [50, 150]


def test_a_run_that_goes_on_sums_its_time(tmp_path: Path, attempts: dict[str, list[float]]) -> None:
    parts = [_part("accuracy", "5000", share=None)]
    for seconds in (1000, 500):
        driver = _run(parts, tmp_path, seconds)
    assert driver.records["accuracy"].seconds == pytest.approx(1500, abs=1)


def test_a_part_that_kills_the_driver_is_tried_twice(tmp_path: Path) -> None:
    part = _part("kills", "exit 0")
    for deaths, status in ((0, DONE), (1, FAILED)):
        record = {"status": "running", "seconds": 1.0, "note": "", "deaths": deaths}
        (tmp_path / STATE).write_text(json.dumps({"kills": record}))
        assert _states(_run([part], tmp_path)) == {"kills": status}


def test_after_a_change_of_the_code_only_what_failed_is_tried_again(
    tmp_path: Path, limits: dict[str, list[float]]
) -> None:
    parts = [_part("a", ""), _part("b", "hangs"), _part("accuracy", "hangs", share=None)]
    _run(parts, tmp_path)
    parts[1] = _part("b", "")
    driver = _run(parts, tmp_path, origin=replace(_HERE, commit="def"))
    assert {key: len(times) for key, times in limits.items()} == {"a": 1, "b": 2, "accuracy": 2}
    driver = _run(parts, tmp_path, origin=replace(_HERE, commit="def"))
    commits = {key: record.commit for key, record in driver.records.items()}
    assert commits == {"a": "abc", "b": "def", "accuracy": "abc, then def"}
    text = markdown(parts, driver.records, {}, _settings(tmp_path), "python -m benchmarks.gpu")
    said = "**Not one commit:** abc (`a`); def (`b`); abc, then def (`accuracy`). `python -m benchmarks.gpu`."
    assert said in " ".join(text.splitlines())


def test_another_card_measures_everything_anew(tmp_path: Path, limits: dict[str, list[float]]) -> None:
    for number, card in enumerate(("H100", "H100", "H200")):
        origin, output = replace(_HERE, machine=f"{card}, torch 2.11"), tmp_path / "gpu"
        aside = set_aside(output, origin)
        _run([_part("a", "")], output, origin=origin)
        assert (aside is None) == (card == "H100") and len(limits["a"]) == max(1, number)
    assert aside == tmp_path / "gpu-H100-torch-2.11" and (aside / STATE).exists()
    (output / STATE).write_text(json.dumps({"a": {"status": "done", "seconds": 9.0}}))  # as an earlier version wrote it
    assert set_aside(output, origin) == tmp_path / "gpu-unknown"


def test_a_card_that_does_not_tell_its_name_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, list[float]]
) -> None:
    """Another process asks: a broken card raises there, and this one holds no memory of a card."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: pytest.fail("asked in the process of the driver"))
    for said in ("a warning\nH100", None, "a warning\nH100"):
        monkeypatch.setattr("benchmarks.gpu.origin.said_by", lambda *_, said=said, **__: said)
        origin = Origin.here(rehearse=False)
        assert origin.machine == f"{'H100' if said else 'unknown card'}, torch {torch.__version__}"
        assert set_aside(tmp_path, origin) is None
        _run([_part("a", ""), _part("b", "")][: 1 if said else 2], tmp_path, origin=origin)
    assert {key: len(times) for key, times in limits.items()} == {"a": 1, "b": 1}, "a later call goes on"


@pytest.mark.parametrize(
    "stored", ['{"a": {"status": "done", "of another version": 1}}', '{"a": {"sta', "[]", '{"a": 1}']
)
def test_a_state_that_cannot_be_read_is_none(stored: str, tmp_path: Path, limits: dict[str, list[float]]) -> None:
    (tmp_path / STATE).write_text(stored)
    assert set_aside(tmp_path, _HERE) is None
    lines: list[str] = []
    driver = Driver([_part("a", "")], tmp_path, _HERE, lines.append, lambda driver: None)
    driver.run(10)
    assert _states(driver) == {"a": DONE} and "state.json in" in lines[0] and "measured anew" in lines[0]
    assert read_records(tmp_path) == driver.records


def test_a_commit_is_known_without_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are not committed have a digest, too: two of them are not the same code."""
    for said, begin in (
        ("v1.0-2-gabc", "v1.0-2-gabc"),
        ("abc-dirty", "abc-dirty (sources "),
        (None, "no commit known ("),
    ):
        monkeypatch.setattr("benchmarks.gpu.origin.said_by", lambda *_, said=said: said)
        assert commit().startswith(begin)


def test_a_run_gets_the_time_that_measurements_leave(tmp_path: Path, limits: dict[str, list[float]]) -> None:
    parts = [_part("a", "hangs", share=1.1), _part("b", "hangs", share=0.1), _part("accuracy", "hangs", share=None)]
    assert _states(_run(parts, tmp_path)) == {"a": CUT_OFF, "b": TOO_LONG, "accuracy": CUT_OFF}
    assert [limits[part.key] for part in parts] == [[pytest.approx(each, abs=30)] for each in (600, 60, 1000)]


def test_a_part_is_split_when_memory_runs_out(tmp_path: Path) -> None:
    shell = 'case "$0" in *=4) exit 0;; *) echo "CUDA out of memory. Tried to allocate"; exit 1;; esac'
    driver = _run([_part("big", shell, may_split=True), _part("whole", shell)], tmp_path)
    assert driver.records["big"].status == DONE and "grad_accumulation=4" in driver.records["big"].note
    assert driver.records["whole"].status == FAILED and "out of memory" in driver.records["whole"].note


def test_a_fault_of_the_report_costs_no_measurement(tmp_path: Path) -> None:
    def fails(driver: Driver) -> None:
        raise KeyError("cards")

    lines: list[str] = []
    driver = Driver([_part("a", "exit 0")], tmp_path, _HERE, lines.append, fails)
    driver.run(10)
    assert _states(driver) == {"a": DONE} and "KeyError: 'cards'" in "\n".join(lines)


_DRIVER = """
import sys
from benchmarks.gpu import __main__
from benchmarks.gpu.origin import Origin
from benchmarks.gpu.parts import Part
__main__.Origin.here = lambda **_: Origin("abc", "CPU")  # the import of torch takes seconds
part = Part("a", "stand-in", "a", ["bash", "-c", "touch {folder}/began; sleep 60"], 1.0, 0.0)
__main__.all_parts = lambda settings: [part]
sys.exit(__main__.main(["--rehearse", "--minutes", "1", "--output", "{folder}"]))
"""


def test_a_stop_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER.replace("{folder}", str(tmp_path))],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "began").exists():
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)
    out, _ = driver.communicate(timeout=30)
    assert driver.returncode == 130 and "the same command goes on" in out
    assert json.loads((tmp_path / STATE).read_text())["a"]["status"] == CUT_OFF
    assert "| `a` | cut off |" in (tmp_path / "report.md").read_text()


# ---- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed, said",
    [
        (["--rehearse", "--from", "step"], "there is no such part; give one of environment"),
        (["--rehearse", "--source-dir", "nowhere"], "nowhere holds no train.csv"),
        (["--rehearse", "--data-path", "nowhere"], "nowhere holds no train/dataset.json"),
        *([] if torch.cuda.is_available() else [(["--minutes", "1"], "--rehearse runs every part")]),
    ],
)
def test_a_mistake_is_told(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_missing_package_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pretrain", None)
    with pytest.raises(SystemExit):
        main(["--minutes", "1"])
    assert "install what requirements.txt names" in capsys.readouterr().err


def test_a_log_says_why_pytest_did_not_start() -> None:
    log = "ImportError while loading conftest 'tests/conftest.py'.\nE   ModuleNotFoundError: No module named 'x'\n"
    assert last_error(log) == "ModuleNotFoundError: No module named 'x'"


# ---- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_are_valid(recipe: str, rehearse: bool, tmp_path: Path) -> None:
    typed = overrides(recipe, _settings(tmp_path, rehearse=rehearse))
    config = validate(PretrainConfig, read_config("pretrain", typed))
    assert config.device == ("cpu" if rehearse else "cuda")


def test_the_parts_depend_on_the_data(tmp_path: Path) -> None:
    with_data, generated = all_parts(_settings(tmp_path)), all_parts(_settings(tmp_path, sudoku=None))
    assert [part.key for part in with_data][-1] == "accuracy" and with_data[-1].share is None
    assert "accuracy" not in [part.key for part in generated]
    keys = [part.key for part in generated]
    assert len(set(keys)) == len(keys)
    for number, part in enumerate(generated):
        assert part.needs is None or part.needs in keys[:number], "a part comes after what it needs"


def test_no_test_of_the_cpu_takes_time_from_the_card(tmp_path: Path) -> None:
    """tests/gpu also holds a rehearsal on the CPU, which takes minutes."""
    (part,) = [part for part in all_parts(_settings(tmp_path, rehearse=False)) if part.key == "tests"]
    words = list(part.command)
    assert words[words.index("pytest") + 1 :].count("-m") == 1 and words[-words[::-1].index("-m")] == "gpu", words


def test_tests_that_were_cut_off_are_counted(tmp_path: Path) -> None:
    (part,) = [part for part in all_parts(_settings(tmp_path)) if part.key == "tests"]
    (tmp_path / LOG).write_text(
        "tests/gpu/test_cuda.py::test_a[x y] PASSED    [  5%]\n"
        "tests/gpu/test_cuda.py::test_b FAILED         [ 10%]\n"
        "tests/gpu/test_options.py::test_c SKIPPED (no GPU) [ 15%]\n"
        "tests/gpu/test_options.py::test_d \n"
        "FAILED tests/gpu/test_cuda.py::test_b - assert\n"
    )
    assert part.read(tmp_path) == {"passed": 1, "failed": ["tests/gpu/test_cuda.py::test_b"], "skipped": 1}


def test_the_environment_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.environment._version", {"numpy": "2.0.0"}.get)
    found = environment()
    assert found["other_versions"]["numpy"] == "2.0.0" and found["other_versions"]["pydantic"] == "missing"


@pytest.mark.filterwarnings("ignore")  # the warm steps warn, too
def test_waits_are_counted_with_their_place() -> None:
    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    found = count_waits(train, 3, torch.device("cpu"))
    ((place, number),) = found["places"].items()
    assert place.startswith("tests/benchmarks/test_gpu.py:") and place.endswith("(train)") and number == 3


# ---- kernels ------------------------------------------------------------------------------------


def _operator(number: int, name: str, shapes: list[list[int]], kind: str = "c10::BFloat16") -> Event:
    strides = [[1] * len(dims) for dims in shapes]
    args = {"External id": number, "Input Dims": shapes, "Input type": [kind] * len(shapes), "Input Strides": strides}
    return {"cat": "cpu_op", "name": name, "tid": 1, "ts": 0.0, "dur": 1.0, "args": args}


def _kernel(name: str, ts: float, us: float, **args: Any) -> Event:
    return {"cat": "kernel", "name": name, "tid": 7, "ts": ts, "dur": us, "args": args}


def test_kernels_are_bound_by_what_their_operators_move_and_compute() -> None:
    """This is a trace as PyTorch writes it for CUDA, of two steps."""
    best = {"gb_per_s": 1000.0, "tflops": 100.0, "size": 8192.0}
    launch = {"cat": "cuda_driver", "name": "cuLaunchKernel", "args": {"External id": 2, "correlation": 22}}
    events: list[Event] = [
        _operator(1, "aten::mm", [[1000, 1000], [1000, 1000]]),  # 2 GFLOP: 20 us at best
        _operator(2, "triton_poi_fused_add_0", [[1_000_000], [1_000_000], [1_000_000]], "float"),  # 12 MB: 12 us
        _operator(3, "aten::add_", [[10], [10]], "float"),
        _operator(4, "CompiledFunctionBackward", [[1_000_000]]),
        launch,
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "args": {"correlation": 5}},
    ]
    for step in (0.0, 1000.0):
        events += [
            _kernel("cutlass_gemm", step, 40.0, **{"External id": 1, "est. achieved occupancy %": 25}),
            _kernel("triton_poi_fused_add_0", step + 100, 15.0, correlation=22),
            _kernel("vectorized_add", step + 200, 2.0, **{"External id": 3}),
            _kernel("triton_red_1", step + 300, 30.0, **{"External id": 4}),
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": step + 400, "dur": 8.0, "args": {"bytes": 1_000_000}},
        ]
    found = summary(events, 2, step_ms=0.2, best=best)
    rows = {row["name"]: row for row in found["largest"]}
    assert [row["name"] for row in found["largest"]][:2] == ["cutlass_gemm", "triton_red_1"]
    assert rows["cutlass_gemm"]["bound"] == "compute" and rows["cutlass_gemm"]["compute"] == pytest.approx(0.5)
    assert rows["cutlass_gemm"]["occupancy"] == 25 and rows["cutlass_gemm"]["calls"] == 1
    assert rows["triton_poi_fused_add_0"]["bound"] == "memory"
    assert rows["triton_poi_fused_add_0"]["memory"] == pytest.approx(0.8)
    assert rows["vectorized_add"]["bound"] == "launches"
    assert rows["triton_red_1"]["bound"] == "unknown", "a graph's inputs are not those of its kernels"
    assert rows["Memcpy DtoD"]["bound"] == "latency"
    assert found["busy_ms"] == pytest.approx(0.095) and found["calls"] == 5 and found["waits"] == 0.5


def test_a_broadcast_tensor_is_read_once() -> None:
    operator = _operator(1, "aten::mul", [[100, 1000], [100, 1000]], "float")
    operator["args"]["Input Strides"] = [[1000, 1], [0, 1]]
    assert work(operator) == (4 * (100_000 + 1000 + 100_000), 0.0)


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    shape = [3, 81, 8, 64]
    _, forward = work(_operator(1, "aten::_flash_attention_forward", [shape] * 3))
    _, backward = work(_operator(1, "aten::_flash_attention_backward", [shape] * 5))
    assert forward == 2 * 2 * 3 * 8 * 81 * 81 * 64 and backward == 2.5 * forward
    assert work(_operator(1, "aten::_scaled_dot_product_cudnn_attention", [[3, 8, 81, 64]] * 3))[1] == forward


def test_what_bounds_a_kernel() -> None:
    nan = float("nan")
    assert [bound(*each) for each in ((2, 0.9, 0.9), (9, nan, 0), (9, 0.2, 0.3), (9, 0.5, 0.2), (9, 0.5, 0.6))] == [
        *("launches", "unknown", "latency", "memory", "compute")
    ]


# ---- levers and attention -----------------------------------------------------------------------

_STEPS = """
import os, sys
print("AUTOTUNE mm(62976x512, 512x1536)")  # a library's words, which are no answer
print("W1123 cudagraph_utils.py:380] skipping cudagraphs due to cpu device", file=sys.stderr, flush=True)
speed = float(os.environ.get("SPEED", 1))
if "AT_START" in os.environ:
    raise RuntimeError(os.environ["AT_START"])
for request in sys.stdin:
    if request.startswith("describe"):
        print('{"what": "hrm", "device": "1 x card", "device_type": "cuda", "batch_size": 96}', flush=True)
    elif request.startswith("metrics"):
        print('{"train/lm_loss": 2.0}', flush=True)
    elif speed < 0:
        raise RuntimeError(os.environ.get("RAISES", "accessing tensor output of CUDAGraphs that has been overwritten"))
    else:
        print(f'{{"step_ms": {10 / speed}, "max_memory_gb": 1.0}}', flush=True)
"""


def _lever(file: Path, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", _STEPS]
    return measure_lever({"with": command, "without": command}, environment, 2, 3, file)


def test_a_lever_is_measured_against_the_same_steps_without_it(tmp_path: Path) -> None:
    found = _lever(tmp_path / RESULT, {"SPEED": "2"})
    assert [[row["step_ms"] for row in found[arm]["rounds"]] for arm in ("with", "without")] == [[5.0] * 3, [10.0] * 3]
    assert found["with"]["loss"] == found["without"]["loss"] == 2.0
    assert found["warned"] == "skipping cudagraphs due to cpu device", "otherwise a lever without effect looks useless"
    assert json.loads((tmp_path / RESULT).read_text()) == found


def test_what_a_lever_raises_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _lever(tmp_path / RESULT, {"SPEED": "-1"})
    assert found["raised"] == "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten"
    found = _lever(tmp_path / RESULT, {"AT_START": "no FP8 here"})
    assert found["raised"] == "RuntimeError: no FP8 here"
    monkeypatch.setenv("SPEED", "-1")
    with pytest.raises(SystemExit, match="without the lever: RuntimeError: accessing"):
        _lever(tmp_path / RESULT, {"SPEED": "1"})


@pytest.mark.parametrize("both", [{"AT_START": "no Triton"}, {"SPEED": "-1", "RAISES": "no data"}])
def test_what_ends_the_steps_without_the_lever_too_is_no_result(
    both: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as done for ever, although a mended machine might measure the lever."""
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="without the lever: RuntimeError: no "):
        _lever(tmp_path / RESULT, {})
    assert not (tmp_path / RESULT).exists()


@pytest.mark.parametrize("lever", [{"AT_START": "CUDA out of memory."}, {"SPEED": "-1", "RAISES": "out of memory"}])
def test_memory_that_runs_out_is_no_result_of_a_lever(lever: dict[str, str], tmp_path: Path) -> None:
    """Two programs hold the card. With smaller parts of a step, both may fit."""
    with pytest.raises(SystemExit, match="out of memory with the lever"):
        _lever(tmp_path / RESULT, lever)
    assert not (tmp_path / RESULT).exists()


@pytest.mark.parametrize("key", LEVERS)
def test_the_arms_of_a_lever_differ_in_nothing_else(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out, the driver appends the split, which both arms must get."""
    given: list[Any] = []
    (part,) = [part for part in all_parts(_settings(tmp_path)) if part.key == f"lever-{key}"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(levers, "measure", lambda *arguments: given.extend(arguments))
    monkeypatch.setattr(sys, "argv", [*part.command[2:], "grad_accumulation=2"])
    levers.main()
    (with_, without), environment = given[0].values(), given[1]
    ours = without[3:]
    assert without[2] == "benchmarks.our_steps" and ours[-1] == "grad_accumulation=2"
    start = next(number for number in range(len(with_)) if with_[number : number + len(ours)] == ours)
    program, lever = with_[2:start], with_[start + len(ours) :]
    assert find_spec(program[0]) and set(program[1:]) <= set(SWITCHES)
    assert lever or environment or program != ["benchmarks.our_steps"]
    assert part.may_split == ("benchmarks.gpu.marked_steps" not in program), "its mark needs one microbatch"


def test_a_switch_is_set_before_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", allowed.append)
    with inductor.patch(force_shape_pad=False), functorch.patch(enable_autograd_cache=True):
        SWITCHES["shape-pad"]()
        assert inductor.force_shape_pad and functorch.enable_autograd_cache
        SWITCHES["no-cudnn-attention"]()
        assert allowed == [False] and not functorch.enable_autograd_cache, "it would keep cuDNN"


def test_a_lever_is_left_out_where_the_card_lacks_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert [lacks(each) for each in ("0.0", "8.9")] == ["", ""]
    assert lacks("9.0") == "needs a card of capability 9.0, and this one has 8.9"


def test_each_step_is_marked_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("mark"))
    monkeypatch.setattr(OurTrainer, "_step", lambda self: calls.append("step"))
    MarkedTrainer.__new__(MarkedTrainer).train(2)
    assert calls == ["mark", "step"] * 2


def test_a_backend_that_is_refused_has_a_reason_and_no_time() -> None:
    found = measure_attention(2, 3, torch.device("cpu"))
    assert {name for name, ms in found["ms"].items() if ms} == {
        "flash",
        "math",
        CHOSEN,
    } and "No viable backend" in found["refused"]["cuDNN"]
    assert found["choices"] == {"forward": "flash", "forward and backward": "flash"}
    assert all(ms > 0 for times in found["ms"].values() if times for ms in times.values())


def test_attention_in_packed_rows_is_timed_where_it_runs() -> None:
    found = measure_packing(40, 9, torch.device("cpu"))
    assert [each["mask"] for each in found] == ["prefixlm", "causal"]
    for each in found:
        assert each["ms"]["varlen"] is None and "CPU" in each["refused"]["varlen"]
        assert all(ms > 0 for ms in each["ms"]["sdpa"].values()) and each["refused"].keys() == {"varlen"}


@pytest.mark.parametrize(("num_tokens", "longest"), [(40, 9), (41, 2), (1, 5)])
def test_sequences_fill_a_row(num_tokens: int, longest: int) -> None:
    sequences = draw_sequences(num_tokens, longest)
    assert sum(map(sum, sequences)) == num_tokens
    assert all(prefix >= 1 and prefix + response <= longest for prefix, response in sequences)


def test_heads_lie_in_memory_as_the_model_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated queries and keys are no views of the projection."""
    seen: list[list[tuple[int, ...]]] = []

    def attend(*heads: torch.Tensor, mask: None) -> torch.Tensor:
        seen.append([each.stride() for each in heads])
        return heads[0]

    monkeypatch.setattr("models.attention.attend", attend)
    size = NUM_HEADS * HEAD_DIM
    Attention(size, NUM_HEADS)(torch.zeros(2, 5, size), rotary_tables(5, HEAD_DIM, 10000.0))
    ours = make_heads(2, 5, torch.float32, torch.device("cpu"))
    assert seen == [[each.stride() for each in ours]] and all(each.requires_grad for each in ours)


# ---- the report ---------------------------------------------------------------------------------

_BEST = {"tflops": 700.0, "gb_per_s": 3000.0, "size": 8192}
_ROUND = {"examples_per_second": 9000.0, "step_ms": 85.0, "model_tflops": 300.0, "peak_tflops": 600.0}
_RESULTS: dict[str, Any] = {
    "environment": {
        **{
            "python": "3.12.3",
            "torch": "2.11.0+cu130",
            "triton": "3.6.0",
            "cpu": "a CPU",
            "cores": 16,
        },
        **{"cards": ["NVIDIA H100 80GB HBM3"], "memory_gb": 85.0, "multiprocessors": 132},
        **{"nvidia_smi": {"driver_version": "580", "power.limit": "700 W"}, "other_versions": {"wandb": "missing"}},
    },
    "tests": {"passed": 40, "failed": ["tests/gpu/test_cuda.py::test_b"], "skipped": 1},
    "steps-hrm-compiled": [
        {
            **{
                "batch_size": 768,
                "start_s": 70.0,
                "rounds": [{**_ROUND, "utilization": 0.5, "max_memory_gb": 12.0}] * 3,
            },
            **{"parts": {"step": 85.0, "forward": 40.0, "rest": 45.0}},
        }
    ],
    "kernels-fast": {
        **{"what": "kernels", "step_ms": 70.0, "busy_ms": 68.0, "calls": 3000.0, "different": 80, "waits": 0.0},
        **{"total_ms": 68.0, "by_bound": {"compute": 40.0, "memory": 28.0}, "best": _BEST},
        "largest": [
            {
                **{"name": "void cutlass::Kernel2<a | b>", "calls": 200.0, "ms": 40.0, "us": 200.0},
                **{"memory": 0.3, "compute": 0.8, "occupancy": 25.0, "bound": "compute"},
            }
        ],
    },
    "waits-fast": {"steps": 10, "is_counted": True, "places": {"pretrain.py:300 (train_step)": 10}},
    "peak-hrm": {
        **{"dtype": "bfloat16", "best": _BEST, "peak_tflops": 600.0},
        "products": [
            {
                **{"rows": 62976, "in_features": 512, "out_features": 1536, "number": 8},
                **{"forward_ms": 0.165, "input_gradient_ms": 0.17, "weight_gradient_ms": 0.18},
            }
        ],
    },
    "ranks": {"1": {"losses": [2.0, 1.0], "step_ms": [9, 5]}, "2": {"losses": [2.0, 1.00001], "step_ms": [9, 6]}},
    "checkpoint": {
        **{"gb": 0.5, "num_parameters": 27_000_000, "batch_size": 768, "step_s": 0.1},
        "rows": [{"save": 1, "stall_s": 0.03, "step_while_writing": 1.05, "until_published_s": 0.4}],
    },
    "attention": [
        {
            **{"slots": slots, "positions": positions, "refused": {"cuDNN": reason}},
            "ms": {"flash": {"forward": 0.5, "forward and backward": 2.0}, "cuDNN": None},
            "choices": {"forward": "flash", "forward and backward": "cuDNN"},
        }
        for slots, positions, reason in ((72, 900, "no kernel"), (768, 82, "no kernel"), (24, 2500, "out of memory"))
    ],
    "packing": [
        {
            **{"tokens": 32768, "longest": 1024, "sequences": 64, "mask": mask, "refused": refused},
            "ms": {"sdpa": {"forward": 1.5, "forward and backward": 5.0}, "varlen": varlen},
        }
        for mask, varlen, refused in (
            ("causal", {"forward": 0.5, "forward and backward": 2.0}, {}),
            ("prefixlm", None, {"varlen": "no | kernel"}),
        )
    ],
    "lever-autotune": {"warned": "skipping x"}
    | {
        name: {"batch_size": 384, "start_s": 90.0, "loss": loss, "rounds": [{"step_ms": ms, "max_memory_gb": 9.0}] * 3}
        for name, ms, loss in (("with", 60.0, 2.002), ("without", 80.0, 2.0))
    },
    "lever-fp8": {"skipped": "needs a card of capability 9.0, and this one has 8.9"},
    "lever-graphs": {"raised": "RuntimeError: accessing `x` | overwritten"},
    "accuracy": {
        **{"last_step": 1234, "minutes": 9.5, "step_ms": [70.0, 71.0]},
        "evaluations": [{"step": 500, "minutes": 1.2, "exact_accuracy": 0.031, "examples": 2000.0}],
    },
}


@pytest.fixture
def report(tmp_path: Path) -> str:
    settings = _settings(tmp_path, rehearse=False)
    records = {key: Record(DONE, 10.0, commit="abc") for key in _RESULTS}
    records["accuracy"] = Record(CUT_OFF, 600.0)
    records["steps-fast-eager"] = Record(FAILED, 3.0, "status 1: torch.OutOfMemoryError: CUDA out of memory")
    return markdown(all_parts(settings), records, _RESULTS, settings, "python -m benchmarks.gpu --minutes 25")


@pytest.mark.parametrize(
    "said",
    [
        "### NVIDIA H100 80GB HBM3, 20",
        "Commit abc. `python -m benchmarks.gpu --minutes 25`. Unlike requirements.txt: wandb missing.",
        "| HRM of the paper, compiled | 768 | 85 (85 to 85) | 9,000 | 300 | 50% | 12 | 70 | 3 |",
        "| HRM of the paper, compiled | 85 | 40 | 45 |",
        "The card computes 68 ms of a step of 70 ms (97%)",
        "| `cutlass::Kernel2<a / b>` | 200 | 40 | 59% | 200 | 30% | 80% | 25% | compute |",
        "| fast recipe, Sudoku | 10 | 10 | 10 x `pretrain.py:300 (train_step)` |",
        "| HRM of the paper | 62,976 x 512 x 1,536 | 8 | 600 | 583 | 550 |",
        "1.0e-05 at most",
        "| 1 | 30 | 1.05 | 0.40 |",
        "| 500 | 1.2 | 0.031 | 2,000 |",
        "| 900 | 72 | forward | 0.5 | - | flash |",
        "| 32,768 | 1,024 | causal | forward and backward | 5 | 2 |",
        "| 32,768 | 1,024 | prefixlm | forward | 1.5 | - |",
        "- varlen: `no / kernel`",
        "| 900 | 72 | forward and backward | 2 | - | cuDNN |",
        "- cuDNN, 900 and 82 positions: `no kernel` - cuDNN, 2,500 positions: `out of memory`",
        "| TORCHINDUCTOR_MAX_AUTOTUNE=1; fast recipe, Sudoku | 384 | 80 (80 to 80) | 60 (60 to 60) | 0.750 (0.750 to "
        "0.750) | 9 / 9 | 90 / 90 | loss +1.0e-03; `skipping x` |",
        "| arch.fp8_no_grad=true; HRM of the paper |  |  |  |  |  |  | needs a card of capability 9.0, "
        "and this one has 8.9 |",
        "| TORCHINDUCTOR_CUDAGRAPHS=1; HRM of the paper |  |  |  |  |  |  | "
        "`RuntimeError: accessing 'x' / overwritten` |",
        "40 passed, 1 failed, 1 skipped:",
        "| `steps-fast-eager` | failed | 3 | `status 1: torch.OutOfMemoryError: CUDA out of memory` |",
        "No time was left for `steps-fast-compiled`,",
        "| HRM of the paper, all together |  |  | 600 | 583 | 550 |",
        "python -m benchmarks.throughput --steps 20 --rounds 3 compile=true experiment=sudoku_extreme_1k data_path=DIR",
    ],
)
def test_the_report_tells_what_was_found(said: str, report: str) -> None:
    assert said in " ".join(report.splitlines()), report  # prose is wrapped


def test_the_report_fits_a_page_of_prose(report: str) -> None:
    is_code = False
    for line in report.splitlines():
        is_code ^= line == "```"
        assert is_code or line.startswith(("|", "- ", "`")) or len(line) <= 100, line


def test_a_report_of_nothing_can_be_written(tmp_path: Path) -> None:
    """The first part may fail, and results may be missing or half written."""
    settings = _settings(tmp_path, sudoku=None, rehearse=False)
    driver = Driver(all_parts(settings), tmp_path, _HERE, print, lambda driver: None)
    driver.records = {"environment": Record(FAILED, 1.0, "status 1: ImportError"), "ranks": Record(TOO_LONG, 9.0)}
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / RESULT).write_text('{"1": {"losses": [')
    write_report(driver, settings, "python -m benchmarks.gpu")
    text = (tmp_path / "report.md").read_text()
    assert "The machine is not known" in text and "Not measured: there was no Sudoku-Extreme." in text
    assert json.loads((tmp_path / "report.json").read_text())["parts"]["ranks"]["result"] is None

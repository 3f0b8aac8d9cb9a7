"""python -m benchmarks.gpu times programs in turn, and knows what bounds a kernel."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.kernels import Event, summary, work
from benchmarks.our_steps import parts_of
from tests.in_process import pretrain_config

# A program that answers requests, and writes each into a common file.
_STEPS = """
import sys, time
name, log = sys.argv[1:]
print("AUTOTUNE mm(62976x512, 512x1536)", flush=True)  # a library's words, which are no answer
if name == "breaks":
    sys.exit("RuntimeError: no FP8 here")
if name == "compiles":
    time.sleep(60)
answers = {"describe": '{"batch_size": 8, "flops": 2e9}', "metrics": '{"train/lm_loss": 2.0}'}
answers |= {"peak": '{"best": {"tflops": 0.5}}', "kernels": '{"busy_ms": 4.0}'}
for request in sys.stdin:
    kind = request.split()[0]
    if name == "dies" and kind == "steps":
        raise RuntimeError("accessing tensor output of CUDAGraphs")
    open(log, "a").write(f"{name} {kind}\\n")
    ms = 5 if name == "hrm_graph_off" else 10
    print(answers.get(kind, f'{{"step_ms": {ms}}}'), flush=True)
"""


def test_programs_are_timed_in_turn_and_none_ends_another(tmp_path: Path) -> None:
    log = tmp_path / "log"
    names = ("hrm", "hrm_graph_off", "breaks", "dies", "compiles")
    programs = {name: [sys.executable, "-c", _STEPS, name, str(log)] for name in names}
    measurement = gpu.Measurement(tmp_path, 20.0)
    gpu.time_in_turn(measurement, programs, None)
    found = json.loads((tmp_path / "result.json").read_text())
    rounds = {name: len(each["rounds"]) for name, each in found["programs"].items()}
    assert rounds == {"hrm": 3, "hrm_graph_off": 3, "dies": 0}
    assert "no FP8 here" in found["ended"]["breaks"] and "CUDAGraphs" in found["ended"]["dies"]
    assert "not warm in time" in found["ended"]["compiles"]
    asked = log.read_text().splitlines()
    assert [line for line in asked if "steps" in line] == ["hrm steps", "hrm_graph_off steps"] * 3
    row = "| hrm_graph_off | 8 | 5.0 (5.0 to 5.0) | 0.500 |  | 4.0 | 1,600 examples | 0 | 80.0% | 2.0000 | 1 |"
    assert row in gpu.summary(found)


@pytest.mark.parametrize("recipe", gpu.RECIPES | gpu.TEXT_RECIPES)
def test_the_recipes_are_valid(recipe: str, tmp_path: Path) -> None:
    for rehearse in (False, True):
        config = pretrain_config(*gpu.overrides_of(recipe, tmp_path, rehearse=rehearse))
        assert config.device == ("cpu" if rehearse else "cuda")


@pytest.mark.slow
def test_a_rehearsal_measures_a_step_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--rehearse", "--minutes", "6", "--only", "hrm", "gpt_small", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
    for name in ("hrm", "gpt_small"):
        each = found["programs"][name]
        assert each["kernels"]["step_ms"] > 0 and each["peak"]["peak_tflops"] > 0 and each["parts"]["forward"] > 0
        assert [row["idle_programs"] for row in each["rounds"]] == [1] * 3
    shown = capsys.readouterr().out
    assert "| hrm | 8 |" in shown and "| gpt_small | 256 |" in shown and " tokens |" in shown


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


# ---- parts of a step ----------------------------------------------------------------------------

CPU, CUDA = DeviceType.CPU, DeviceType.CUDA


def _event(name: str, on: DeviceType, number: int, begin: int, end: int, *, is_named: bool = False) -> SimpleNamespace:
    """Return an event as the profiler gives it, of whole milliseconds."""
    values = {"name": name, "device_type": on, "correlation_id": number, "is_user_annotation": is_named}
    values |= {"start_ns": begin * 10**6, "end_ns": end * 10**6}
    return SimpleNamespace(**{key: partial(lambda value: value, value) for key, value in values.items()})


def test_a_part_on_cuda_is_what_its_code_launched() -> None:
    """The names on the device leave out backward and the optimizer, as in a trace of an H200."""
    code = {1: ("forward", 0, 10), 2: ("forward without gradient", 1, 4), 3: ("backward", 10, 20)}
    code |= {4: ("optimizer", 20, 26), 5: ("Optimizer.step#AdamW.step", 21, 25), 6: ("metrics", 26, 28)}
    # When the host launched a kernel, and when it ran. Numbers of launches are also those of names.
    kernels = {3: ("mm", 2, 5, 9), 1: ("mm", 6, 9, 11), 2: ("mm_backward", 12, 14, 30), 4: ("adamw", 22, 31, 35)}
    kernels |= {5: ("ncclDevKernel_AllReduce", 13, 28, 32), 6: ("add", 27, 35, 36), 7: ("augment", 29, 36, 40)}
    events = [_event(name, CPU, number, *span, is_named=True) for number, (name, *span) in code.items()]
    for number, (name, at, begin, end) in kernels.items():
        events += [_event("cudaLaunchKernel", CPU, number, at, at + 1), _event(name, CUDA, number, begin, end)]
    events += [_event(code[each][0], CUDA, each, 5, 35, is_named=True) for each in (1, 2, 5, 6)]
    events.append(_event("cudaStreamSynchronize", CPU, 8, 30, 40))
    found = parts_of(events, {"data_ms": 0.5, "step_ms": 45.0}, 1, torch.device("cuda"))
    parts = {"forward without gradient": 4, "forward": 2, "backward": 16, "optimizer": 4, "metrics": 1}
    assert found == {"step": 45, "data": 0.5, **parts, "puzzle table": 0, "average": 0, "reduction": 1, "rest": 16.5}

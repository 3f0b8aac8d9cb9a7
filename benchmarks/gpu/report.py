"""Write one Markdown report, and one JSON, of what the parts have found so far.

The Markdown is a section for docs/lab/benchmarks.md.
"""

import json
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable
from datetime import date
from typing import Any

from benchmarks.gpu.driver import CUT_OFF, DONE, NO_TIME, Driver, Record
from benchmarks.gpu.origin import REPOSITORY
from benchmarks.gpu.parts import ACCURACY, Part, Settings
from benchmarks.spread import spread
from utils.files import write_atomically

Found = list[tuple[Part, Any]]
"""Parts of a kind, with their results."""

_WIDTH = 100
_LONGEST_NAME = 60
_LONGEST_MESSAGE = 300


def write_report(driver: Driver, settings: Settings, command: str) -> None:
    """Write report.json and report.md into the folder of the results."""
    results = {part.key: part.read(settings.output / part.key) for part in driver.parts if part.key in driver.records}
    stored = {
        "command": command,
        "date": date.today().isoformat(),
        "rehearsal": settings.rehearse,
        "parts": {
            part.key: {
                "title": part.title,
                "command": _typed(part, settings),
                **driver.records[part.key].__dict__,
                "result": results[part.key],
            }
            for part in driver.parts
            if part.key in driver.records
        },
    }
    write_atomically(settings.output / "report.json", json.dumps(stored, indent=1) + "\n")
    write_atomically(settings.output / "report.md", markdown(driver.parts, driver.records, results, settings, command))


def markdown(
    parts: list[Part], records: dict[str, Record], results: dict[str, Any], settings: Settings, command: str
) -> str:
    """Return the report. What was not measured is missing in it, but for a line that says why."""
    blocks = [_heading(results.get("environment") or {}, records, settings, command)]
    for kind, show in _SECTIONS.items():
        found = [(part, results[part.key]) for part in parts if part.kind == kind and results.get(part.key)]
        if found:
            blocks.append(show(found))
    if not settings.has_real_sudoku:
        blocks.append(
            _prose(
                "**Accuracy over time.** Not measured: there was no Sudoku-Extreme. Give --data-path or --source-dir."
            )
        )
    blocks += [_states(parts, records), _commands(parts, records, settings)]
    return "\n\n".join(blocks) + "\n"


def _prose(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _heading(environment: dict[str, Any], records: dict[str, Record], settings: Settings, command: str) -> str:
    cards, smi = environment.get("cards") or [], environment.get("nvidia_smi") or {}
    name = cards[0] if cards and not settings.rehearse else "A rehearsal on a CPU"
    machine = [f"{len(cards)} x {cards[0]}" if len(cards) > 1 else cards[0]] if cards else []
    if cards:
        machine += [f"{environment['memory_gb']:.0f} GB", f"{environment['multiprocessors']} multiprocessors"]
    words = {"driver_version": "driver {}", "power.limit": "power limit {}", "clocks.max.sm": "at most {}"}
    machine += [text.format(smi[key]) for key, text in words.items() if "N/A" not in smi.get(key, "N/A")]
    if smi.get("mig.mode.current") == "Enabled":
        machine.append("a slice of the card (MIG)")
    machine.append(f"{environment.get('cores', '?')} cores of {environment.get('cpu', 'an unknown CPU')}")
    versions = [f"Python {environment.get('python')}", f"torch {environment.get('torch')}"]
    versions += [f"{key} {environment[key]}" for key in ("triton", "cudnn", "numpy") if environment.get(key)]
    text = f"{'; '.join(machine)}. {', '.join(versions)}."
    if not environment:
        text = "The machine is not known: the part `environment` has no result."
    text += f" {_commits(records)} `{command}`."
    if environment.get("other_versions"):
        others = ", ".join(f"{package} {has}" for package, has in environment["other_versions"].items())
        text += f" Unlike requirements.txt: {others}."
    blocks = [f"### {name}, {date.today().isoformat()}", _prose(text)]
    if settings.rehearse:
        blocks.append(
            _prose(
                "**Every model is tiny here. These figures show that the command works, and say nothing about the "
                "speed of anything.**"
            )
        )
    figures = "Figures are medians, with the lowest and the highest in brackets."
    if not settings.has_real_sudoku:
        figures += " Sudokus were generated, which changes no time of a step."
    blocks.append(_prose(figures))
    return "\n\n".join(blocks)


def _commits(records: dict[str, Record]) -> str:
    """Return the commit that was measured; if there were several, each with its parts."""
    keys: dict[str, list[str]] = {}
    for key, record in records.items():
        if record.commit:
            keys.setdefault(record.commit, []).append(f"`{key}`")
    if len(keys) <= 1:
        return f"Commit {', '.join(keys) or 'unknown'}."
    each = (f"{commit} ({', '.join(parts)})" for commit, parts in keys.items())
    return f"**Not one commit:** {'; '.join(each)}."


def _name(part: Part) -> str:
    return part.title.partition(": ")[2]


def _steps(found: Found) -> str:
    rows, parts_of_step = [], []
    names: list[str] = []
    for part, (result, *_) in found:
        rounds = result["rounds"]
        if not rounds:
            continue
        values = {name: [row[name] for row in rounds] for name in rounds[0]}
        rows.append(
            [
                _name(part),
                str(result["batch_size"]),
                spread(values["step_ms"], _number),
                _number(statistics.median(values["examples_per_second"])),
                _number(statistics.median(values.get("model_tflops", [0.0]))),
                f"{statistics.median(values.get('utilization', [0.0])):.0%}",
                _number(max(values["max_memory_gb"])) if "max_memory_gb" in values else "",
                f"{result['start_s']:.0f}",
                str(len(rounds)),
            ]
        )
        if result["parts"]:
            names = names or [name for name in result["parts"] if name != "step"]
            parts_of_step.append([_name(part), *(_number(result["parts"][name]) for name in ("step", *names))])
    titles = ["recipe", "slots", "step, ms", "examples/s", "TFLOP/s", "of the products", "GB", "start, s", "rounds"]
    text = _prose(
        "**Steps.** The share is that of the TFLOP/s which the same matrices reach alone. The start includes compiling "
        "and the first steps."
    )
    blocks = [text, _table(titles, rows)]
    if parts_of_step:
        blocks += [
            _prose("**Parts of a step**, in ms, of three steps after the rounds:"),
            _table(["recipe", "step", *names], parts_of_step),
        ]
    return "\n\n".join(blocks)


def _peak(found: Found) -> str:
    rows, best, times = [], [], ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
    for part, result in found:
        total = 0.0
        for each in result["products"]:
            operations = 2.0 * each["rows"] * each["in_features"] * each["out_features"]
            total += each["number"] * operations
            rows.append(
                [
                    _name(part),
                    f"{each['rows']:,} x {each['in_features']:,} x {each['out_features']:,}",
                    str(each["number"]),
                    *(_number(operations / each[name] / 1e9) for name in times),
                ]
            )
        sums = [sum(each["number"] * each[name] for each in result["products"]) for name in times]
        rows.append([f"{_name(part)}, all together", "", "", *(_number(total / each / 1e9) for each in sums)])
        most, side = result["best"], f"{result['best']['size']:.0f}"
        best.append(
            f"Two matrices of {side} x {side} reach {_number(most['tflops'])} TFLOP/s in {result['dtype']}, and a "
            f"large copy {_number(most['gb_per_s'])} GB/s."
        )
    text = _prose(f"**Products of matrices**, in TFLOP/s, nothing else running. {best[0]}")
    titles = ["recipe", "rows x inputs x outputs", "matrices", "forward", "gradient of inputs", "gradient of weights"]
    return f"{text}\n\n{_table(titles, rows)}"


def _waits(found: Found) -> str:
    if not any(result["is_counted"] for _, result in found):
        return _prose("**Waits of the host.** Not counted: there is no card for which a CPU waits.")
    rows = []
    for part, result in found:
        places = ", ".join(f"{times} x `{place}`" for place, times in result["places"].items())
        rows.append([_name(part), str(result["steps"]), str(sum(result["places"].values())), places])
    text = _prose("**Waits of the host between two logs**, compiled. There should be none.")
    return f"{text}\n\n{_table(['recipe', 'steps', 'waits', 'where'], rows)}"


_BOUNDS = {
    "memory": "memory",
    "compute": "compute",
    "launches": "launches (shorter than 5 µs)",
    "latency": "latency (under 40 % of both)",
    "unknown": "unknown",
}


def _kernels(found: Found) -> str:
    blocks = []
    for part, result in found:
        what = result["what"]
        shares = [f"{_BOUNDS[name]} {ms / result['total_ms']:.0%}" for name, ms in result["by_bound"].items()]
        text = (
            f"**The largest {what}: {_name(part)}**, compiled. A step has {result['calls']:,.0f} calls of "
            f"{result['different']} {what}. "
        )
        if what == "kernels":
            busy = result["busy_ms"] / result["step_ms"]
            text += (
                f"The card computes {_number(result['busy_ms'])} ms of a step of {_number(result['step_ms'])} ms "
                f"({busy:.0%}); the rest is waiting for launches. The host waits {_number(result['waits'])} times a "
                "step. "
            )
        text += f"What bounds them, by time: {', '.join(shares)}. Bytes are compared with a large copy "
        text += f"({_number(result['best']['gb_per_s'])} GB/s), operations with a large product "
        text += f"({_number(result['best']['tflops'])} TFLOP/s)."
        rows = [
            [
                f"`{_short(row['name'])}`",
                _number(row["calls"]),
                _number(row["ms"]),
                f"{row['ms'] / result['total_ms']:.0%}",
                _number(row["us"]),
                "" if row["memory"] is None else f"{row['memory']:.0%}",
                "" if row["compute"] is None else f"{row['compute']:.0%}",
                "" if row["occupancy"] is None else f"{row['occupancy']:.0f}%",
                row["bound"],
            ]
            for row in result["largest"]
        ]
        titles = [
            what[:-1],
            "calls a step",
            "ms a step",
            "share",
            "µs",
            "of copy",
            "of product",
            "occupancy",
            "bound by",
        ]
        if all(row["occupancy"] is None for row in result["largest"]):
            for cells in (titles, *rows):
                del cells[-2]
        blocks.append(f"{_prose(text)}\n\n{_table(titles, rows)}")
    return "\n\n".join(blocks)


def _short(name: str) -> str:
    """Return a kernel's name without what stands in each of them, and not too long for a table."""
    name = name.replace("|", "/").replace("`", "'").removeprefix("void ")
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _cell(text: str) -> str:
    """Return a message so that it can stand as code in a table."""
    return text.replace("|", "/").replace("`", "'")[:_LONGEST_MESSAGE]


def _ranks(found: Found) -> str:
    ((_, result),) = found
    one, two = result["1"], result.get("2")
    if two is None:
        return _prose("**Two ranks on one card.** One rank has trained, two have not.")
    differences = [abs(b - a) / abs(a) for a, b in zip(one["losses"], two["losses"], strict=False)]
    times = [spread(each["step_ms"][1:], _number) for each in (one, two)]
    return _prose(
        f"**Two ranks on one card**, over gloo, eager, float32. Over {len(differences)} steps the losses differ from "
        f"those of one rank by {max(differences):.1e} at most, relatively. A step takes {times[0]} ms with one rank "
        f"and {times[1]} ms with two, which share the card and send gradients through the host."
    )


def _levers(found: Found) -> str:
    rows = []
    for part, result in found:
        with_, without = (result.get(arm) or {"rounds": []} for arm in ("with", "without"))
        pairs = list(zip(with_["rounds"], without["rounds"], strict=False))
        if "raised" in result or not pairs:
            raised = f"`{_cell(result['raised'])}`" if "raised" in result else ""
            rows.append([_name(part), *[""] * 6, raised or result.get("skipped", "no round is over")])
            continue
        ratios = [a["step_ms"] / b["step_ms"] for a, b in pairs]
        has_losses = "loss" in with_ and "loss" in without
        rows.append(
            [
                _name(part),
                str(without["batch_size"]),
                *(spread([row["step_ms"] for row in arm["rounds"]], _number) for arm in (without, with_)),
                spread(ratios, "{:.3f}".format),
                " / ".join(_number(max(row["max_memory_gb"] for row in arm["rounds"])) for arm in (without, with_)),
                " / ".join(f"{arm['start_s']:.0f}" for arm in (without, with_)),
                "; ".join(
                    [
                        *([f"loss {with_['loss'] / without['loss'] - 1:+.1e}"] if has_losses else []),
                        *([f"`{_cell(result['warned'])}`"] if "warned" in result else []),
                    ]
                ),
            ]
        )
    text = (
        "**Levers**, each alone, on compiled steps. The ratio is the time with the lever divided by that without it, "
        "round by round. The last column is what was raised, why it was left out, or how far the mean loss of the same "
        "steps is from that without the lever."
    )
    if any(result.get("with", {}).get("device_type") == "cpu" for _, result in found):
        text += " On a CPU, CUDA graphs, padded shapes and attention without cuDNN change nothing."
    titles = ["lever", "slots", "without, ms", "with, ms", "ratio", "GB", "start, s", "found"]
    return f"{_prose(text)}\n\n{_table(titles, rows)}"


def _attention(found: Found) -> str:
    ((_, result),) = found
    backends = list(result[0]["ms"])
    rows = []
    for how in ("forward", "forward and backward"):
        for each in result:
            cells = ["-" if each["ms"][name] is None else _number(each["ms"][name][how]) for name in backends]
            rows.append([f"{each['positions']:,}", str(each["slots"]), how, *cells, each["choices"][how]])
    text = _prose(
        "**Attention by its backends**, in ms, 8 heads of 64, each call alone. A dash is a backend that has raised an "
        "error at this shape; the errors are below. Without a choice of the backend, PyTorch makes one: the last "
        "columns."
    )
    table = _table(["positions", "slots", "pass", *backends, "which is"], rows)
    shapes: dict[tuple[str, str], list[str]] = {}
    for each in result:
        for name, reason in each["refused"].items():
            shapes.setdefault((name, reason), []).append(f"{each['positions']:,}")
    refusals = [f"- {name}, {' and '.join(at)} positions: `{_cell(reason)}`" for (name, reason), at in shapes.items()]
    return "\n\n".join([text, table, *(["\n".join(refusals)] if refusals else [])])


def _packing(found: Found) -> str:
    ((_, result),) = found
    kernels = list(result[0]["ms"])
    rows = [
        [
            f"{each['tokens']:,}",
            f"{each['longest']:,}",
            each["mask"],
            how,
            *("-" if each["ms"][kernel] is None else _number(each["ms"][kernel][how]) for kernel in kernels),
        ]
        for how in ("forward", "forward and backward")
        for each in result
    ]
    text = _prose(
        "**Attention in a packed row of text**, in ms, by `arch.attention_kernel`, 8 heads of 64, each call alone. A "
        "dash is a kernel that has raised an error; the errors are below."
    )
    table = _table(["tokens", "longest sequence", "mask", "pass", *kernels], rows)
    reasons = {(kernel, reason) for each in result for kernel, reason in each["refused"].items()}
    refusals = [f"- {kernel}: `{_cell(reason)}`" for kernel, reason in sorted(reasons)]
    return "\n\n".join([text, table, *(["\n".join(refusals)] if refusals else [])])


def _checkpoint(found: Found) -> str:
    ((_, result),) = found
    rows = [
        [
            str(row["save"]),
            f"{1e3 * row['stall_s']:.0f}",
            f"{row['step_while_writing']:.2f}",
            f"{row['until_published_s']:.2f}",
        ]
        for row in result["rows"]
    ]
    text = _prose(
        f"**Checkpoints** of {result['gb']:.2f} GB: the HRM of the paper, {result['num_parameters']:,} parameters, "
        f"{result['batch_size']} slots. A step takes {1e3 * result['step_s']:.0f} ms. The first save also allocates."
    )
    titles = ["save", "training stands still, ms", "a step while it is written, relatively", "until published, s"]
    return f"{text}\n\n{_table(titles, rows)}"


def _accuracy(found: Found) -> str:
    ((_, result),) = found
    text = (
        f"**Accuracy over time.** `experiment=sudoku_extreme_fast`, one seed: {result['last_step']:,} steps in "
        f"{result['minutes']:.1f} minutes, evaluations and compiling included."
    )
    if result["step_ms"]:
        text += f" A step takes {spread(result['step_ms'], _number)} ms."
    rows = [
        [f"{row['step']:,}", f"{row['minutes']:.1f}", f"{row['exact_accuracy']:.3f}", f"{row['examples']:,.0f}"]
        for row in result["evaluations"]
    ]
    if not rows:
        return _prose(f"{text} There was no evaluation yet.")
    return f"{_prose(text)}\n\n{_table(['step', 'minutes', 'exact', 'of puzzles'], rows)}"


def _tests(found: Found) -> str:
    ((_, result),) = found
    failed = len(result["failed"])
    text = f"**Tests on the card.** {result['passed']} passed, {failed} failed, {result['skipped']} skipped"
    lines = [_prose(f"{text}{':' if failed else '.'}")]
    return "\n\n".join([*lines, *(["\n".join(f"- `{name}`" for name in result["failed"])] if failed else [])])


_SECTIONS: dict[str, Callable[[Found], str]] = {
    "steps": _steps,
    "kernels": _kernels,
    "waits": _waits,
    "peak": _peak,
    "ranks": _ranks,
    "checkpoint": _checkpoint,
    "packing": _packing,
    "attention": _attention,
    "levers": _levers,
    ACCURACY: _accuracy,
    "tests": _tests,
}


def _states(parts: list[Part], records: dict[str, Record]) -> str:
    """Return the parts that are not done. What they found until then is in the tables above."""
    rows, waiting = [], []
    for part in parts:
        record = records.get(part.key, Record(NO_TIME))
        if record.status == NO_TIME:
            waiting.append(f"`{part.key}`")
        elif record.status != DONE or record.note:
            note = f"`{_cell(record.note)}`" if record.note else ""
            rows.append([f"`{part.key}`", record.status, f"{record.seconds:.0f}", note])
    num_done = sum(part.key in records and records[part.key].status == DONE for part in parts)
    text = f"**State.** {num_done} of {len(parts)} parts are done."
    if waiting:
        text += f" No time was left for {', '.join(waiting)}."
    if waiting or any(row[1] == CUT_OFF for row in rows):
        text += " The same command goes on."
    return "\n\n".join([_prose(text), *([_table(["part", "state", "s", "why"], rows)] if rows else [])])


def _typed(part: Part, settings: Settings) -> str:
    """Return a part's command as a person would type it in the repository."""
    # A page names no folder of a machine.
    names = {sys.executable: "python", f"{settings.output}/": "OUTPUT/", f"{REPOSITORY}/": ""}
    data = {str(folder): "DIR" for folder in (settings.sudoku, settings.source_dir) if folder is not None}
    words, skip = [], False
    for word in part.command:
        if skip or word in ("--json", "--folder"):
            skip = not skip
            continue
        for path, name in (data | names).items():
            word = word.replace(path, name)
        words.append(word)
    return shlex.join(words)


def _commands(parts: list[Part], records: dict[str, Record], settings: Settings) -> str:
    typed = [_typed(part, settings) for part in parts if part.key in records and records[part.key].seconds]
    text = _prose("**Commands of the parts.** OUTPUT is the folder of the results, and DIR that of the data.")
    return "\n\n".join([text, "\n".join(["```", *typed, "```"])])

"""The results of an evaluation: tables for people, results.json, and the folder that holds both."""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dataset.evaluators import Evaluators
from models.metric_sums import NUM_BINS
from training.config import PretrainConfig
from training.data import AnySplit
from training.trained import Trained
from utils.errors import UserError
from utils.files import file_errors, plain, refuse_links
from utils.terminal import tell

_IN_OTHER_TABLES = ("/reliability/", "/running/", "exact_accuracy_of/", "segments_of/")
_BESIDE_THE_SINGLE_PASS = ("tta/", "trajectories/", "restarts/")

Intervals = dict[str, tuple[float, float]]


def intervals(metrics: dict[str, float], evaluators: Evaluators) -> Intervals:
    """Return 95 % confidence intervals of the metrics that are shares of examples or ARC tasks."""
    of_examples = {"exact_accuracy", "any_exact_accuracy", "q_halt_accuracy", *evaluators.checks}
    found = {}
    for name, value in metrics.items():
        _, set_name, metric = name.split("/", 2)
        *_, of_method = metric.rsplit("/", 1) if metric.startswith(_BESIDE_THE_SINGLE_PASS) else (metric,)
        num_answers = metrics.get(f"eval/{set_name}/{metric.replace('exact_accuracy', 'num_answers', 1)}")
        if metric.startswith("exact_accuracy") and num_answers is not None:  # of text
            found[name] = wilson_interval(value, num_answers)
        elif of_method in of_examples or metric.startswith("exact_accuracy_at_step/"):
            found[name] = wilson_interval(value, metrics[f"eval/{set_name}/num_examples"])
        elif metric.startswith("pass@") and evaluators.votes is not None:
            found[name] = wilson_interval(value, evaluators.votes.num_tasks)
    return found


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `num` independent trials (Wilson, 1927).

    It lies within [0, 1], also for shares of 0 and 1.
    """
    z = 1.959964
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def table(metrics: dict[str, float], found: Intervals) -> Iterator[str]:
    for name, value in metrics.items():
        if any(part in name for part in _IN_OTHER_TABLES):
            continue
        if name.split("/")[2] in ("num_examples", "num_answers"):
            yield f"  {name:<44}{value:>10,.0f}"
        else:
            low_high = f"   {found[name][0]:.4f} .. {found[name][1]:.4f}" if name in found else ""
            yield f"  {name:<44}{value:>10.4f}{low_high}"


def reliability_bins(metrics: dict[str, float], set_name: str) -> list[dict[str, float]]:
    """Return the bins of confidence that have answers: limits, and what their answers have."""
    found = []
    for n in range(1, NUM_BINS + 1):
        prefix = f"eval/{set_name}/reliability/{n}/"
        if prefix + "count" in metrics:
            limits = {"low": (n - 1) / NUM_BINS, "high": n / NUM_BINS, "count": round(metrics[prefix + "count"])}
            found.append(limits | {name: metrics[prefix + name] for name in ("confidence", "accuracy")})
    return found


def reliability_table(set_name: str, bins: Sequence[dict[str, float]], error: float) -> Iterator[str]:
    yield f"confidence against accuracy of the set {set_name}: expected calibration error {error:.4f}"
    yield f"  {'confidence':<12}{'examples':>12}{'mean confidence':>18}{'accuracy':>12}"
    for each in bins:
        between = f"{each['low']:.1f} .. {each['high']:.1f}"
        yield f"  {between:<12}{each['count']:>12,}{each['confidence']:>18.4f}{each['accuracy']:>12.4f}"


def compute_table(set_name: str, rows: Sequence[dict[str, Any]], num_examples: float) -> Iterator[str]:
    yield f"accuracy of the set {set_name} against compute, 95 % intervals"
    yield f"  {'':<34}{'segments of an example':>24}{'exact_accuracy':>18}"
    for row in rows:
        low, high = wilson_interval(accuracy := row["exact_accuracy"], num_examples)
        yield f"  {row['method']:<34}{row['segments']:>24.2f}{accuracy:>18.4f}   {low:.4f} .. {high:.4f}"


# ---- the folder --------------------------------------------------------------------------------


class _FormerResults(BaseModel):
    num_examples: dict[str, int] = {}
    data: str = ""


def _former_results(folder: Path) -> _FormerResults:
    """Return the results in a folder. Damaged results count as those of no examples."""
    try:
        return _FormerResults.model_validate_json(plain(folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return _FormerResults()


def prepare_folder(
    named: str | None,
    trained: Trained,
    data_path: str | None,
    split: AnySplit,
    max_examples: int | None,
    *,
    writes_more: bool,
) -> tuple[Path | None, bool]:
    """Make the folder for results.

    A quick look must not cost the results of hours, which lie in the folder of a run. A folder that
    the user named loses its results.

    Returns:
        The folder, or None if there is nothing to write; and whether it keeps its results, because
        they are of more examples.
    """
    out, keeps_results = Path(named) if named is not None else _folder_in_run(trained, data_path, split), False
    if out is None:
        return None, False
    if named is None:
        with file_errors():
            refuse_links([out.parent, out, *out.rglob("*")])  # the run may come from somebody else
        num = sum(split.num_examples(max_examples).values())
        former = sum(_former_results(out).num_examples.values())
        if keeps_results := former > num:
            tell(f"{out} keeps its results of {former:,} examples; give out=<another folder> to store those of {num:,}")
            if not writes_more:
                return None, True
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(f"{out} can't be written ({error.strerror}); give another folder with out=...") from error
    return out, keeps_results


def _folder_in_run(trained: Trained, data_path: str | None, split: AnySplit) -> Path | None:
    """Return the folder for results on the run's own data, or beside it one for other data.

    Its name ends with the name of other data, and also with a number if that folder holds results
    on data of the same name in another place.
    """
    if trained.checkpoint is None or trained.config is None:
        return None
    step = trained.checkpoint.path
    own = step.parent / "eval_outputs" / step.name
    if data_path is None or is_own(data_path, trained.config):
        return own
    folder = first = own.with_name(f"{own.name}_{split.path.parent.resolve().name}")
    number = 1
    while (former := _former_results(folder).data) and os.path.abspath(former) != os.path.abspath(split.path):
        number += 1
        folder = first.with_name(f"{first.name}_{number}")
    return folder


def is_own(data_path: str, of_run: PretrainConfig) -> bool:
    """Return whether the run's own test split is that of this dataset alone."""
    return {Path(path).resolve() for path in of_run.test_paths} == {Path(data_path).resolve()}

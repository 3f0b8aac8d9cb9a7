"""The results of an evaluation: tables for people, results.json, and the folder that holds both."""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from dataset.evaluators import Evaluators
from models.metric_sums import NUM_BINS
from training.data import AnySplit
from training.more_compute import Cost
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


@dataclass(frozen=True)
class Bin:
    """The answers whose confidence lies between two numbers."""

    low: float
    high: float
    count: int
    confidence: float  # mean
    accuracy: float


def reliability_bins(metrics: dict[str, float], set_name: str) -> list[Bin]:
    """Return the bins of confidence that have answers."""
    found = []
    for n in range(1, NUM_BINS + 1):
        prefix = f"eval/{set_name}/reliability/{n}/"
        if prefix + "count" in metrics:
            confidence, accuracy = metrics[prefix + "confidence"], metrics[prefix + "accuracy"]
            found.append(Bin((n - 1) / NUM_BINS, n / NUM_BINS, round(metrics[prefix + "count"]), confidence, accuracy))
    return found


def reliability_table(set_name: str, bins: list[Bin], error: float) -> Iterator[str]:
    yield f"confidence against accuracy of the set {set_name}: expected calibration error {error:.4f}"
    yield f"  {'confidence':<12}{'examples':>12}{'mean confidence':>18}{'accuracy':>12}"
    for each in bins:
        between = f"{each.low:.1f} .. {each.high:.1f}"
        yield f"  {between:<12}{each.count:>12,}{each.confidence:>18.4f}{each.accuracy:>12.4f}"


def compute_table(rows: Sequence[Cost], num_examples: float) -> Iterator[str]:
    yield f"accuracy of the set {rows[0].set_name} against compute, 95 % intervals"
    yield f"  {'':<34}{'segments of an example':>24}{'exact_accuracy':>18}"
    for row in rows:
        low, high = wilson_interval(row.exact_accuracy, num_examples)
        yield f"  {row.method:<34}{row.segments:>24.2f}{row.exact_accuracy:>18.4f}   {low:.4f} .. {high:.4f}"


# ---- the folder --------------------------------------------------------------------------------


class FormerResults(BaseModel):
    """What counts of the results.json of an earlier evaluation."""

    num_examples: dict[str, int] = {}
    data: str = ""

    @staticmethod
    def of(folder: Path) -> "FormerResults":
        """Return the results in a folder. Damaged results count as those of no examples."""
        try:
            text = plain(folder / "results.json").read_text(encoding="utf-8")
            return FormerResults.model_validate_json(text)
        except (OSError, UnicodeDecodeError, ValidationError):
            return FormerResults()


def folder_for_other_data(own: Path, split: AnySplit) -> Path:
    """Return the folder for results on other data than the run's own, beside the folder for these.

    Its name ends with the name of the data, and also with a number if that folder holds results on
    data of the same name in another place.
    """
    first = own.with_name(f"{own.name}_{split.path.parent.resolve().name}")
    folder, number = first, 1
    while (former := FormerResults.of(folder).data) and os.path.abspath(former) != os.path.abspath(split.path):
        number += 1
        folder = first.with_name(f"{first.name}_{number}")
    return folder


def prepare_folder(
    named: str | None,
    of_run: Path | None,
    split: AnySplit,
    max_examples: int | None,
    *,
    saves_answers: bool,
    draws: bool,
) -> tuple[Path | None, bool]:
    """Make the folder for results.

    A quick look must not cost the results of hours, which lie in the folder of a run.

    Args:
        named: the folder that the user named, which loses its results.
        of_run: the folder otherwise; None: results are not written.

    Returns:
        The folder, or None if there is nothing to write; and whether it keeps its results, because
        they are of more examples.

    Raises:
        UserError: The folder can't be written.
    """
    out, keeps_results = Path(named) if named is not None else of_run, False
    if out is None:
        return None, False
    if named is None:
        with file_errors():
            refuse_links([out.parent, out, *out.rglob("*")])  # the run may come from somebody else
        num = sum(split.num_examples(max_examples).values())
        former = sum(FormerResults.of(out).num_examples.values())
        if keeps_results := former > num:
            tell(f"{out} keeps its results of {former:,} examples; give out=<another folder> to store those of {num:,}")
            if not saves_answers and not draws:
                return None, True
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(f"{out} can't be written ({error.strerror}); give another folder with out=...") from error
    return out, keeps_results

"""Draw pictures with matplotlib and plotly, two optional packages."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import refuse_links, write_atomically
from utils.text import one_line

BLACK, BLUE, RED, GREY = "#1d2127", "#1f6feb", "#c2410c", "#8a8f98"
_DPI = 130


def pyplot() -> Any:
    """Import matplotlib, with the backend that draws into files and needs no screen.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("drawing needs matplotlib; pip install -r requirements-demo.txt") from error

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plotly() -> tuple[Any, Any]:
    """Import plotly, and return its modules graph_objects and subplots.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly import graph_objects, subplots
    except ImportError as error:
        raise UserError("an HTML plot needs plotly; pip install -r requirements-plot.txt") from error
    return graph_objects, subplots


def save_figure(figure: Any, path: Path) -> None:
    """Save and close a figure.

    Raises:
        UserError: the path is a link or cannot be written.
    """
    refuse_links([path])
    picture = BytesIO()
    try:
        figure.savefig(picture, dpi=_DPI)
        write_atomically(path, picture.getbuffer())
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"cannot write {path} ({reason}); choose another file, or make its folder writable") from None
    finally:
        pyplot().close(figure)


def draw_accuracy_over_steps(accuracy: Mapping[str, Sequence[float]], trained_steps: int, path: Path) -> None:
    """Draw the share of puzzles that are solved exactly after 1, 2, ... steps, a line per set.

    Args:
        accuracy: for each set the shares after 1, 2, ... steps.
        trained_steps: the number of steps in training, drawn as a vertical line.
        path: the picture's file.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.5, 3.4), constrained_layout=True)
    for name, values in accuracy.items():
        steps = range(1, len(values) + 1)
        axis.plot(steps, values, marker="o", markersize=4, label=f"{name}: {values[-1]:.3f} at the last")
    longest = max(map(len, accuracy.values()), default=0)
    if trained_steps < longest:
        axis.axvline(trained_steps, color="#8a8f98", linewidth=1, linestyle="--", label="as many as in training")
    axis.set(xlabel="steps of reasoning", ylabel="puzzles solved exactly", ylim=(-0.02, 1.02))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="best")
    save_figure(figure, path)


def draw_reliability(bins: Mapping[str, Sequence[tuple[float, float, int, float, float]]], path: Path) -> None:
    """Draw accuracy over confidence, a line per set, above the number of answers.

    A model whose confidence is its accuracy has its points on the diagonal.

    Args:
        bins: for each set the lower and the upper limit of each bin of confidence, and of its
            answers the number, the mean confidence and the accuracy.
        path: the picture's file.
    """
    plt = pyplot()
    figure, (axis, counts) = plt.subplots(
        2, 1, figsize=(4.4, 5.2), height_ratios=(4, 1), sharex=True, constrained_layout=True
    )
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="confidence = accuracy")
    for place, (name, of_set) in enumerate(bins.items()):
        low, high, num, confidence, accuracy = zip(*of_set, strict=True)
        (line,) = axis.plot(confidence, accuracy, marker="o", markersize=5, label=name)
        width = (high[0] - low[0]) / len(bins)  # side by side, a bar of each set
        left = [each + place * width for each in low]
        counts.bar(left, num, width=0.9 * width, align="edge", color=line.get_color())
    axis.set(ylabel="share of right answers", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    counts.set(xlabel="confidence, sigmoid(q_halt)", ylabel="answers", yscale="log")
    # In a range of few powers of ten, Matplotlib would write numbers between them that overlap.
    counts.tick_params(axis="y", which="minor", labelleft=False)
    for each in (axis, counts):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="best")
    save_figure(figure, path)

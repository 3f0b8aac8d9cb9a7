"""Draw the pictures of view.py --png: the curves and a puzzle of a run, or examples of a dataset.

The pictures are drawn from the data of the page. dataset/pictures.py draws the boards.
"""

from pathlib import Path

import numpy as np

from dataset.pictures import Board, draw_answers, draw_boards, names_of_tokens, whole_board
from utils.drawing import BLUE, GREY, pyplot, save_figure
from viewer.pages import Page, board_for, from_text, label_of, spread

_NUM_EXAMPLES = 4


def draw_curves(page: Page, path: Path) -> bool:
    """Draw cross-entropy and exact accuracy over training steps.

    Returns:
        Whether the run logged one of them, so that there is a picture.
    """
    plt = pyplot()
    is_text = "texts" in page
    titles = {
        "lm_loss": "cross-entropy per token",
        "loss": "cross-entropy per token",
        "exact_accuracy": "problems answered exactly" if is_text else "puzzles solved exactly",
    }
    of_training = "training" if is_text else "training (sequences that halted)"
    panels = [(titles[one["metric"]], one) for one in page["curves"] if one["metric"] in titles]
    panels.sort(key=lambda panel: list(titles).index(panel[1]["metric"]))
    if not panels:
        return False
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 3.2), squeeze=False, constrained_layout=True
    )
    for axis, (title, curve) in zip(axes.flat, panels, strict=True):
        tests = [series["name"] for series in curve["series"] if series["name"] != "train"]
        for series in curve["series"]:
            if series["name"] == "train":
                label, style = of_training, {"color": GREY, "linewidth": 1}
            else:
                label = "test" if len(tests) == 1 else series["name"].removeprefix("eval ")
                style = {"linewidth": 2, "marker": "o", "markersize": 4}
                if len(tests) == 1:
                    style["color"] = BLUE
            values = [float("nan") if value is None else value for value in series["values"]]
            axis.plot(series["steps"], values, label=label, **style)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if curve["metric"].endswith("loss"):
            axis.set_yscale("log")
        else:
            axis.set_ylim(-0.02, 1.02)
    axes.flat[-1].legend(frameon=False, loc="best")
    save_figure(figure, path)
    return True


def draw_puzzle(page: Page, path: Path) -> None:
    """Draw the puzzle that the page opens with, and the answer after each step that changed it."""
    example = page["examples"][page["opens"]]
    named = f", {example['name']}" if "name" in example else ""
    draw_answers(
        board_for(page, example),
        from_text(example["input"]),
        label_of(example),
        np.stack([from_text(answer) for answer in example["answers"]]),
        f"{page['title']}: row {example['row']} of {example['set']}{named}",
        path,
        confidence_T=example.get("confidence"),
    )


def draw_examples(page: Page, path: Path) -> None:
    """Draw the first example of a few groups of a dataset, each question beside its solution."""
    shape = page["board"]
    firsts: dict[tuple[str, int], Page] = {}
    for example in page["examples"]:
        firsts.setdefault((example["set"], example["group"]), example)
    groups = list(firsts.values())
    boards: list[Board] = []
    for place in spread(len(groups), _NUM_EXAMPLES):
        example = groups[place]
        question_S = from_text(example["input"])
        boards.append(whole_board(shape, f"{example['set']}, row {example['row']}", question_S, question_S))
        boards.append(whole_board(shape, "solution", label_of(example), question_S))
    draw_boards(shape, boards, page["title"], names_of_tokens(shape), path, in_pairs=True)

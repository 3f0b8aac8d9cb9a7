"""Draw the pictures of view.py --png: the curves and a puzzle of a run, or examples of a dataset.

dataset/pictures.py draws the boards, and viewer/curve_pictures.py the curves.
"""

from pathlib import Path

import numpy as np

from dataset.pictures import Board, draw_answers, draw_boards, names_of_tokens, whole_board
from viewer.curve_pictures import draw_png
from viewer.pages import Page, from_text, label_of, spread
from viewer.run_page import panels_of_page

_NUM_EXAMPLES = 4


def draw_run(run: Path, page: Page) -> list[str]:
    """Draw curve.png and puzzle.png into the run's folder, and return lines that report them.

    The puzzle is the one that the page opens with, and the answer after each step that changed it.
    Without saved outputs there is none, and the report names the command that saves them.
    """
    curve, puzzle, lines = run / "curve.png", run / "puzzle.png", []
    _, panels = panels_of_page(run)
    if chosen := [panel for panel in panels if panel.metric in ("lm_loss", "loss", "exact_accuracy")]:
        draw_png(chosen, curve)
        lines.append(f"drew {curve}")
    if "texts" in page:
        return lines
    if not page["examples"]:
        return [*lines, f"{puzzle} needs saved outputs; run this, then view.py again: {page['command']}"]
    example = page["examples"][page["opens"]]
    named = f", {example['name']}" if "name" in example else ""
    draw_answers(
        page.get("boards", {}).get(example["set"], page["board"]),
        from_text(example["input"]),
        label_of(example),
        np.stack([from_text(answer) for answer in example["answers"]]),
        f"{page['title']}: row {example['row']} of {example['set']}{named}",
        puzzle,
        confidence_T=example.get("confidence"),
    )
    return [*lines, f"drew {puzzle}"]


def draw_examples(page: Page, path: Path) -> list[str]:
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
    return [f"drew {path}"]

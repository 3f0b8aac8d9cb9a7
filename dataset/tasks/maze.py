"""Define the maze task. The rules and the search for paths are in dataset/maze.py."""
# B, N = mazes, S = cells of a maze, L = side

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dataset import maze
from dataset.tasks.base import GREY, Fault, Verdict, count
from dataset.tasks.square import SquareTask
from utils.errors import UserError

if TYPE_CHECKING:
    import torch


class MazeTask(SquareTask):
    """Mazes of one size. dataset/maze.py lists the tokens and the characters."""

    kind = noun = "maze"
    plural = "mazes"
    shapes = f"maze: a square of {maze.VOCAB_SIZE}"
    checked = "Maze: labels that are no shortest path."
    # Whether an answer is a path from S to G, and whether no path is shorter. The label does not
    # matter, because there are many shortest paths and the label is only one of them.
    metrics = ("path_valid", "path_optimal")
    has_one_solution = False
    tokens = ("padding", "wall", "free", "start", "goal", "path")
    symbols = "?" + maze.SYMBOLS[1:]
    looks = (("? ", ""), ("██", GREY), *((f"{symbol} ", "") for symbol in maze.SYMBOLS[2:]))

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> MazeTask | None:
        side = maze.side_of(seq_len)
        return None if side is None or vocab_size != maze.VOCAB_SIZE else cls(side)

    def of_other_size(self, num_cells: int) -> MazeTask | None:
        # Any square would be a maze. A row of a large maze must not be taken for a whole small one.
        other = self.of_shape(num_cells, maze.VOCAB_SIZE)
        return other if other is not None and maze.MIN_SIDE <= other.side <= maze.MAX_SIDE else None

    def parse(self, text: str, where: str) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(maze.SYMBOLS) if 0 < token < maze.PATH}
        tokens_S = self._parse_cells(text, where, token_of, "# for a wall, blank, S and G")
        for symbol in "SG":
            num = int((tokens_S == token_of[symbol]).sum())
            if num != 1:
                raise UserError(f"{where} has {num or 'no'} {symbol}, where a maze has one; correct it")
        if maze.shortest_path(tokens_S.reshape(self.side, self.side)) is None:
            raise UserError(f"{where} has no way from S to G; open one")
        return tokens_S

    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        solution_S = self._parse_cells(text, where, *self.symbols_of_solutions())
        verdict = self.verdict(question_S, solution_S)
        if not verdict.valid:
            raise UserError(f"{where} is no solution of its question: {verdict.reason}; correct it")
        return solution_S

    def symbols_of_solutions(self) -> tuple[dict[str, int], str]:
        return super().symbols_of_solutions()[0], "#, blank, S, G and o"

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        judged = maze.judge_paths(question_S[None], answer_S[None])
        if not judged["path_valid"][0]:
            if num_altered := int(self._against_rules(question_S, answer_S).sum()):
                return Verdict(False, False, f"{count(num_altered, 'cell')} of the maze altered")
            if not (answer_S == maze.PATH).any():
                return Verdict(False, False, "no path is marked")
            return Verdict(False, False, "the marked cells are not one path from S to G")
        num_steps = int((answer_S == maze.PATH).sum()) + 1
        if judged["path_optimal"][0]:
            return Verdict(True, True, f"a path of {count(num_steps, 'step')}, and there is no shorter one")
        shortest = maze.shortest_path(question_S.reshape(self.side, self.side))
        assert shortest is not None
        return Verdict(True, False, f"a path of {num_steps} steps, but the shortest has {len(shortest) - 1}")

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        return (answer_S != question_S) & ~((answer_S == maze.PATH) & (question_S == maze.BLANK))

    def _allowed_transforms(self, inputs_NS: np.ndarray, labels_NS: np.ndarray) -> np.ndarray:
        return maze.allowed_transforms(inputs_NS, labels_NS)

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        # The breadth-first search runs on the host.
        found = maze.judge_paths(inputs_BS.cpu().numpy(), predictions_BS.cpu().numpy())
        return {name: inputs_BS.new_tensor(found[name]).bool() for name in self.metrics}

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        complete_N = labelled_NS.all(axis=1)
        judged = maze.judge_paths(inputs_NS, labels_NS)
        valid_N, shortest_N = judged["path_valid"], judged["path_optimal"]
        return {
            ("labels", "is not its input with one path from S to G"): complete_N & ~valid_N,
            ("labels", "is a path, but not a shortest one"): complete_N & valid_N & ~shortest_N,
        }

"""What an evaluation is about: a trained model, and the data on which it is scored."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.evaluators import EvaluatorName
from training.config import PretrainConfig
from training.kinds import kind_of_arch
from training.results import folder_for_other_data
from training.splits import open_own
from training.trained import Trained
from utils.errors import UserError
from utils.out_of_memory import half
from utils.ranks.world import World


@dataclass
class Target:
    """A trained model, and the data on which it is scored."""

    trained: Trained
    split: Any  # of the kind of data that the model reads
    batch_size: int
    out: Path | None  # default folder for results
    evaluators: list[EvaluatorName]  # those of the run

    @staticmethod
    def of(trained: Trained, data_path: str | None, world: World) -> "Target":
        """Open the data, and fit the model to them. Every rank.

        Args:
            data_path: the data; None: those of the run's own test split.

        Raises:
            UserError: The checkpoint or the data can't be read, or don't fit each other.
        """
        of_run, kind = trained.config, kind_of_arch(trained.arch)
        out: Path | None = None
        with world.shared_errors():
            own = set[Path]() if of_run is None else {Path(path).resolve() for path in of_run.train_paths}
            if data_path is not None and Path(data_path).resolve() in own:
                assert of_run is not None
                split = kind.open_all(trained.arch, [data_path], "test", of_run.train_paths)
            elif data_path is not None:  # the user promises that other data have the same numbers of puzzles
                split = kind.open(data_path, "test")
            elif of_run is not None:
                split = open_own(of_run, "test")
            else:
                raise UserError(f"{trained.name} was trained on {trained.data} and holds no data; give data_path=...")
            if trained.checkpoint is not None and of_run is not None:
                step = trained.checkpoint.path
                out = step.parent / "eval_outputs" / step.name
                if data_path is not None and not is_own(data_path, of_run):
                    out = folder_for_other_data(out, split)
            trained = trained.on(split)
        batch_size = kind.batch_size if of_run is None else of_run.eval_batch_size or of_run.global_batch_size
        evaluators = of_run.evaluators or [] if of_run is not None else []
        return Target(trained, split, batch_size, out, evaluators)

    def less_memory(self, batch_size: int, max_examples: int | None) -> str:
        """Return the advice for an evaluation that did not fit into memory."""
        return half("batch_size", min(batch_size, max(self.split.num_examples(max_examples).values())))


def is_own(data_path: str, of_run: PretrainConfig) -> bool:
    """Return whether the run's own test split is that of this dataset alone."""
    return {Path(path).resolve() for path in of_run.test_paths} == {Path(data_path).resolve()}

"""Evaluation: every example of every set once."""
# B = slots of this rank, N = sequences that leave, S = tokens of a puzzle

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataset.canvas import Corner
from dataset.evaluators import NO_EVALUATORS, Evaluators
from dataset.loader import EvalLoader
from dataset.schema import Split
from models.base import RecursiveModel
from models.inference import Examples, Finished, Slots, idle_segment
from models.metric_sums import EvalSums
from training.laps import Interrupts, Lap, run_laps
from training.samples import AnswerSample
from training.saved_outputs import OutputWriter, SavedOutput
from utils.ranks.world import World


@dataclass(frozen=True)
class EvalOptions:
    """How a split is evaluated. Of text, only the first three options count."""

    batch_size: int  # slots, or tokens of text, over all ranks together; changes no result
    max_examples: int | None = None  # of each larger set only so many, evenly spread
    target_only: bool = True  # the loss of text is that of responses, not of all tokens but the first
    num_steps: int | None = None  # segments of an example; None for halt_max_steps
    adaptive: bool = False  # settled examples leave, and others take their slots (models/inference.py)
    keep_votes: bool = False  # add to the votes of the evaluation before
    save_outputs: Sequence[SavedOutput] = ()  # what to write of each example, beside its row
    save_to: Path | None = None  # the folder for these outputs and for the evaluators' own files
    keep_saved: bool = False  # leave the outputs of an earlier evaluation there
    keep_results: bool = False  # leave the evaluators' own files of an earlier evaluation there
    calibration: bool = False  # report whether the confidence is the accuracy (`metric_sums.reliability`)
    loop_deltas: bool = False  # report how far each segment moves the state, and running/<n>


@torch.no_grad()
def evaluate(
    model: RecursiveModel,
    split: Split,
    world: World,
    options: EvalOptions,
    evaluators: Evaluators = NO_EVALUATORS,
    interrupts: Interrupts | None = None,
    sample: AnswerSample | None = None,
) -> dict[str, float] | None:
    """Evaluate each example of every set once. All ranks get the same metrics. Every rank.

    Returns:
        eval/<set>/<name> for EVAL_METRICS, the evaluators' metrics, exact_accuracy_at_step/<n> and
        num_examples, which counts the examples with labels. `steps` are those that ran; `halt_step`
        is where the Q head would have stopped. None if the evaluation was abandoned.
    """
    interrupts = interrupts or Interrupts()
    metrics: dict[str, float] = {}
    if options.save_to is not None and not options.keep_saved:
        OutputWriter.clear(options.save_to, list(split.sets), world)
    for set_name, deadline in interrupts.deadline.shared_by(list(split.sets)):
        of_set = _SetEvaluation(model, split, set_name, world, options, evaluators, sample)
        idle = partial(idle_segment, model, split.metadata.seq_len, world.device)
        if not run_laps(of_set.laps(each_batch=deadline.is_set), idle, world, interrupts, deadline):
            return None
        metrics |= {f"eval/{set_name}/{name}": value for name, value in of_set.metrics().items()}
    return metrics


@dataclass
class _SetEvaluation:
    model: RecursiveModel
    split: Split
    set_name: str
    world: World
    options: EvalOptions
    evaluators: Evaluators
    sample: AnswerSample | None

    def __post_init__(self) -> None:
        to = self.options.save_to if self.options.save_outputs else None
        self._writer = None if to is None else OutputWriter(to, self.set_name, self.world)
        self.sums = self._new_sums()

    def _new_sums(self) -> EvalSums:
        num_steps = self.options.num_steps or self.model.config.halt_max_steps
        return EvalSums(num_steps, self.evaluators.checks, self.world)

    def laps(self, *, each_batch: bool) -> Iterator[Lap]:
        """Yield this rank's laps: one of all examples, or one of each batch, which is spread."""
        options, world = self.options, self.world
        self._loader = EvalLoader(
            self.split, self.set_name, options.batch_size, options.max_examples, spread=each_batch
        )
        if self.sample is not None:
            self.sample.begin(self.set_name, next(self._loader.shares(world), np.zeros(0, np.int64)))
        if not options.keep_votes:
            self.evaluators.clear()
        examples = self._loader.batches(world)
        for first in examples:
            yield self._lap(chain([first], () if each_batch else examples), holds=each_batch)

    def _lap(self, examples: Iterator[Examples], *, holds: bool) -> Lap:
        """Run the segments of some examples; `holds` the answers until the lap is in time."""
        options, sums, held = self.options, self._new_sums(), list[Finished]()
        slots = Slots(
            self.model,
            examples,
            num_steps=options.num_steps or self.model.config.halt_max_steps,
            adaptive=options.adaptive,
            keep_steps=not {"predictions_at_step", "q_halt_at_step"}.isdisjoint(options.save_outputs),
            keep_deltas=options.loop_deltas,
        )
        while slots.busy:
            yield True
            said = slots.advance()
            sums.add_segment(said.outputs, said.labels_BS, said.steps_B, said.halted_before_B, said.deltas_B)
            if said.finished is not None and holds:
                held.append(said.finished)
            elif said.finished is not None:
                self._count_answers(said.finished)
        yield False
        self.sums.add(sums)
        for finished in held:
            self._count_answers(finished)

    def _count_answers(self, done: Finished) -> None:
        """Count the answers of sequences that left."""
        done, answers_NS = on_boards(done, self.split.sets[self.set_name].corner)
        self.evaluators.vote(done.batch, answers_NS, done.outputs.q_halt_B.sigmoid())
        checks = self.evaluators.judge(done.batch["inputs"], answers_NS, self.set_name)
        loss, labels_NS = self.model.config.loss, done.batch["labels"]
        self.sums.add_last(done.outputs, labels_NS, done.steps_N, checks, config=loss)
        if self.sample is not None:
            self.sample.take(self.set_name, done, answers_NS)
        if self._writer is not None:
            possible = done.batch | {
                "rows": torch.from_numpy(done.rows_N),
                "logits": done.outputs.logits_BSV,
                "predictions": answers_NS.int(),
                "q_halt": done.outputs.q_halt_B,
                "q_continue": done.outputs.q_continue_B,
                "steps": done.steps_N,
            }
            if done.predictions_NTS is not None and done.q_halt_NT is not None:
                possible |= {"predictions_at_step": done.predictions_NTS, "q_halt_at_step": done.q_halt_NT}
            self._writer.add({name: possible[name] for name in ("rows", *self.options.save_outputs)})

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all ranks together, or raise UserError for a file. Every rank."""
        options, world = self.options, self.world
        with world.shared_errors():
            self._loader.require_all_read()
        found = self.sums.reduce(calibration=options.calibration)
        if found:  # at least one example
            found |= self.evaluators.results(world, None if options.keep_results else options.save_to)
        if self._writer is not None:
            self._writer.close(world)
        return found


def on_boards(done: Finished, corner: Corner | None) -> tuple[Finished, Tensor]:
    """Return sequences without the canvas around their boards, and their answers, (N, S).

    On a canvas, answers have padding for tokens that no board has.
    """
    if corner is None:
        return done, done.outputs.logits_BSV.argmax(-1)
    logits_BSV = corner.crop(done.outputs.logits_BSV.movedim(-1, 1)).movedim(1, -1)
    predictions_NTS = None if done.predictions_NTS is None else corner.crop_answers(done.predictions_NTS)
    tokens = {name: corner.crop(done.batch[name]) for name in ("inputs", "labels")}
    outputs = replace(done.outputs, logits_BSV=logits_BSV)
    done = replace(done, batch=done.batch | tokens, outputs=outputs, predictions_NTS=predictions_NTS)
    return done, corner.without_other_tokens(logits_BSV.argmax(-1))

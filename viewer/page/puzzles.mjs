/** What follows from the tokens of an example, and which runs solve a puzzle. */
// In arrays: T reasoning steps, S cells of a board.

import { boardOf, drawingOf } from "./boards.mjs";

/** Compute what the views show of an example, which stores it. */
export function study(example, board) {
  if (example.studied) return example.studied;
  const { input: question, label, answers = [] } = example;
  const count = (tokens, counts) => tokens.reduce((sum, token, s) => sum + (counts(token, s) ? 1 : 0), 0);
  const isWrong = (token, s) => label !== undefined && label[s] >= 0 && label[s] !== token;
  const numWrong = answers.map((answer) => count(answer, isWrong));
  const numChanged = answers.map((answer, t) => count(answer, (token, s) => t > 0 && answers[t - 1][s] !== token));
  // The first step after which the answer does not change any more.
  let settled = answers.length;
  while (settled > 1 && numChanged[settled - 1] === 0) settled--;
  const confidence = example.confidence;
  // Adaptive evaluation halts at the first step that is confident and repeats the last answer.
  const halt = confidence ? confidence.findIndex((value, t) => t > 0 && value > 0.5 && numChanged[t] === 0) + 1 : 0;
  const scored = label !== undefined && label.some((token) => token >= 0);
  const wrong = numWrong.at(-1) ?? 0;
  const solved = scored && answers.length > 0 && wrong === 0;
  const windows = drawingOf(board).windows?.(board, question, label, answers) ?? {};
  example.studied = {
    ...{ question, label, answers, windows, confidence },
    ...{ numWrong, numChanged, settled, halt, scored, solved, wrong },
  };
  return example.studied;
}

/** Return the tokens of the examples: each once, without ignored labels. */
export function usedTokens(examples) {
  const used = new Set();
  for (const { question, label, answers } of examples.map((example) => example.studied))
    for (const tokens of [question, label ?? [], ...answers]) tokens.forEach((token) => used.add(token));
  used.delete(-1);
  return [...used].sort((a, b) => a - b);
}

export const groupText = (example) => `group ${example.group}` + (example.puzzle ? `, puzzle ${example.puzzle}` : "");
export const sameGroup = (one, other) => one.set === other.set && one.group === other.group;

/**
 * Return the examples of each run, by the number of the run.
 *
 * An example has the puzzle's keys, and the answers of the run. `puzzle.of` has the examples of all
 * runs for the same puzzle.
 */
export function examplesByRun(page) {
  const examplesOf = (run) =>
    page.examples
      .filter((puzzle) => puzzle.runs[run])
      .map((puzzle) => {
        const example = { ...puzzle, ...puzzle.runs[run], puzzle };
        study(example, boardOf(page, example));
        (puzzle.of ??= {})[run] = example;
        return example;
      });
  page.byRun ??= new Map(page.answering.map((run) => [run, examplesOf(run)]));
  return page.byRun;
}

/** Return whether a puzzle is solved by the runs that `agreement` names: see `agreements`. */
export function agrees(page, puzzle, agreement) {
  const examples = page.answering.flatMap((run) => puzzle.of[run] ?? []);
  if (examples.length < page.answering.length || !examples[0].studied.scored) return false;
  const solved = page.answering.filter((run) => puzzle.of[run].studied.solved);
  if (agreement === "all") return solved.length === page.answering.length;
  if (agreement === "none") return solved.length === 0;
  if (agreement === "differ") return solved.length > 0 && solved.length < page.answering.length;
  return solved.length === 1 && String(solved[0]) === agreement;
}

/** Return [[value, text, number of puzzles]] for the ways in which runs may agree on a puzzle. */
export function agreements(page) {
  examplesByRun(page);
  return [
    ["differ", "runs differ"],
    ["all", "all runs solve it"],
    ["none", "no run solves it"],
    ...page.answering.map((run) => [String(run), `only ${page.runs[run].name} solves it`]),
  ].map(([value, text]) => [value, text, page.examples.filter((puzzle) => agrees(page, puzzle, value)).length]);
}

/**
 * Describe the augmentation that the name of an ARC puzzle holds.
 *
 * The name is task|||t<transform>|||<permutation>. The permutation lists the new colours.
 */
export function augmentationText(name) {
  const [task, transform, permutation] = name.split("|||");
  if (permutation === undefined) return name;
  const turned = [
    ...["unchanged", "turned by 90°", "turned by 180°", "turned by 270°"],
    ...["mirrored left to right", "mirrored top to bottom", "transposed", "transposed the other way"],
  ];
  const recoloured = permutation === "0123456789" ? "" : `, colours 0–9 become ${permutation}`;
  return `${task}, ${turned[Number(transform.slice(1))] ?? transform}${recoloured}`;
}

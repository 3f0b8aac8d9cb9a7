/** The views that are tables: results of a run, and the comparison of runs. */

import { $, breakable, button, card, make, numberText, plural, span, table } from "./dom.mjs";
import { agreements } from "./puzzles.mjs";

const range = (low, high) => (low === undefined ? "" : `${numberText(low)} to ${numberText(high)}`);
const quiet = (text) => make("p", { class: "small quiet" }, text);
const examplesOf = (counts) =>
  Object.entries(counts)
    .map(([set, num]) => `${plural(num, "example")} of the set ${set}`)
    .join(", ");

/** Fill the view of results.json. */
export function showResults({ checkpoint, data, num_examples: counts, rows, tables }) {
  const about = [checkpoint, data && `on ${data}`, examplesOf(counts)].filter(Boolean).join(" · ");
  const metrics = rows.map(([name, value, low, high]) => [name, make("b", {}, numberText(value)), range(low, high)]);
  const others = tables.map(({ title, columns, rows: cells }) =>
    card(title, table(columns, cells, (column) => cells.every((row) => typeof row[column] !== "string"))),
  );
  const head = ["metric", "value", rows.some((row) => row.length > 2) ? "interval" : ""];
  $("panel-results").append(
    card("Evaluation", quiet(about), table(head, metrics, (column) => column === 1)),
    ...others,
  );
}

/** Tell the reader of a run without saved predictions how to save them. */
export function showNone({ command }) {
  const how = "Run this command to save the model's answer after every reasoning step. Then run view.py again.";
  $("panel-none").append(card("No predictions were saved", make("p", {}, how), make("pre", {}, command)));
}

/** Return the value of the best run: the only one that may stand out; null if nobody can tell. */
export function winner(better, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!better || known.length < 2 || known.every((value) => value === known[0])) return null;
  return better === "max" ? Math.max(...known) : Math.min(...known);
}

/** Fill the view that compares runs. `showPuzzles` shows the puzzles that some runs solve. */
export function showComparison(page, showPuzzles) {
  const judged = page.numbers.filter(({ better }) => better);
  const others = page.numbers.filter(({ better }) => !better);
  const summary = make("summary", {}, plural(others.length, "other metric"));
  const rest = others.length ? make("details", {}, summary, numbersTable(page, others)) : null;
  $("panel-compare").append(
    ...page.notes.map((note) => make("p", {}, note)),
    configsCard(page),
    card("Logged values: the last, and the best with its step", numbersTable(page, judged), rest),
  );
  if (page.results.length) $("panel-compare").append(evaluationsCard(page));
  if (page.answering.length > 1) $("panel-compare").append(puzzlesCard(page, showPuzzles));
  if (page.unanswered.length) $("panel-compare").append(missingCard(page));
}

/** Make a table with a column for each run. A row is [name, [cell of each run]]. */
function runsTable({ runs }, rows, isNumber) {
  // The table of differences has no numbers, and its rows are what the label repeats.
  const head = runs.map(({ name, label }) => make("div", {}, name, isNumber ? span("small quiet", label) : null));
  const body = rows.map(([name, cells]) => [breakable(name), ...cells]);
  const filled = table(["", ...head], body, (column) => isNumber && column > 0);
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table of runs" }, filled);
}

/** Make the card of the configs. A config holds the last values: those of earlier steps may differ. */
function configsCard(page) {
  if (page.differences.length) return card("What differs in the configs", runsTable(page, page.differences, false));
  const known = "Only names and places differ in the last configs. Earlier steps may have had other values.";
  return card("The configs are the same at the end", make("p", {}, known));
}

function numbersTable(page, metrics) {
  const rows = metrics.map(({ metric, better, runs }) => {
    const best = winner(better, runs.map((one) => one?.best));
    const cell = (one) => {
      if (one === null || !better) return one && numberText(one.last);
      const text = `best ${numberText(one.best)} at ${one.best_step.toLocaleString("en")}`;
      return [numberText(one.last), span(`small ${one.best === best ? "good" : "quiet"}`, text)];
    };
    return [metric, runs.map(cell)];
  });
  return runsTable(page, rows, true);
}

/** Make the card of evaluations. A value stands out only if all evaluations are of the same examples. */
function evaluationsCard(page) {
  const { evaluated, runs, results } = page;
  const same = new Set(evaluated.filter(Boolean).map((one) => JSON.stringify(one))).size === 1;
  const note = "The evaluations are of different data or examples, so that no value is marked as the best.";
  const head = [
    ["step", runs.map(({ step }) => step?.toLocaleString("en"))],
    ["data", evaluated.map((one) => one?.data)],
    ["examples", evaluated.map((one) => one && examplesOf(one.num_examples))],
  ];
  const rows = results.map(({ metric, better, runs: values }) => {
    const best = winner(same && better, values.map((one) => one?.[0]));
    const cell = (one) => {
      if ((one?.[0] ?? null) === null) return null;
      const [value, low, high] = one;
      const mark = make("b", { class: value === best ? "good" : "" }, numberText(value));
      return [mark, span("small quiet", range(low, high))];
    };
    return [metric, values.map(cell)];
  });
  const filled = runsTable(page, [...head, ...rows], true);
  return card("Newest evaluation of this step", same ? null : quiet(note), filled);
}

/** Make the card that counts the puzzles that runs agree on. A click shows these puzzles. */
function puzzlesCard(page, showPuzzles) {
  const buttons = agreements(page).map(([value, text, count]) =>
    button(() => showPuzzles(value), { disabled: count === 0 }, make("b", {}, String(count)), ` ${text}`),
  );
  const num = page.examples.filter((puzzle) => page.answering.every((run) => puzzle.runs[run])).length;
  const title = `${plural(num, "puzzle")} that ${page.answering.length} runs have answered`;
  return card(title, make("div", { class: "tally" }, ...buttons));
}

function missingCard({ unanswered, runs, command }) {
  const names = unanswered.map((run) => runs[run].name).join(", ");
  const text = `No saved answers: ${names}. This command lets their models answer, and writes the page again:`;
  return card("Without answers", make("p", {}, text), make("pre", {}, command));
}

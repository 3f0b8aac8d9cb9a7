/** The functions below the views. */

import assert from "node:assert/strict";
import { test } from "node:test";

import "./browser.mjs";
import { numberText } from "../../../viewer/page/dom.mjs";
import { logTicks, smoothed, ticks } from "../../../viewer/page/plot.mjs";
import { augmentationText, study, usedTokens } from "../../../viewer/page/puzzles.mjs";
import { winner } from "../../../viewer/page/tables.mjs";

test("an example tells where it settles and where its model halts", () => {
  const board = { kind: "sudoku", rows: 1, columns: 3, tokens: [] };
  const example = { input: [1, 1, 1], label: [2, 3, -1], answers: [[3, 3, 2], [2, 3, 1], [2, 3, 1]], confidence: [0.9, 0.9, 0.6] };
  const { numWrong, numChanged, settled, halt, solved, scored } = study(example, board);
  assert.deepEqual([numWrong, numChanged], [[1, 0, 0], [0, 2, 0]], "a cell without a label is never wrong");
  assert.deepEqual([settled, halt, solved, scored], [2, 3, true, true]);
  assert.deepEqual(usedTokens([example]), [1, 2, 3]);
  assert.ok(!study({ input: [1, 1, 1], label: [-1, -1, -1], answers: [[1, 1, 1]] }, board).scored);
});

test("numbers are short", () => {
  const texts = [0, 0.25, 0.00012345, 123456.7, 1234.56, null].map(numberText);
  assert.deepEqual(texts, ["0", "0.25", "1.23e-4", "123.46K", "1,235", "–"]);
});

test("ticks are round numbers inside the axis", () => {
  assert.deepEqual(ticks(0, 1, 5).map((tick) => tick + 0), [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1]);
  assert.deepEqual(ticks(0.2, 3, 5, true), [1, 2, 3]);
  assert.deepEqual(logTicks(0.01, 1), [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]);
  assert.deepEqual(logTicks(1e-4, 1).length, 5);
});

test("a running mean has fewer neighbours at the ends", () => {
  const points = [1, 2, 3, 8].map((y, x) => [x, y]);
  assert.deepEqual(smoothed([...points, [4, null]], 1), [[0, 1.5], [1, 2], [2, 13 / 3], [3, 5.5]]);
});

test("the best of several runs stands out, unless all are equal or only one is known", () => {
  assert.equal(winner("max", [1, null, 3]), 3);
  assert.equal(winner("min", [1, undefined, 3]), 1);
  for (const [better, values] of [["max", [1, 1]], ["max", [1, null]], [null, [1, 2]]])
    assert.equal(winner(better, values), null);
});

test("a name of an ARC puzzle tells its augmentation", () => {
  assert.equal(augmentationText("a|||t4|||0123456789"), "a, mirrored left to right");
  assert.equal(augmentationText("puzzle 3"), "puzzle 3");
});

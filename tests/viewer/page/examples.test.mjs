/** The player of the reasoning steps, and the list of examples. */

import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";

import { choose, click, drawn, find, open, press, rows, text } from "./browser.mjs";

afterEach(() => mock.timers.reset());

test("reasoning can be stepped through", async () => {
  await open("run");
  assert.equal(text("#heading"), "Row 4", "the page must open with the row of puzzle.png");
  assert.match(text("#verdict"), /solved from step 4 on/);
  assert.match(text("#said"), /step 1 of 4 · 3 wrong/);
  find("#items").find("button")[1].click();
  assert.equal(text("#errors-title"), "Wrong cells");
  assert.equal(text("#heading"), "Row 1");
  assert.match(text("#verdict"), /1 wrong cell in the end/);
  // The model is confident at step 3 too, but its answer has just changed.
  assert.match(text("#halt"), /Halts at step 4/);
  click("#last");
  assert.equal(
    text("#said"),
    "step 4 of 4 · nothing changed · 1 wrong · confidence 0.95 · the model would halt here",
  );
  click("#first");
  assert.equal(find("#slider").value, "0");
  const pictures = [drawn("#board")];
  for (const said of ["1 of 4 · 3 wrong", "2 of 4 · 1 cell changed · 2 wrong", "3 of 4 · 1 cell changed"]) {
    click("#forward");
    assert.ok(text("#said").startsWith(`step ${said}`), text("#said"));
    assert.doesNotMatch(text("#said"), /would halt here/);
    pictures.push(drawn("#board"));
  }
  assert.equal(new Set(pictures).size, 4, "two steps show the same board");
  click("#back");
  assert.equal(drawn("#board"), pictures[2]);
  choose("#slider", 4, "input");
  assert.match(text("#said"), /step 4 of 4/);
});

test("reasoning plays to its end, and can be paused", async () => {
  mock.timers.enable({ apis: ["setInterval"] });
  await open("run");
  choose("#speed", "250");
  click("#first");
  click("#play");
  assert.equal(find("#play").getAttribute("aria-label"), "Pause");
  mock.timers.tick(750);
  assert.equal(find("#slider").value, "3");
  mock.timers.tick(250);
  assert.equal(find("#play").getAttribute("aria-label"), "Play", "it ends at the last step");
  click("#play"); // from the beginning
  mock.timers.tick(250);
  click("#play");
  mock.timers.tick(2000);
  assert.equal(find("#slider").value, "1", "it must stay paused");
  click("#play");
  click("#next");
  mock.timers.tick(2000);
  assert.equal(find("#slider").value, "1", "another example must pause the player");
});

test("filters, orders and the search change the list", async () => {
  await open("run");
  assert.deepEqual(rows(), [0, 1, 2, 3, 4, 5]);
  assert.match(text("#items"), /row 0 ✓ solved settled at step 1 .*row 1 ✗ 1 wrong settled at step 3 .*4 ✓ solved not/);
  click("#filter [data-value=solved]");
  assert.deepEqual(rows(), [0, 2, 4]);
  choose("#sort", "slowest");
  assert.deepEqual(rows(), [4, 2, 0]);
  assert.equal(text("#heading"), "Row 4");
  click("#filter [data-value=unsolved]");
  assert.equal(text("#heading"), "Row 5", "the filter must choose the first row that remains");
  choose("#sort", "fastest");
  assert.deepEqual(rows(), [3, 1, 5]);
  choose("#sort", "most");
  assert.deepEqual(rows(), [3, 5, 1]);
  choose("#sort", "fewest");
  assert.deepEqual(rows(), [1, 5, 3]);
  click("#filter [data-value=all]");
  choose("#search", " Puzzle 3", "input");
  assert.deepEqual(rows(), [3]);
  assert.equal(text("#heading"), "Row 3");
  choose("#search", "9", "input");
  assert.deepEqual(rows(), []);
  assert.match(text("#count"), /Nothing matches/);
  assert.equal(text("#heading"), "Row 3", "the stage keeps what it shows");
});

test("the keyboard can do everything", async () => {
  const { tabs } = await open("run");
  press("k", "ArrowUp", "ArrowUp", "j");
  assert.equal(text("#heading"), "Row 2");
  press("Home");
  assert.match(text("#said"), /4 reasoning steps to come/);
  press("ArrowRight", "ArrowRight", "ArrowLeft");
  assert.match(text("#said"), /step 1 of 4 · 2 wrong/);
  press("h");
  assert.match(text("#said"), /step 4 of 4/);
  press("Home", "End");
  assert.match(text("#said"), /step 4 of 4/);
  press(" ");
  assert.equal(find("#play").getAttribute("aria-label"), "Pause");
  press(" ");
  press("f");
  assert.deepEqual(rows(), [0, 2, 4]);
  press("f", "f", "/");
  assert.equal(document.activeElement, find("#search"));
  press("j");
  assert.equal(text("#heading"), "Row 1", "letters in the search field must be text");
  press("Escape");
  press("?");
  assert.ok(find("#keys").open);
  assert.match(text("#keys"), /play and pause/);
  press("j");
  assert.equal(text("#heading"), "Row 1", "an open dialog must take the keys");
  find("#keys").close();
  find("#tab-examples").focus();
  press("ArrowRight");
  assert.equal(document.activeElement, find("#tab-curves"));
  assert.equal(tabs.open.name, "curves");
  press("ArrowLeft", "ArrowLeft");
  assert.equal(tabs.open.name, "results", "the first tab comes after the last");
  press("ArrowRight");
  assert.match(text("#said"), /steps to come/, "arrows on the tabs must not move the player");
});

test("a theme is kept for the next page, and boards follow it", async () => {
  await open("run");
  const light = drawn("#board");
  press("t");
  assert.equal(find("#theme").getAttribute("aria-pressed"), "true");
  assert.notEqual(drawn("#board"), light);
  assert.notEqual(drawn("#items canvas"), light);
  await open("run");
  assert.equal(find("html").dataset.theme, "dark");
  press("t");
  assert.equal(drawn("#board"), light);
});

test("a dataset is browsed by group", async () => {
  await open("data");
  assert.deepEqual(rows(), [0, 1, 0, 1], "the list must have two groups of each split");
  assert.notEqual(drawn("#question"), drawn("#solution"));
  choose("#set", "test/all");
  assert.deepEqual([...rows(), text("#count"), text("#heading")], [0, 1, "2 groups", "group 0, row 0"]);
  find("#strip").find("button")[2].click();
  assert.equal(text("#heading"), "group 0, puzzle 2, row 2");
  assert.match(text("#strip"), /From the 3 puzzles of this group: first puzzle 1 puzzle 2/);
  assert.equal(find("#items button").getAttribute("aria-current"), "true", "the list marks the group");
  click("#next");
  assert.equal(text("#heading"), "group 1, row 3");
});

test("tokens of an unknown task are numbers, whose rows mean nothing", async () => {
  await open("other");
  assert.ok(find("#legend").hidden, "a board of numbers must have no legend");
  const canvas = find("#question");
  const c = Number.parseFloat(canvas.style.width) / 16;
  canvas.onpointermove({ offsetX: 1.5 * c, offsetY: 1.5 * c });
  assert.equal(canvas.title, "token 18: 3");
});

test("tokens of a task without a drawing have their names", async () => {
  const texts = (canvas) => canvas.drawn.filter(([name]) => name === "fillText").map((each) => each[1]);
  const written = (selector) => new Set(texts(find(selector)));
  await open("undrawn");
  const names = new Set(["dark", "lit", "leave", "press"]);
  assert.deepEqual(written("#question").union(written("#solution")), names);
  assert.ok(names.isSupersetOf(written("#items canvas")), "thumbnails must show names, as the boards do");
  assert.ok(find("#legend").hidden, "the cells show the names");
  find("#boards").clientWidth = 120;
  const { tabs } = await open("undrawn");
  find("#boards").clientWidth = 120;
  tabs.open.view.redraw();
  assert.deepEqual(written("#question"), new Set(["1", "2"]), "no name fits into a cell");
  assert.equal(text("#legend"), "dark lit leave press");
  await open("undrawn_run");
  assert.equal(text("#legend"), "as in the puzzle answered changed in this step wrong");
  const pictures = ["Home", "ArrowRight", "End"].map((key) => {
    press(key);
    return drawn("#board");
  });
  assert.equal(new Set(pictures).size, 3, "the puzzle, the first answer and the last one must differ");
});

test("ARC boards are cropped, and an augmentation is described", async () => {
  await open("arc_run");
  assert.match(text("#verdict"), /1 wrong cell/);
  assert.ok(find("#controls").hidden, "a run with only final answers must have no player");
  assert.match(text("#hint"), /python evaluate.py checkpoint=/);
  assert.ok(find("#confidence-card").hidden, "one answer has no curve");
  press("j");
  assert.match(text("#verdict"), /aaaa0001, turned by 90°, colours 0–9 become 0213456789/);
  const { width, height } = find("#board");
  assert.ok(Math.abs(width / height - 1.5) < 0.05, "the board must be cropped to 3 columns and 2 rows");
});

test("runs are compared by their answers to a puzzle", async () => {
  await open("runs");
  const tally = find("#panel-compare .tally").find("button");
  assert.deepEqual(
    tally.map((button) => button.textContent),
    ["1 runs differ", "3 all runs solve it", "2 no run solves it", "1 only hrm solves it", "0 only trm-0 solves it"],
  );
  assert.ok(tally[4].disabled);
  tally[3].click();
  assert.deepEqual(rows(), [3]);
  assert.equal(text("#heading"), "Row 3 · hrm");
  assert.match(text("#items"), /runs: ✓ ✗/);
  assert.doesNotMatch(text("#confidence-card"), /alts at step/, "the page cannot know when an HRM halts");
  click("#last");
  const [hrm, trm] = find("#rivals").find("button");
  const verdicts = () => find("#rivals").find("button").map((button) => button.textContent);
  assert.deepEqual(verdicts(), ["hrmstep 4: ✓ solved", "trm-0step 4: ✗ 4 wrong"]);
  assert.notDeepEqual(hrm.find("canvas")[0].drawn, trm.find("canvas")[0].drawn);
  press("r");
  assert.equal(text("#heading"), "Row 3 · trm-0");
  assert.match(text("#verdict"), /4 wrong cells/);
  assert.match(text("#said"), /step 4 of 4/, "the reader stays at the last step");
  click("#back");
  assert.deepEqual(verdicts(), ["hrmstep 3: ✗ 4 wrong", "trm-0step 3: ✗ 4 wrong"]);
  click("#filter [data-value=solved]");
  click("#tab-compare");
  tally[2].click();
  assert.deepEqual(rows(), [1, 5]);
  find("#rivals").find("button")[0].click();
  assert.equal(text("#heading"), "Row 1 · hrm");
  assert.match(text("#said"), /step 3 of 4/, "the reader stays at the step");
});

test("each run has the player that its answers allow", async () => {
  await open("mixed");
  click("#tab-examples");
  assert.equal(text("#heading"), "Row 0 · hrm");
  assert.ok(find("#controls").hidden && !find("#hint").hidden);
  assert.match(text("#hint"), /python evaluate.py checkpoint=/, "view.py makes no answers where there are some");
  const verdicts = find("#rivals").find("button").map((button) => button.textContent);
  assert.deepEqual(verdicts, ["hrmstep 1: ✓ solved", "trm-0step 4: ✓ solved"]);
  press("r");
  assert.equal(text("#heading"), "Row 0 · trm-0");
  assert.ok(!find("#controls").hidden && find("#hint").hidden);
  press("ArrowLeft");
  assert.match(text("#said"), /step 3 of 4/);
  press("r");
  assert.ok(find("#controls").hidden && !find("#hint").hidden);
});

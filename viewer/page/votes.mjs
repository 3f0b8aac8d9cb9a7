/** The view of the votes on ARC tasks, with the ranked candidates of each test. */

import { draw, prepare } from "./boards.mjs";
import { $, card, choice, make, numberText, plural, span } from "./dom.mjs";
import { List } from "./list.mjs";

const VERDICTS = {
  solved: ["good small", "✓ solved"],
  unsolved: ["bad small", "✗ not solved"],
  unknown: ["quiet small", "no solution known"],
};

export class Votes extends List {
  constructor(tasks) {
    super("vote-");
    this.tasks = tasks;
    for (const task of tasks) {
      // As in the competition, each test has two attempts, and a solved task has no unsolved test.
      const known = task.tests.every((test) => test.solution !== null);
      task.places = task.tests.map((test) => test.candidates.findIndex((candidate) => candidate.right) + 1);
      task.state = !known ? "unknown" : task.places.every((place) => place > 0 && place <= 2) ? "solved" : "unsolved";
    }
    this.filter = "all";
    const count = (state) => tasks.filter((task) => task.state === state).length;
    const choices = [
      ["all", `All ${tasks.length}`],
      ["solved", `Solved ${count("solved")}`],
      ["unsolved", `Failed ${count("unsolved")}`],
    ];
    choice($("vote-filter"), choices, (value) => {
      this.filter = value;
      this.refill();
    });
    this.refill();
  }

  matching(query) {
    return this.tasks.filter(
      (task) => (this.filter === "all" || task.state === this.filter) && task.task.toLowerCase().includes(query),
    );
  }

  counted() {
    const rule = "A task is solved if each test has the right answer among its first two candidates.";
    return `${plural(this.shown.length, "task")}. ${rule}`;
  }

  describe(task) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    drawGrid(canvas, task.tests[0].input, 56);
    return [span("thumb", canvas), span("", make("b", {}, task.task), span(...VERDICTS[task.state]))];
  }

  show() {
    $("vote-stage").replaceChildren();
    if (!this.current) return;
    const { tests, train } = this.current;
    $("vote-stage").append(...tests.map((_, i) => testCard(this.current, i)));
    if (!train.length) return;
    const pairs = train.map(([input, output]) => pair(input, output, ["input", "output"]));
    $("vote-stage").append(card("Training pairs of the task", make("div", { class: "pairs" }, ...pairs)));
  }

  /** Draw everything that depends on the size of the window. */
  redraw() {
    this.show();
  }

  restyle() {
    this.refill();
    this.show();
  }
}

/** Draw a grid, which is given as rows of digits, at most `size` pixels wide and high. */
function drawGrid(canvas, rows, size) {
  const columns = rows[0]?.length ?? 0;
  if (!columns) return prepare(canvas, 12, 12);
  const board = { kind: "arc", rows: rows.length, columns };
  const tokens = [...rows.join("")].map((digit) => Number(digit) + 2);
  const most = Math.min(size, 36 * Math.max(rows.length, columns));
  return draw(canvas, board, { tokens, question: tokens }, most, most);
}

function gridFigure(rows, size, caption, sized) {
  const [height, width] = [rows.length, rows[0]?.length ?? 0];
  const canvas = make("canvas", { role: "img", "aria-label": `${caption}, ${height} rows of ${width} cells` });
  drawGrid(canvas, rows, size);
  return make("figure", {}, canvas, make("figcaption", {}, sized ? `${caption} · ${height}×${width}` : caption));
}

/** Make a pair of an input and its output. */
function pair(input, output, captions) {
  const size = Math.min(220, ($("vote-stage").clientWidth - 80) / 2);
  return make(
    "div",
    { class: "io" },
    gridFigure(input, size, captions[0], true),
    make("span", { class: "arrow", "aria-hidden": "true" }, "→"),
    output ? gridFigure(output, size, captions[1], true) : make("p", { class: "quiet" }, "no solution is known"),
  );
}

/** Make the card of a test, with its input, its solution and its candidates. */
function testCard(task, i) {
  const { input, solution, candidates, num_votes: num, num_empty: empty } = task.tests[i];
  const place = task.places[i];
  const isGood = place > 0 && place <= 2;
  const where = place ? `in place ${place}` : "not among the candidates";
  const verdict = solution && span(isGood ? "good" : "bad", `${isGood ? "✓" : "✗"} right answer ${where}`);
  const about =
    plural(num, "vote") +
    (empty ? `, ${plural(empty, "prediction")} without a grid` : "") +
    (candidates.length === 1 ? ". The candidate:" : `. The first ${candidates.length} candidates:`);
  return make(
    "div",
    { class: "card" },
    make("h2", {}, `${task.task}, test ${i + 1} of ${task.tests.length} `, verdict),
    make("div", { class: "pairs" }, pair(input, solution, ["input", "solution"])),
    make("p", { class: "quiet small" }, about),
    candidates.length
      ? make("ol", { class: "candidates" }, ...candidates.map((one) => candidateItem(one, num)))
      : make("p", {}, "No prediction holds a grid."),
  );
}

function candidateItem({ grid, count, confidence, right }, num) {
  const fill = make("i");
  fill.style.width = `${(num ? count / num : 0) * 100}%`;
  const caption = right ? "✓ right" : right === false ? "✗ wrong" : "unchecked";
  return make(
    "li",
    { class: right ? "is-right" : "" },
    gridFigure(grid, 104, caption, false),
    make("div", { class: "meter" }, fill),
    make("b", {}, plural(count, "vote")),
    make("br"),
    span("quiet", `confidence ${numberText(confidence)}`),
  );
}

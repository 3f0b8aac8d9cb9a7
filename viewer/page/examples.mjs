/** The view of the examples of a dataset or of runs: a list with filters, beside the stage. */

import { boardOf, draw } from "./boards.mjs";
import { $, choice, make, option, plural, span } from "./dom.mjs";
import { List } from "./list.mjs";
import { agreements, agrees, examplesByRun, groupText, sameGroup, study } from "./puzzles.mjs";
import { Stage } from "./stage.mjs";

const ORDERS = {
  row: () => 0,
  most: (a, b) => b.studied.wrong - a.studied.wrong,
  fewest: (a, b) => a.studied.wrong - b.studied.wrong,
  slowest: (a, b) => b.studied.settled - a.studied.settled,
  fastest: (a, b) => a.studied.settled - b.studied.settled,
};
const FILTERS = ["all", "solved", "unsolved"];

export class Examples extends List {
  constructor(page) {
    super("");
    this.page = page;
    this.isRun = page.kind !== "dataset";
    // With several runs, the examples are those of the run that is looked at.
    this.byRun = page.kind === "runs" ? examplesByRun(page) : null;
    this.run = page.answering?.[0];
    this.all = this.byRun ? this.byRun.get(this.run) : page.examples;
    const every = this.byRun ? [...this.byRun.values()].flat() : page.examples;
    every.forEach((example) => study(example, boardOf(page, example)));
    const opens = page.examples[page.opens];
    this.current = this.all.find((example) => opens === (example.puzzle ?? example)) ?? this.all[0];
    this.filter = "all";
    this.stage = new Stage(this, every);
    this.buildControls();
    this.refill();
    this.reveal();
    this.show();
  }

  buildControls() {
    this.buildFilter();
    const sets = Object.keys(this.page.sets);
    if (sets.length > 1) $("set").append(option("", "all sets"));
    $("set").append(...sets.map((name) => option(name, name)));
    $("set").hidden = sets.length < 2;
    $("sort").hidden = !this.isRun;
    $("agreement").hidden = !this.byRun || this.page.answering.length < 2;
    if (!$("agreement").hidden) {
      const ways = agreements(this.page).map(([value, text, count]) => option(value, `${text} (${count})`));
      $("agreement").append(option("", "solved by any run or none"), ...ways);
    }
    if (this.all.some((example) => example.name)) $("search").placeholder = "search…";
    for (const id of ["set", "sort", "agreement"]) $(id).addEventListener("change", () => this.refill());
    $("previous").addEventListener("click", () => this.move(-1));
    $("next").addEventListener("click", () => this.move(1));
  }

  /** Fill the buttons that choose solved or failed examples. */
  buildFilter() {
    $("filter").hidden = !this.isRun || !this.all.some((example) => example.studied.scored);
    if ($("filter").hidden) return;
    const solved = this.all.filter((example) => example.studied.solved).length;
    const texts = [`All ${this.all.length}`, `Solved ${solved}`, `Failed ${this.all.length - solved}`];
    const choices = FILTERS.map((value, i) => [value, texts[i]]);
    this.pressFilter = choice($("filter"), choices, (value) => {
      this.filter = value;
      this.refill();
    });
    this.pressFilter(this.filter);
  }

  /** Look at the answers of another run to the same puzzle, at the same step or at the last one. */
  lookAt(run) {
    const same = this.current.puzzle.of[run];
    const step = this.stage.step === this.stage.numSteps ? Infinity : this.stage.step;
    this.run = run;
    this.all = this.byRun.get(run);
    this.buildFilter();
    this.current = same;
    this.refill();
    if (!same) return;
    this.select(same);
    this.stage.seek(step);
  }

  /** Show the puzzles that some runs solve and others do not, as `agreements` names them. */
  compareBy(value) {
    $("agreement").value = value;
    $("set").value = $("search").value = "";
    this.filter = "all";
    this.buildFilter();
    this.refill();
  }

  // ---- the list ----------------------------------------------------------------------------------

  matching(query) {
    const set = $("set").value,
      agreement = this.byRun ? $("agreement").value : "";
    const found = ({ row, name }) => String(row).startsWith(query) || (name ?? "").toLowerCase().includes(query);
    let shown = this.all.filter((example) => (set === "" || example.set === set) && (!query || found(example)));
    // The list shows one example of each group. The strip below the board shows the others.
    const isFirst = (example, i) => i === 0 || !sameGroup(example, shown[i - 1]);
    if (!this.isRun && !query) shown = shown.filter(isFirst);
    if (this.filter !== "all")
      shown = shown.filter(({ studied }) => studied.scored && studied.solved === (this.filter === "solved"));
    if (agreement) shown = shown.filter(({ puzzle }) => agrees(this.page, puzzle, agreement));
    return shown.sort(ORDERS[$("sort").value]);
  }

  counted() {
    const set = $("set").value;
    const sizes = Object.entries(this.page.sets).map(([name, size]) => (set === "" || set === name ? size : 0));
    const total = sizes.reduce((sum, size) => sum + size, 0);
    const what = this.isRun || $("search").value ? "example" : "group";
    const sampled = total > this.all.length ? `, spread evenly over ${total.toLocaleString("en")} rows` : "";
    return plural(this.shown.length, what) + sampled;
  }

  refill() {
    this.observer?.disconnect();
    // A thumbnail is drawn when it comes into view.
    const drawSeen = (entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) this.thumbnail(target);
    };
    this.observer = new IntersectionObserver(drawSeen, { rootMargin: "200px" });
    super.refill();
  }

  describe(example) {
    const canvas = make("canvas", { "aria-hidden": "true", width: 1, height: 1 });
    canvas.example = example;
    this.observer.observe(canvas);
    return [span("thumb", canvas), this.itemText(example)];
  }

  itemText(example) {
    const { solved, scored, wrong, settled, answers } = example.studied;
    const label = span("", make("b", {}, this.isRun ? `row ${example.row}` : groupText(example)));
    const add = (look, text) => label.append(span(`${look} small`, text));
    if (!this.isRun) add("quiet", `${example.set} · row ${example.row}`);
    else if (scored) {
      add(solved ? "good" : "bad", solved ? "✓ solved" : `✗ ${wrong} wrong`);
      const end = settled === answers.length ? "not settled" : `settled at step ${settled}`;
      if (answers.length > 1) add("quiet", end);
    }
    if (this.byRun && scored) {
      const marks = this.page.answering.map((run) => (example.puzzle.of[run]?.studied.solved ? "✓" : "✗"));
      const title = "in the order of the runs";
      label.append(make("span", { class: "quiet small", title }, `runs: ${marks.join(" ")}`));
    }
    if (example.name) add("quiet", example.name.split("|||")[0]);
    return label;
  }

  /** Draw the thumbnail of an example: its last answer, or its puzzle if it has no answer. */
  thumbnail(canvas) {
    const { question, label, answers, windows } = canvas.example.studied;
    const picture = answers.length
      ? { tokens: answers.at(-1), question, label, window: windows.answer }
      : { tokens: question, question, window: windows.question };
    draw(canvas, boardOf(this.page, canvas.example), picture, 56, 56);
  }

  /** Draw the thumbnails that were seen again. */
  redrawThumbnails() {
    for (const canvas of document.querySelectorAll("#items canvas")) if (canvas.width > 1) this.thumbnail(canvas);
  }

  /** Return the place of the current example, or of its group, in the list. */
  place() {
    const at = super.place();
    if (at >= 0 || this.isRun || !this.current) return at;
    return this.shown.findIndex((example) => sameGroup(example, this.current));
  }

  mark() {
    super.mark();
    $("previous").disabled = this.place() <= 0;
    $("next").disabled = this.place() >= this.shown.length - 1;
  }

  // ---- the stage ---------------------------------------------------------------------------------

  select(example) {
    if (example) super.select(example);
    else this.mark(); // nothing matches: the stage keeps what it shows
  }

  show() {
    this.stage.show(this.current);
  }

  redraw() {
    this.stage.redraw();
  }

  restyle() {
    this.redrawThumbnails();
    this.stage.restyle();
  }

  pause() {
    this.stage.pause();
  }

  key(event) {
    const { answering } = this.page;
    if (event.key === "f" && this.pressFilter) {
      this.filter = FILTERS[(FILTERS.indexOf(this.filter) + 1) % 3];
      this.pressFilter(this.filter);
      this.refill();
    } else if (event.key === "r" && answering?.length > 1)
      this.lookAt(answering[(answering.indexOf(this.run) + 1) % answering.length]);
    else return super.key(event) || this.stage.key(event);
    return true;
  }

  /** Scroll the list to the current example. On a phone the list lies below the stage. */
  reveal() {
    if (matchMedia("(min-width: 761px)").matches) super.reveal();
  }
}

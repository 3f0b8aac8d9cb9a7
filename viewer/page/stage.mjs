/** The stage of an example: its boards, the player of the reasoning steps, and what stands beside. */
// In arrays: T reasoning steps, S cells of a board.

import { boardOf, cellSide, colours, draw, drawingOf, namesFit, tokenName } from "./boards.mjs";
import { $, button, clamp, make, plural, span } from "./dom.mjs";
import { plot } from "./plot.mjs";
import { augmentationText, groupText, sameGroup, usedTokens } from "./puzzles.mjs";

const LEGEND_CELL = 18;

/** The stage. `list` is the view of the examples, and `every` has the examples of all runs. */
export class Stage {
  constructor(list, every) {
    this.list = list;
    this.page = list.page;
    this.isRun = list.isRun;
    this.step = this.isRun ? 1 : 0;
    this.timer = null;
    const hasNames = every.some((example) => drawingOf(boardOf(this.page, example)).namesTokens);
    this.tokens = hasNames ? usedTokens(every) : [];
    $("side").hidden = !this.isRun;
    this.acts = {
      first: () => this.seek(0),
      back: () => this.seek(this.step - 1),
      play: () => (this.timer === null ? this.play() : this.pause()),
      forward: () => this.seek(this.step + 1),
      last: () => this.seek(Infinity),
    };
    for (const [id, act] of Object.entries(this.acts)) $(id).addEventListener("click", act);
    $("slider").addEventListener("input", () => this.seek(Number($("slider").value)));
    $("speed").addEventListener("change", () => {
      if (this.timer === null) return;
      this.pause();
      this.play();
    });
    this.showPlaying();
  }

  /** The board of the example. */
  get board() {
    return boardOf(this.page, this.example);
  }

  get numSteps() {
    return this.example.studied.answers.length;
  }

  /** Show an example. The reader stays at the same step, or at the last one. */
  show(example) {
    const wasLast = this.example !== undefined && this.step === this.numSteps;
    this.pause();
    this.example = example;
    this.step = wasLast ? this.numSteps : Math.min(this.step, this.numSteps);
    this.build();
    this.redraw();
  }

  /** Build what does not depend on the step. */
  build() {
    const { answers, halt, confidence, scored } = this.example.studied;
    const source = this.list.byRun ? this.page.runs[this.list.run] : this.page;
    const hasSteps = this.isRun && this.list.all.some((example) => example.studied.answers.length > 1);
    $("controls").hidden = !hasSteps;
    $("hint").hidden = hasSteps || !this.isRun;
    $("command").textContent = source.command ?? "";
    $("slider").max = answers.length;
    $("confidence-card").hidden = !confidence || answers.length < 2;
    $("errors-card").hidden = answers.length < 2;
    $("errors-title").textContent = scored ? "Wrong cells" : "Changed cells";
    this.halt = source.values_going_on ? 0 : halt;
    $("halt").textContent = source.values_going_on
      ? "This model halts where it values halting above going on, and that value was not saved."
      : halt
        ? `Halts at step ${halt}: confident (above 0.5), and the same answer as at step ${halt - 1}.`
        : "Does not halt early: never confident (above 0.5) with the same answer as a step before.";
    this.buildHeading();
    this.buildFigures();
    this.buildLegend();
    this.buildStrip();
    this.buildRivals();
  }

  buildHeading() {
    const { name, set, row, studied } = this.example;
    const { scored, solved, wrong, settled, answers } = studied;
    const where = this.isRun ? "Row" : `${groupText(this.example)}, row`;
    const whose = this.list.byRun ? ` · ${this.page.runs[this.list.run].name}` : "";
    $("heading").textContent = `${where} ${row}${whose}`;
    const hasSteps = answers.length > 1;
    const right = `✓ solved${hasSteps ? ` from step ${settled} on` : ""}`;
    const failed = `✗ ${plural(wrong, "wrong cell")}${hasSteps ? " in the end" : ""}`;
    const verdict = this.isRun && scored ? span(solved ? "good" : "bad", solved ? right : failed) : null;
    const about = [
      name ? augmentationText(name) : null,
      Object.keys(this.page.sets).length > 1 ? set : null,
      this.isRun && !scored ? "no solution is known" : null,
    ].filter(Boolean);
    const rest = about.length ? span("quiet", (verdict ? " · " : "") + about.join(" · ")) : null;
    $("verdict").replaceChildren(...[verdict, rest].filter(Boolean));
  }

  /** Build the large boards and, in a run, the small ones beside. */
  buildFigures() {
    const { question, label, scored, windows } = this.example.studied;
    const puzzle = () => ({ tokens: question, question, window: windows.question });
    const solution = () => ({ tokens: label, question, window: windows.label });
    // An answer that contains the puzzle, as in Sudoku, needs only a small board of the puzzle.
    const isLarge = !this.isRun || drawingOf(this.board).besidePuzzle === true;
    const plan = [
      { caption: "puzzle", id: "question", picture: puzzle, small: !isLarge },
      this.isRun ? { caption: "", id: "board", picture: () => this.picture(), small: false } : null,
      scored ? { caption: "solution", id: "solution", picture: solution, small: this.isRun } : null,
    ].filter(Boolean);
    this.figures = plan.map(({ caption, id, ...rest }) => {
      const canvas = make("canvas", { id, role: "img" });
      const text = make("figcaption", {}, caption);
      return { canvas, text, element: make("figure", {}, canvas, text), id, ...rest };
    });
    const small = this.figures.filter((one) => one.small);
    $("boards").replaceChildren(...this.figures.filter((one) => !one.small).map(({ element }) => element));
    $("pair").replaceChildren(...small.map(({ element }) => element));
    $("pair-card").hidden = small.length === 0;
    $("pair").style.gridTemplateColumns = small.length === 1 ? "1fr" : "";
  }

  /** Show the answers of all runs side by side. Each is a button that shows its run's reasoning. */
  buildRivals() {
    const { byRun, run: shown } = this.list;
    const { answering, runs } = this.page;
    $("rivals").hidden = !byRun || answering.length < 2;
    const shownRuns = $("rivals").hidden ? [] : answering.filter((run) => this.example.puzzle.of[run]);
    this.rivals = shownRuns.map((run) => {
      const [canvas, verdict] = [make("canvas", { "aria-hidden": "true" }), span("")];
      const parts = [canvas, make("b", {}, runs[run].name), make("br"), verdict];
      const element = button(() => this.list.lookAt(run), { "aria-current": String(run === shown) }, ...parts);
      return { example: this.example.puzzle.of[run], canvas, verdict, element };
    });
    $("rivals").replaceChildren(...this.rivals.map(({ element }) => element));
  }

  /** Show the other puzzles of the group: augmentations, or other pairs of an ARC task. */
  buildStrip() {
    const { group_size: size } = this.example;
    const others = this.isRun ? [] : this.list.all.filter((other) => sameGroup(other, this.example));
    $("strip").hidden = others.length < 2;
    if (others.length < 2) return;
    const firsts = others.filter((other) => other.puzzle === 0);
    const nameOf = (other) => {
      if (other.puzzle) return `puzzle ${other.puzzle}`;
      return firsts.length > 1 ? `pair ${firsts.indexOf(other) + 1}` : "first";
    };
    const buttons = others.map((other) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      const { question, windows } = other.studied;
      draw(canvas, this.board, { tokens: question, question, window: windows.question }, 68, 68);
      const look = { "aria-current": String(other === this.example), title: other.name };
      return button(() => this.list.select(other), look, canvas, nameOf(other));
    });
    const from = make("p", { class: "small quiet" }, `From the ${plural(size, "puzzle")} of this group:`);
    $("strip").replaceChildren(...(size > 1 ? [from] : []), ...buttons);
  }

  buildLegend() {
    const small = { ...this.board, rows: 1, columns: 1, box: [1, 1], wrapped: false, byName: false };
    const { legend, namesTokens } = drawingOf(this.board);
    const entries = [...(this.isRun ? legend : []), ...(namesTokens ? this.tokenLegend() : [])];
    $("legend").hidden = entries.length === 0;
    $("legend").replaceChildren(
      ...entries.map(([text, token, question, label, previous]) => {
        const canvas = make("canvas", { "aria-hidden": "true" });
        const picture = { tokens: [token], question: [question], label: [label] };
        if (previous !== undefined) picture.previous = [previous];
        draw(canvas, small, picture, LEGEND_CELL, LEGEND_CELL);
        return make("li", {}, canvas, text);
      }),
    );
  }

  /** Return legend entries that name the tokens of the example, unless its cells show the names. */
  tokenLegend() {
    if (this.board.byName || !this.board.tokens.length) return [];
    return usedTokens([this.example]).map((token) => [tokenName(this.board, token), token, token, token]);
  }

  /** Draw names of tokens into all boards if they fit into the cells of the large ones, else numbers. */
  nameTokens(c) {
    const byName = this.tokens.length > 0 && namesFit(this.board, this.tokens, c);
    if (byName === this.board.byName) return;
    this.board.byName = byName;
    this.list.redrawThumbnails();
    this.buildLegend();
    this.buildStrip();
  }

  // ---- what depends on the step ------------------------------------------------------------------

  /** Return the picture of the large board at the current step. */
  picture() {
    const { question, label, answers, windows, scored } = this.example.studied;
    if (this.step === 0) return { tokens: question, question, window: windows.question };
    return {
      tokens: answers[this.step - 1],
      question,
      label: scored ? label : undefined,
      // The first answer has no previous one: compared with the puzzle, most cells would be changed.
      previous: answers[this.step - 2],
      window: windows.answer,
    };
  }

  /** Draw everything that depends on the step, the size of the window or the theme. */
  redraw() {
    if ($("panel-examples").hidden) return;
    this.drawFigures();
    this.drawRivals();
    $("said").hidden = !this.isRun;
    if (!this.isRun) return;
    const num = this.numSteps;
    const answer = num > 1 ? `answer after step ${this.step} of ${num}` : "the answer";
    const main = this.figures.find(({ id }) => id === "board");
    main.text.textContent = this.step === 0 ? "the puzzle, before any reasoning" : answer;
    main.canvas.setAttribute("aria-label", this.said());
    $("slider").value = this.step;
    $("slider").setAttribute("aria-valuetext", `step ${this.step} of ${num}`);
    $("first").disabled = $("back").disabled = this.step === 0;
    $("last").disabled = $("forward").disabled = this.step === num;
    $("said").textContent = this.said();
    if (num > 1) this.drawPlots();
  }

  /** Draw the large and the small boards. */
  drawFigures() {
    const room = $("boards").clientWidth;
    const numLarge = this.figures.filter((one) => !one.small).length;
    const beside = numLarge > 1 && room >= 560;
    const height = clamp(window.innerHeight - (this.rivals.length ? 570 : 390), 300, 660);
    const width = beside ? (room - 16 * (numLarge - 1)) / numLarge : room;
    const pictures = this.figures.map((one) => one.picture());
    const parts = pictures.map((picture) => picture.window ?? { top: 0, left: 0, ...this.board });
    // ARC grids differ in size. Neighbouring grids have cells of the same size.
    const scale = Math.min(
      ...this.figures.map((one, i) => (one.small ? Infinity : cellSide(parts[i], width, height))),
      drawingOf(this.board).largestCell ?? Infinity,
    );
    this.nameTokens(scale);
    this.figures.forEach(({ canvas, text, small }, i) => {
      const side = Math.min(($("pair").clientWidth - 12) / 2, 48 * parts[i].columns);
      const [most, highest] = small ? [side, side] : [scale * parts[i].columns, scale * parts[i].rows];
      const c = draw(canvas, this.board, pictures[i], most, highest);
      canvas.onpointermove = (event) => this.nameCell(event, canvas, pictures[i], parts[i], c);
      canvas.setAttribute("aria-label", `${text.textContent}: ${plural(pictures[i].tokens.length, "token")}`);
    });
  }

  /**
   * Draw the answer of each run at the step of the player, or its last answer if it halted before.
   *
   * A run with one answer has no player. Beside its answer stand the last answers of the others.
   */
  drawRivals() {
    const at = this.step === 1 && $("controls").hidden ? Infinity : this.step;
    for (const { example, canvas, verdict } of this.rivals) {
      const { question, label, answers, numWrong, windows, scored } = example.studied;
      const step = Math.min(at, answers.length);
      const tokens = step ? answers[step - 1] : question;
      const picture = { tokens, question, label: scored && step ? label : undefined, window: windows.answer };
      draw(canvas, this.board, picture, 120, 120);
      const wrong = numWrong[step - 1];
      const judged = wrong ? `: ✗ ${wrong} wrong` : ": ✓ solved";
      verdict.className = !scored || !step ? "quiet" : wrong ? "bad" : "good";
      verdict.textContent = step ? `step ${step}${scored ? judged : ""}` : "the puzzle";
    }
  }

  /** Draw the confidence and the number of wrong cells over the steps. */
  drawPlots() {
    const { numWrong, numChanged, confidence, scored } = this.example.studied;
    const here = this.step > 0 ? [{ x: this.step, strong: true }] : [];
    const shared = { height: 150, low: 0, x: "step", pick: (step) => this.seek(step) };
    const series = (name, values, colour) => [
      { name, colour, dots: values.length <= 32, points: values.map((value, t) => [t + 1, value]) },
    ];
    if (confidence)
      plot($("confidence"), {
        ...shared,
        series: series("confidence", confidence, colours["series-1"]),
        high: 1,
        threshold: 0.5,
        label: "Halting confidence over reasoning steps",
        marks: [...here, ...(this.halt ? [{ x: this.halt }] : [])],
      });
    plot($("errors"), {
      ...shared,
      series: series(scored ? "wrong" : "changed", scored ? numWrong : numChanged, colours["series-2"]),
      whole: true,
      label: `${$("errors-title").textContent} over reasoning steps`,
      marks: here,
    });
  }

  /** Describe the step in words, for the line below the board and for screen readers. */
  said() {
    const { numWrong, numChanged, confidence, scored } = this.example.studied;
    const num = this.numSteps;
    if (this.step === 0) return num > 1 ? `${plural(num, "reasoning step")} to come` : "the puzzle";
    const t = this.step - 1;
    const parts = num > 1 ? [`step ${this.step} of ${num}`] : [];
    if (t > 0) parts.push(numChanged[t] ? `${plural(numChanged[t], "cell")} changed` : "nothing changed");
    if (scored) parts.push(numWrong[t] ? `${numWrong[t]} wrong` : "all cells right");
    if (confidence) parts.push(`confidence ${confidence[t].toFixed(2)}`);
    if (this.halt === this.step && num > 1) parts.push("the model would halt here");
    return parts.join(" · ");
  }

  /** Set the tooltip of a board to the cell under the pointer. */
  nameCell(event, canvas, { tokens, label }, part, c) {
    const column = Math.floor(event.offsetX / c),
      row = Math.floor(event.offsetY / c);
    const s = (part.top + row) * this.board.columns + part.left + column;
    if (row < 0 || column < 0 || row >= part.rows || column >= part.columns || tokens[s] === undefined) return;
    const isWrong = label !== undefined && label[s] >= 0 && label[s] !== tokens[s];
    const should = isWrong ? `, should be ${tokenName(this.board, label[s])}` : "";
    const place = this.board.wrapped ? `token ${s + 1}` : `row ${row + 1}, column ${column + 1}`;
    canvas.title = `${place}: ${tokenName(this.board, tokens[s])}${should}`;
  }

  // ---- the player --------------------------------------------------------------------------------

  seek(step) {
    this.step = clamp(step, 0, this.numSteps);
    if (this.timer !== null && this.step === this.numSteps) this.pause();
    this.redraw();
  }

  play() {
    if (this.step >= this.numSteps) this.seek(0);
    this.timer = setInterval(() => this.seek(this.step + 1), Number($("speed").value));
    this.showPlaying();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.showPlaying();
  }

  showPlaying() {
    const playing = this.timer !== null;
    $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
    $("play").textContent = playing ? "❚❚" : "▶";
  }

  restyle() {
    this.buildLegend();
    this.buildStrip();
    this.redraw();
  }

  /** Act on a key, and return whether the stage has a use for the key. */
  key(event) {
    const ids = { Home: "first", ArrowLeft: "back", " ": "play", ArrowRight: "forward", End: "last" };
    if ($("controls").hidden || !(event.key in ids || event.key === "h")) return false;
    if (event.key === "h") this.seek(this.halt || this.step);
    else this.acts[ids[event.key]]();
    return true;
  }
}

/** A board that a person paints, cell by cell: walls of a maze, colours of a grid. */

import { colours, draw, tokenName } from "../page/boards.mjs";
import { $, button, clamp, make } from "../page/dom.mjs";
import { usedTokens } from "../page/puzzles.mjs";

const SIDE = 306;
const SWATCH = 26;

export class Painter {
  /** `examples` tell which tokens a puzzle may have. `changed` is called after each change of a person. */
  constructor({ boards, host, examples }, changed) {
    const [board] = Object.values(boards);
    Object.assign(this, { board, changed, symbols: host.symbols, tokens: [], at: 0 });
    const questions = examples.map(({ tokens }) => tokens);
    this.palette = usedTokens(questions.map((question) => ({ studied: { question, answers: [] } })));
    // Such a token, as the start of a maze, is moved: a puzzle without it, or with two, is none.
    const times = (question, token) => question.filter((each) => each === token).length;
    this.single = this.palette.filter((token) => questions.every((question) => times(question, token) === 1));
    this.canvas = make("canvas", { tabindex: 0, role: "img", class: "painted" });
    this.canvas.addEventListener("pointerdown", (event) => this.paintAt(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.paintAt(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    for (const event of ["focus", "blur"]) this.canvas.addEventListener(event, () => this.redraw());
    this.swatches = this.palette.map((token) => {
      const canvas = make("canvas", {});
      const name = tokenName(board, token);
      return { token, canvas, element: button(() => this.choose(token), { "aria-label": name, title: name }, canvas) };
    });
    $("cells").className = "painter";
    $("cells").replaceChildren(this.canvas, make("div", { class: "swatches" }, ...this.swatches.map(({ element }) => element)));
    this.choose(this.palette[0]);
  }

  /** What is wrong with the puzzle: nothing, because the palette lets no mistake pass. */
  mistake = "";

  get line() {
    return this.tokens.map((token) => this.symbols[token]).join("");
  }

  /** Return the tokens of a pasted line, or throw an Error that says what is wrong. */
  read(text) {
    const line = text.replace(/[\r\n]/g, "");
    const { length } = this.tokens;
    if (line.length !== length) throw new Error(`${line.length} characters; this board has ${length}`);
    const tokens = [...line].map((character) => this.symbols.indexOf(character));
    const wrong = tokens.findIndex((token) => !this.palette.includes(token));
    if (wrong >= 0) throw new Error(`character ${wrong + 1} is ${line[wrong]}, which puzzles lack`);
    for (const token of this.single)
      if (tokens.filter((each) => each === token).length !== 1)
        throw new Error(`a puzzle has ${this.symbols[token]} (${tokenName(this.board, token)}) exactly once`);
    return tokens;
  }

  fill(tokens) {
    this.tokens = [...tokens];
    this.redraw();
  }

  choose(token) {
    this.chosen = token;
    for (const swatch of this.swatches) swatch.element.setAttribute("aria-pressed", String(swatch.token === token));
  }

  paintAt(event) {
    const { rows, columns } = this.board;
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const place = (distance, size, num) => clamp(Math.floor((distance / size) * num), 0, num - 1);
    this.paint(place(event.clientY - top, height, rows) * columns + place(event.clientX - left, width, columns));
  }

  /** Paint a cell. Of a token that puzzles have once, the two cells exchange what they hold. */
  paint(s) {
    const { tokens, chosen, single } = this;
    if (s >= tokens.length) return; // behind the last token, where these stand in lines
    this.at = s;
    if (tokens[s] !== chosen && (single.includes(chosen) || !single.includes(tokens[s]))) {
      if (single.includes(chosen)) tokens[tokens.indexOf(chosen)] = tokens[s];
      tokens[s] = chosen;
      this.changed();
    }
    this.redraw();
  }

  key(event) {
    const { rows, columns } = this.board;
    const [row, column] = [Math.floor(this.at / columns), this.at % columns];
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in steps) {
      const [down, right] = steps[event.key];
      const next = clamp(row + down, 0, rows - 1) * columns + clamp(column + right, 0, columns - 1);
      this.at = Math.min(next, this.tokens.length - 1);
      this.redraw();
    } else if (event.key === " ") this.paint(this.at);
    else if (event.key === "Enter") $("solve").click();
    else return;
    event.preventDefault();
    event.stopPropagation(); // these keys move the player of the page too
  }

  redraw() {
    const { board, canvas, tokens, at } = this;
    const c = draw(canvas, board, { tokens, question: tokens }, SIDE, SIDE);
    const [row, column] = [Math.floor(at / board.columns), at % board.columns];
    canvas.setAttribute("aria-label", `row ${row + 1}, column ${column + 1}: ${tokenName(board, tokens[at])}`);
    if (document.activeElement === canvas) {
      const context = canvas.getContext("2d");
      context.strokeStyle = colours.accent;
      context.lineWidth = 2;
      context.strokeRect(column * c + 1, row * c + 1, c - 2, c - 2);
    }
    const one = { ...board, rows: 1, columns: 1 };
    for (const swatch of this.swatches)
      draw(swatch.canvas, one, { tokens: [swatch.token], question: [swatch.token] }, SWATCH, SWATCH);
  }
}

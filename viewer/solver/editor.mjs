/** The cells of a Sudoku, in which a person types. */

import { $, make, plural } from "../page/dom.mjs";
import { boxOf, unitsOfCell } from "./solver.mjs";

export const BLANK = 1;

export class Editor {
  /** `changed` is called after each change of a person. */
  constructor({ boards, host }, changed) {
    const sides = Object.keys(boards).map(Math.sqrt);
    Object.assign(this, { symbols: host.symbols, changed, sides, side: 0, inputs: [] });
  }

  get tokens() {
    return this.inputs.map((input) => this.tokenOf(input.value));
  }

  get line() {
    const line = this.tokens.map((token) => this.symbols[token]).join("");
    return /[^.]/.test(line) ? line : "";
  }

  /** What is wrong with the puzzle; empty if nothing is. */
  get mistake() {
    return this.clashes.includes(true) ? "a row, a column or a box has a digit twice; correct it" : "";
  }

  /**
   * Return the tokens of a pasted line, or throw an Error that says what is wrong.
   *
   * Other characters, such as spaces and frames, are left out.
   */
  read(text) {
    const { sides } = this;
    const line = text.replace(/[^0-9A-Za-z.]/g, "");
    const side = Math.sqrt(line.length);
    if (!sides.includes(side))
      throw new Error(`${plural(line.length, "character")}; a board has ${sides.map((n) => n * n).join(", ")}`);
    const tokens = [...line].map((character) => this.tokenOf(character, side));
    const wrong = tokens.indexOf(undefined);
    if (wrong >= 0) throw new Error(`character ${wrong + 1} is ${line[wrong]}, which a board of ${side}x${side} lacks`);
    return tokens;
  }

  /** Return the token of a character; undefined if this board has no such token. */
  tokenOf(character, side = this.side) {
    if (["", " ", ".", "0"].includes(character)) return BLANK;
    const token = this.symbols.indexOf(character.toUpperCase());
    return token > BLANK && token < side + 2 ? token : undefined;
  }

  /** Show an empty board with this side. */
  resize(side) {
    this.side = side;
    const [rows, columns] = boxOf(side);
    this.inputs = Array.from({ length: side * side }, (_, s) => {
      const [row, column] = [Math.floor(s / side), s % side];
      const strong = [
        (column + 1) % columns === 0 && column + 1 < side ? "right" : "",
        (row + 1) % rows === 0 && row + 1 < side ? "bottom" : "",
      ];
      const input = make("input", {
        ...{ type: "text", maxlength: 1, autocomplete: "off", inputmode: side < 10 ? "numeric" : "text" },
        ...{ "aria-label": `row ${row + 1}, column ${column + 1}`, class: strong.join(" ") },
      });
      input.addEventListener("input", () => this.type(s));
      input.addEventListener("focus", () => input.select());
      input.addEventListener("keydown", (event) => this.move(event, s));
      return input;
    });
    $("cells").style.gridTemplateColumns = `repeat(${side}, 1fr)`;
    $("cells").style.fontSize = `${Math.min(20, 180 / side)}px`;
    $("cells").replaceChildren(...this.inputs);
  }

  /** Show tokens on a board of their size. */
  fill(tokens) {
    this.resize(Math.sqrt(tokens.length));
    this.inputs.forEach((input, s) => (input.value = tokens[s] === BLANK ? "" : this.symbols[tokens[s]]));
    this.mark();
  }

  type(s) {
    const input = this.inputs[s];
    if (this.tokenOf(input.value) === undefined) input.value = "";
    else if (input.value) this.inputs[s + 1]?.focus();
    this.mark();
    this.changed();
  }

  redraw() {} // the style sheet does

  move(event, s) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.side, ArrowDown: this.side };
    if (event.key === "Enter") $("solve").click();
    if (event.key === "Backspace" && !this.inputs[s].value) this.inputs[s - 1]?.focus();
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.inputs[s + steps[event.key]]?.focus();
  }

  /** Mark the digits that a row, a column or a box has twice. */
  mark() {
    const { tokens, side } = this;
    const seen = tokens.flatMap((token, s) => unitsOfCell(side, s).map((unit) => `${unit} ${token}`));
    const twice = new Set(seen.filter((each, place) => seen.indexOf(each) !== place));
    this.clashes = tokens.map(
      (token, s) => token > BLANK && unitsOfCell(side, s).some((unit) => twice.has(`${unit} ${token}`)),
    );
    this.inputs.forEach((input, s) => input.setAttribute("aria-invalid", String(this.clashes[s])));
  }
}

/** Let a person choose or type a puzzle, and show how the model solves it. */

import { $, option, plural, span } from "../page/dom.mjs";
import { study } from "../page/puzzles.mjs";
import { Stage } from "../page/stage.mjs";
import { start } from "../page/start.mjs";
import { Editor } from "./editor.mjs";
import { unitsOfCell } from "./solver.mjs";

const RESTARTS = 15;
const sigmoid = (x) => 1 / (1 + Math.exp(-x));

/** The stage of view.py, with a heading of its own. */
class SolverStage extends Stage {
  buildHeading() {
    const { answers, settled, valid } = this.example.studied;
    $("heading").textContent = answers.length ? "The model's answer" : "The puzzle";
    const verdict = valid ? `✓ solved from step ${settled} on` : "✗ not solved";
    $("verdict").replaceChildren(...(answers.length && valid !== undefined ? [span(valid ? "good" : "bad", verdict)] : []));
  }
}

class Page {
  constructor(data) {
    this.data = data;
    this.code = URL.createObjectURL(new Blob([$("worker").textContent], { type: "text/javascript" }));
    this.editor = new Editor(data.host.symbols, () => this.edited());
    // What the stage asks of a page and of its list of examples.
    this.page = { boards: data.boards, sets: {}, answering: [], runs: [], values_going_on: data.host.values_going_on };
    this.list = { page: this.page, isRun: true, byRun: false, all: [], redrawThumbnails: () => {} };
    this.stage = new SolverStage(this.list, []);
    $("restarts").textContent = RESTARTS;
    const again = $("again").parentElement;
    again.hidden = data.host.noise === "none" && Object.values(data.host.starts).at(-1).length < 2;
    for (const cells of Object.keys(data.boards)) {
      const side = Math.sqrt(cells);
      $("size").append(option(side, `${side}x${side}`));
    }
    $("examples").append(...data.examples.map(([name]) => option(name, name)));
    $("size").addEventListener("change", () => this.show(".".repeat(Number($("size").value) ** 2)));
    $("examples").addEventListener("change", () => this.showExample($("examples").selectedIndex));
    for (const [id, step] of [["previous", -1], ["next", 1]])
      $(id).addEventListener("click", () => this.showExample(this.number + step));
    $("line").addEventListener("input", () => this.paste());
    $("solve").addEventListener("click", () => this.solve());
    $("clear").addEventListener("click", () => this.show(".".repeat(this.editor.side ** 2)));
    document.addEventListener("keydown", (event) => {
      if (!event.target.matches("input, select, button") && this.stage.key(event)) event.preventDefault();
    });
    this.showExample(0);
  }

  /** Show an example by its number. The first one follows the last. */
  showExample(number) {
    const { examples } = this.data;
    this.number = (number + examples.length) % examples.length;
    $("examples").selectedIndex = this.number;
    this.show(examples[this.number][1]);
  }

  /** Show a puzzle, and forget what the model thought of another one. */
  show(line) {
    this.editor.fill(line);
    $("size").value = String(this.editor.side);
    this.edited();
  }

  /** Stop thinking, because the puzzle has changed. */
  edited() {
    this.worker?.terminate();
    this.worker = null;
    $("solve").disabled = false;
    $("mistake").textContent = "";
    $("status").textContent = "";
    const { line } = this.editor;
    $("line").value = /[^.]/.test(line) ? line : "";
    this.view([]);
  }

  /** Read a pasted line. Other characters, such as spaces and frames, are left out. */
  paste() {
    const line = $("line").value.replace(/[^0-9A-Za-z.]/g, "");
    const sides = Object.keys(this.data.boards).map(Math.sqrt);
    const side = Math.sqrt(line.length);
    const fits = sides.includes(side);
    if (!fits) return this.mistake(`${plural(line.length, "character")}; a board has ${sides.map((n) => n * n).join(", ")}`);
    const wrong = [...line].findIndex((character) => this.editor.tokenOf(character, side) === undefined);
    if (wrong >= 0) return this.mistake(`character ${wrong + 1} is ${line[wrong]}, which a board of ${side}x${side} lacks`);
    this.show(line);
    return undefined;
  }

  mistake(text) {
    $("mistake").textContent = text;
  }

  solve() {
    const { tokens, clashes } = this.editor;
    if (clashes.includes(true)) return this.mistake("a row, a column or a box has a digit twice; correct it");
    this.edited();
    $("solve").disabled = true;
    const began = performance.now();
    // Not a module: browsers refuse these to a page that is a file.
    this.worker = new Worker(this.code);
    // Of each pass all that it thought. A pass that settled answers, or else the surest one.
    const passes = [];
    const sureness = (pass) => (pass.at(-1).settled ? Infinity : pass.at(-1).qHalt);
    this.worker.onmessage = ({ data }) => {
      if (data.failed) return this.stop(`the model could not run: ${data.failed}`);
      if (data.done)
        return this.finish(tokens, passes.reduce((best, pass) => (sureness(pass) > sureness(best) ? pass : best)), began);
      if (data.step === 1) passes.push([]);
      passes.at(-1).push(data);
      $("status").textContent = `pass ${data.pass + 1}, step ${data.step}…`;
      return this.view(passes.at(-1));
    };
    const restarts = $("again").checked && !$("again").parentElement.hidden ? RESTARTS : 0;
    this.worker.postMessage({ host: this.data.host, weights: this.data.weights });
    this.worker.postMessage({ tokens, options: { restarts } });
    return undefined;
  }

  /** Stop with a mistake. */
  stop(text) {
    this.edited();
    this.mistake(text);
  }

  finish(tokens, pass, began) {
    $("solve").disabled = false;
    const thought = pass.at(-1);
    const seconds = ((performance.now() - began) / 1000).toFixed(2);
    const valid = isSolution(tokens, thought.answer, this.editor.side);
    const passes = thought.pass ? ` in pass ${thought.pass + 1}` : "";
    const sure = thought.settled ? "" : " The model did not settle on this answer.";
    $("status").textContent = `${plural(thought.step, "step")}${passes}, ${seconds} s.${sure}`;
    this.view(pass, valid);
    this.stage.seek(0);
    this.stage.play();
  }

  /** Show the answers of a pass, the last one first. */
  view(pass, valid) {
    const { tokens, side } = this.editor;
    const answers = pass.map(({ answer }) => answer);
    const example = { set: side * side, row: 0, input: tokens, answers };
    if (pass.length) example.confidence = pass.map(({ qHalt }) => sigmoid(qHalt));
    study(example, this.data.boards[side * side]);
    example.studied.valid = valid;
    this.list.all = [example];
    this.stage.step = answers.length;
    this.stage.show(example);
  }
}

/** Return whether an answer keeps the clues, and every row, column and box holds each digit once. */
function isSolution(question, answer, side) {
  const keeps = question.every((token, s) => token < 2 || token === answer[s]);
  const units = Array.from({ length: 3 * side }, () => new Set());
  answer.forEach((token, s) => unitsOfCell(side, s).forEach((unit) => units[unit].add(token)));
  return keeps && units.every((tokens) => tokens.size === side) && answer.every((token) => token > 1);
}

function show(data) {
  $("panel-examples").hidden = false;
  $("title").textContent = data.title;
  $("parameters").textContent = data.parameters.toLocaleString("en");
  const { stage } = new Page(data);
  window.addEventListener("resize", () => stage.redraw());
  return stage;
}

start(show, "python -m sharing.export");

/** Let a person choose or type a puzzle, and show how the model solves it. */

import { $, option, plural, span } from "../page/dom.mjs";
import { study } from "../page/puzzles.mjs";
import { Stage } from "../page/stage.mjs";
import { inflated, start } from "../page/start.mjs";
import { BLANK, Editor } from "./editor.mjs";
import { Painter } from "./painter.mjs";
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
  /** `runtime` is that of `runtimeBeside`, or null. */
  constructor(data, runtime) {
    Object.assign(this, { data, runtime });
    this.code = URL.createObjectURL(new Blob([$("worker").textContent], { type: "text/javascript" }));
    const isSudoku = Object.values(data.boards)[0].kind === "sudoku";
    this.editor = new (isSudoku ? Editor : Painter)(data, () => this.edited());
    // What the stage asks of a page and of its list of examples.
    this.page = { boards: data.boards, sets: {}, answering: [], runs: [], values_going_on: data.host.values_going_on };
    this.list = { page: this.page, isRun: true, byRun: false, all: [], redrawThumbnails: () => {} };
    this.stage = new SolverStage(this.list, []);
    $("restarts").textContent = RESTARTS;
    const again = $("again").parentElement;
    again.hidden = data.host.noise === "none" && (Object.values(data.host.starts).at(-1)?.length ?? 0) < 2;
    for (const cells of Object.keys(data.boards)) {
      const side = Math.sqrt(cells);
      $("size").append(option(side, `${side}x${side}`));
    }
    $("size").hidden = Object.keys(data.boards).length < 2;
    $("line").hidden = !data.host.symbols;
    $("clear").textContent = isSudoku ? "Clear" : "Undo";
    $("examples").append(...data.examples.map(({ name }) => option(name, name)));
    const blank = (side) => new Array(side * side).fill(BLANK);
    $("size").addEventListener("change", () => this.show(blank(Number($("size").value))));
    $("examples").addEventListener("change", () => this.showExample($("examples").selectedIndex));
    for (const [id, step] of [["previous", -1], ["next", 1]])
      $(id).addEventListener("click", () => this.showExample(this.number + step));
    $("line").addEventListener("input", () => this.paste());
    $("solve").addEventListener("click", () => this.solve());
    $("clear").addEventListener("click", () =>
      isSudoku ? this.show(blank(this.editor.side)) : this.showExample(this.number),
    );
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
    this.show(examples[this.number].tokens);
  }

  /** Show a puzzle, and forget what the model thought of another one. */
  show(tokens) {
    this.editor.fill(tokens);
    $("size").value = String(Math.sqrt(tokens.length));
    this.edited();
  }

  /** Stop thinking, because the puzzle has changed. */
  edited() {
    if (this.thinking) {
      this.worker.terminate();
      this.worker = null;
    }
    this.thinking = false;
    $("solve").disabled = false;
    $("mistake").textContent = "";
    $("status").textContent = "";
    $("line").value = this.editor.line;
    this.view([]);
  }

  paste() {
    try {
      this.show(this.editor.read($("line").value));
    } catch (error) {
      $("mistake").textContent = error.message;
    }
  }

  /** Return the worker that holds the model. It stays until a person interrupts it. */
  thinker() {
    if (!this.worker) {
      // Not a module: browsers refuse these to a page that is a file.
      this.worker = new Worker(this.code);
      this.worker.postMessage({ ...this.data, runtime: this.runtime });
    }
    return this.worker;
  }

  solve() {
    const { tokens, mistake } = this.editor;
    $("mistake").textContent = mistake;
    if (mistake) return;
    this.edited();
    this.thinking = true;
    $("solve").disabled = true;
    $("status").textContent = "reading the model…";
    const began = performance.now();
    // Of each pass all that it thought. A pass that settled answers, or else the surest one.
    const passes = [];
    const sureness = (pass) => (pass.at(-1).settled ? Infinity : pass.at(-1).qHalt);
    const worker = this.thinker();
    worker.onmessage = ({ data }) => {
      if (data.failed) {
        this.edited();
        $("mistake").textContent = `the model could not run: ${data.failed}`;
      } else if (data.done) {
        this.finish(tokens, passes.reduce((best, pass) => (sureness(pass) > sureness(best) ? pass : best)), began);
      } else {
        if (data.step === 1) passes.push([]);
        passes.at(-1).push(data);
        $("status").textContent = `pass ${data.pass + 1}, step ${data.step}…`;
        this.view(passes.at(-1));
      }
    };
    const restarts = $("again").checked && !$("again").parentElement.hidden ? RESTARTS : 0;
    worker.postMessage({ tokens, options: { restarts, puzzle: this.data.examples[this.number].puzzle } });
  }

  finish(tokens, pass, began) {
    this.thinking = false;
    $("solve").disabled = false;
    const thought = pass.at(-1);
    const seconds = ((performance.now() - began) / 1000).toFixed(2);
    const passes = thought.pass ? ` in pass ${thought.pass + 1}` : "";
    const sure = thought.settled ? "" : " The model did not settle on this answer.";
    $("status").textContent = `${plural(thought.step, "step")}${passes}, ${seconds} s.${sure}`;
    this.view(pass, this.isRight(tokens, thought.answer));
    this.stage.seek(0);
    this.stage.play();
  }

  /** Return whether an answer is right; undefined if a person has changed the puzzle of an example. */
  isRight(tokens, answer) {
    if (this.editor instanceof Editor) return isSolution(tokens, answer, this.editor.side);
    const label = this.labelOf(tokens);
    return label?.every((token, s) => token < 0 || token === answer[s]);
  }

  labelOf(tokens) {
    const example = this.data.examples[this.number];
    return example.tokens.every((token, s) => token === tokens[s]) ? example.label : undefined;
  }

  /** Show the answers of a pass, the last one first. */
  view(pass, valid) {
    const { tokens } = this.editor;
    const set = tokens.length;
    const answers = pass.map(({ answer }) => answer);
    const example = { set, row: 0, input: tokens, answers, label: this.labelOf(tokens) };
    if (pass.length) example.confidence = pass.map(({ qHalt }) => sigmoid(qHalt));
    study(example, this.data.boards[set]);
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

/** Return the bytes of onnxruntime-web, from the file beside the page. */
async function runtimeBeside(name) {
  const beside = globalThis.onnxruntimeWeb;
  if (!beside) throw new Error(`${name} is missing beside it; copy both files to one folder`);
  const bytes = (packed) => inflated(packed).arrayBuffer();
  return { module: await bytes(beside.module), wasm: await bytes(beside.wasm) };
}

async function show(data) {
  const runtime = data.runtime ? await runtimeBeside(data.runtime) : null;
  $("panel-examples").hidden = false;
  $("title").textContent = data.title;
  $("parameters").textContent = data.parameters.toLocaleString("en");
  $("units").hidden = !data.host.any_size;
  const { editor, stage } = new Page(data, runtime);
  const restyle = () => {
    stage.restyle();
    editor.redraw();
  };
  window.addEventListener("resize", () => stage.redraw());
  return { restyle };
}

start(show, "python -m sharing.export");

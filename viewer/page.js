"use strict";
// In arrays: N examples, T reasoning steps, S cells of a board. A cell's side in pixels is c.

// -------------------------------------------------------------------------------------------------
// Small helpers

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * Make an HTML element.
 *
 * Text becomes text nodes only, because other people chose the names in the data, and a name could
 * hold HTML.
 */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Make an SVG element. */
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function numberText(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  if (size >= 1e5) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** Inflate and parse the data block of the page. */
async function readData() {
  const packed = Uint8Array.from(atob($("data").textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// viewer/pages.py writes one character for each token. The character "-" is an ignored label.
const CODES = new Int16Array(128).fill(-1);
[..."ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"].forEach((character, token) => {
  CODES[character.charCodeAt(0)] = token;
});

/** Return the tokens of an example, (S,) integers. An ignored label is -1. */
function tokensOf(text) {
  if (typeof text !== "string") return Int32Array.from(text);
  const tokens = new Int16Array(text.length);
  for (let i = 0; i < text.length; i++) tokens[i] = CODES[text.charCodeAt(i)];
  return tokens;
}

// -------------------------------------------------------------------------------------------------
// Drawing boards

const colours = {};

/** Read the colours of the theme from the style sheet, which canvases do not use by themselves. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [
    "board",
    "grid",
    "frame",
    "given",
    "answer",
    "wrong",
    "wrong-soft",
    "changed",
    "right",
    "wall",
    "start",
    "goal",
    "quiet",
    "text",
    "card",
    "accent",
    "line",
    "train",
    "series-1",
    "series-2",
    "series-3",
    "series-4",
  ]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

const LAMP = "#f2b632";
const ARC_COLOURS = [
  "#000000",
  "#0074d9",
  "#ff4136",
  "#2ecc40",
  "#ffdc00",
  "#aaaaaa",
  "#f012be",
  "#ff851b",
  "#7fdbff",
  "#870c25",
];
const LEGEND_CELL = 18;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

/**
 * Return the side of a cell in CSS pixels.
 *
 * A cell of four or more screen pixels gets a whole number of them, so that neighbouring cells meet
 * without a seam.
 */
function cellSide({ rows, columns }, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const c = Math.min(width / columns, height / rows);
  return c * ratio < 4 ? c : Math.floor(c * ratio) / ratio;
}

/** Resize and clear a canvas, and return its context. One unit of the context is one CSS pixel. */
function prepare(canvas, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/**
 * Draw a cross, which marks a wrong cell.
 *
 * A second cross in the colour `under` lies below the first, so that the mark is visible on every
 * ground.
 */
function cross(context, x, y, c, stroke, under) {
  const inset = c * 0.24;
  const lines = () => {
    context.beginPath();
    context.moveTo(x + inset, y + inset);
    context.lineTo(x + c - inset, y + c - inset);
    context.moveTo(x + c - inset, y + inset);
    context.lineTo(x + inset, y + c - inset);
    context.stroke();
  };
  context.lineCap = "round";
  if (under) {
    context.strokeStyle = under;
    context.lineWidth = Math.max(2.2, c * 0.2);
    lines();
  }
  context.strokeStyle = stroke;
  context.lineWidth = Math.max(1.2, c * 0.1);
  lines();
}

/**
 * How the page draws each kind of board. The page draws the tokens of a kind without an entry.
 *
 * The keys of an entry are:
 *
 *   cell           a function of (context, cell, board) that draws a cell. The cell is {x, y, c,
 *                  token, question, label, wrong, changed}; question is the puzzle's token.
 *   legend         [[text, token, question, label, previous?]]: each becomes a board of one cell
 *   over?          a function of (context, cells, part, c) that draws over the cells, not lines
 *   line?          the colour of the lines between cells, instead of the theme's
 *   windows?       a function of (board, question, label, answers) that returns the parts to show
 *   largestCell?   the largest side of a cell in CSS pixels; by default cells fill the screen
 *   namesTokens?   true if cells hold the names of the tokens, or their numbers with a legend of names
 *   besidePuzzle?  true if answers do not contain the puzzle, so that both need a large board
 */
const DRAWINGS = {
  sudoku: {
    cell: sudokuCell,
    legend: [
      ["given", 5, 5, 5],
      ["answered", 5, 1, 5],
      ["changed in this step", 5, 1, 5, 4],
      ["wrong", 5, 1, 7],
    ],
  },
  maze: {
    cell: mazeCell,
    legend: [
      ["path", 5, 2, 5],
      ["changed in this step", 2, 2, 2, 5],
      ["not on the path", 5, 2, 2],
      ["missing from the path", 2, 2, 5],
    ],
    over: way,
  },
  lights_out: {
    cell: lightsOutCell,
    legend: [
      ["lit", 3, 2, 3],
      ["press", 4, 1, 4],
      ["changed in this step", 4, 1, 4, 3],
      ["wrong", 4, 1, 3],
    ],
  },
  arc: {
    cell: arcCell,
    legend: [
      ["changed in this step", 3, 3, 3, 4],
      ["wrong", 3, 3, 4],
      ["no colour", 1, 1, 1],
    ],
    line: "rgb(128 128 128 / 55%)",
    windows: arcWindows,
    largestCell: 48,
    besidePuzzle: true,
  },
  numbers: {
    cell: numberCell,
    legend: [
      ["as in the puzzle", 0, 0, 0],
      ["answered", 0, -1, 0],
      ["changed in this step", 0, 0, 0, -1],
      ["wrong", 0, 0, 1],
    ],
    namesTokens: true,
  },
};

/** Return the board of an example: that of its set, where sets have boards of several sizes. */
const boardOf = (page, example) => page.boards?.[example.set] ?? page.board;

const drawingOf = (board) => DRAWINGS[board.kind] ?? DRAWINGS.numbers;

function sudokuCell(context, { x, y, c, token, question, wrong, changed }, board) {
  if (changed || wrong) {
    context.fillStyle = wrong ? colours["wrong-soft"] : colours.changed;
    context.fillRect(x, y, c, c);
  }
  if (wrong && changed) corner(context, x, y, c);
  if (token < 2) {
    if (token === 0) {
      context.fillStyle = colours.quiet;
      context.font = `500 ${c * 0.56}px ${FONT}`;
      context.fillText("·", x + c / 2, y + c * 0.54);
    }
    if (wrong) underline(context, x, y, c);
    return;
  }
  const given = question > 1;
  context.fillStyle = wrong ? colours.wrong : given ? colours.given : colours.answer;
  context.font = `${given ? 700 : 500} ${c * 0.56}px ${FONT}`;
  context.fillText(tokenName(board, token), x + c / 2, y + c * 0.54); // a letter above 9
  if (wrong) underline(context, x, y, c);
}

function mazeCell(context, { x, y, c, token, label, wrong, changed }) {
  if (changed) {
    context.fillStyle = colours.changed;
    context.fillRect(x, y, c, c);
  }
  if (token === 1) {
    context.fillStyle = colours.wall;
    context.fillRect(x, y, c, c);
  } else if (token === 0) {
    context.fillStyle = colours.grid;
    context.fillRect(x + c * 0.4, y + c * 0.4, c * 0.2, c * 0.2);
  }
  if (!wrong) return;
  if (label === 5 && token !== 1) {
    // A ring marks a cell that is missing from the path.
    context.strokeStyle = colours.wrong;
    context.lineWidth = Math.max(1, c * 0.12);
    context.beginPath();
    context.arc(x + c / 2, y + c / 2, c * 0.24, 0, 2 * Math.PI);
    context.stroke();
  }
}

function lightsOutCell(context, { x, y, c, token, question, wrong, changed }) {
  if (changed || wrong) {
    context.fillStyle = wrong ? colours["wrong-soft"] : colours.changed;
    context.fillRect(x, y, c, c);
  }
  if (wrong && changed) corner(context, x, y, c);
  // The lamp of the puzzle lies below the press.
  context.beginPath();
  context.arc(x + c / 2, y + c / 2, c * 0.3, 0, 2 * Math.PI);
  if (question === 2) {
    context.fillStyle = LAMP;
    context.fill();
  } else {
    context.strokeStyle = colours.grid;
    context.lineWidth = Math.max(1, c * 0.04);
    context.stroke();
  }
  if (token === 4) {
    context.fillStyle = wrong ? colours.wrong : colours.answer;
    context.beginPath();
    context.arc(x + c / 2, y + c / 2, c * 0.17, 0, 2 * Math.PI);
    context.fill();
  }
  if (wrong) underline(context, x, y, c);
}

function arcCell(context, { x, y, c, token, wrong, changed }) {
  if (token >= 2) {
    context.fillStyle = ARC_COLOURS[token - 2];
    context.fillRect(x, y, c, c);
  } else {
    // A cell without a colour is padding or the end of the grid.
    context.strokeStyle = colours.grid;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, y + c);
    context.lineTo(x + c, y);
    context.stroke();
  }
  if (changed) {
    context.strokeStyle = "#ffffff";
    context.lineWidth = Math.max(1, c * 0.09);
    const inset = c * 0.12;
    context.strokeRect(x + inset, y + inset, c - 2 * inset, c - 2 * inset);
  }
  if (wrong) cross(context, x, y, c, "#ffffff", "#000000");
}

function numberCell(context, { x, y, c, token, question, wrong, changed }, board) {
  if (changed || wrong) {
    context.fillStyle = wrong ? colours["wrong-soft"] : colours.changed;
    context.fillRect(x, y, c, c);
  }
  const text = token < 0 ? "" : board.byName ? tokenName(board, token) : String(token);
  const given = token === question;
  context.fillStyle = wrong ? colours.wrong : given ? colours.given : colours.answer;
  context.font = `${given ? 700 : 500} ${textSize(text.length, c)}px ${FONT}`;
  context.fillText(text, x + c / 2, y + c * 0.54);
  if (wrong) underline(context, x, y, c);
}

/** Return the font size at which a text of this length fits into a cell. */
const textSize = (length, c) => Math.min(c * 0.5, (c * 1.4) / Math.max(1, length));

/** Return whether tokens have names that are legible in a cell, or as short as their numbers. */
function namesFit(board, tokens, c) {
  if (!board.tokens.length) return false;
  const longest = Math.max(...tokens.map((token) => tokenName(board, token).length));
  return longest <= String(Math.max(...tokens)).length || textSize(longest, c) >= 8;
}

function underline(context, x, y, c) {
  context.fillStyle = colours.wrong;
  context.fillRect(x + c * 0.2, y + c * 0.84, c * 0.6, Math.max(1.5, c * 0.07));
}

/** Mark a changed cell in the corner, because the ground of the cell already marks it as wrong. */
function corner(context, x, y, c) {
  context.fillStyle = colours.wrong;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + c * 0.26, y);
  context.lineTo(x, y + c * 0.26);
  context.fill();
}

/**
 * Draw a board of at most `width` x `height` CSS pixels, and return the side of a cell.
 *
 * The picture is {tokens, question, label?, previous?, window?}:
 *
 *   label      the solution: cells that differ from it are marked as wrong
 *   previous   an earlier answer: cells that differ from it are marked as changed
 *   window     the part of the board to show, {top, left, rows, columns}; by default all of it
 */
function draw(canvas, board, picture, width, height) {
  const part = picture.window ?? { top: 0, left: 0, rows: board.rows, columns: board.columns };
  const c = cellSide(part, width, height);
  const context = prepare(canvas, c * part.columns, c * part.rows);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = colours.board;
  context.fillRect(0, 0, c * part.columns, c * part.rows);
  const { tokens, question, label, previous } = picture;
  const cells = [];
  for (let row = 0; row < part.rows; row++) {
    for (let column = 0; column < part.columns; column++) {
      const s = (part.top + row) * board.columns + part.left + column;
      if (s >= tokens.length) continue;
      cells.push({
        x: column * c,
        y: row * c,
        c,
        row,
        column,
        s,
        token: tokens[s],
        question: question[s],
        label: label?.[s],
        wrong: label !== undefined && label[s] >= 0 && label[s] !== tokens[s],
        changed: previous !== undefined && previous[s] !== tokens[s],
      });
    }
  }
  const drawing = drawingOf(board);
  for (const cell of cells) drawing.cell(context, cell, board);
  // The rows and columns of wrapped tokens mean nothing, and lines would suggest a board.
  if (!board.wrapped) {
    (drawing.over ?? lines)(context, cells, part, c, board);
    frame(context, part, c);
  }
  return c;
}

/** Draw the path through a maze as a line from cell to cell, then the start and the goal. */
function way(context, cells, part, c) {
  const at = (row, column) =>
    row < part.rows && column < part.columns ? cells[row * part.columns + column] : undefined;
  const isWay = (cell) => cell !== undefined && cell.token >= 3;
  const middle = (cell) => [cell.x + c / 2, cell.y + c / 2];
  context.lineCap = "round";
  const thick = Math.max(1, c * 0.34);
  context.lineWidth = thick;
  context.strokeStyle = colours.answer;
  context.beginPath();
  for (const cell of cells) {
    if (!isWay(cell)) continue;
    for (const other of [at(cell.row + 1, cell.column), at(cell.row, cell.column + 1)]) {
      if (isWay(other) && (cell.token === 5 || other.token === 5)) {
        context.moveTo(...middle(cell));
        context.lineTo(...middle(other));
      }
    }
  }
  context.stroke();
  for (const cell of cells) {
    if (cell.token === 5) {
      // The dot shows a cell of the path that has no neighbours on the path.
      context.fillStyle = colours.answer;
      context.beginPath();
      context.arc(...middle(cell), thick / 2, 0, 2 * Math.PI);
      context.fill();
    }
    if (cell.token === 3 || cell.token === 4) {
      const [x, y] = middle(cell);
      context.fillStyle = cell.token === 3 ? colours.start : colours.goal;
      context.beginPath();
      // Start and goal stay inside a large cell, but are larger than a small cell, to be found.
      const radius = clamp(c * 0.62, 2.5, Math.max(7, c * 0.42));
      if (cell.token === 3) context.arc(x, y, radius, 0, 2 * Math.PI);
      else context.rect(x - radius * 0.9, y - radius * 0.9, radius * 1.8, radius * 1.8);
      context.fill();
      if (c >= 10) {
        context.fillStyle = colours.board;
        context.font = `700 ${radius * 1.3}px ${FONT}`;
        context.fillText(cell.token === 3 ? "S" : "G", x, y + c * 0.05);
      }
    }
    if (cell.wrong && !(cell.label === 5 && cell.token !== 1))
      cross(context, cell.x, cell.y, c, colours.wrong, colours.board);
  }
}

/** Draw thin lines between cells, and strong lines between boxes. */
function lines(context, cells, part, c, board) {
  const [boxRows, boxColumns] = board.box ?? [part.rows, part.columns];
  const width = c * part.columns,
    height = c * part.rows;
  const line = (x1, y1, x2, y2, strong) => {
    context.strokeStyle = strong ? colours.frame : (drawingOf(board).line ?? colours.grid);
    context.lineWidth = strong ? clamp(c * 0.05, 1, 2.5) : clamp(c * 0.03, 0.3, 1);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  };
  context.lineCap = "butt";
  for (const strong of [false, true]) {
    for (let row = 1; row < part.rows; row++)
      if ((row % boxRows === 0) === strong) line(0, row * c, width, row * c, strong);
    for (let column = 1; column < part.columns; column++) {
      if ((column % boxColumns === 0) === strong) line(column * c, 0, column * c, height, strong);
    }
  }
}

/** Draw the edge of a board. */
function frame(context, part, c) {
  const edge = clamp(c * 0.06, 1, 3);
  context.strokeStyle = colours.frame;
  context.lineWidth = edge;
  context.strokeRect(edge / 2, edge / 2, c * part.columns - edge, c * part.rows - edge);
}

/** Return the name of a token, or its number if the token has no name. */
function tokenName(board, token) {
  if (token < 0) return "any";
  return board.tokens[token] ?? String(token);
}

// -------------------------------------------------------------------------------------------------
// What follows from the tokens of an example

/** Return the smallest part of a board with all cells for which `keep` holds; null for no cells. */
function extent(board, keep) {
  let top = Infinity,
    left = Infinity,
    bottom = -1,
    right = -1;
  for (let s = 0; s < board.rows * board.columns; s++) {
    if (!keep(s)) continue;
    const row = Math.floor(s / board.columns),
      column = s % board.columns;
    top = Math.min(top, row);
    bottom = Math.max(bottom, row);
    left = Math.min(left, column);
    right = Math.max(right, column);
  }
  return bottom < 0 ? null : { top, left, rows: bottom - top + 1, columns: right - left + 1 };
}

/** Decode the tokens of an example and compute what the views show. The example stores both. */
function study(example, board) {
  if (example.studied) return example.studied;
  const question = tokensOf(example.input);
  const label = example.label === undefined ? undefined : tokensOf(example.label);
  const answers = (example.answers ?? []).map(tokensOf);
  const numWrong = answers.map((answer) => {
    let count = 0;
    if (label) for (let s = 0; s < answer.length; s++) if (label[s] >= 0 && label[s] !== answer[s]) count++;
    return count;
  });
  const numChanged = answers.map((answer, t) => {
    let count = 0;
    if (t > 0) for (let s = 0; s < answer.length; s++) if (answers[t - 1][s] !== answer[s]) count++;
    return count;
  });
  // The first step after which the answer does not change any more.
  let settled = answers.length;
  while (settled > 1 && numChanged[settled - 1] === 0) settled--;
  const confidence = example.confidence;
  // Adaptive evaluation halts at the first step that is confident and repeats the last answer.
  const halt = confidence ? confidence.findIndex((value, t) => t > 0 && value > 0.5 && numChanged[t] === 0) + 1 : 0;
  const scored = label !== undefined && label.some((token) => token >= 0);
  const last = answers.length - 1;
  example.studied = {
    question,
    label,
    answers,
    numWrong,
    numChanged,
    settled,
    confidence,
    halt,
    scored,
    solved: scored && last >= 0 && numWrong[last] === 0,
    wrong: last >= 0 ? numWrong[last] : 0,
    windows: drawingOf(board).windows?.(board, question, label, answers) ?? {},
  };
  return example.studied;
}

/** Return the tokens of the examples: each once, without ignored labels. */
function usedTokens(examples) {
  const used = new Set();
  for (const { question, label, answers } of examples.map((example) => example.studied))
    for (const tokens of [question, label ?? [], ...answers]) tokens.forEach((token) => used.add(token));
  used.delete(-1);
  return [...used].sort((a, b) => a - b);
}

/** Return the parts of the 30x30 canvas that hold an ARC puzzle, its answers and its solution. */
function arcWindows(board, question, label, answers) {
  const ofQuestion = extent(board, (s) => question[s] >= 2) ?? undefined;
  const ofLabel = label ? (extent(board, (s) => label[s] >= 2) ?? undefined) : undefined;
  // The window of the answers shows every cell that differs from the solution. Without a solution,
  // it shows every cell that has a colour.
  const differs = label?.some((token) => token >= 0)
    ? (s) => label[s] >= 2 || (label[s] >= 0 && answers.some((answer) => answer[s] !== label[s]))
    : (s) => answers.some((answer) => answer[s] >= 2);
  return { question: ofQuestion, label: ofLabel, answer: extent(board, differs) ?? ofQuestion };
}

// -------------------------------------------------------------------------------------------------
// Plots

/** Return about `count` round numbers from low to high. */
function ticks(low, high, count, whole) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

/** Return the powers of ten from low to high, and their multiples by 2 and 5 if there is room. */
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of high / low > 1e3 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

const axisText = (value) =>
  Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 1e-3)
    ? Math.abs(value) >= 1000
      ? value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 })
      : value.toExponential(0)
    : String(Number(value.toPrecision(4)));

/**
 * Draw series into a .plot element. The pointer and the arrow keys show the values.
 *
 * The options are:
 *
 *   series       [{name, colour, points: [[x, y]], band?: [[x, low, high]], dash?, faint?, dots?}]
 *   height       in CSS pixels
 *   x, label     the name of the x axis, and the name of the plot for screen readers
 *   low?, high?  the ends of the y axis, unless the data determines them
 *   log?         true for a logarithmic y axis
 *   whole?       true if all y are whole numbers
 *   marks?       [{x, strong?}], vertical lines
 *   threshold?   the y of a horizontal line
 *   pick?        the function that takes a clicked x
 */
function plot(container, options) {
  const width = container.clientWidth;
  if (!width) return;
  const shown = options.series.map((one) => ({
    ...one,
    points: one.points.filter(([, y]) => y !== null && (!options.log || y > 0)),
    band: one.band?.filter(([, low, high]) => low !== null && high !== null),
  }));
  container.replaceChildren();
  if (shown.every((one) => one.points.length === 0)) {
    const reason = options.log ? "No value is above zero." : "No value is finite.";
    container.append(make("p", { class: "quiet small" }, reason));
    return;
  }
  const area = plotArea(shown, options, width);
  const root = svg("svg", { height: options.height, viewBox: `0 0 ${width} ${options.height}`, "aria-hidden": "true" });
  drawAxes(root, area, options);
  for (const one of shown) drawSeries(root, area, one);
  container.append(root);
  showValues(container, root, area, shown, options);
}

/**
 * Return the x values in order, the ticks, the margins (left, right, top, bottom) and the functions
 * toX and toY, which turn values into pixels.
 */
function plotArea(shown, options, width) {
  const { height } = options;
  const all = shown.flatMap((one) => one.points);
  const edges = shown.flatMap((one) => (one.band ?? []).flatMap(([x, low, high]) => [[x, low], [x, high]]));
  const xs = [...new Set(all.map(([x]) => x))].sort((a, b) => a - b);
  let [xLow, xHigh] = [xs[0], xs.at(-1)];
  if (xLow === xHigh) [xLow, xHigh] = [xLow - 0.5, xHigh + 0.5];
  const [low, high] = plotRange([...all, ...edges.filter(([, y]) => !options.log || y > 0)], options);
  const yTicks = options.log ? logTicks(low, high) : ticks(low, high, height < 160 ? 3 : 5, options.whole);
  const left = 10 + 6.8 * Math.max(3, ...yTicks.map((value) => axisText(value).length));
  const right = 14,
    top = 12,
    bottom = 36;
  // The edge of a band may be zero, which has no logarithm: it lies at the bottom of the plot.
  const scale = options.log ? (value) => Math.log(Math.max(value, low)) : (value) => value;
  const toX = (x) => left + ((x - xLow) / (xHigh - xLow)) * (width - left - right);
  const toY = (y) => top + (1 - (scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom);
  return { width, height, xs, xLow, xHigh, yTicks, left, right, top, bottom, toX, toY };
}

/** Return the ends of the y axis, which always differ. */
function plotRange(points, options) {
  let low = options.low ?? Infinity,
    high = options.high ?? -Infinity;
  for (const [, y] of points) [low, high] = [Math.min(low, y), Math.max(high, y)];
  if (low === high) {
    const room = (Math.abs(low) || 1) * 0.1;
    if (options.log) [low, high] = [low / 2, high * 2];
    else if (options.low !== undefined) high += 1;
    else [low, high] = [low - room, high + room];
  }
  if (!options.log) {
    const room = (high - low) * 0.04;
    if (options.low === undefined) low -= room;
    if (options.high === undefined) high += room;
  }
  return [low, high];
}

/** Draw the numbers of both axes, the threshold and the marks. */
function drawAxes(root, area, options) {
  const { width, height, xLow, xHigh, yTicks, left, right, top, bottom, toX, toY } = area;
  for (const value of yTicks) {
    root.append(
      svg("line", { x1: left, x2: width - right, y1: toY(value), y2: toY(value), stroke: colours.line }),
      svg("text", { x: left - 7, y: toY(value) + 4, "text-anchor": "end" }, axisText(value)),
    );
  }
  for (const value of ticks(xLow, xHigh, width / 90, true)) {
    root.append(svg("text", { x: toX(value), y: height - bottom + 17, "text-anchor": "middle" }, axisText(value)));
  }
  root.append(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, options.x));
  if (options.threshold !== undefined) {
    const y = toY(options.threshold);
    root.append(
      svg("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: colours.quiet, "stroke-dasharray": "2 4" }),
    );
  }
  for (const mark of options.marks ?? []) {
    const x = toX(mark.x);
    const look = mark.strong
      ? { stroke: colours.accent, "stroke-width": 2 }
      : { stroke: colours.quiet, "stroke-dasharray": "5 4" };
    root.append(svg("line", { x1: x, x2: x, y1: top, y2: height - bottom, ...look }));
  }
}

function drawSeries(root, { toX, toY }, one) {
  if (one.band?.length) {
    const edge = (place) => one.band.map((point) => [point[0], point[place]]);
    const d = pathOf([...edge(1), ...edge(2).reverse()], toX, toY);
    root.append(svg("path", { d: `${d}Z`, fill: one.colour, opacity: 0.18 }));
  }
  root.append(
    svg("path", {
      d: pathOf(one.points, toX, toY),
      fill: "none",
      stroke: one.colour,
      "stroke-width": one.faint ? 1 : 2,
      "stroke-linejoin": "round",
      opacity: one.faint ? 0.4 : 1,
      "stroke-dasharray": one.dash ?? "none",
    }),
  );
  if (one.dots || one.points.length === 1) {
    for (const [x, y] of one.points) root.append(svg("circle", { cx: toX(x), cy: toY(y), r: 3, fill: one.colour }));
  }
}

/** Show the values under the pointer. In a focused plot, the arrow keys choose the values. */
function showValues(container, root, area, shown, options) {
  const { width, height, xs, xLow, xHigh, left, right, top, bottom, toX } = area;
  const hair = svg("line", { y1: top, y2: height - bottom, stroke: colours.quiet, visibility: "hidden" });
  root.append(hair);
  const tip = make("div", { class: "tip", role: "status", hidden: true });
  container.append(tip);
  container.tabIndex = 0;
  container.setAttribute("role", "group");
  container.setAttribute("aria-label", `${options.label}; arrow keys read the values`);

  let place = -1;
  const show = (index) => {
    place = index;
    const x = xs[index];
    hair.setAttribute("x1", toX(x));
    hair.setAttribute("x2", toX(x));
    hair.setAttribute("visibility", "visible");
    tip.replaceChildren(make("b", {}, `${options.x} ${x.toLocaleString("en")}`));
    for (const one of shown) {
      if (one.faint || one.points.length === 0) continue;
      const near = nearest(one.points, x);
      // A series without a point near x has no value to show.
      if (Math.abs(near[0] - x) > (xHigh - xLow) * 0.02) continue;
      tip.append(make("br"), `${one.name} ${numberText(near[1])}`);
    }
    tip.hidden = false;
    tip.style.left = `${clamp(toX(x) + 12, 0, Math.max(0, width - tip.offsetWidth))}px`;
    if (toX(x) + 12 + tip.offsetWidth > width) tip.style.left = `${Math.max(0, toX(x) - 12 - tip.offsetWidth)}px`;
    tip.style.top = `${top}px`;
  };
  const hide = () => {
    place = -1;
    hair.setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  const indexAt = (event) => {
    const x =
      xLow + ((event.clientX - root.getBoundingClientRect().left - left) / (width - left - right)) * (xHigh - xLow);
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  };
  // The container outlives a drawing. The next drawing replaces these properties, but would add
  // another listener.
  root.onpointermove = (event) => show(indexAt(event));
  root.onpointerdown = (event) => (options.pick ? options.pick(xs[indexAt(event)]) : show(indexAt(event)));
  root.onpointerleave = hide;
  container.onblur = hide;
  container.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (options.pick) options.pick(clamp((options.marks?.[0]?.x ?? xLow) + by, xLow, xHigh));
    else show(clamp(place < 0 ? (by > 0 ? 0 : xs.length - 1) : place + by, 0, xs.length - 1));
  };
}

/** Return the line through points as the data of an SVG path. */
const pathOf = (points, toX, toY) =>
  points.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");

/** Return the point whose x is nearest. The points are in ascending order. */
function nearest(points, x) {
  let low = 0,
    high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

/** Make the legend of a plot. */
function plotKeys(series) {
  const list = make("ul", { class: "keys" });
  for (const one of series.filter((each) => !each.faint)) {
    const sample = svg(
      "svg",
      { "aria-hidden": "true", viewBox: "0 0 26 10" },
      svg("line", {
        x1: 0,
        x2: 26,
        y1: 5,
        y2: 5,
        stroke: one.colour,
        "stroke-width": 2,
        "stroke-dasharray": one.dash ?? "none",
      }),
    );
    list.append(make("li", {}, sample, one.name));
  }
  return list;
}

/** Return the running mean over `reach` points to either side. */
function smoothed(points, reach) {
  const sums = [0];
  const kept = points.filter(([, y]) => y !== null);
  for (const [, y] of kept) sums.push(sums.at(-1) + y);
  return kept.map(([x], i) => {
    const first = Math.max(0, i - reach),
      end = Math.min(kept.length, i + reach + 1);
    return [x, (sums[end] - sums[first]) / (end - first)];
  });
}

// -------------------------------------------------------------------------------------------------
// The views

/** Scroll a list to one of its buttons, unless it is in view. The page itself does not scroll. */
function scrollListTo(button) {
  const list = button.closest(".items"),
    place = button.getBoundingClientRect(),
    frame = list.getBoundingClientRect();
  if (place.top < frame.top || place.bottom > frame.bottom)
    list.scrollTop += (place.top + place.bottom - frame.top - frame.bottom) / 2;
}

/**
 * Fill a container with buttons of which one is pressed.
 *
 * The choices are [[value, text]]. The function `pick` takes the value of a clicked button. The
 * returned function presses the button of a value.
 */
function choice(container, choices, pick) {
  const buttons = choices.map(([value, text]) =>
    make(
      "button",
      {
        type: "button",
        "data-value": value,
        onclick: () => {
          press(value);
          pick(value);
        },
      },
      text,
    ),
  );
  const press = (value) =>
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === value)));
  container.replaceChildren(...buttons);
  press(choices[0][0]);
  return press;
}

/**
 * Return the examples of each run, by the number of the run.
 *
 * An example has the puzzle's keys, and the answers of the run. `puzzle.of` has the examples of all
 * runs for the same puzzle.
 */
function examplesByRun(page) {
  page.byRun ??= new Map(
    page.answering.map((run) => [
      run,
      page.examples
        .filter((puzzle) => puzzle.runs[run])
        .map((puzzle) => {
          const example = { ...puzzle, ...puzzle.runs[run], puzzle };
          study(example, boardOf(page, example));
          (puzzle.of ??= {})[run] = example;
          return example;
        }),
    ]),
  );
  return page.byRun;
}

/** Return whether a puzzle is solved by the runs that `agreement` names: see `agreements`. */
function agrees(page, puzzle, agreement) {
  const examples = page.answering.flatMap((run) => puzzle.of[run] ?? []);
  if (examples.length < page.answering.length || !examples[0].studied.scored) return false;
  const solved = page.answering.filter((run) => puzzle.of[run].studied.solved);
  if (agreement === "all") return solved.length === page.answering.length;
  if (agreement === "none") return solved.length === 0;
  if (agreement === "differ") return solved.length > 0 && solved.length < page.answering.length;
  return solved.length === 1 && String(solved[0]) === agreement;
}

/** Return [[value, text, number of puzzles]] for the ways in which runs may agree on a puzzle. */
function agreements(page) {
  examplesByRun(page);
  return [
    ["differ", "runs differ"],
    ["all", "all runs solve it"],
    ["none", "no run solves it"],
    ...page.answering.map((run) => [String(run), `only ${page.runs[run].name} solves it`]),
  ].map(([value, text]) => [value, text, page.examples.filter((puzzle) => agrees(page, puzzle, value)).length]);
}

/** The view of the examples of a dataset or a run, with the player of the reasoning steps. */
class Examples {
  constructor(page) {
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
    this.tokens = drawingOf(this.board).namesTokens ? usedTokens(every) : [];
    this.filter = "all";
    this.shown = [];
    this.step = this.isRun ? 1 : 0;
    this.timer = null;
    this.buildControls();
    this.refill();
    this.markCurrent(true);
    this.build();
  }

  /** The board of the example that is looked at. */
  get board() {
    return this.current ? boardOf(this.page, this.current) : this.page.board;
  }

  buildControls() {
    this.buildPlayer();
    $("side").hidden = !this.isRun;
    this.buildFilter();
    this.buildAgreement();
    const sets = Object.keys(this.page.sets);
    $("set").append(
      ...(sets.length > 1 ? [make("option", { value: "" }, "all sets")] : []),
      ...sets.map((name) => make("option", { value: name }, name)),
    );
    $("set").hidden = sets.length < 2;
    $("sort").hidden = !this.isRun;
    if (this.all.some((example) => example.name)) $("search").placeholder = "search…";
    for (const id of ["set", "sort", "agreement"]) $(id).addEventListener("change", () => this.refill());
    $("search").addEventListener("input", () => this.refill());
    $("previous").addEventListener("click", () => this.move(-1));
    $("next").addEventListener("click", () => this.move(1));
    $("first").addEventListener("click", () => this.seek(0));
    $("last").addEventListener("click", () => this.seek(Infinity));
    $("back").addEventListener("click", () => this.seek(this.step - 1));
    $("forward").addEventListener("click", () => this.seek(this.step + 1));
    $("play").addEventListener("click", () => this.toggle());
    $("slider").addEventListener("input", () => this.seek(Number($("slider").value)));
    $("speed").addEventListener("change", () => {
      if (this.timer !== null) {
        this.pause();
        this.play();
      }
    });
    this.showPlaying();
  }

  /** Show the player, or the command that saves the answers which it needs. */
  buildPlayer() {
    const hasSteps = this.isRun && this.all.some((example) => example.answers.length > 1);
    $("controls").hidden = !hasSteps;
    $("hint").hidden = hasSteps || !this.isRun;
    $("command").textContent = (this.byRun ? this.page.runs[this.run] : this.page).command ?? "";
  }

  /** Fill the buttons that choose solved or failed examples. */
  buildFilter() {
    const scored = this.all.some((example) => example.studied.scored);
    $("filter").hidden = !this.isRun || !scored;
    if (!this.isRun || !scored) return;
    const solved = this.all.filter((example) => example.studied.solved).length;
    this.pressFilter = choice(
      $("filter"),
      [
        ["all", `All ${this.all.length}`],
        ["solved", `Solved ${solved}`],
        ["unsolved", `Failed ${this.all.length - solved}`],
      ],
      (value) => {
        this.filter = value;
        this.refill();
      },
    );
    this.pressFilter(this.filter);
  }

  /** Fill the choice of puzzles by the runs that solve them. */
  buildAgreement() {
    $("agreement").hidden = !this.byRun || this.page.answering.length < 2;
    if ($("agreement").hidden) return;
    const option = ([value, text, count]) => make("option", { value }, count === null ? text : `${text} (${count})`);
    $("agreement").append(...[["", "solved by any run or none", null], ...agreements(this.page)].map(option));
  }

  /** Look at the answers of another run to the same puzzle. */
  lookAt(run) {
    const example = this.current?.puzzle.of[run];
    const step = this.step === this.current?.studied.answers.length ? Infinity : this.step;
    this.run = run;
    this.all = this.byRun.get(run);
    this.buildPlayer();
    this.buildFilter();
    this.current = null;
    this.refill();
    if (!example) return;
    this.select(example, false);
    this.seek(step);
  }

  /** Show the puzzles that some runs solve and others do not, as `agreements` names them. */
  compareBy(value) {
    $("agreement").value = value;
    this.filter = "all";
    this.buildFilter();
    this.refill();
  }

  /** Show the examples that match the set, the search and the filter. */
  refill() {
    const set = $("set").value,
      query = $("search").value.trim().toLowerCase();
    this.shown = this.matching(set, query);
    const total = Object.entries(this.page.sets).reduce(
      (sum, [name, size]) => sum + (set === "" || set === name ? size : 0),
      0,
    );
    const what = this.isRun || query ? "example" : "group";
    const sampled = total > this.all.length ? `, spread evenly over ${total.toLocaleString("en")} rows` : "";
    $("count").textContent = this.shown.length
      ? `${plural(this.shown.length, what)}${sampled}`
      : "Nothing matches. Change the filters.";
    this.fillList();
    if (!this.shown.includes(this.current) && this.shown.length) this.select(this.shown[0], false);
    else this.markCurrent(false);
  }

  /** Return the examples that match the set, the search and the filter, in the chosen order. */
  matching(set, query) {
    let shown = this.all.filter((example) => set === "" || example.set === set);
    if (query) {
      shown = shown.filter(
        ({ row, name }) => String(row).startsWith(query) || (name ?? "").toLowerCase().includes(query),
      );
    } else if (!this.isRun) {
      // The list shows one example of each group. The strip below the board shows the others.
      shown = shown.filter(
        (example, i) => i === 0 || example.group !== shown[i - 1].group || example.set !== shown[i - 1].set,
      );
    }
    if (this.filter !== "all")
      shown = shown.filter(
        (example) => example.studied.scored && example.studied.solved === (this.filter === "solved"),
      );
    const agreement = this.byRun ? $("agreement").value : "";
    if (agreement) shown = shown.filter(({ puzzle }) => agrees(this.page, puzzle, agreement));
    const orders = {
      most: (a, b) => b.studied.wrong - a.studied.wrong,
      fewest: (a, b) => a.studied.wrong - b.studied.wrong,
      slowest: (a, b) => b.studied.settled - a.studied.settled,
      fastest: (a, b) => a.studied.settled - b.studied.settled,
    };
    return orders[$("sort").value] ? [...shown].sort(orders[$("sort").value]) : shown;
  }

  /** Fill the list with a button for each example. A thumbnail is drawn when it comes into view. */
  fillList() {
    this.observer?.disconnect();
    this.observer = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) if (entry.isIntersecting) this.thumbnail(entry.target);
      },
      { rootMargin: "200px" },
    );
    this.items = new Map();
    $("items").replaceChildren(
      ...this.shown.map((example) => {
        const canvas = make("canvas", { "aria-hidden": "true", width: 1, height: 1 });
        canvas.example = example;
        this.observer.observe(canvas);
        const button = make(
          "button",
          { type: "button", class: "item", onclick: () => this.select(example, false) },
          make("span", { class: "thumb" }, canvas),
          this.itemText(example),
        );
        this.items.set(example, button);
        return make("li", {}, button);
      }),
    );
  }

  itemText(example) {
    const { solved, scored, wrong, settled, answers } = example.studied;
    const label = make("span", {}, make("b", {}, this.isRun ? `row ${example.row}` : this.groupText(example)));
    if (this.isRun && scored) {
      label.append(
        solved
          ? make("span", { class: "good small" }, "✓ solved")
          : make("span", { class: "bad small" }, `✗ ${wrong} wrong`),
      );
      if (answers.length > 1)
        label.append(
          make(
            "span",
            { class: "quiet small" },
            settled === answers.length ? "not settled" : `settled at step ${settled}`,
          ),
        );
    } else if (!this.isRun) {
      label.append(make("span", { class: "quiet small" }, `${example.set} · row ${example.row}`));
    }
    if (this.byRun && scored) {
      const marks = this.page.answering.map((run) => `${example.puzzle.of[run]?.studied.solved ? "✓" : "✗"} `);
      label.append(make("span", { class: "quiet small", title: "in the order of the runs" }, `runs: ${marks.join("")}`));
    }
    if (example.name) label.append(make("span", { class: "quiet small" }, example.name.split("|||")[0]));
    return label;
  }

  groupText(example) {
    return `group ${example.group}` + (example.puzzle ? `, puzzle ${example.puzzle}` : "");
  }

  /** Draw the thumbnail of an example: its last answer, or its puzzle if it has no answer. */
  thumbnail(canvas) {
    const { question, label, answers, windows } = canvas.example.studied;
    const tokens = answers.at(-1) ?? question;
    const picture = answers.length
      ? { tokens, question, label, window: windows.answer }
      : { tokens, question, window: windows.question };
    draw(canvas, boardOf(this.page, canvas.example), picture, 56, 56);
  }

  select(example, reveal = true) {
    const wasLast = this.step === this.current?.studied.answers.length;
    this.pause();
    this.current = example;
    // The reader stays at the same step, or at the last one.
    const last = example.studied.answers.length;
    this.step = wasLast ? last : Math.min(this.step, last);
    this.markCurrent(reveal);
    this.build();
  }

  /** Return the place of the current example, or of its group, in the list. */
  place() {
    const at = this.shown.indexOf(this.current);
    if (at >= 0 || this.isRun || !this.current) return at;
    return this.shown.findIndex(({ set, group }) => set === this.current.set && group === this.current.group);
  }

  markCurrent(reveal) {
    const place = this.place();
    for (const [example, button] of this.items) {
      if (example === this.shown[place]) {
        button.setAttribute("aria-current", "true");
        if (reveal) scrollListTo(button);
      } else button.removeAttribute("aria-current");
    }
    $("previous").disabled = place <= 0;
    $("next").disabled = place >= this.shown.length - 1;
  }

  move(by) {
    const to = this.shown[clamp(this.place() + by, 0, this.shown.length - 1)];
    if (to && to !== this.current) this.select(to, matchMedia("(min-width: 761px)").matches);
  }

  /** Build the stage for the current example. */
  build() {
    const example = this.current;
    const { question, label, scored, solved, wrong, settled, answers, halt, confidence } = example.studied;
    $("heading").textContent = `${this.isRun ? "Row" : `${this.groupText(example)}, row`} ${example.row}`;
    if (this.byRun) $("heading").textContent += ` · ${this.page.runs[this.run].name}`;
    const about = [
      example.name ? augmentationText(example.name) : null,
      Object.keys(this.page.sets).length > 1 ? example.set : null,
    ];
    const verdict = $("verdict");
    verdict.replaceChildren();
    if (this.isRun && scored) {
      const text = answers.length > 1 ? `✓ solved from step ${settled} on` : "✓ solved";
      const end = answers.length > 1 ? " in the end" : "";
      const wrongText = `✗ ${plural(wrong, "wrong cell")}${end}`;
      verdict.append(make("span", { class: solved ? "good" : "bad" }, solved ? text : wrongText));
    } else if (this.isRun) about.push("no solution is known");
    const rest = about.filter(Boolean).join(" · ");
    if (rest) verdict.append(make("span", { class: "quiet" }, (verdict.childNodes.length ? " · " : "") + rest));

    this.figures = [];
    const figure = (caption, id) => {
      const canvas = make("canvas", { id, role: "img" });
      return { canvas, element: make("figure", {}, canvas, make("figcaption", {}, caption)) };
    };
    $("boards").replaceChildren();
    $("pair").replaceChildren();
    const add = (container, caption, id, picture, small) => {
      const one = { ...figure(caption, id), picture, small };
      container.append(one.element);
      this.figures.push(one);
      return one;
    };
    const { windows } = example.studied;
    const puzzle = () => ({ tokens: question, question, window: windows.question });
    const solution = () => ({ tokens: label, question, window: windows.label });
    if (this.isRun) {
      // An answer that contains the puzzle, as in Sudoku, needs only a small board of the puzzle.
      const { besidePuzzle } = drawingOf(this.board);
      if (besidePuzzle) add($("boards"), "puzzle", "question", puzzle, false);
      this.main = add($("boards"), "", "board", () => this.picture(), false);
      if (!besidePuzzle) add($("pair"), "puzzle", "question", puzzle, true);
      if (scored) add($("pair"), "solution", "solution", solution, true);
    } else {
      add($("boards"), "puzzle", "question", puzzle, false);
      if (scored) add($("boards"), "solution", "solution", solution, false);
    }
    const spare = $("pair").childNodes.length;
    $("pair").parentElement.hidden = spare === 0;
    $("pair").style.gridTemplateColumns = spare === 1 ? "1fr" : "";
    $("slider").max = answers.length;
    $("confidence-card").hidden = !confidence || answers.length < 2;
    $("errors-card").hidden = answers.length < 2;
    $("errors-title").textContent = scored ? "Wrong cells" : "Changed cells";
    const goesOn = (this.byRun ? this.page.runs[this.run] : this.page).values_going_on;
    this.halt = goesOn ? 0 : halt;
    $("halt").textContent = goesOn
      ? "This model halts where it values halting above going on, and that value was not saved."
      : halt
        ? `Halts at step ${halt}: confident (above 0.5), and the same answer as at step ${halt - 1}.`
        : "Does not halt early: never confident (above 0.5) with the same answer as a step before.";
    this.buildLegend();
    this.buildStrip();
    this.buildRivals();
    this.redraw();
  }

  /** Show the answers of all runs side by side. Each is a button that shows its run's reasoning. */
  buildRivals() {
    const { byRun, page } = this;
    $("rivals").hidden = !byRun || page.answering.length < 2;
    this.rivals = [];
    if ($("rivals").hidden) return;
    this.rivals = page.answering.flatMap((run) => {
      const example = this.current.puzzle.of[run];
      if (!example) return [];
      const canvas = make("canvas", { "aria-hidden": "true" });
      const verdict = make("span", {});
      const button = make(
        "button",
        { type: "button", "aria-current": run === this.run ? "true" : null, onclick: () => this.lookAt(run) },
        canvas,
        make("b", {}, page.runs[run].name),
        make("br"),
        verdict,
      );
      return [{ example, canvas, verdict, button }];
    });
    $("rivals").replaceChildren(...this.rivals.map(({ button }) => button));
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
      verdict.className = !scored || !step ? "quiet" : wrong ? "bad" : "good";
      verdict.textContent = !step ? "the puzzle" : `step ${step}` + (scored ? (wrong ? `: ✗ ${wrong} wrong` : ": ✓ solved") : "");
    }
  }

  /** Show the other puzzles of the group: augmentations, or other pairs of an ARC task. */
  buildStrip() {
    const others = this.isRun
      ? []
      : this.all.filter((other) => other.set === this.current.set && other.group === this.current.group);
    const firsts = others.filter((other) => other.puzzle === 0);
    $("strip").hidden = others.length < 2;
    $("strip").replaceChildren(
      ...(others.length < 2
        ? []
        : others.map((other) => {
            const canvas = make("canvas", { "aria-hidden": "true" });
            const { question, windows } = other.studied;
            draw(canvas, this.board, { tokens: question, question, window: windows.question }, 68, 68);
            return make(
              "button",
              {
                type: "button",
                "aria-current": other === this.current ? "true" : null,
                title: other.name ?? null,
                onclick: () => this.select(other, false),
              },
              canvas,
              other.puzzle
                ? `puzzle ${other.puzzle}`
                : firsts.length > 1
                  ? `pair ${firsts.indexOf(other) + 1}`
                  : "first",
            );
          })),
    );
    if (others.length > 1 && this.current.group_size > 1) {
      $("strip").prepend(
        make("p", { class: "small quiet" }, `From the ${plural(this.current.group_size, "puzzle")} of this group:`),
      );
      $("strip").firstChild.style.flexBasis = "100%";
      $("strip").firstChild.style.textAlign = "center";
    }
  }

  buildLegend() {
    const small = { ...this.board, rows: 1, columns: 1, box: [1, 1], wrapped: false, byName: false };
    const { legend, namesTokens } = drawingOf(this.board);
    const entries = [...(this.isRun ? legend : []), ...(namesTokens ? this.tokenLegend() : [])];
    $("legend").hidden = entries.length === 0;
    $("legend").replaceChildren(
      ...entries.map(([text, token, question, label, previous]) => {
        const canvas = make("canvas", { "aria-hidden": "true" });
        draw(
          canvas,
          small,
          {
            tokens: [token],
            question: [question],
            label: [label],
            previous: previous === undefined ? undefined : [previous],
          },
          LEGEND_CELL,
          LEGEND_CELL,
        );
        return make("li", {}, canvas, text);
      }),
    );
  }

  /** Return legend entries that name the tokens of the example, unless its cells show the names. */
  tokenLegend() {
    if (this.board.byName || !this.board.tokens.length) return [];
    return usedTokens([this.current]).map((token) => [tokenName(this.board, token), token, token, token]);
  }

  /** Draw names of tokens into all boards if they fit into the cells of the large ones, else numbers. */
  nameTokens(c) {
    const byName = this.tokens.length > 0 && namesFit(this.board, this.tokens, c);
    if (byName === this.board.byName) return;
    this.board.byName = byName;
    this.redrawSmall();
  }

  /** Draw the thumbnails, the legend and the other puzzles of the group again. */
  redrawSmall() {
    document.querySelectorAll("#items canvas").forEach((canvas) => {
      if (canvas.width > 1) this.thumbnail(canvas);
    });
    if (this.current) {
      this.buildLegend();
      this.buildStrip();
    }
  }

  /** Return the picture of the large board at the current step. */
  picture() {
    const { question, label, answers, windows, scored } = this.current.studied;
    if (this.step === 0) {
      return { tokens: question, question, window: windows.question };
    }
    const tokens = answers[this.step - 1];
    // The first answer has no previous one: compared with the puzzle, most cells would be changed.
    return {
      tokens,
      question,
      label: scored ? label : undefined,
      previous: this.step > 1 ? answers[this.step - 2] : undefined,
      window: windows.answer,
    };
  }

  /** Draw everything that depends on the step, the size of the window or the theme. */
  redraw() {
    if (!this.current || $("panel-examples").hidden) return;
    this.drawFigures();
    this.drawRivals();
    $("said").hidden = !this.isRun;
    if (!this.isRun) return;
    const { answers } = this.current.studied;
    this.main.element.lastChild.textContent =
      this.step === 0
        ? "the puzzle, before any reasoning"
        : answers.length > 1
          ? `answer after step ${this.step} of ${answers.length}`
          : "the answer";
    $("slider").value = this.step;
    $("slider").setAttribute("aria-valuetext", `step ${this.step} of ${answers.length}`);
    $("first").disabled = $("back").disabled = this.step === 0;
    $("last").disabled = $("forward").disabled = this.step === answers.length;
    $("said").textContent = this.said();
    if (answers.length > 1) this.drawPlots();
  }

  /** Draw the large and the small boards. */
  drawFigures() {
    const { question } = this.current.studied;
    const room = $("boards").clientWidth;
    const numLarge = this.figures.filter((one) => !one.small).length;
    const beside = numLarge > 1 && room >= 560;
    const below = this.rivals.length ? 570 : 390;
    const height = clamp(window.innerHeight - below, 300, 660);
    const width = beside ? (room - 16 * (numLarge - 1)) / numLarge : room;
    const pictures = this.figures.map((one) => one.picture());
    const whole = { rows: this.board.rows, columns: this.board.columns };
    // ARC grids differ in size. Neighbouring grids have cells of the same size.
    const scale = Math.min(
      ...this.figures.map((one, i) => (one.small ? Infinity : cellSide(pictures[i].window ?? whole, width, height))),
      drawingOf(this.board).largestCell ?? Infinity,
    );
    this.nameTokens(scale);
    for (const [i, one] of this.figures.entries()) {
      const picture = pictures[i],
        part = picture.window ?? whole;
      const small = Math.min(($("pair").clientWidth - 12) / 2, 48 * part.columns);
      const c = one.small
        ? draw(one.canvas, this.board, picture, small, small)
        : draw(one.canvas, this.board, picture, scale * part.columns, scale * part.rows);
      one.canvas.onpointermove = (event) => this.nameCell(event, one.canvas, picture, c);
      one.canvas.setAttribute(
        "aria-label",
        one === this.main ? this.said() : `${one.element.lastChild.textContent}: ${plural(question.length, "token")}`,
      );
    }
  }

  /** Draw the confidence and the number of wrong cells over the steps. */
  drawPlots() {
    const { numWrong, numChanged, confidence, scored } = this.current.studied;
    const here = this.step > 0 ? [{ x: this.step, strong: true }] : [];
    const pick = (step) => this.seek(step);
    const series = (name, values, colour) => [
      { name, colour, dots: values.length <= 32, points: values.map((value, t) => [t + 1, value]) },
    ];
    if (confidence) {
      const halts = this.halt ? [{ x: this.halt }] : [];
      plot($("confidence"), {
        series: series("confidence", confidence, colours["series-1"]),
        height: 150,
        low: 0,
        high: 1,
        threshold: 0.5,
        x: "step",
        label: "Halting confidence over reasoning steps",
        marks: [...here, ...halts],
        pick,
      });
    }
    plot($("errors"), {
      series: series(scored ? "wrong" : "changed", scored ? numWrong : numChanged, colours["series-2"]),
      height: 150,
      low: 0,
      whole: true,
      x: "step",
      label: `${$("errors-title").textContent} over reasoning steps`,
      marks: here,
      pick,
    });
  }

  /** Describe the step in words, for the line below the board and for screen readers. */
  said() {
    const { answers, numWrong, numChanged, confidence, scored } = this.current.studied;
    if (this.step === 0)
      return answers.length > 1 ? `${plural(answers.length, "reasoning step")} to come` : "the puzzle";
    const t = this.step - 1;
    const parts = answers.length > 1 ? [`step ${this.step} of ${answers.length}`] : [];
    if (t > 0) parts.push(numChanged[t] ? `${plural(numChanged[t], "cell")} changed` : "nothing changed");
    if (scored) parts.push(numWrong[t] ? `${numWrong[t]} wrong` : "all cells right");
    if (confidence) parts.push(`confidence ${confidence[t].toFixed(2)}`);
    if (this.halt === this.step && answers.length > 1) parts.push("the model would halt here");
    return parts.join(" · ");
  }

  /** Set the tooltip of a board to the cell under the pointer. */
  nameCell(event, canvas, picture, c) {
    const part = picture.window ?? { top: 0, left: 0, ...this.board };
    const column = Math.floor(event.offsetX / c),
      row = Math.floor(event.offsetY / c);
    if (row < 0 || column < 0 || row >= part.rows || column >= part.columns) return;
    const s = (part.top + row) * this.board.columns + part.left + column;
    const token = picture.tokens[s],
      label = picture.label?.[s];
    const should =
      label !== undefined && label >= 0 && label !== token ? `, should be ${tokenName(this.board, label)}` : "";
    if (token === undefined) return;
    const place = this.board.wrapped ? `token ${s + 1}` : `row ${row + 1}, column ${column + 1}`;
    canvas.title = `${place}: ${tokenName(this.board, token)}${should}`;
  }

  seek(step) {
    const last = this.current.studied.answers.length;
    this.step = clamp(step, 0, last);
    if (this.timer !== null && this.step === last) this.pause();
    this.redraw();
  }

  play() {
    const last = this.current.studied.answers.length;
    if (this.step >= last) this.seek(0);
    this.timer = setInterval(() => this.seek(this.step + 1), Number($("speed").value));
    this.showPlaying();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.showPlaying();
  }

  toggle() {
    if (this.timer === null) this.play();
    else this.pause();
  }

  showPlaying() {
    const playing = this.timer !== null;
    $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
    $("play").replaceChildren(
      svg(
        "svg",
        { viewBox: "0 0 24 24", "aria-hidden": "true" },
        svg("path", { d: playing ? "M7 5h4v14H7zm6 0h4v14h-4z" : "M7 4v16l13-8z" }),
      ),
    );
  }

  /** Act on a key, and return whether the view has a use for the key. */
  key(event) {
    const hasSteps = this.isRun && !$("controls").hidden;
    const acts = {
      ArrowDown: () => this.move(1),
      ArrowUp: () => this.move(-1),
      j: () => this.move(1),
      k: () => this.move(-1),
      "/": () => $("search").focus(),
      f: () => this.cycleFilter(),
      ...(this.rivals.length && {
        r: () => {
          const { answering } = this.page;
          this.lookAt(answering[(answering.indexOf(this.run) + 1) % answering.length]);
        },
      }),
      ...(hasSteps && {
        " ": () => this.toggle(),
        ArrowRight: () => this.seek(this.step + 1),
        ArrowLeft: () => this.seek(this.step - 1),
        Home: () => this.seek(0),
        End: () => this.seek(Infinity),
        h: () => {
          if (this.halt) this.seek(this.halt);
        },
      }),
    };
    const act = acts[event.key];
    if (act) act();
    return act !== undefined;
  }

  cycleFilter() {
    if (!this.pressFilter) return;
    const order = ["all", "solved", "unsolved"];
    this.filter = order[(order.indexOf(this.filter) + 1) % 3];
    this.pressFilter(this.filter);
    this.refill();
  }

  restyle() {
    this.redrawSmall();
    this.redraw();
  }
}

/**
 * Describe the augmentation that the name of an ARC puzzle holds.
 *
 * The name is task|||t<transform>|||<permutation>. The permutation lists the new colours.
 */
function augmentationText(name) {
  const [task, transform, permutation] = name.split("|||");
  if (permutation === undefined) return name;
  const turned = [
    "unchanged",
    "turned by 90°",
    "turned by 180°",
    "turned by 270°",
    "mirrored left to right",
    "mirrored top to bottom",
    "transposed",
    "transposed the other way",
  ];
  return (
    `${task}, ${turned[Number(transform.slice(1))] ?? transform}` +
    (permutation === "0123456789" ? "" : `, colours 0–9 become ${permutation}`)
  );
}

/** The view of the votes on ARC tasks, with the ranked candidates of each test. */
class Votes {
  constructor(tasks) {
    this.tasks = tasks;
    for (const task of tasks) {
      // As in the competition, each test has two attempts, and a solved task has no unsolved test.
      const known = task.tests.every((test) => test.solution !== null);
      task.places = task.tests.map((test) => test.candidates.findIndex((candidate) => candidate.right) + 1);
      task.state = !known ? "unknown" : task.places.every((place) => place > 0 && place <= 2) ? "solved" : "unsolved";
    }
    this.filter = "all";
    const count = (state) => tasks.filter((task) => task.state === state).length;
    this.press = choice(
      $("vote-filter"),
      [
        ["all", `All ${tasks.length}`],
        ["solved", `Solved ${count("solved")}`],
        ["unsolved", `Failed ${count("unsolved")}`],
      ],
      (value) => {
        this.filter = value;
        this.refill();
      },
    );
    $("vote-search").addEventListener("input", () => this.refill());
    this.refill();
  }

  refill() {
    const query = $("vote-search").value.trim().toLowerCase();
    this.shown = this.tasks.filter(
      (task) => (this.filter === "all" || task.state === this.filter) && task.task.toLowerCase().includes(query),
    );
    $("vote-count").textContent = this.shown.length
      ? `${plural(this.shown.length, "task")}. A task is solved if each test has the right answer among its first two candidates.`
      : "Nothing matches. Change the filters.";
    this.items = new Map(
      this.shown.map((task) => {
        const status = {
          solved: ["good", "✓ solved"],
          unsolved: ["bad", "✗ not solved"],
          unknown: ["quiet", "no solution known"],
        }[task.state];
        const canvas = make("canvas", { "aria-hidden": "true" });
        this.grid(canvas, task.tests[0].input, 56);
        return [
          task,
          make(
            "button",
            { type: "button", class: "item", onclick: () => this.select(task) },
            make("span", { class: "thumb" }, canvas),
            make("span", {}, make("b", {}, task.task), make("span", { class: `${status[0]} small` }, status[1])),
          ),
        ];
      }),
    );
    $("vote-items").replaceChildren(...[...this.items.values()].map((button) => make("li", {}, button)));
    this.select(this.shown.includes(this.current) ? this.current : this.shown[0]);
  }

  /** Draw a grid, which is given as rows of digits, at most `size` pixels wide and high. */
  grid(canvas, rows, size) {
    const columns = rows[0]?.length ?? 0;
    if (!columns) return prepare(canvas, 12, 12);
    const board = { kind: "arc", rows: rows.length, columns };
    const tokens = [...rows.join("")].map((digit) => Number(digit) + 2);
    const most = Math.min(size, 36 * Math.max(rows.length, columns));
    return draw(canvas, board, { tokens, question: tokens }, most, most);
  }

  figure(rows, size, caption, shape) {
    const canvas = make("canvas", {
      role: "img",
      "aria-label": `${caption}, ${rows.length} rows of ${rows[0]?.length ?? 0} cells`,
    });
    this.grid(canvas, rows, size);
    return make(
      "figure",
      {},
      canvas,
      make("figcaption", {}, shape ? `${caption} · ${rows.length}×${rows[0]?.length ?? 0}` : caption),
    );
  }

  select(task) {
    this.current = task;
    for (const [other, button] of this.items) {
      if (other === task) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    $("vote-stage").replaceChildren();
    if (!task) return;
    $("vote-stage").append(...task.tests.map((test, i) => this.testCard(task, i)));
    if (task.train.length) {
      $("vote-stage").append(
        make(
          "div",
          { class: "card" },
          make("h2", {}, "Training pairs of the task"),
          make(
            "div",
            { class: "pairs" },
            ...task.train.map(([input, output]) => this.pair(input, output, ["input", "output"])),
          ),
        ),
      );
    }
  }

  /** Make a pair of an input and its output. */
  pair(input, output, captions) {
    const size = Math.min(220, ($("vote-stage").clientWidth - 80) / 2);
    return make(
      "div",
      { class: "io" },
      this.figure(input, size, captions[0], true),
      make("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      output ? this.figure(output, size, captions[1], true) : make("p", { class: "quiet" }, "no solution is known"),
    );
  }

  /** Make the card of a test, with its input, its solution and its candidates. */
  testCard(task, i) {
    const test = task.tests[i],
      place = task.places[i];
    const verdict =
      test.solution === null
        ? null
        : place
          ? make(
              "span",
              { class: place <= 2 ? "good" : "bad" },
              `${place <= 2 ? "✓" : "✗"} right answer in place ${place}`,
            )
          : make("span", { class: "bad" }, "✗ right answer not among the candidates");
    const list = make("ol", { class: "candidates" }, ...test.candidates.map((one) => this.candidate(test, one)));
    return make(
      "div",
      { class: "card" },
      make("h2", {}, `${task.task}, test ${i + 1} of ${task.tests.length} `, verdict),
      make("div", { class: "pairs" }, this.pair(test.input, test.solution, ["input", "solution"])),
      make(
        "p",
        { class: "quiet small" },
        `${plural(test.num_votes, "vote")}` +
          (test.num_empty ? `, ${plural(test.num_empty, "prediction")} without a grid` : "") +
          (test.candidates.length === 1 ? ". The candidate:" : `. The first ${test.candidates.length} candidates:`),
      ),
      test.candidates.length ? list : make("p", {}, "No prediction holds a grid."),
    );
  }

  candidate(test, candidate) {
    const share = test.num_votes ? candidate.count / test.num_votes : 0;
    const fill = make("i");
    fill.style.width = `${share * 100}%`;
    const caption = candidate.right ? "✓ right" : candidate.right === false ? "✗ wrong" : "unchecked";
    return make(
      "li",
      { class: candidate.right ? "is-right" : "" },
      this.figure(candidate.grid, 104, caption, false),
      make("div", { class: "meter" }, fill),
      make("b", {}, plural(candidate.count, "vote")),
      make("br"),
      make("span", { class: "quiet" }, `confidence ${numberText(candidate.confidence)}`),
    );
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (by === undefined && event.key === "/") $("vote-search").focus();
    else if (by !== undefined && this.shown.length) {
      const task = this.shown[clamp(this.shown.indexOf(this.current) + by, 0, this.shown.length - 1)];
      this.select(task);
      scrollListTo(this.items.get(task));
    } else return false;
    return true;
  }

  restyle() {
    this.refill();
  }

  redraw() {
    if (this.current) this.select(this.current);
  }
}

/** The view of the curves of a run. */
/** The view of samples of text: a list, and the tokens of one sample. */
class Texts {
  constructor({ texts, kind }) {
    this.texts = texts;
    for (const text of texts) {
      const plain = text.parts.map(({ pieces }) => pieces.map(plainText).join(""));
      text.search = plain.join("\n").toLowerCase();
      text.begin = plain[0].slice(0, 80);
    }
    for (const [id, key, all] of [
      ["text-set", "set", kind === "run" ? "all steps" : "all sets"],
      ["text-task", "task", "all tasks"],
    ]) {
      const values = [...new Set(texts.map((text) => text[key]))];
      $(id).append(make("option", { value: "" }, all), ...values.map((value) => make("option", { value }, value)));
      $(id).hidden = values.length < 2;
      $(id).addEventListener("change", () => this.refill());
    }
    $("text-search").addEventListener("input", () => this.refill());
    this.refill();
  }

  refill() {
    const query = $("text-search").value.toLowerCase(),
      set = $("text-set").value,
      task = $("text-task").value;
    this.shown = this.texts.filter(
      (text) => (!set || text.set === set) && (!task || text.task === task) && text.search.includes(query),
    );
    $("text-count").textContent = this.shown.length
      ? plural(this.shown.length, "sample")
      : "Nothing matches. Change the filters.";
    this.items = new Map(
      this.shown.map((text) => [
        text,
        make(
          "button",
          { type: "button", class: "item", onclick: () => this.select(text) },
          make(
            "span",
            {},
            make("b", {}, `${{ true: "✓ ", false: "✗ " }[text.is_right] ?? ""}${sampleName(text)}`),
            make("span", { class: "small quiet" }, text.begin),
          ),
        ),
      ]),
    );
    $("text-items").replaceChildren(...[...this.items.values()].map((button) => make("li", {}, button)));
    this.select(this.shown.includes(this.current) ? this.current : this.shown[0]);
  }

  select(text) {
    this.current = text;
    for (const [other, button] of this.items) {
      if (other === text) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    $("text-stage").replaceChildren();
    if (!text) return;
    $("text-stage").append(
      make(
        "h2",
        {},
        `${sampleName(text)} `,
        make("span", { class: "quiet" }, `${text.task} `),
        text.is_right === undefined
          ? null
          : make("span", { class: text.is_right ? "good" : "bad" }, text.is_right ? "✓ right" : "✗ wrong"),
      ),
      ...text.parts.flatMap((part) => this.part(part)),
    );
  }

  /** Make the heading and the tokens of a part of a sample. */
  part({ title, num_tokens: count, shown, pieces }) {
    const length = count === undefined ? "" : ` · ${plural(count, "token")}`;
    const note = shown < count ? `, of which the first ${shown.toLocaleString("en")} are shown` : "";
    return [make("h3", {}, title + length + note), make("div", { class: "said-text" }, ...pieces.map(pieceOf))];
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (by === undefined && event.key === "/") $("text-search").focus();
    else if (by !== undefined && this.shown.length) {
      const text = this.shown[clamp(this.shown.indexOf(this.current) + by, 0, this.shown.length - 1)];
      this.select(text);
      scrollListTo(this.items.get(text));
    } else return false;
    return true;
  }
}

const sampleName = (text) => `${text.set}, sample ${text.row.toLocaleString("en")}`;

/** Return the text of a piece, without special tokens. */
const plainText = (piece) => (typeof piece === "string" ? piece : (piece[0] ?? ""));

/** Make the element of a piece. A token has a ground, and its number as its title. */
function pieceOf(piece) {
  if (typeof piece === "string") return piece;
  if (!Array.isArray(piece)) return make("b", { class: "special" }, piece.special);
  const [text, ...numbers] = piece;
  const name = numbers.length > 1 ? "tokens" : "token";
  return make("span", { class: "token", title: `${name} ${numbers.join(", ")}` }, text);
}

/** Show how many samples of each set have how many tokens. */
class Lengths {
  constructor(lengths) {
    this.lengths = lengths;
    this.plots = lengths.map(() => make("div", { class: "plot" }));
    $("panel-lengths").append(
      ...lengths.map(({ set, counts, mean, longest }, i) => {
        const num = counts.reduce((sum, count) => sum + count, 0);
        return make(
          "div",
          { class: "card" },
          make("h2", {}, `Tokens of the samples of ${set}`),
          make(
            "p",
            { class: "small quiet" },
            `${plural(num, "sample")}: mean ${numberText(mean)}, longest ${longest.toLocaleString("en")}`,
          ),
          this.plots[i],
        );
      }),
    );
  }

  redraw() {
    this.lengths.forEach(({ set, least, width, counts }, i) => {
      // An empty bar at each end keeps the other bars inside of the axes.
      const points = [0, ...counts, 0].map((count, bar) => [least + (bar - 1) * width + (width - 1) / 2, count]);
      const band = points.flatMap(([x, count]) => [
        [x - width / 2, 0, count],
        [x + width / 2, 0, count],
      ]);
      const name = width === 1 ? "samples" : `samples within ${(width - 1) / 2}`;
      // The line between the bars has no colour. Its points are the values that the pointer shows.
      plot(this.plots[i], {
        series: [{ name, colour: "none", points }, { name, colour: colours["series-1"], points: [], band }],
        height: 260,
        low: 0,
        x: "tokens",
        label: `Lengths of the samples of ${set}`,
      });
    });
  }

  restyle() {
    this.redraw();
  }
}

class Curves {
  constructor(page) {
    this.metrics = page.curves;
    this.overSteps = page.over_steps;
    this.smooth = true;
    this.log = false;
    // The curves of several runs are drawn over steps or seconds. A run has one colour everywhere.
    const over = Object.keys(this.metrics[0].over ?? {});
    $("over").append(...over.map((name) => make("option", { value: name }, name === "step" ? "over steps" : `over ${name}`)));
    $("over").hidden = over.length < 2;
    $("over").addEventListener("change", () => this.redraw());
    this.names = [...new Set(this.metrics.flatMap(({ over: of }) => (of ? of.step.map(({ name }) => name) : [])))];
    $("metric").append(...this.metrics.map(({ metric }) => make("option", { value: metric }, metric)));
    $("metric").addEventListener("change", () => this.redraw());
    for (const name of ["smooth", "log"]) {
      $(name).addEventListener("click", () => {
        this[name] = !this[name];
        $(name).setAttribute("aria-pressed", String(this[name]));
        this.redraw();
      });
    }
    this.minis = this.metrics.map((metric) => {
      const button = make("button", {
        type: "button",
        class: "mini",
        onclick: () => {
          $("metric").value = metric.metric;
          this.redraw();
          $("curve").scrollIntoView({ block: "nearest", behavior: calm.matches ? "auto" : "smooth" });
        },
      });
      return { metric, button };
    });
    $("minis").append(...this.minis.map(({ button }) => button));
    const sets = [...new Set(this.overSteps.map(({ set }) => set))];
    $("over-steps-card").hidden = sets.length === 0;
    $("over-steps-set").append(...sets.map((name) => make("option", { value: name }, name)));
    $("over-steps-set").hidden = sets.length < 2;
    $("over-steps-set").addEventListener("change", () => this.redraw());
  }

  /** Return the lines of several runs for `plot`, the mean of several seeds with its band. */
  seriesOfRuns(metric) {
    return metric.over[$("over").value].flatMap(({ name, steps, values, low, high }) => {
      const place = this.names.indexOf(name);
      const points = steps.map((step, i) => [step, values[i]]);
      const line = {
        name,
        colour: colours[`series-${(place % 4) + 1}`],
        dash: ["none", "7 4", "2 4", "9 4 2 4"][Math.floor(place / 4) % 4],
        points,
        dots: metric.metric.startsWith("eval") && points.length <= 60,
        band: low && steps.map((step, i) => [step, low[i], high[i]]),
      };
      if (!this.smooth || points.length < 40) return [line];
      return [
        { ...line, faint: true },
        { ...line, band: undefined, points: smoothed(points, Math.ceil(points.length / 60)) },
      ];
    });
  }

  /** Return the lines of a metric for `plot`: training in grey, evaluations in colours. */
  series(metric) {
    if (metric.over) return this.seriesOfRuns(metric);
    let next = 0;
    return metric.series.flatMap(({ name, steps, values }) => {
      const points = steps.map((step, i) => [step, values[i]]);
      const training = name === "train" || metric.series.length === 1;
      const colour = name === "train" ? colours.train : colours[`series-${(next % 4) + 1}`];
      const dash = ["none", "7 4", "2 4", "9 4 2 4"][next % 4];
      if (name !== "train") next++;
      const line = {
        name,
        colour,
        dash: name === "train" ? "none" : dash,
        points,
        dots: name.startsWith("eval") && points.length <= 60,
      };
      if (!this.smooth || !training || points.length < 40) return [line];
      return [
        { ...line, faint: true },
        { ...line, points: smoothed(points, Math.ceil(points.length / 60)) },
      ];
    });
  }

  redraw() {
    if ($("panel-curves").hidden || !this.metrics.length) return;
    const chosen = this.metrics.find(({ metric }) => metric === $("metric").value);
    const series = this.series(chosen);
    plot($("curve"), {
      series,
      height: clamp(window.innerHeight * 0.42, 240, 400),
      log: this.log,
      x: $("over").value || "step",
      label: `${chosen.metric} over training ${$("over").value === "seconds" ? "time" : "steps"}`,
    });
    $("curve").append(plotKeys(series));
    for (const { metric, button } of this.minis) {
      button.setAttribute("aria-current", String(metric === chosen));
      button.replaceChildren(make("span", { class: "quiet" }, ...breakable(metric.metric)));
      const latest = metric.series?.at(-1);
      if (latest)
        button.append(
          make("b", {}, numberText(latest.values.at(-1))),
          " ",
          make("span", { class: "small quiet" }, latest.name === metric.metric ? "" : latest.name),
        );
      button.append(this.mini(metric));
    }
    if (!$("over-steps-card").hidden) this.drawOverSteps();
  }

  /** Make the small picture of a metric, which has no axes. */
  mini(metric) {
    const root = svg("svg", { viewBox: "0 0 200 44", preserveAspectRatio: "none", "aria-hidden": "true" });
    const series = this.series(metric).filter((one) => !one.faint);
    const all = series.flatMap((one) => one.points).filter(([, y]) => y !== null);
    if (!all.length) return root;
    const reduce = (pick, of) => all.reduce((best, point) => of(best, point[pick]), all[0][pick]);
    const [x0, x1, y0, y1] = [reduce(0, Math.min), reduce(0, Math.max), reduce(1, Math.min), reduce(1, Math.max)];
    for (const one of series) {
      const d = pathOf(
        one.points.filter(([, y]) => y !== null),
        (x) => ((x - x0) / (x1 - x0 || 1)) * 196 + 2,
        (y) => 40 - ((y - y0) / (y1 - y0 || 1)) * 36,
      );
      root.append(svg("path", { d, stroke: one.colour, "stroke-width": 1.75, "vector-effect": "non-scaling-stroke" }));
    }
    return root;
  }

  /** Draw the accuracy after each reasoning step. Only the last evaluation has a colour. */
  drawOverSteps() {
    const of = this.overSteps.filter(({ set }) => set === $("over-steps-set").value);
    const chosen = of.length <= 4 ? of : [0, 1, 2, 3].map((i) => of[Math.round((i * (of.length - 1)) / 3)]);
    const series = chosen.map(({ step, counts, values }, i) => {
      const last = i === chosen.length - 1;
      return {
        name: `training step ${step.toLocaleString("en")}`,
        colour: last ? colours["series-1"] : colours.train,
        dash: last ? "none" : ["2 4", "7 4", "9 4 2 4"][i % 3],
        dots: last,
        points: counts.map((count, k) => [count, values[k]]),
      };
    });
    plot($("over-steps"), {
      series,
      height: 260,
      low: 0,
      x: "reasoning step",
      label: "Exact accuracy over reasoning steps",
    });
    $("over-steps").append(plotKeys(series));
  }

  key() {
    return false;
  }

  restyle() {
    this.redraw();
  }
}

/** Fill the tables of results.json. */
function showResults(results) {
  $("panel-results").append(...results.tables.map(plainTable));
  const counts = Object.entries(results.num_examples).map(([set, count]) => `${plural(count, "example")} of the set ${set}`);
  $("results-about").textContent = [results.checkpoint, results.data && `on ${results.data}`, counts.join(", ")]
    .filter(Boolean)
    .join(" · ");
  const withIntervals = results.rows.some((row) => row.length > 2);
  $("results").append(
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("th", {}, "metric"),
        make("th", { class: "number" }, "value"),
        withIntervals ? make("th", {}, "interval") : null,
      ),
    ),
    make(
      "tbody",
      {},
      ...results.rows.map(([name, value, low, high]) =>
        make(
          "tr",
          {},
          make("td", {}, name),
          make("td", { class: "number" }, make("b", {}, numberText(value))),
          withIntervals
            ? make("td", { class: "quiet" }, low === undefined ? "" : `${numberText(low)} to ${numberText(high)}`)
            : null,
        ),
      ),
    ),
  );
}

/** Return a card with a table whose cells are texts and numbers. */
function plainTable({ title, columns, rows }) {
  const isNumber = columns.map((_, column) => rows.every((row) => typeof row[column] !== "string"));
  const row = (tag, cells) =>
    make("tr", {}, ...cells.map((cell, column) => make(tag, { class: isNumber[column] ? "number" : "" }, cell)));
  return make(
    "div",
    { class: "card" },
    make("h2", {}, title),
    make(
      "table",
      {},
      make("thead", {}, row("th", columns)),
      make(
        "tbody",
        {},
        ...rows.map((cells) => row("td", cells.map((cell) => (typeof cell === "string" ? cell : numberText(cell))))),
      ),
    ),
  );
}

/** Return the nodes of a dotted or slashed name, which a line may leave between its parts only. */
function breakable(name) {
  return name.split(/(?<=[/.])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
}

/** The view that compares runs: their configs, their numbers, and the puzzles that each solves. */
class Compare {
  constructor(page, tabs) {
    this.page = page;
    this.tabs = tabs;
    const judged = page.numbers.filter(({ better }) => better);
    const others = page.numbers.filter(({ better }) => !better);
    const rest = make("details", {}, make("summary", {}, plural(others.length, "other metric")), this.numbers(others));
    const cards = [
      this.configs(),
      this.card("Logged values: the last, and the best with its step", this.numbers(judged), others.length ? rest : null),
      page.results.length ? this.card("Newest evaluation of this step", ...this.results()) : null,
      page.answering.length > 1 ? this.puzzles() : null,
      page.unanswered.length ? this.missing() : null,
    ];
    $("panel-compare").append(...page.notes.map((note) => make("p", {}, note)), ...cards.filter(Boolean));
  }

  card(title, ...children) {
    return make("div", { class: "card" }, make("h2", {}, title), ...children);
  }

  /** Make a table with a column for each run. A row is [name, [node of each run]]. */
  table(rows, number) {
    // The table of differences has no numbers, and its rows are what the label repeats.
    const head = this.page.runs.map(({ name, label }) =>
      make(
        "th",
        { class: number ? "number" : "" },
        make("div", {}, name, number ? make("span", { class: "small quiet" }, label) : null),
      ),
    );
    const body = rows.map(([name, cells]) =>
      make(
        "tr",
        {},
        make("td", {}, ...breakable(name)),
        ...cells.map((cell) => make("td", { class: number ? "number" : "" }, ...(cell ?? [make("span", {}, "–")]))),
      ),
    );
    const table = make("table", {}, make("thead", {}, make("tr", {}, make("th"), ...head)), make("tbody", {}, ...body));
    return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table of runs" }, table);
  }

  /** Make the card of the configs. A config holds the last values: those of earlier steps may differ. */
  configs() {
    const { differences, branched } = this.page;
    const rows = branched ? [...differences, ["resume", branched]] : differences;
    const cells = rows.map(([key, values]) => [key, values.map((value) => (value === null ? null : [value]))]);
    const table = rows.length ? this.table(cells, false) : null;
    if (differences.length) return this.card("What differs in the configs", table);
    const known = "Only names and places differ in the last configs. Earlier steps may have had other values.";
    return this.card("The configs are the same at the end", make("p", {}, known), table);
  }

  /** Return the value of the best run: the only one that may stand out; null if nobody can tell. */
  winner(better, values) {
    const known = values.filter((value) => value !== null && value !== undefined);
    if (!better || known.length < 2 || known.every((value) => value === known[0])) return null;
    return better === "max" ? Math.max(...known) : Math.min(...known);
  }

  numbers(rows) {
    return this.table(
      rows.map(({ metric, better, runs }) => {
        const winner = this.winner(
          better,
          runs.map((one) => one?.best),
        );
        const cell = (one) => {
          if (one === null) return null;
          const best = `best ${numberText(one.best)} at ${one.best_step?.toLocaleString("en")}`;
          const mark = { class: `small ${one.best === winner ? "good" : "quiet"}` };
          return [numberText(one.last), better ? make("span", mark, best) : null].filter((part) => part !== null);
        };
        return [metric, runs.map(cell)];
      }),
      true,
    );
  }

  /** Make the table of evaluations. A value stands out only if all evaluations are of the same examples. */
  results() {
    const { evaluated } = this.page;
    const same = new Set(evaluated.filter(Boolean).map((one) => JSON.stringify(one))).size === 1;
    const note = "The evaluations are of different data or examples, so that no value is marked as the best.";
    const examplesOf = ({ num_examples: of }) =>
      Object.entries(of).map(([set, num]) => `${plural(num, "example")} of the set ${set}`).join(", ");
    const head = [
      ["step", this.page.runs.map(({ step }) => (step === null ? null : [step.toLocaleString("en")]))],
      ["data", evaluated.map((one) => one && [one.data])],
      ["examples", evaluated.map((one) => one && [examplesOf(one)])],
    ];
    const rows = this.page.results.map(({ metric, better, runs }) => {
      const winner = this.winner(
        same && better,
        runs.map((one) => one?.[0]),
      );
      const cell = (one) => {
        if (!one) return null;
        const [value, low, high] = one;
        if (value === null) return null;
        const range = low === undefined ? "" : `${numberText(low)} to ${numberText(high)}`;
        return [
          make("b", { class: value === winner ? "good" : "" }, numberText(value)),
          make("span", { class: "small quiet" }, range),
        ];
      };
      return [metric, runs.map(cell)];
    });
    return [same ? null : make("p", { class: "small quiet" }, note), this.table([...head, ...rows], true)];
  }

  /** Make the card that counts the puzzles that runs agree on. A click shows these puzzles. */
  puzzles() {
    const buttons = agreements(this.page).map(([value, text, count]) =>
      make(
        "button",
        {
          type: "button",
          disabled: count === 0,
          onclick: () => {
            this.tabs.show("examples");
            this.tabs.open.view.compareBy(value);
          },
        },
        make("b", {}, String(count)),
        ` ${text}`,
      ),
    );
    const num = this.page.examples.filter((puzzle) => this.page.answering.every((run) => puzzle.runs[run])).length;
    return this.card(
      `${plural(num, "puzzle")} that ${this.page.answering.length} runs have answered`,
      make("div", { class: "tally" }, ...buttons),
    );
  }

  missing() {
    const names = this.page.unanswered.map((run) => this.page.runs[run].name).join(", ");
    const text = `No saved answers: ${names}. This command lets their models answer, and writes the page again:`;
    return this.card("Without answers", make("p", {}, text), make("pre", {}, this.page.command));
  }
}

/** Tell the reader of a run without saved predictions how to save them. */
function showNone(page) {
  $("panel-none").append(
    make(
      "div",
      { class: "card" },
      make("h2", {}, "No predictions were saved"),
      ...page.notes.map((note) => make("p", {}, note)),
      make("p", {}, "Run this command to save the model's answer after every reasoning step. Then run view.py again."),
      make("pre", {}, page.command),
    ),
  );
}

// -------------------------------------------------------------------------------------------------
// The page

const KEYS = {
  examples: [
    ["↑ ↓", "previous and next example (also k and j)"],
    ["← →", "go one step back or forward"],
    ["space", "play and pause"],
    ["Home, End", "go to the puzzle, to the last step"],
    ["h", "go to the step at which the model would halt"],
    ["f", "show all, solved or failed examples"],
    ["r", "show the next run's answers, on a page of several runs"],
    ["/", "search by row or name"],
  ],
  texts: [
    ["↑ ↓", "previous and next sample (also k and j)"],
    ["/", "search in the text"],
  ],
  votes: [
    ["↑ ↓", "previous and next task"],
    ["/", "search by name"],
  ],
  curves: [["← →", "show the values of the focused plot"]],
};

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-pressed", String(theme === "dark"));
  readColours();
}

function storedTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null; // some browsers offer no storage to files
  }
}

/** The views of the page. Each has a tab and a panel, and one of them is open. */
class Tabs {
  constructor(page) {
    this.tabs = [];
    this.open = null;
    const add = (name, title, build) => this.tabs.push({ name, title, build, built: false, view: null });
    if (page.kind === "runs") add("compare", "Comparison", () => new Compare(page, this));
    if (page.examples.length)
      add("examples", page.kind === "dataset" ? "Puzzles" : "Reasoning", () => new Examples(page));
    else if (page.kind === "run" && !page.texts) add("none", "Reasoning", () => showNone(page));
    if (page.texts?.length) add("texts", page.kind === "dataset" ? "Samples" : "Answers", () => new Texts(page));
    if (page.lengths?.length) add("lengths", "Lengths", () => new Lengths(page.lengths));
    if (page.votes?.length) add("votes", "ARC votes", () => new Votes(page.votes));
    if (page.curves?.length) add("curves", "Curves", () => new Curves(page));
    if (page.results && page.kind === "run") add("results", "Results", () => showResults(page.results));
    $("tabs").append(
      ...this.tabs.map(({ name, title }) =>
        make(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "aria-controls": `panel-${name}`,
            onclick: () => this.show(name),
          },
          title,
        ),
      ),
    );
    $("tabs").hidden = this.tabs.length < 2;
    $("tabs").addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      this.show(this.tabs[(this.tabs.indexOf(this.open) + by + this.tabs.length) % this.tabs.length].name, true);
    });
    // A run without predictions opens with its curves.
    this.show((this.tabs.find(({ name }) => name !== "none") ?? this.tabs[0]).name);
  }

  show(name, focus) {
    this.open?.view?.pause?.();
    for (const tab of this.tabs) {
      const is = tab.name === name;
      $(`panel-${tab.name}`).hidden = !is;
      $(`tab-${tab.name}`).setAttribute("aria-selected", String(is));
      $(`tab-${tab.name}`).tabIndex = is ? 0 : -1;
      if (is) this.open = tab;
    }
    // A hidden panel has no size, so a view is built when it is first shown.
    if (!this.open.built) {
      this.open.built = true;
      this.open.view = this.open.build() ?? null;
    }
    this.open.view?.redraw?.();
    if (focus) $(`tab-${name}`).focus();
  }

  restyle() {
    for (const { view } of this.tabs) view?.restyle?.();
  }
}

/**
 * Follow the theme of the system until the reader chooses a theme.
 *
 * The returned function toggles the theme.
 */
function followTheme(tabs) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const toggle = () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    applyTheme(theme);
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // Without storage, the choice holds until the page is closed.
    }
    tabs.restyle();
  };
  $("theme").addEventListener("click", toggle);
  dark.addEventListener("change", () => {
    if (storedTheme() === null) {
      applyTheme(dark.matches ? "dark" : "light");
      tabs.restyle();
    }
  });
  return toggle;
}

/** Show the keys of the open view. */
function showHelp(page, tabs) {
  $("keys-table").replaceChildren(
    ...[...(KEYS[tabs.open.name] ?? []), ["t", "dark or light theme"], ["?", "this list of keys"]].map(([key, text]) =>
      make(
        "tr",
        {},
        make("td", {}, ...key.split(" ").flatMap((one) => [make("kbd", {}, one.replace(",", "")), " "])),
        make("td", {}, text),
      ),
    ),
  );
  $("keys-note").textContent = page.texts
    ? "The samples are spread evenly over the data. A token has a ground of its own, unless tokens are bytes."
    : page.kind !== "dataset"
      ? "The model writes the whole board anew in every step."
      : "The puzzles are spread evenly over the dataset. A group is a puzzle and its augmentations.";
  $("keys").showModal();
}

/** Hand a key to the page or to the open view, unless the focused element needs the key itself. */
function pressKey(event, tabs, help, toggleTheme) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const on = event.target;
  // The slider needs no keys of its own: its arrow keys would do what those of the player do.
  if (on.matches('input[type="search"]')) {
    if (event.key === "Escape") on.blur();
    return;
  }
  if (on.matches("select") || (on.matches("button, a, [role=tab]") && [" ", "Enter"].includes(event.key))) return;
  if (event.key === "?") help();
  else if (event.key === "t") toggleTheme();
  else if (!tabs.open.view?.key?.(event)) return;
  event.preventDefault();
}

async function start() {
  applyTheme(storedTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  const page = await readData();
  $("loading").hidden = true;
  document.body.classList.add(page.kind);
  $("title").textContent = page.project ? `${page.project} / ${page.title}` : page.title;
  $("facts").append(
    ...Object.entries(page.facts).map(([name, text]) => make("li", {}, `${name} `, make("b", {}, text))),
  );
  const tabs = new Tabs(page);
  const toggleTheme = followTheme(tabs);
  const help = () => showHelp(page, tabs);
  $("help").addEventListener("click", help);
  $("close").addEventListener("click", () => $("keys").close());
  document.addEventListener("keydown", (event) => pressKey(event, tabs, help, toggleTheme));
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => tabs.open.view?.redraw?.());
  });
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  $("loading").hidden = false;
  $("loading").textContent =
    `This page could not be drawn: ${error.message}. The page needs a browser from 2023 or later. ` +
    "If the file is incomplete, write it again with view.py.";
  throw error;
});

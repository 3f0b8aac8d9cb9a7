/** Draw boards: a puzzle, an answer or a solution, into a canvas. */
// In arrays: S cells of a board. A cell's side in pixels is c.

import { clamp } from "./dom.mjs";

export const colours = {};

const NAMES =
  "board grid frame given answer wrong wrong-soft changed right wall start goal quiet text card accent line train " +
  "series-1 series-2 series-3 series-4";

/** Read the colours of the theme from the style sheet, which canvases do not use by themselves. */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES.split(" ")) colours[name] = style.getPropertyValue(`--${name}`).trim();
}

const LAMP = "#f2b632";
const ARC_COLOURS =
  "#000000 #0074d9 #ff4136 #2ecc40 #ffdc00 #aaaaaa #f012be #ff851b #7fdbff #870c25".split(" ");
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

/**
 * Return the side of a cell in CSS pixels.
 *
 * A cell of four or more screen pixels gets a whole number of them, so that neighbouring cells meet
 * without a seam.
 */
export function cellSide({ rows, columns }, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const c = Math.min(width / columns, height / rows);
  return c * ratio < 4 ? c : Math.floor(c * ratio) / ratio;
}

/** Resize and clear a canvas, and return its context. One unit of the context is one CSS pixel. */
export function prepare(canvas, width, height) {
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

// ---- shapes --------------------------------------------------------------------------------------

function paint(context, colour, x, y, width, height) {
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
}

/** Draw lines, each [x1, y1, x2, y2]. */
function stroke(context, colour, width, ...lines) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  for (const [x1, y1, x2, y2] of lines) {
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
  }
  context.stroke();
}

/** Draw a disc, or a ring if there is a width for its line. */
function disc(context, colour, [x, y], radius, width) {
  Object.assign(context, { fillStyle: colour, strokeStyle: colour, lineWidth: width ?? 1 });
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  if (width) context.stroke();
  else context.fill();
}

function write(context, colour, text, [x, y], weight, size) {
  context.fillStyle = colour;
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillText(text, x, y);
}

const middle = ({ x, y, c }) => [x + c / 2, y + c / 2];

/**
 * Draw a cross, which marks a wrong cell.
 *
 * A second cross in the colour `under` lies below the first, so that the mark is visible on every
 * ground.
 */
function cross(context, { x, y, c }, colour, under) {
  const [near, far] = [c * 0.24, c * 0.76];
  const lines = [
    [x + near, y + near, x + far, y + far],
    [x + far, y + near, x + near, y + far],
  ];
  context.lineCap = "round";
  stroke(context, under, Math.max(2.2, c * 0.2), ...lines);
  stroke(context, colour, Math.max(1.2, c * 0.1), ...lines);
}

// ---- kinds of boards -----------------------------------------------------------------------------

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
export const boardOf = (page, example) => page.boards?.[example.set] ?? page.board;

export const drawingOf = (board) => DRAWINGS[board.kind] ?? DRAWINGS.numbers;

/** Mark the ground of a cell that is wrong or has changed, and the corner of a cell that is both. */
function ground(context, { x, y, c, wrong, changed }) {
  if (changed || wrong) paint(context, wrong ? colours["wrong-soft"] : colours.changed, x, y, c, c);
  if (!wrong || !changed) return;
  context.fillStyle = colours.wrong;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + c * 0.26, y);
  context.lineTo(x, y + c * 0.26);
  context.fill();
}

function underline(context, { x, y, c }) {
  paint(context, colours.wrong, x + c * 0.2, y + c * 0.84, c * 0.6, Math.max(1.5, c * 0.07));
}

/** Write a token: bold if the puzzle has it, and underlined if it is wrong. */
function writeToken(context, cell, text, given, size) {
  const { x, y, c, wrong } = cell;
  const colour = wrong ? colours.wrong : given ? colours.given : colours.answer;
  write(context, colour, text, [x + c / 2, y + c * 0.54], given ? 700 : 500, size);
  if (wrong) underline(context, cell);
}

function sudokuCell(context, cell, board) {
  const { x, y, c, token, question, wrong } = cell;
  ground(context, cell);
  if (token === 0) write(context, colours.quiet, "·", [x + c / 2, y + c * 0.54], 500, c * 0.56);
  if (token > 1) writeToken(context, cell, tokenName(board, token), question > 1, c * 0.56); // a letter above 9
  else if (wrong) underline(context, cell);
}

function mazeCell(context, cell) {
  const { x, y, c, token, changed } = cell;
  if (changed) paint(context, colours.changed, x, y, c, c);
  if (token === 1) paint(context, colours.wall, x, y, c, c);
  if (token === 0) paint(context, colours.grid, x + c * 0.4, y + c * 0.4, c * 0.2, c * 0.2);
  if (isMissing(cell)) disc(context, colours.wrong, middle(cell), c * 0.24, Math.max(1, c * 0.12));
}

/** Return whether a cell of a maze is missing from the path. */
const isMissing = ({ wrong, label, token }) => wrong && label === 5 && token !== 1;

function lightsOutCell(context, cell) {
  const { c, token, question, wrong } = cell;
  ground(context, cell);
  // The lamp of the puzzle lies below the press.
  if (question === 2) disc(context, LAMP, middle(cell), c * 0.3);
  else disc(context, colours.grid, middle(cell), c * 0.3, Math.max(1, c * 0.04));
  if (token === 4) disc(context, wrong ? colours.wrong : colours.answer, middle(cell), c * 0.17);
  if (wrong) underline(context, cell);
}

function arcCell(context, cell) {
  const { x, y, c, token, wrong, changed } = cell;
  // A cell without a colour is padding or the end of the grid.
  if (token < 2) stroke(context, colours.grid, 1, [x, y + c, x + c, y]);
  else paint(context, ARC_COLOURS[token - 2], x, y, c, c);
  if (changed) {
    context.strokeStyle = "#ffffff";
    context.lineWidth = Math.max(1, c * 0.09);
    context.strokeRect(x + c * 0.12, y + c * 0.12, c * 0.76, c * 0.76);
  }
  if (wrong) cross(context, cell, "#ffffff", "#000000");
}

function numberCell(context, cell, board) {
  const { c, token, question } = cell;
  ground(context, cell);
  const text = token < 0 ? "" : board.byName ? tokenName(board, token) : String(token);
  writeToken(context, cell, text, token === question, textSize(text.length, c));
}

/** Return the font size at which a text of this length fits into a cell. */
const textSize = (length, c) => Math.min(c * 0.5, (c * 1.4) / Math.max(1, length));

/** Return whether tokens have names that are legible in a cell, or as short as their numbers. */
export function namesFit(board, tokens, c) {
  if (!board.tokens.length) return false;
  const longest = Math.max(...tokens.map((token) => tokenName(board, token).length));
  return longest <= String(Math.max(...tokens)).length || textSize(longest, c) >= 8;
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
export function draw(canvas, board, picture, width, height) {
  const part = picture.window ?? { top: 0, left: 0, rows: board.rows, columns: board.columns };
  const c = cellSide(part, width, height);
  const context = prepare(canvas, c * part.columns, c * part.rows);
  context.textAlign = "center";
  context.textBaseline = "middle";
  paint(context, colours.board, 0, 0, c * part.columns, c * part.rows);
  const { tokens, question, label, previous } = picture;
  const cells = [];
  for (let row = 0; row < part.rows; row++) {
    for (let column = 0; column < part.columns; column++) {
      const s = (part.top + row) * board.columns + part.left + column;
      const place = { row, column, x: column * c, y: row * c, c };
      const found = { token: tokens[s], question: question[s], label: label?.[s] };
      const wrong = label !== undefined && label[s] >= 0 && label[s] !== tokens[s];
      const changed = previous !== undefined && previous[s] !== tokens[s];
      if (s < tokens.length) cells.push({ ...place, ...found, wrong, changed });
    }
  }
  const drawing = drawingOf(board);
  for (const cell of cells) drawing.cell(context, cell, board);
  // The rows and columns of wrapped tokens mean nothing, and lines would suggest a board.
  if (!board.wrapped) {
    (drawing.over ?? grid)(context, cells, part, c, board);
    const edge = clamp(c * 0.06, 1, 3);
    context.strokeStyle = colours.frame;
    context.lineWidth = edge;
    context.strokeRect(edge / 2, edge / 2, c * part.columns - edge, c * part.rows - edge);
  }
  return c;
}

/** Draw the path through a maze as a line from cell to cell, then the start and the goal. */
function way(context, cells, part, c) {
  const at = (row, column) =>
    row < part.rows && column < part.columns ? cells[row * part.columns + column] : undefined;
  const joins = (cell, other) => other?.token >= 3 && (cell.token === 5 || other.token === 5);
  const steps = cells
    .filter((cell) => cell.token >= 3)
    .flatMap((cell) =>
      [at(cell.row + 1, cell.column), at(cell.row, cell.column + 1)]
        .filter((other) => joins(cell, other))
        .map((other) => [...middle(cell), ...middle(other)]),
    );
  const thick = Math.max(1, c * 0.34);
  context.lineCap = "round";
  stroke(context, colours.answer, thick, ...steps);
  // Start and goal stay inside a large cell, but are larger than a small cell, to be found.
  const radius = clamp(c * 0.62, 2.5, Math.max(7, c * 0.42));
  for (const cell of cells) {
    const [x, y] = middle(cell);
    // The dot shows a cell of the path that has no neighbours on the path.
    if (cell.token === 5) disc(context, colours.answer, [x, y], thick / 2);
    if (cell.token === 3) disc(context, colours.start, [x, y], radius);
    if (cell.token === 4)
      paint(context, colours.goal, x - radius * 0.9, y - radius * 0.9, radius * 1.8, radius * 1.8);
    if (c >= 10 && (cell.token === 3 || cell.token === 4))
      write(context, colours.board, cell.token === 3 ? "S" : "G", [x, y + c * 0.05], 700, radius * 1.3);
    if (cell.wrong && !isMissing(cell)) cross(context, cell, colours.wrong, colours.board);
  }
}

/** Draw thin lines between cells, and strong lines between boxes. */
function grid(context, cells, part, c, board) {
  const [boxRows, boxColumns] = board.box ?? [part.rows, part.columns];
  const [width, height] = [c * part.columns, c * part.rows];
  const inside = (num) => Array.from({ length: num - 1 }, (_, i) => i + 1);
  const linesOf = (strong) => [
    ...inside(part.rows)
      .filter((row) => (row % boxRows === 0) === strong)
      .map((row) => [0, row * c, width, row * c]),
    ...inside(part.columns)
      .filter((column) => (column % boxColumns === 0) === strong)
      .map((column) => [column * c, 0, column * c, height]),
  ];
  context.lineCap = "butt";
  stroke(context, drawingOf(board).line ?? colours.grid, clamp(c * 0.03, 0.3, 1), ...linesOf(false));
  stroke(context, colours.frame, clamp(c * 0.05, 1, 2.5), ...linesOf(true));
}

/** Return the name of a token, or its number if the token has no name. */
export function tokenName(board, token) {
  if (token < 0) return "any";
  return board.tokens[token] ?? String(token);
}

/** Return the smallest part of a board with all cells for which `keep` holds; undefined for none. */
function extent(board, keep) {
  const kept = Array.from({ length: board.rows * board.columns }, (_, s) => s).filter(keep);
  if (!kept.length) return undefined;
  const columns = kept.map((s) => s % board.columns);
  const [top, left] = [Math.floor(kept[0] / board.columns), Math.min(...columns)];
  const rows = Math.floor(kept.at(-1) / board.columns) - top + 1;
  return { top, left, rows, columns: Math.max(...columns) - left + 1 };
}

/** Return the parts of the 30x30 canvas that hold an ARC puzzle, its answers and its solution. */
function arcWindows(board, question, label, answers) {
  const ofQuestion = extent(board, (s) => question[s] >= 2);
  const ofLabel = label && extent(board, (s) => label[s] >= 2);
  // The window of the answers shows every cell that differs from the solution. Without a solution,
  // it shows every cell that has a colour.
  const differs = label?.some((token) => token >= 0)
    ? (s) => label[s] >= 2 || (label[s] >= 0 && answers.some((answer) => answer[s] !== label[s]))
    : (s) => answers.some((answer) => answer[s] >= 2);
  return { question: ofQuestion, label: ofLabel, answer: extent(board, differs) ?? ofQuestion };
}

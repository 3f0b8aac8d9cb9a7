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
export const boardOf = (page, example) => page.boards?.[example.set] ?? page.board;

export const drawingOf = (board) => DRAWINGS[board.kind] ?? DRAWINGS.numbers;

/** Mark the ground of a cell that is wrong or has changed. */
function ground(context, { x, y, c, wrong, changed }) {
  if (!changed && !wrong) return;
  context.fillStyle = wrong ? colours["wrong-soft"] : colours.changed;
  context.fillRect(x, y, c, c);
  if (wrong && changed) corner(context, x, y, c);
}

function sudokuCell(context, cell, board) {
  const { x, y, c, token, question, wrong } = cell;
  ground(context, cell);
  if (token === 0) write(context, cell, "·", 500, 0.56 * c, colours.quiet);
  if (token > 1) {
    const given = question > 1;
    const colour = wrong ? colours.wrong : given ? colours.given : colours.answer;
    write(context, cell, tokenName(board, token), given ? 700 : 500, 0.56 * c, colour); // a letter above 9
  }
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

function lightsOutCell(context, cell) {
  const { x, y, c, token, question, wrong } = cell;
  ground(context, cell);
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

function numberCell(context, cell, board) {
  const { x, y, c, token, question, wrong } = cell;
  ground(context, cell);
  const text = token < 0 ? "" : board.byName ? tokenName(board, token) : String(token);
  const given = token === question;
  const colour = wrong ? colours.wrong : given ? colours.given : colours.answer;
  write(context, cell, text, given ? 700 : 500, textSize(text.length, c), colour);
  if (wrong) underline(context, x, y, c);
}

/** Write a text into the middle of a cell. */
function write(context, { x, y, c }, text, weight, size, colour) {
  context.fillStyle = colour;
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillText(text, x + c / 2, y + c * 0.54);
}

/** Return the font size at which a text of this length fits into a cell. */
const textSize = (length, c) => Math.min(c * 0.5, (c * 1.4) / Math.max(1, length));

/** Return whether tokens have names that are legible in a cell, or as short as their numbers. */
export function namesFit(board, tokens, c) {
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
export function draw(canvas, board, picture, width, height) {
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
export function tokenName(board, token) {
  if (token < 0) return "any";
  return board.tokens[token] ?? String(token);
}

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

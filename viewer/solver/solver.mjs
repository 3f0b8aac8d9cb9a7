/**
 * The loop over segments: states, noise, and when a puzzle is settled (sharing/segment/host.py).
 *
 * A segment is a function, perhaps an asynchronous one, from inputs by name to outputs by name, of
 * one puzzle. It may be that of mixer.mjs, or a session of ONNX Runtime.
 */
// In arrays: S cells, V tokens, D components of a state, U rows, columns and boxes.

const GOLDEN = 0x9e3779b9;
const NOISE = 1;

/** Return the 32-bit seed of the part with a number (models/dropout.py). */
export function derived(seed, number) {
  let hashed = (seed + Math.imul(number + 1, GOLDEN)) >>> 0;
  hashed = Math.imul(hashed ^ (hashed >>> 16), 0x21f0aaad) >>> 0;
  hashed = Math.imul(hashed ^ (hashed >>> 15), 0x735a2d97) >>> 0;
  return (hashed ^ (hashed >>> 15)) >>> 0;
}

// Giles, "Approximating the erfinv function" (2010), table 5.
const CENTRAL = [
  2.81022636e-8, 3.43273939e-7, -3.5233877e-6, -4.39150654e-6, 0.00021858087, -0.00125372503, -0.00417768164,
  0.246640727, 1.50140941,
];
const TAIL = [
  -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
  1.00167406, 2.83297682,
];

export function erfinv(x) {
  const w = -Math.log((1 - x) * (1 + x));
  const [at, factors] = w < 5 ? [w - 2.5, CENTRAL] : [Math.sqrt(w) - 3, TAIL];
  return factors.reduce((sum, factor) => sum * at + factor, 0) * x;
}

/** Return the noise that a segment reads, (S, V): models/noise.py, full_strength. */
export function noiseOf(kind, seed, S, V) {
  const own = derived(seed, NOISE);
  const scale = Math.sqrt(kind === "annealed" ? 2 / V : 2);
  return Float32Array.from({ length: S * V }, (_, place) => {
    const uniform = ((derived(own, place) >>> 9) + 0.5) / 2 ** 23;
    return erfinv(2 * uniform - 1) * scale;
  });
}

/** Return the rows and columns of a box of a board with this side: its closest factors. */
export function boxOf(side) {
  let rows = Math.floor(Math.sqrt(side));
  while (side % rows) rows--;
  return [rows, side / rows];
}

/** Return the numbers of a cell's row, column and box: rows come first, then columns, then boxes. */
export function unitsOfCell(side, s) {
  const [rows, columns] = boxOf(side);
  const [row, column] = [Math.floor(s / side), s % side];
  return [row, side + column, 2 * side + Math.floor(row / rows) * rows + Math.floor(column / columns)];
}

/** Return which cells belong to which rows, columns and boxes, (U, S). */
export function unitsOf(side) {
  const S = side * side;
  const units = new Float32Array(3 * side * S);
  for (let s = 0; s < S; s++) for (const unit of unitsOfCell(side, s)) units[unit * S + s] = 1;
  return units;
}

/** Return the states of a trajectory at its start, by name. */
function started(host, trajectory, sizes) {
  const shape = host.state_shape.map((size) => sizes[size] ?? size);
  const length = shape.reduce((product, size) => product * size, 1);
  return Object.fromEntries(
    Object.entries(host.starts).map(([name, starts]) => {
      const start = starts[trajectory % starts.length];
      return [name, Float32Array.from({ length }, (_, i) => start[i % start.length])];
    }),
  );
}

/** Return the most likely token of each cell. */
function best(logits, S) {
  const V = logits.length / S;
  return Array.from({ length: S }, (_, s) => {
    let token = 0;
    for (let v = 1; v < V; v++) if (logits[s * V + v] > logits[s * V + token]) token = v;
    return token;
  });
}

/**
 * Solve a puzzle, and yield what the model thinks after each segment.
 *
 * A pass ends when its answer is settled: the model would halt, and the answer is that of the segment
 * before. A pass that does not settle is followed by another one, up to `restarts` of them, which
 * starts elsewhere or reads other noise. `puzzle` is the number of the puzzle's row in the model.
 *
 * Yields {pass, step, answer, qHalt, settled}: the number of the pass from 0, of the segment from 1,
 * and the tokens.
 */
export async function* solve(host, segment, tokens, { restarts = 0, seed = 0, puzzle = 0 } = {}) {
  const S = tokens.length;
  const side = Math.sqrt(S);
  const V = host.any_size ? side + 2 : host.model.vocab_size;
  const fixed = { tokens: Int32Array.from(tokens), puzzles: Int32Array.of(puzzle) };
  if (host.inputs.includes("units")) fixed.units = unitsOf(side);
  for (let pass = 0; pass <= restarts; pass++) {
    const ofPass = derived(pass ? seed : 0, pass);
    let states = started(host, pass, { cells: S, symbols: V - 2 });
    let before = null;
    for (let step = 1; step <= host.segments; step++) {
      const given = { ...fixed, ...states };
      if (host.noise !== "none") given.noise = noiseOf(host.noise, derived(ofPass, step), S, V);
      const out = await segment(Object.fromEntries(host.inputs.map((name) => [name, given[name]])));
      states = Object.fromEntries(Object.keys(host.starts).map((name) => [name, out[`next_${name}`]]));
      const answer = best(out.logits, S);
      const halts = host.values_going_on ? out.q_halt > out.q_continue : out.q_halt > 0;
      const settled = halts && before !== null && answer.every((token, s) => token === before[s]);
      yield { pass, step, answer, qHalt: out.q_halt, settled };
      if (settled) return;
      before = answer;
    }
  }
}

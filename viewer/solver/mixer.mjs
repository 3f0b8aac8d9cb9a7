/** One segment of the symbol-equivariant mixer (models/se_mixer.py), with typed arrays. */
// In arrays: S cells, K symbols, D components of a candidate, M of a message, W of the MLP, U units.
// A candidate is a symbol in a cell, and has the number s * K + k. Units are rows, columns and boxes.

const NUM_SPECIAL = 2;
const SUM_SCALE = 0.5;
const RMS_EPS = 1e-5;

const silu = (x) => x / (1 + Math.exp(-x));

/**
 * Write rows of x, (N, I), times a matrix (O, width) into out, (N, O). The matrix is read from its
 * column `first` on. With `add`, the products are added to what out holds.
 *
 * Four rows at a time, so that each number of the matrix is read once for all of them.
 */
function multiply(out, x, matrix, { num, I, O, width = I, first = 0, add = false }) {
  let n = 0;
  for (; n + 3 < num; n += 4) {
    const [p, q, r, t] = [n * I, (n + 1) * I, (n + 2) * I, (n + 3) * I];
    for (let o = 0; o < O; o++) {
      const row = o * width + first;
      let a = 0;
      let b = 0;
      let c = 0;
      let d = 0;
      for (let i = 0; i < I; i++) {
        const weight = matrix[row + i];
        a += x[p + i] * weight;
        b += x[q + i] * weight;
        c += x[r + i] * weight;
        d += x[t + i] * weight;
      }
      const at = n * O + o;
      out[at] = add ? out[at] + a : a;
      out[at + O] = add ? out[at + O] + b : b;
      out[at + 2 * O] = add ? out[at + 2 * O] + c : c;
      out[at + 3 * O] = add ? out[at + 3 * O] + d : d;
    }
  }
  for (; n < num; n++)
    for (let o = 0; o < O; o++) {
      let sum = add ? out[n * O + o] : 0;
      for (let i = 0; i < I; i++) sum += x[n * I + i] * matrix[o * width + first + i];
      out[n * O + o] = sum;
    }
}

/** Return silu(gate) * up of rows [gate, up], (N, 2 W) -> (N, W). */
function gated(rows, num, W) {
  const out = new Float64Array(num * W);
  for (let n = 0; n < num; n++)
    for (let w = 0; w < W; w++) out[n * W + w] = silu(rows[2 * n * W + w]) * rows[(2 * n + 1) * W + w];
  return out;
}

/**
 * Return the function that runs a segment.
 *
 * `arch` has the options of the model, and `weights` its matrices, row by row, by their names.
 */
export function mixer(arch, weights) {
  const [D, M] = [arch.hidden_size, arch.message_size];
  const layers = Array.from({ length: arch.L_layers }, (_, layer) => {
    const of = (name) => weights[`L_level.layers.${layer}.${name}.weight`];
    return { offer: of("offer_proj"), answer: of("answer_proj"), gateUp: of("gate_up_proj"), down: of("down_proj") };
  });
  const W = layers[0].down.length / D;

  /** Return what constraints answer to the sums of their offers, (N, M). */
  function answer({ answer: matrix }, sums, num) {
    const rows = new Float64Array(num * 2 * M);
    for (let i = 0; i < sums.length; i++) sums[i] *= SUM_SCALE;
    multiply(rows, sums, matrix, { num, I: M, O: 2 * M });
    return gated(rows, num, M);
  }

  /** Return the messages of the cell and of the units of each candidate, (S, K, M). */
  function messages(layer, x, { S, K, cellsOf }) {
    const offers = new Float64Array(S * K * M);
    multiply(offers, x, layer.offer, { num: S * K, I: D, O: M });
    for (let i = 0; i < offers.length; i++) offers[i] = silu(offers[i]);
    const ofCells = new Float64Array(S * M);
    const ofUnits = new Float64Array(cellsOf.length * K * M);
    for (let s = 0; s < S; s++)
      for (let i = 0; i < K * M; i++) ofCells[s * M + (i % M)] += offers[s * K * M + i];
    cellsOf.forEach((cells, u) => {
      for (const s of cells) for (let i = 0; i < K * M; i++) ofUnits[u * K * M + i] += offers[s * K * M + i];
    });
    const [cellAnswers, unitAnswers] = [answer(layer, ofCells, S), answer(layer, ofUnits, cellsOf.length * K)];
    const out = offers; // no longer needed
    for (let s = 0; s < S; s++)
      for (let i = 0; i < K * M; i++) out[s * K * M + i] = cellAnswers[s * M + (i % M)];
    cellsOf.forEach((cells, u) => {
      for (const s of cells) for (let i = 0; i < K * M; i++) out[s * K * M + i] += unitAnswers[u * K * M + i];
    });
    return out;
  }

  /** Change x (S, K, D) to rms(x + mlp([x, messages])). */
  function block(layer, x, sizes) {
    const num = sizes.S * sizes.K;
    const rows = new Float64Array(num * 2 * W);
    const shape = { num, O: 2 * W, width: D + M };
    multiply(rows, x, layer.gateUp, { ...shape, I: D });
    multiply(rows, messages(layer, x, sizes), layer.gateUp, { ...shape, I: M, first: D, add: true });
    multiply(x, gated(rows, num, W), layer.down, { num, I: W, O: D, add: true });
    for (let n = 0; n < num; n++) {
      let squares = 0;
      for (let d = 0; d < D; d++) squares += x[n * D + d] ** 2;
      const scale = 1 / Math.sqrt(squares / D + RMS_EPS);
      for (let d = 0; d < D; d++) x[n * D + d] *= scale;
    }
  }

  /** Return the input of the recursion, (S, K, D). */
  function embed(tokens, noise, { S, K }) {
    const [kinds, noisy] = [weights["embed_kinds.weight"], weights["embed_noisy.weight"]];
    const x = new Float64Array(S * K * D);
    for (let s = 0; s < S; s++)
      for (let k = 0; k < K; k++) {
        const kind = tokens[s] < NUM_SPECIAL ? tokens[s] + 2 : Number(tokens[s] !== k + NUM_SPECIAL);
        const amount = noise ? noise[s * (K + NUM_SPECIAL) + k + NUM_SPECIAL] : 0;
        for (let d = 0; d < D; d++) {
          const value = kinds[kind * D + d] + (noise ? amount * noisy[d] : 0);
          x[(s * K + k) * D + d] = Math.sqrt(D) * value;
        }
      }
    return x;
  }

  /** Return logits (S, 2 + K), the special tokens first. */
  function readOut(z, { S, K }) {
    const [head, special] = [weights["lm_head.weight"], weights["special_head.weight"]];
    const V = K + NUM_SPECIAL;
    const logits = new Float64Array(S * V);
    for (let s = 0; s < S; s++)
      for (let k = 0; k < K; k++)
        for (let d = 0; d < D; d++) {
          const value = z[(s * K + k) * D + d];
          for (let v = 0; v < NUM_SPECIAL; v++) logits[s * V + v] += (value * special[v * D + d]) / K;
          logits[s * V + NUM_SPECIAL + k] += value * head[d];
        }
    return logits;
  }

  return ({ tokens, noise, units, z }) => {
    const S = tokens.length;
    const K = z.length / (S * D);
    const cellsOf = Array.from({ length: units.length / S }, (_, u) =>
      Array.from({ length: S }, (_, s) => s).filter((s) => units[u * S + s]),
    );
    const x = embed(tokens, noise, { S, K });
    const state = Float64Array.from(z);
    for (let call = 0; call < arch.H_cycles * arch.L_cycles; call++) {
      for (let i = 0; i < state.length; i++) state[i] += x[i];
      for (const layer of layers) block(layer, state, { S, K, cellsOf });
    }
    const logits = readOut(state, { S, K });
    return { logits, q_halt: confidence(logits, S), q_continue: 0, next_z: state };
  };
}

/** Return the logit of the confidence in the least sure cell (models/symbols.py). */
function confidence(logits, S) {
  const V = logits.length / S;
  let least = Infinity;
  for (let s = 0; s < S; s++) {
    const row = Array.from(logits.subarray(s * V, (s + 1) * V)).sort((a, b) => b - a);
    const others = row.slice(1).reduce((sum, value) => sum + Math.exp(value - row[1]), 0);
    least = Math.min(least, row[0] - row[1] - Math.log(others));
  }
  return least;
}

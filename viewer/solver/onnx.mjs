/** A segment that ONNX Runtime computes, for solver.mjs. */

/**
 * Return the function that runs a segment.
 *
 * `ort` is the module onnxruntime-web or onnxruntime-node, `session` one of its sessions, and `host`
 * what config.json beside the file says.
 */
export function onnxSegment(ort, session, host) {
  const { seq_len: S, vocab_size: V } = host.model;
  return async (given) => {
    const cells = given.tokens.length;
    const sizes = host.any_size ? { cells, symbols: Math.sqrt(cells) } : { cells: S, symbols: V - 2 };
    const state = [1, ...host.state_shape.map((size) => sizes[size] ?? size)];
    const shapes = {
      ...{ tokens: [1, cells], puzzles: [1], noise: [1, cells, sizes.symbols + 2], units: [3 * sizes.symbols, cells] },
      ...Object.fromEntries(Object.keys(host.starts).map((name) => [name, state])),
    };
    const type = (numbers) => (numbers instanceof Int32Array ? "int32" : "float32");
    const feeds = Object.entries(given).map(([name, numbers]) => [
      name,
      new ort.Tensor(type(numbers), numbers, shapes[name]),
    ]);
    const found = await session.run(Object.fromEntries(feeds));
    const scalar = (name) => found[name].data[0];
    const states = Object.keys(host.starts).map((name) => [`next_${name}`, found[`next_${name}`].data]);
    return { logits: found.logits.data, q_halt: scalar("q_halt"), q_continue: scalar("q_continue"), ...Object.fromEntries(states) };
  };
}

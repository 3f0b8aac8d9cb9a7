/** Solves beside the page, which stays free to draw. */

import { mixer } from "./mixer.mjs";
import { solve } from "./solver.mjs";
import { weightsOf } from "./weights.mjs";

let host, segment;

self.onmessage = async ({ data }) => {
  if (data.weights) {
    host = data.host;
    segment = mixer(host.model.arch, weightsOf(data.weights));
    return;
  }
  try {
    for await (const thought of solve(host, segment, data.tokens, data.options)) self.postMessage(thought);
    self.postMessage({ done: true });
  } catch (error) {
    self.postMessage({ failed: error.message });
  }
};

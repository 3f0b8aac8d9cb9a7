/** Solves beside the page, which stays free to draw. */

import { segmentOf } from "./segment.mjs";
import { solve } from "./solver.mjs";

let host, segment;

self.onmessage = async ({ data }) => {
  if (data.host) {
    host = data.host;
    // A worker may import what it made itself, and nothing of the page.
    const url = data.runtime && URL.createObjectURL(new Blob([data.runtime.module], { type: "text/javascript" }));
    segment = segmentOf(data, { url, wasm: data.runtime?.wasm });
    return;
  }
  try {
    for await (const thought of solve(host, await segment, data.tokens, data.options)) self.postMessage(thought);
    self.postMessage({ done: true });
  } catch (error) {
    self.postMessage({ failed: error.message });
  }
};

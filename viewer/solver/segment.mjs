/** Run the segments of a page: by the recursion in mixer.mjs, or by ONNX Runtime. */

import { mixer } from "./mixer.mjs";
import { onnxSegment } from "./onnx.mjs";
import { bytesOf, weightsOf } from "./weights.mjs";

/**
 * Return the function that runs a segment of a page's model.
 *
 * Without `weights`, `model` is a file of ONNX in base64, and `runtime` is onnxruntime-web: {url, wasm},
 * the address of its module and the bytes of its WebAssembly.
 */
export async function segmentOf({ host, weights, model }, runtime) {
  if (weights) return mixer(host.model.arch, weightsOf(weights));
  const ort = await import(runtime.url);
  ort.env.wasm.wasmBinary = runtime.wasm;
  ort.env.wasm.numThreads = 1; // browsers give memory that threads share to servers' pages alone
  return onnxSegment(ort, await ort.InferenceSession.create(bytesOf(model)), host);
}

/**
 * Run single segments of a page in Node.js, for the comparison with PyTorch.
 *
 *     node check.mjs PAGE
 *
 * Each line of the input is {name: base64 of the numbers of one puzzle}, and so is each line of the
 * output.
 */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { inflateSync } from "node:zlib";

import { segmentOf } from "./segment.mjs";

const inflated = (packed) => inflateSync(Buffer.from(packed, "base64"));

const [, packed] = readFileSync(process.argv[2], "utf-8").match(/id="data">([^<]*)</);
const data = JSON.parse(inflated(packed));
let runtime = null;
if (data.runtime) {
  await import(new URL(data.runtime, pathToFileURL(process.argv[2])));
  const { module, wasm } = globalThis.onnxruntimeWeb;
  runtime = { url: `data:text/javascript;base64,${inflated(module).toString("base64")}`, wasm: inflated(wasm) };
}
const segment = await segmentOf(data, runtime);

for await (const line of createInterface({ input: process.stdin })) {
  const given = Object.fromEntries(
    Object.entries(JSON.parse(line)).map(([name, text]) => {
      const { buffer } = Uint8Array.from(Buffer.from(text, "base64"));
      return [name, ["tokens", "puzzles"].includes(name) ? new Int32Array(buffer) : new Float32Array(buffer)];
    }),
  );
  const found = Object.entries(await segment(given)).map(([name, numbers]) => {
    const { buffer } = Float32Array.from([numbers].flat().flatMap((one) => (one.length === undefined ? one : [...one])));
    return [name, Buffer.from(buffer).toString("base64")];
  });
  console.log(JSON.stringify(Object.fromEntries(found)));
}

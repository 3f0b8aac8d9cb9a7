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
import { inflateSync } from "node:zlib";

import { mixer } from "./mixer.mjs";
import { weightsOf } from "./weights.mjs";

const [, packed] = readFileSync(process.argv[2], "utf-8").match(/id="data">([^<]*)</);
const { host, weights } = JSON.parse(inflateSync(Buffer.from(packed, "base64")).toString());
const segment = mixer(host.model.arch, weightsOf(weights));

for await (const line of createInterface({ input: process.stdin })) {
  const given = Object.fromEntries(
    Object.entries(JSON.parse(line)).map(([name, text]) => {
      const { buffer } = Uint8Array.from(Buffer.from(text, "base64"));
      return [name, name === "tokens" ? new Int32Array(buffer) : new Float32Array(buffer)];
    }),
  );
  const found = Object.entries(segment(given)).map(([name, numbers]) => {
    const { buffer } = Float32Array.from([numbers].flat().flatMap((one) => (one.length === undefined ? one : [...one])));
    return [name, Buffer.from(buffer).toString("base64")];
  });
  console.log(JSON.stringify(Object.fromEntries(found)));
}

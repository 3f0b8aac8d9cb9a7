/** node solve_onnx.mjs ONNXRUNTIME FOLDER: read puzzles line by line, and write the answers. */

import { readFileSync } from "node:fs";

import { onnxSegment } from "../../../viewer/solver/onnx.mjs";
import { solve } from "../../../viewer/solver/solver.mjs";

const [runtime, folder] = process.argv.slice(2);
const ort = await import(runtime);
ort.env.wasm.numThreads = 1;
const host = JSON.parse(readFileSync(`${folder}/config.json`, "utf-8"));
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(`${folder}/${host.file}`)));
const segment = onnxSegment(ort, session, host);
for (const line of readFileSync(0, "utf-8").split("\n").filter(Boolean)) {
  let last;
  for await (last of solve(host, segment, [...line].map((character) => host.symbols.indexOf(character))));
  console.log(last.answer.map((token) => host.symbols[token]).join(""));
}

/** Read what a page holds in base64: bytes, and the weights of a mixer. */

export const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** Return the numbers of a stored matrix, {dtype, data, scales?, columns?}, as float64. */
function numbersOf({ dtype, data, scales, columns }) {
  const { buffer } = bytesOf(data);
  if (dtype === "float32") return Float64Array.from(new Float32Array(buffer));
  if (dtype === "bfloat16") {
    // The upper half of a float32.
    const wide = Uint32Array.from(new Uint16Array(buffer), (bits) => bits << 16);
    return Float64Array.from(new Float32Array(wide.buffer));
  }
  const scale = new Float32Array(bytesOf(scales).buffer);
  return Float64Array.from(new Int8Array(buffer), (value, i) => Math.fround(value * scale[Math.floor(i / columns)]));
}

export const weightsOf = (stored) =>
  Object.fromEntries(Object.entries(stored).map(([name, matrix]) => [name, numbersOf(matrix)]));

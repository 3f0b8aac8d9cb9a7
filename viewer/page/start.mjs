/** What every page does first: unpack its data, and follow the theme. */

import { $ } from "./dom.mjs";
import { applyTheme, chosenTheme, dark, toggleTheme } from "./theme.mjs";

/** Inflate and parse the data block of the page. */
async function readData() {
  const packed = Uint8Array.from(atob($("data").textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/**
 * Draw the page. `show` takes its data, and returns what has the method `restyle`.
 *
 * `program` writes such a page.
 */
export async function start(show, program) {
  try {
    applyTheme(chosenTheme());
    const data = await readData();
    $("loading").hidden = true;
    const shown = show(data);
    $("theme").addEventListener("click", () => toggleTheme(shown));
    dark.addEventListener("change", () => {
      applyTheme(chosenTheme());
      shown.restyle();
    });
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    $("loading").hidden = false;
    $("loading").textContent =
      `This page could not be drawn: ${error.message}. The page needs a browser from 2023 or later. ` +
      `If the file is incomplete, write it again with ${program}.`;
    throw error;
  }
}

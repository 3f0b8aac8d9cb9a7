/** What every page does first: unpack its data, and follow the theme. */

import { $ } from "./dom.mjs";
import { applyTheme, chosenTheme, dark, toggleTheme } from "./theme.mjs";

/** Return what utils/html_page.py packed, as a Response. */
export function inflated(packed) {
  const bytes = Uint8Array.from(atob(packed.trim()), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

/**
 * Draw the page. `show` takes its data, and returns what has the method `restyle`, perhaps later.
 *
 * `program` writes such a page.
 */
export async function start(show, program) {
  try {
    applyTheme(chosenTheme());
    const data = await inflated($("data").textContent).json();
    const shown = await show(data);
    $("loading").hidden = true;
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

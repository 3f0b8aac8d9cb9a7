/** Unpack the data of the page, and show it. */

import { $, make } from "./dom.mjs";
import { pressKey, showHelp } from "./keys.mjs";
import { Tabs } from "./tabs.mjs";
import { applyTheme, chosenTheme, dark, toggleTheme } from "./theme.mjs";

/** Inflate and parse the data block of the page. */
async function readData() {
  const packed = Uint8Array.from(atob($("data").textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function start() {
  applyTheme(chosenTheme());
  const page = await readData();
  $("loading").hidden = true;
  document.body.classList.add(page.kind);
  $("title").textContent = page.project ? `${page.project} / ${page.title}` : page.title;
  $("facts").append(
    ...Object.entries(page.facts).map(([name, text]) => make("li", {}, `${name} `, make("b", {}, text))),
  );
  const tabs = new Tabs(page);
  $("theme").addEventListener("click", () => toggleTheme(tabs));
  dark.addEventListener("change", () => {
    applyTheme(chosenTheme());
    tabs.restyle();
  });
  $("help").addEventListener("click", () => showHelp(tabs));
  $("close").addEventListener("click", () => $("keys").close());
  document.addEventListener("keydown", (event) => pressKey(event, tabs));
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => tabs.open.view?.redraw?.());
  });
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  $("loading").hidden = false;
  $("loading").textContent =
    `This page could not be drawn: ${error.message}. The page needs a browser from 2023 or later. ` +
    "If the file is incomplete, write it again with view.py.";
  throw error;
});

/** Show the page of a run, of runs or of a dataset. */

import { $, make } from "./dom.mjs";
import { pressKey, showHelp } from "./keys.mjs";
import { start } from "./start.mjs";
import { Tabs } from "./tabs.mjs";

function show(page) {
  document.body.classList.add(page.kind);
  $("title").textContent = page.project ? `${page.project} / ${page.title}` : page.title;
  $("facts").append(
    ...Object.entries(page.facts).map(([name, text]) => make("li", {}, `${name} `, make("b", {}, text))),
  );
  const tabs = new Tabs(page);
  $("help").addEventListener("click", () => showHelp(tabs));
  $("close").addEventListener("click", () => $("keys").close());
  document.addEventListener("keydown", (event) => pressKey(event, tabs));
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => tabs.open.view?.redraw?.());
  });
  return tabs;
}

start(show, "view.py");

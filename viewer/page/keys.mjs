/** The keys of the page. */

import { $, make } from "./dom.mjs";
import { toggleTheme } from "./theme.mjs";

const OF_LISTS = [
  ["↑ ↓", "previous and next entry (also k and j)"],
  ["/", "search"],
];
const KEYS = {
  examples: [
    ["↑ ↓", "previous and next example (also k and j)"],
    ["← →", "go one step back or forward"],
    ["space", "play and pause"],
    ["Home, End", "go to the puzzle, to the last step"],
    ["h", "go to the step at which the model would halt"],
    ["f", "show all, solved or failed examples"],
    ["r", "show the next run's answers, on a page of several runs"],
    ["/", "search by row or name"],
  ],
  texts: OF_LISTS,
  votes: OF_LISTS,
  curves: [["← →", "show the values of the focused plot"]],
};

/** Show the keys of the open view. */
export function showHelp(tabs) {
  const keys = [...(KEYS[tabs.open.name] ?? []), ["t", "dark or light theme"], ["?", "this list of keys"]];
  const symbols = (key) => key.split(" ").flatMap((one) => [make("kbd", {}, one.replace(",", "")), " "]);
  $("keys-table").replaceChildren(
    ...keys.map(([key, text]) => make("tr", {}, make("td", {}, ...symbols(key)), make("td", {}, text))),
  );
  $("keys").showModal();
}

/** Hand a key to the page or to the open view, unless the focused element needs the key itself. */
export function pressKey(event, tabs) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const on = event.target;
  // The slider needs no keys of its own: its arrow keys would do what those of the player do.
  if (on.matches('input[type="search"]')) {
    if (event.key === "Escape") on.blur();
    return;
  }
  if (on.matches("select") || (on.matches("button, a, [role=tab]") && [" ", "Enter"].includes(event.key))) return;
  if (event.key === "?") showHelp(tabs);
  else if (event.key === "t") toggleTheme(tabs);
  else if (!tabs.open.view?.key?.(event)) return;
  event.preventDefault();
}

/** The theme of the page, dark or light. */

import { readColours } from "./boards.mjs";
import { $ } from "./dom.mjs";

export const dark = matchMedia("(prefers-color-scheme: dark)");

/** Use the storage. Some browsers offer none to files: a choice holds until the page is closed. */
function stored(act) {
  try {
    return act(localStorage);
  } catch {
    return null;
  }
}

/** Return the theme that the reader has chosen, or else that of the system. */
export const chosenTheme = () => stored((storage) => storage.getItem("theme")) ?? (dark.matches ? "dark" : "light");

export function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-pressed", String(theme === "dark"));
  readColours();
}

/** Change the theme, and keep the choice for the next page. */
export function toggleTheme(tabs) {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme(theme);
  stored((storage) => storage.setItem("theme", theme));
  tabs.restyle();
}

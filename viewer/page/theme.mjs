/** The theme of the page, dark or light. */

import { readColours } from "./boards.mjs";
import { $ } from "./dom.mjs";

export const dark = matchMedia("(prefers-color-scheme: dark)");

/** Return the theme that the reader has chosen, or else that of the system. */
export function chosenTheme() {
  try {
    return localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
  } catch {
    return dark.matches ? "dark" : "light"; // some browsers offer no storage to files
  }
}

export function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-pressed", String(theme === "dark"));
  readColours();
}

/** Change the theme, and keep the choice for the next page. */
export function toggleTheme(tabs) {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme(theme);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // Without storage, the choice holds until the page is closed.
  }
  tabs.restyle();
}

/** A list of entries beside a stage that shows one of them. */

import { $, button, clamp, make } from "./dom.mjs";

/**
 * A list with a search field, whose entries are chosen with the pointer or with keys.
 *
 * The elements have ids with the list's prefix: search, count and items. A view extends the class by
 * matching(query), which returns the entries to list; counted(), a text about them; describe(entry),
 * the children of an entry's button; and show(), which shows `current` on the stage.
 */
export class List {
  constructor(prefix) {
    this.prefix = prefix;
    this.current = undefined;
    $(`${prefix}search`).addEventListener("input", () => this.refill());
  }

  /** List the entries that match. If the current one is not among them, choose the first. */
  refill() {
    this.shown = this.matching($(`${this.prefix}search`).value.trim().toLowerCase());
    const nothing = "Nothing matches. Change the filters.";
    $(`${this.prefix}count`).textContent = this.shown.length ? this.counted() : nothing;
    const item = (entry) => button(() => this.select(entry), { class: "item" }, ...this.describe(entry));
    this.buttons = new Map(this.shown.map((entry) => [entry, item(entry)]));
    $(`${this.prefix}items`).replaceChildren(...[...this.buttons.values()].map((each) => make("li", {}, each)));
    if (this.shown.includes(this.current)) this.mark();
    else this.select(this.shown[0]);
  }

  select(entry) {
    this.current = entry;
    this.mark();
    this.show();
  }

  /** Return the place of the current entry in the list. */
  place() {
    return this.shown.indexOf(this.current);
  }

  mark() {
    const current = this.shown[this.place()];
    for (const [entry, item] of this.buttons) item.setAttribute("aria-current", String(entry === current));
  }

  move(by) {
    const to = this.shown[clamp(this.place() + by, 0, this.shown.length - 1)];
    if (!to || to === this.current) return;
    this.select(to);
    this.reveal();
  }

  /** Scroll the list to the current entry, unless it is in view. The page itself does not scroll. */
  reveal() {
    const list = $(`${this.prefix}items`);
    const place = this.buttons.get(this.shown[this.place()]).getBoundingClientRect();
    const frame = list.getBoundingClientRect();
    if (place.top < frame.top || place.bottom > frame.bottom)
      list.scrollTop += (place.top + place.bottom - frame.top - frame.bottom) / 2;
  }

  /** Act on a key, and return whether the view has a use for the key. */
  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (event.key === "/") $(`${this.prefix}search`).focus();
    else if (by !== undefined) this.move(by);
    else return false;
    return true;
  }
}

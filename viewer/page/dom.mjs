/** Make elements, and write numbers for people. */

export const $ = (id) => document.getElementById(id);

/**
 * Make an HTML element. Attributes and children that are null are left out.
 *
 * Text becomes text nodes only, because other people chose the names in the data, and a name could
 * hold HTML.
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Make an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const span = (look, ...children) => make("span", { class: look }, ...children);
export const option = (value, text) => make("option", { value }, text);
export const card = (title, ...children) => make("div", { class: "card" }, make("h2", {}, title), ...children);

/** Make a button, with an action for a click. */
export const button = (click, attributes, ...children) =>
  make("button", { type: "button", onclick: click, ...attributes }, ...children);

/**
 * Make a table. A cell is a text, a number, an element, a list of these, or null for an unknown value.
 *
 * `isNumber` tells of the number of a column whether its cells are numbers.
 */
export function table(head, rows, isNumber = () => false) {
  const content = (cell) => (typeof cell === "number" ? numberText(cell) : (cell ?? "–"));
  const row = (tag, cells) =>
    make(
      "tr",
      {},
      ...cells.map((cell, column) =>
        make(tag, { class: isNumber(column) ? "number" : null }, ...[content(cell)].flat()),
      ),
    );
  const body = make("tbody", {}, ...rows.map((cells) => row("td", cells)));
  return make("table", {}, make("thead", {}, row("th", head)), body);
}

/**
 * Fill a container with buttons of which one is pressed.
 *
 * The choices are [[value, text]]. The function `pick` takes the value of a clicked button. The
 * returned function presses the button of a value.
 */
export function choice(container, choices, pick) {
  const press = (value) =>
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === value)));
  const click = (value) => {
    press(value);
    pick(value);
  };
  const buttons = choices.map(([value, text]) => button(() => click(value), { "data-value": value }, text));
  container.replaceChildren(...buttons);
  press(choices[0][0]);
  return press;
}

export const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

export function numberText(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  if (size >= 1e5) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** Return the nodes of a dotted or slashed name, which a line may leave between its parts only. */
export const breakable = (name) =>
  name.split(/(?<=[/.])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));

/**
 * As much of a browser as the page needs: elements without a layout, and canvases that note what is
 * drawn. Import this file before the modules of the page.
 */

import { readFileSync } from "node:fs";

const [PAGE, STAGE] = ["page", "stage"].map((name) =>
  readFileSync(new URL(`../../../viewer/page/${name}.html`, import.meta.url), "utf-8"),
);
const TEMPLATE = PAGE.replace("@@STAGE@@", STAGE);
const EMPTY = ["meta", "link", "input", "br", "wbr"];
const PART = /([.#]?)([\w-]+)|\[([\w-]+)="?([^\]"]*)"?\]/g;

class Element {
  constructor(tag) {
    Object.assign(this, { tag, nodes: [], attributes: {}, listeners: {}, style: {} });
    Object.assign(this, { clientWidth: 800, offsetWidth: 50 });
    this.classList = { add: (name) => this.setAttribute("class", `${this.className} ${name}`) };
    this.dataset = new Proxy(this.attributes, {
      get: (all, name) => all[`data-${name}`],
      set: (all, name, value) => Reflect.set(all, `data-${name}`, value),
    });
  }

  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "hidden" || name === "disabled") this[name] = true;
  }
  getAttribute(name) {
    return this.attributes[name] ?? null;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  get className() {
    return this.attributes.class ?? "";
  }
  set className(name) {
    this.attributes.class = name;
  }
  get open() {
    return "open" in this.attributes;
  }
  showModal() {
    this.setAttribute("open", "");
  }
  close() {
    this.removeAttribute("open");
  }

  get value() {
    return this.chosen ?? this.attributes.value ?? this.find("option")[0]?.attributes.value ?? "";
  }
  set value(value) {
    this.chosen = String(value);
  }

  append(...nodes) {
    for (const node of nodes) if (node instanceof Element) node.parent = this;
    this.nodes.push(...nodes);
  }
  replaceChildren(...nodes) {
    this.nodes = [];
    this.append(...nodes);
  }
  get textContent() {
    return this.nodes.map((node) => node.textContent ?? String(node)).join("");
  }
  set textContent(text) {
    this.replaceChildren(text);
  }
  /** The text that a reader sees, with | between elements. */
  get seen() {
    if (this.hidden) return "";
    return this.nodes.map((node) => (node instanceof Element ? `|${node.seen}` : node)).join("");
  }

  /** Return the elements below that a selector of tags, ids, classes and attributes matches. */
  find(selector) {
    const below = this.nodes.flatMap((node) => (node instanceof Element ? [node, ...node.find("*")] : []));
    return selector === "*" ? below : below.filter((element) => element.matches(selector));
  }
  matches(selector) {
    return selector.split(", ").some((each) => {
      const parts = each.split(" ");
      if (!this.isPart(parts.pop())) return false;
      let above = this.parent;
      while (parts.length && above) {
        if (above.isPart(parts.at(-1))) parts.pop();
        above = above.parent;
      }
      return parts.length === 0;
    });
  }
  isPart(part) {
    return [...part.matchAll(PART)].every(([, kind, name, attribute, value]) => {
      if (attribute) return this.attributes[attribute] === value;
      if (kind === "#") return this.attributes.id === name;
      return kind === "." ? this.className.split(" ").includes(name) : this.tag === name;
    });
  }

  addEventListener(type, act) {
    (this.listeners[type] ??= []).push(act);
  }
  /** Send an event to the element and those above it, as far as nobody stops it. */
  send(type, event = {}) {
    const full = { target: this, preventDefault() {}, stopPropagation: () => (full.isStopped = true), ...event };
    for (let element = this; element && !full.isStopped; element = element.parent) {
      for (const act of element.listeners[type] ?? []) act(full);
      element[`on${type}`]?.(full);
    }
  }
  click() {
    if (this.disabled || this.isHidden()) throw new Error(`nobody can click on ${this.tag} ${this.textContent}`);
    this.send("click");
  }
  isHidden() {
    return Boolean(this.hidden || this.parent?.isHidden());
  }
  focus() {
    document.activeElement = this;
  }
  blur() {
    document.activeElement = document.body;
  }
  scrollIntoView() {}
  getBoundingClientRect() {
    return { top: 0, bottom: 0, left: 0, right: 0 };
  }

  /** Return the context of a canvas. `drawn` has what was drawn since the canvas was cleared. */
  getContext() {
    const note = (name, value) => {
      if (name === "clearRect") this.drawn = [];
      else this.drawn.push([name, ...value]);
    };
    this.drawn ??= [];
    return new Proxy(
      {},
      {
        get: (_, name) => (...values) => note(name, values),
        set: (_, name, value) => note(name, [value]) ?? true,
      },
    );
  }
}

/** Return the elements of the template. */
function parsed(text) {
  const root = new Element("document");
  const open = [root];
  for (const [, close, tag, attributes, words] of text.matchAll(/<!.*?>|<(\/?)([\w-]+)([^>]*)>|([^<]+)/gs)) {
    if (words !== undefined) open.at(-1).append(words.trim());
    else if (close) open.pop();
    else if (tag) {
      const element = new Element(tag);
      for (const [, name, , value] of attributes.matchAll(/([\w-]+)(="([^"]*)")?/g))
        element.setAttribute(name, value ?? "");
      open.at(-1).append(element);
      if (!attributes.endsWith("/") && !EMPTY.includes(tag)) open.push(element);
    }
  }
  return root;
}

const stored = new Map();
export const system = { isDark: false };
const matchMedia = (query) => ({
  get matches() {
    return query.includes("dark") ? system.isDark : query.includes("min-width");
  },
  addEventListener() {},
});

class IntersectionObserver {
  constructor(act) {
    this.act = act;
  }
  observe(target) {
    this.act([{ target, isIntersecting: true }]);
  }
  disconnect() {}
}

function newDocument() {
  const root = parsed(TEMPLATE.replace(/<!--.*?-->/gs, ""));
  const [html] = root.find("html");
  return Object.assign(root, {
    documentElement: html,
    body: html.find("body")[0],
    getElementById: (id) => root.find(`#${id}`)[0],
    querySelectorAll: (selector) => root.find(selector),
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
  });
}

const globals = {
  document: newDocument(),
  window: { innerHeight: 1000, devicePixelRatio: 1 },
  localStorage: { getItem: (name) => stored.get(name) ?? null, setItem: (name, value) => stored.set(name, value) },
  getComputedStyle: () => ({ getPropertyValue: (name) => `${document.documentElement.dataset.theme} ${name}` }),
  matchMedia,
  IntersectionObserver,
};
for (const [name, value] of Object.entries(globals))
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true });

/** Open a page that tests/viewer/conftest.py has written, as main.mjs does. */
export async function open(name) {
  const [{ Tabs }, { pressKey }, { applyTheme, chosenTheme }] = await Promise.all(
    ["tabs", "keys", "theme"].map((module) => import(`../../../viewer/page/${module}.mjs`)),
  );
  globalThis.document = newDocument();
  const page = JSON.parse(readFileSync(`${process.env.PAGES}/${name}.json`, "utf-8"));
  applyTheme(chosenTheme());
  const tabs = new Tabs(page);
  document.activeElement = document.body;
  document.addEventListener("keydown", (event) => pressKey(event, tabs));
  return { page, tabs };
}

export const find = (selector) => document.find(selector)[0];
export const text = (selector) => find(selector).seen.replaceAll("|", " ").replace(/\s+/g, " ").trim();
export const click = (selector) => find(selector).click();
export const drawn = (selector) => JSON.stringify(find(selector).drawn);

/** Type keys into the focused element. */
export function press(...keys) {
  for (const key of keys) document.activeElement.send("keydown", { key });
}

export function choose(selector, value, type = "change") {
  find(selector).value = value;
  find(selector).send(type);
}

/** Return the rows in the list, in their order. */
export const rows = () => document.find("#items b").map((each) => Number(each.textContent.split(" ").at(-1)));

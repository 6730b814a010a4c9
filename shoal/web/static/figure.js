// A drawing with its heading, its words for who cannot see it, and its numbers as a table.

import { h, replace, s } from "./dom.js";

const MOST_ROWS = 300;

/**
 * Return a figure.
 *
 * `draw(width)` returns the drawing, `describe()` says in words what it shows, and `table()` returns its
 * numbers as { head, rows }. `update` draws anew; a change of the width does so by itself.
 */
export function figure({ title, note = "", tools = [], draw, describe, table }) {
  const place = h("div", { class: "drawing" });
  const caption = h("figcaption", {}, h("h2", {}, title), note ? h("p", {}, note) : null);
  const words = h("p", { class: "words" });
  const details = table ? h("details", {}, h("summary", {}, "Numbers as a table")) : null;
  const element = h("figure", {}, caption, tools.length ? h("div", { class: "controls" }, tools) : null,
    place, words, details);
  let width = 0;
  const update = () => {
    if (!width) return;
    const said = describe ? describe() : "";
    words.textContent = said;
    const drawing = draw(width);
    if (drawing instanceof SVGElement && !drawing.hasAttribute("role")) {
      drawing.setAttribute("role", "img");
      drawing.setAttribute("aria-label", said ? `${title}. ${said}` : title);
    }
    replace(place, drawing);
    if (details?.open) fill();
  };
  const fill = () => replace(details, details.firstChild, numbers(table(), title));
  details?.addEventListener("toggle", () => details.open && fill());
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now && now !== width) {
      width = now;
      update();
    }
  }).observe(place);
  return { element, update };
}

/** Return a table of numbers. */
export function numbers({ head, rows }, title) {
  const shown = rows.slice(0, MOST_ROWS);
  const table = h(
    "table", {},
    h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col", class: each === "Plan" ? "text" : null }, each)))),
    h("tbody", {}, shown.map((row) => h("tr", {}, row.map((cell, at) =>
      at ? h("td", cell instanceof Element && cell.tagName === "CODE" ? { class: "text" } : {}, cell) : h("th", { scope: "row" }, cell))))),
  );
  const more = rows.length > shown.length ? h("p", {}, `${rows.length - shown.length} more rows.`) : null;
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, table` }, table, more);
}

/** Return what the colours mean: entries of [class, words]. */
export function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([name, text]) =>
    h("li", {}, h("span", { class: `swatch c-${name}`, "aria-hidden": "true" }), text)));
}

/** Return an SVG of a size. */
export function canvas(width, height, ...children) {
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, children);
}

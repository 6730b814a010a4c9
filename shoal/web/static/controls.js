// Inputs whose values are in the address.

import { h } from "./dom.js";
import { get, put } from "./state.js";

/**
 * Return a slider with its value beside it.
 *
 * `values` lists what it can be, or `least`, `most` and `step` do; with `log` they are powers of `base`.
 */
export function slider({ name, label, values, least, most, step = 1, log = 0, value, format = String, change }) {
  const at = (position) => (values ? values[position] : log ? log ** position : position);
  const stop = values ? values.length - 1 : most;
  const positionOf = (wanted) => {
    if (values) return nearest(values, wanted);
    return log ? Math.log(wanted) / Math.log(log) : wanted;
  };
  const given = get(name) === "" ? value : Number(get(name));
  const input = h("input", {
    type: "range", id: `c-${name}`, min: values ? 0 : least, max: stop, step: values ? 1 : step,
    value: positionOf(Number.isFinite(given) ? given : value),
  });
  const shown = h("output", { for: `c-${name}` });
  const read = () => at(Number(input.value));
  const show = () => {
    shown.textContent = format(read());
    input.setAttribute("aria-valuetext", format(read()));
  };
  input.addEventListener("input", () => {
    show();
    put({ [name]: Number(read().toPrecision(6)) });
    change();
  });
  show();
  const element = h("div", { class: "control" }, h("label", { for: `c-${name}` }, label), input, shown);
  return { element, read, set: (wanted) => { input.value = positionOf(wanted); show(); } };
}

/** Return a choice among words. */
export function choice({ name, label, values, value, format = String, change }) {
  const wanted = get(name, value);
  const select = h(
    "select", { id: `c-${name}` },
    values.map((each) => h("option", { value: each }, format(each))),
  );
  select.value = values.includes(wanted) ? wanted : value;
  select.addEventListener("change", () => {
    put({ [name]: select.value });
    change();
  });
  const element = h("div", { class: "control" }, h("label", { for: `c-${name}` }, label), select);
  return { element, read: () => select.value };
}

/** Return a field for a whole number. */
export function field({ name, label, least, most, value, change }) {
  const input = h("input", {
    type: "number", id: `c-${name}`, min: least, max: most, step: 1, value: get(name, String(value)),
  });
  input.addEventListener("change", () => {
    put({ [name]: input.value });
    change();
  });
  const element = h("div", { class: "control" }, h("label", { for: `c-${name}` }, label), input);
  return { element, read: () => input.value };
}

/** Return a button. */
export function button(label, press, attributes = {}) {
  return h("button", { type: "button", ...attributes, on: { click: press } }, label);
}

/** Return controls side by side. */
export function bar(...controls) {
  return h("div", { class: "controls" }, controls.map((each) => each.element ?? each));
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((each, position) => {
    if (Math.abs(each - wanted) < Math.abs(values[best] - wanted)) best = position;
  });
  return best;
}

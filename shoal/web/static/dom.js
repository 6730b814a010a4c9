// Elements. Text goes into text nodes only: nothing of a run is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element. `attributes` may hold `on` (events by name) and `style` (properties by name). */
export function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return an SVG element. */
export function s(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** Put children in place of those of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((each) => each !== null && each !== undefined));
  return element;
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    } else {
      element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
    }
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

// Parts of a whole as bars that are stacked to scale.

import { s } from "./dom.js";
import { canvas } from "./figure.js";

const LEFT = 76;

/** Return stacked bars: `rows` are { name, parts: [[color, value, words], ...] }, to one scale. */
export function stacked({ width, rows, format, most = 0, height = 24 }) {
  const whole = most || Math.max(...rows.map((row) => row.parts.reduce((sum, part) => sum + part[1], 0)), 1e-12);
  const gap = rows.length > 16 ? 2 : 6;
  const tall = rows.length > 16 ? 14 : height;
  const svg = canvas(width, rows.length * (tall + gap) + 2);
  rows.forEach((row, number) => {
    const top = number * (tall + gap);
    svg.append(s("text", { x: LEFT - 8, y: top + tall / 2 + 4, class: "tick end" }, row.name));
    let at = LEFT;
    for (const [color, value, words] of row.parts) {
      const wide = (value / whole) * (width - LEFT - 2);
      if (!(wide > 0)) continue;
      const text = `${words} ${format(value)}`;
      svg.append(s("rect", { x: at, y: top, width: Math.max(wide - 0.6, 0.4), height: tall, class: `c-${color}`, rx: 2 },
        s("title", {}, `${row.name}: ${text}`)));
      const fits = [text, words, format(value)].find((each) => each.length * 6.6 + 12 < wide);
      if (fits && tall > 15) {
        svg.append(s("text", { x: at + 7, y: top + tall / 2 + 4, class: `inside t-${color}` }, fits));
      }
      at += wide;
    }
  });
  return svg;
}

/** Return two thin bars a row, to one scale: `rows` are { name, values: [first, second], more }. */
export function pairs({ width, rows, format }) {
  const left = Math.min(168, width * 0.36);
  const right = 118;
  const tall = 26;
  const most = Math.max(...rows.flatMap((row) => row.values), 1e-12);
  const svg = canvas(width, rows.length * tall + 4);
  rows.forEach((row, number) => {
    const top = number * tall;
    svg.append(s("text", { x: left - 8, y: top + 16, class: "tick end" }, row.name));
    row.values.forEach((value, at) => {
      const wide = (value / most) * (width - left - right);
      svg.append(s("rect", {
        x: left, y: top + 3 + at * 10, width: Math.max(wide, value > 0 ? 1 : 0), height: 9, class: at ? "c-forward" : "c-other", rx: 1.5,
      }, s("title", {}, `${row.name}: ${format(value)}`)));
    });
    const end = left + (Math.max(...row.values) / most) * (width - left - right) + 8;
    svg.append(s("text", { x: end, y: top + 16, class: "tick" }, `${format(row.values[1])}  ${row.more}`));
  });
  return svg;
}

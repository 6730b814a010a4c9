// Lines over an axis, to scale, with a cursor that the pointer or the arrow keys move.

import { h, s } from "./dom.js";
import { canvas } from "./figure.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [62, 14, 10, 34];

/**
 * Return a chart.
 *
 * `series` are { name, color, points: [[x, y], ...], dashed, dots, bare }, where bare ones have no line; `x` and `y`
 * are { label, format, log, base, zero };
 * `marks` are vertical lines { at, text }.
 */
export function chart({ width, height = 260, series, x, y, marks = [], label = "Chart" }) {
  const shown = series.filter((each) => each.points.length);
  const points = shown.flatMap((each) => each.points);
  if (!points.length) return h("p", { class: "missing" }, "There are no values yet.");
  const across = scale(points.map((each) => each[0]), LEFT, width - RIGHT, x, false);
  const up = scale(points.map((each) => each[1]), height - BOTTOM, TOP, y, true);
  const svg = canvas(width, height);
  for (const tick of up.ticks(Math.max(2, Math.floor(height / 60)))) {
    svg.append(
      s("line", { x1: LEFT, x2: width - RIGHT, y1: up.to(tick), y2: up.to(tick), class: "grid" }),
      s("text", { x: LEFT - 8, y: up.to(tick) + 4, class: "tick end" }, y.format(tick)),
    );
  }
  for (const tick of across.ticks(Math.max(2, Math.floor(width / 110)))) {
    svg.append(
      s("line", { x1: across.to(tick), x2: across.to(tick), y1: height - BOTTOM, y2: height - BOTTOM + 4, class: "axis" }),
      s("text", { x: Math.min(across.to(tick), width - 3.4 * x.format(tick).length), y: height - BOTTOM + 17, class: "tick middle" }, x.format(tick)),
    );
  }
  svg.append(
    s("line", { x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: "axis" }),
    s("text", { x: width - RIGHT, y: height - 3, class: "tick end" }, x.label),
  );
  for (const each of shown) {
    const path = each.points.map(([a, b], at) => `${at ? "L" : "M"}${across.to(a).toFixed(1)} ${up.to(b).toFixed(1)}`);
    if (!each.bare) {
      svg.append(s("path", {
        d: path.join(""), class: `line s-${each.color}`, "stroke-dasharray": each.dashed ? "5 4" : null,
      }));
    }
    if (each.dots || each.bare || each.points.length === 1) {
      for (const [a, b] of each.points) {
        svg.append(s("circle", { cx: across.to(a), cy: up.to(b), r: 3.5, class: `c-${each.color}` }));
      }
    }
  }
  for (const mark of marks) {
    const at = across.to(mark.at);
    const isRight = at > width * 0.7;
    svg.append(
      s("line", { x1: at, x2: at, y1: TOP, y2: height - BOTTOM, class: "mark" }),
      s("text", { x: at + (isRight ? -5 : 5), y: TOP + 11, class: `tick ${isRight ? "end" : ""}` }, mark.text),
    );
  }
  return withCursor(svg, { across, up, shown, height, width, x, y, label });
}

function withCursor(svg, { across, up, shown, height, width, x, y, label }) {
  const readout = h("output", { class: "readout" });
  const line = s("line", { y1: TOP, y2: height - BOTTOM, class: "cursor", visibility: "hidden" });
  const dots = shown.map((each) => s("circle", { r: 4, class: `c-${each.color}`, visibility: "hidden" }));
  svg.append(line, ...dots);
  const every = [...new Set(shown.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
  let position = every.length - 1;
  const show = () => {
    const at = every[position];
    line.setAttribute("x1", across.to(at));
    line.setAttribute("x2", across.to(at));
    line.setAttribute("visibility", "visible");
    const told = shown.map((each, number) => {
      const near = nearest(each.points, at);
      dots[number].setAttribute("cx", across.to(near[0]));
      dots[number].setAttribute("cy", up.to(near[1]));
      dots[number].setAttribute("visibility", "visible");
      return `${each.name} ${y.format(near[1])}`;
    });
    readout.textContent = `${x.label} ${x.format(at)}: ${told.join(", ")}`;
  };
  const group = h("div", {
    class: "chart", tabindex: 0, role: "group", "aria-label": `${label}. Left and right arrow keys read values.`,
  }, svg, readout);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = across.from(((event.clientX - box.left) / box.width) * width);
    position = closest(every, wanted);
    show();
  });
  group.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    position = Math.max(0, Math.min(every.length - 1, position + moves[event.key]));
    show();
  });
  return group;
}

function scale(values, begin, end, { log: isLog = false, base = 10, zero = false }, isPadded) {
  const usable = isLog ? values.filter((each) => each > 0) : values;
  let least = zero ? 0 : Math.min(...usable);
  let most = Math.max(...usable);
  if (least === most) [least, most] = isLog ? [least / 2, most * 2] : [least - Math.abs(least || 1) / 2, most + Math.abs(most || 1) / 2];
  const value = isLog ? (each) => Math.log10(Math.max(each, least / 10)) : (each) => each;
  let [from, to] = [value(least), value(most)];
  if (isPadded) {
    const spare = (to - from) * 0.06;
    from = !isLog && least >= 0 && from - spare < 0 ? 0 : from - spare;
    to += spare;
  }
  return {
    to: (each) => begin + ((value(each) - from) / (to - from)) * (end - begin),
    from: (place) => {
      const at = from + ((place - begin) / (end - begin)) * (to - from);
      return isLog ? 10 ** at : at;
    },
    ticks: (wanted) => (isLog ? powers(from, to, wanted, Math.log10(base)) : steps(from, to, wanted)),
  };
}

/** Return round numbers in a range. */
export function steps(from, to, wanted) {
  const rough = (to - from) / wanted || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= rough) ?? size * 10;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
}

/** Return powers of a base, or round numbers where there are too few; `one` is the logarithm of the base. */
function powers(from, to, wanted, one) {
  const found = [];
  const every = one * Math.max(1, Math.ceil((to - from) / one / wanted));
  for (let power = Math.ceil(from / every - 1e-9) * every; power <= to + 1e-9; power += every) {
    found.push(Number((10 ** power).toPrecision(12)));
  }
  if (found.length > 1) return found;
  return steps(10 ** from, 10 ** to, wanted).filter((each) => each > 0);
}

function nearest(points, at) {
  return points[closest(points.map((each) => each[0]), at)];
}

function closest(values, wanted) {
  let best = 0;
  values.forEach((each, position) => {
    if (Math.abs(each - wanted) < Math.abs(values[best] - wanted)) best = position;
  });
  return best;
}

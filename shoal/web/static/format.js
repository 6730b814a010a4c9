// Numbers as people read them: memory is binary, rates and counts are decimal.

const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const BINARY = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const DECIMAL = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]];

function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

/** Return a number with three digits that count. */
export function digits(value, count = 3) {
  if (!known(value)) return "-";
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size >= 6 || size < -4) return value.toExponential(count - 1);
  return value.toFixed(Math.max(0, count - 1 - size)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Return seconds with a unit that suits them. */
export function seconds(value) {
  if (!known(value)) return "-";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (size >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  const [scale, unit] = TIMES.find(([least]) => size >= least) ?? TIMES[3];
  return `${digits(value / scale)} ${unit}`;
}

/** Return bytes of memory, such as 25 MiB. */
export function bytes(value) {
  if (!known(value)) return "-";
  const [scale, unit] = BINARY.find(([least]) => value >= least) ?? BINARY[4];
  return `${digits(value / scale, 4)} ${unit}`;
}

/** Return bytes per second, such as 12.5 GB/s. */
export function rate(value) {
  return known(value) ? `${count(value).replace(/ ?B$/, " G").replace(/(\d)$/, "$1 ")}B/s` : "-";
}

/** Return a count in decimal thousands, such as 12.6 M. */
export function count(value) {
  if (!known(value)) return "-";
  const [scale, unit] = DECIMAL.find(([least]) => Math.abs(value) >= least) ?? DECIMAL[4];
  return `${digits(value / scale)}${unit ? ` ${unit}` : ""}`;
}

/** Return a whole number with its thousands apart. */
export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : "-";
}

/** Return a share in percent. */
export function percent(value, places = 1) {
  return known(value) ? `${(100 * value).toFixed(places)}%` : "-";
}

/** Return a name of the code as words. */
export function words(name) {
  return String(name).replaceAll("_", " ");
}

/** Return a moment of the wall clock, in the reader's time zone. */
export function moment(unix) {
  return known(unix) ? new Date(unix * 1000).toLocaleString() : "-";
}

/* How quantities are written for people; the same forms as `stoker/units.py` and reports. */

const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

export const count = (value) => (unknown(value) ? "" : Math.round(value).toLocaleString("en-US"));

export const shortCount = (value) => {
  if (unknown(value)) return "";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= 0.9995 * size) return `${+(value / size).toPrecision(3)} ${unit}`;
  }
  return `${+(+value).toPrecision(4)}`;
};

export const seconds = (value) => {
  if (unknown(value)) return "";
  if (!Number.isFinite(value)) return "never";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${+(value * 1e6).toPrecision(3)} µs`;
  if (value < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
  if (value < 60) return `${+value.toPrecision(value < 10 ? 2 : 3)} s`;
  const pair = (big, bigUnit, small, smallUnit) => (small ? `${big} ${bigUnit} ${small} ${smallUnit}` : `${big} ${bigUnit}`);
  const rounded = Math.round(value);
  if (rounded < 3600) return pair(Math.floor(rounded / 60), "min", rounded % 60, "s");
  const minutes = Math.round(value / 60);
  if (minutes < 48 * 60) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(value / 3600);
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
};

export const bytes = (value) => {
  if (unknown(value)) return "";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${(value / size).toFixed(value / size < 100 ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(value)} B`;
};

export const money = (value) => {
  if (unknown(value)) return "";
  if (value >= 100) return `$${Math.round(value).toLocaleString("en-US")}`;
  return value >= 0.01 || value === 0 ? `$${value.toFixed(2)}` : "<$0.01";
};

export const rate = (value, what = "samples") =>
  unknown(value) ? "" : `${value >= 100 ? count(value) : +value.toPrecision(3)} ${what}/s`;

export const percent = (value, digits = 0) => (unknown(value) ? "" : `${(100 * value).toFixed(digits)} %`);

const FRACTIONS = ["accuracy", "precision", "recall", "f1", "auc", "iou", "error_rate"];
export const isFraction = (name) => FRACTIONS.some((word) => name.toLowerCase().includes(word));

export const number = (value) => (unknown(value) ? "" : `${+(+value).toPrecision(4)}`);

export const metric = (name, value) => {
  if (unknown(value)) return "not a number";
  return isFraction(name) && value >= 0 && value <= 1 ? percent(value, 2) : number(value);
};

/* The metric that a row is known by: [name, value]; null before there is any. */
export const metricOf = (row) => (row.metric && row.metric[1] !== null ? row.metric : row.loss !== null && row.loss !== undefined ? ["train loss", row.loss] : null);

/* `1 h 5 min ± 4 min`, or `1 h 5 min (50 min to 2 h)` where the sides differ much. */
export const interval = (value, low, high, form = seconds) => {
  const below = value - low, above = high - value;
  if (below <= 0 && above <= 0) return "";
  const wide = Math.max(below, above);
  return wide < 2 * Math.min(below, above) + 1e-9 ? ` ± ${form(wide)}` : ` (${form(low)} to ${form(high)})`;
};
export const withInterval = (value, low, high, form = seconds) => form(value) + interval(value, low, high, form);

export const ago = (at, now = Date.now() / 1000) => {
  if (unknown(at)) return "";
  const passed = now - at;
  if (passed < -5) return "in the future, by its clock";
  return passed < 5 ? "just now" : `${seconds(passed < 60 ? Math.round(passed) : passed < 3600 ? 60 * Math.round(passed / 60) : passed < 172800 ? 3600 * Math.round(passed / 3600) : 86400 * Math.round(passed / 86400)).replace(/ 0 \w+$/, "")} ago`;
};

export const clock = (at) => {
  const date = new Date(at * 1000);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleString("sv-SE").slice(0, 19);
};

export const plural = (n, what, many = `${what}s`) => `${count(n)} ${n === 1 ? what : many}`;

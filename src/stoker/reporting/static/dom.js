/* Elements without HTML text: what a record holds is always text, never markup. */

/* In running text `words` between backticks are code, as `coded` of the templates has it; names stay as they are. */
const NAMES = ["a", "b", "button", "code", "dd", "h1", "h2", "option", "pre", "td"];
const coded = (text) => text.split(/`([^`]+)`/).map((part, index) => (index % 2 ? h("code", {}, part) : part));

export const h = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...shown.flatMap((child) => (typeof child === "string" && child.includes("`") && !NAMES.includes(tag) ? coded(child) : child)));
  return element;
};

const SVG = "http://www.w3.org/2000/svg";
export const svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(Boolean));
  return element;
};

export const replace = (host, ...children) => host.replaceChildren(...children.flat(Infinity).filter(Boolean));

/* The one place where HTML becomes elements: what this server's own templates made, which escape all they are given. */
const policy = window.trustedTypes?.createPolicy("stoker", { createHTML: (text) => text });
export const fromServer = (text) => {
  const holder = document.createElement("template");
  holder.innerHTML = policy ? policy.createHTML(text) : text;
  return holder.content;
};

export const table = (head, rows, css = "") =>
  h("div", { class: `scroll ${css}`, tabIndex: 0, role: "region", "aria-label": "table" },
    h("table", {},
      h("thead", {}, h("tr", {}, head.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, index) => h("td", { "data-label": head[index] }, cell ?? "")))))));

/* Of columns [title, cell of a row] those of which some row has anything. */
export const withContent = (columns, rows) => columns.filter(([, cell]) => rows.some(cell));

export const section = (title, ...content) => h("section", {}, title && h("h2", {}, title), content);

export const tile = (label, value, note = "", css = "") =>
  h("div", { class: `tile ${css}` }, h("p", { class: "label" }, label), h("p", { class: "value" }, value),
    h("p", { class: "note" }, note));

/* The state of a run, with the reason where one points at it. */
export const pill = (row) => h("span", { class: `state ${row.state}`, title: row.launch ? `${row.launch.place}: ${row.launch.why}` : row.trial?.reason || row.failure || row.problem || "" }, row.state);

export const empty = (title, ...lines) =>
  h("div", { class: "empty" }, h("h2", {}, title), lines.map((line) => (typeof line === "string" ? h("p", {}, line) : line)));

/* A picture of a curve in a table's row: no axes, logarithmic where all is positive. */
export const sparkline = (points, { width = 120, height = 28, isLive = false, label = "loss" } = {}) => {
  const known = points.filter((point) => point[1] !== null);
  if (known.length < 2) return svg("svg", { class: "spark", width, height, "aria-hidden": "true" });
  const isLog = known.every((point) => point[1] > 0);
  const values = known.map((point) => (isLog ? Math.log(point[1]) : point[1]));
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const first = known[0][0], whole = known[known.length - 1][0] - first || 1;
  const place = (index) => [
    2 + ((known[index][0] - first) / whole) * (width - 6), 3 + (1 - (values[index] - low) / span) * (height - 6),
  ];
  const path = known.map((_, index) => place(index).map((one) => one.toFixed(1)).join(" ")).join("L");
  const [x, y] = place(known.length - 1);
  return svg("svg", { class: `spark${isLive ? " live" : ""}`, width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${label} from ${known[0][1].toPrecision(3)} to ${known[known.length - 1][1].toPrecision(3)}` },
    svg("path", { d: `M${path}` }), svg("circle", { cx: x, cy: y, r: 2.2 }));
};

/* A drawing that is redrawn for the width it gets, so that its texts keep their size; below `least` pixels it scrolls. */
export const fitted = (label, least, make) => {
  const host = h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label });
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.max(least, Math.floor(host.clientWidth));
    if (width !== drawn) replace(host, make((drawn = width)));
  }).observe(host);
  return host;
};

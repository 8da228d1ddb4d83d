/* The page around all pages: navigation, theme, what is known of all runs, notices. */

import { get, Stream } from "./api.js";
import { h, replace, empty } from "./dom.js";
import { plural } from "./format.js";

const PAGES = [
  ["/", "Runs", () => import("./runs.js")],
  ["/compare", "Compare", () => import("./compare.js")],
  ["/studies", "Studies", () => import("./studies.js")],
  ["/plans", "Plans", () => import("./plans.js")],
  ["/services", "Services", () => import("./services.js")],
  ["/places", "Places", () => import("./places.js")],
  ["/data", "Data", () => import("./data_checks.js")],
];
const INNER = [["/run/", "/", () => import("./run_live.js")], ["/study/", "/studies", () => import("./studies.js")],
  ["/plan/", "/plans", () => import("./plans.js")], ["/data/", "/data", () => import("./data_checks.js")]];

/* Pages that no stream updates: fetched again whenever they are opened. */
const LISTS = ["/studies", "/plans", "/data"];

/* What all pages know: rows of runs by id, and where the stream of rows goes on. */
export const known = { rows: new Map(), since: "", info: null, listeners: new Set() };

/* Since when a row is known by this page's own clock [s]: clocks of machines differ and jump. */
const received = (rows) => { for (const row of rows) row.received_s = performance.now() / 1000; };

/* With `isPart` those rows that the server has by now, while it looks at the folders for the first time. */
export const loadRuns = async ({ isPart = false } = {}) => {
  const found = await get("runs", isPart ? { part: 1 } : {});
  received(found.rows);
  known.info = found;
  known.rows = new Map(found.rows.map((row) => [row.id, row]));
  known.since = `${found.epoch}.${found.version}`;
};

export const takeRows = ({ epoch, version, rows, removed, problems, is_whole }, only) => {
  if (known.info) Object.assign(known.info, { problems, is_whole });
  received(rows);
  for (const row of rows) known.rows.set(row.id, row);
  for (const id of removed) known.rows.delete(id);
  if (only === undefined) known.since = `${epoch}.${version}`;
};

export const href = (kind, id) => `/${kind}/${id.split("/").map(encodeURIComponent).join("/")}`;

export const link = (where, content, properties = {}) => h("a", { href: where, ...properties }, content);

export const go = (where, { isSame = false } = {}) => {
  if (isSame) { history.replaceState(null, "", where); return; }
  history.pushState(null, "", where);
  show();
};

/* Notices in a corner, and on the desktop where the user has allowed that. */
const notices = h("div", { class: "notices", role: "status", "aria-live": "polite" });
export const notify = (text, css = "") => {
  const note = h("div", { class: `toast ${css}` }, h("span", {}, text), h("button", { class: "plain", "aria-label": "Dismiss", onclick: () => note.remove() }, "×"));
  notices.append(note);
  if (css !== "failed") setTimeout(() => note.remove(), 12000);
};
const onAlert = (alert) => {
  notify(alert.text, alert.kind === "finished" ? "finished" : "failed");
  if (window.Notification?.permission === "granted") {
    const notice = new Notification("Stoker", { body: alert.text, tag: `${alert.run} ${alert.kind}`, icon: "/static/icon.svg" });
    notice.onclick = () => { window.focus(); go(href("run", alert.run)); };
  }
};

const line = h("span", { class: "line", role: "status" });
let wasLost = false;
const onState = (state) => {
  line.className = `line ${state}`;
  line.textContent = state === "live" ? "live" : "reconnecting";
  line.title = state === "live" ? "Changes appear as they happen." : "The server does not answer; the page goes on when it does.";
  if (state === "live" && wasLost) current?.back?.();
  wasLost = state === "lost";
};

let stream = null;
/* `run` is {id, place, handlers}: of a run's page its log comes too. */
export const follow = (handlers, run) => {
  stream?.close();
  stream = new Stream(run ? { run: run.id } : {}, () => ({ since: known.since, ...(run?.place() ?? {}) }), {
    rows: (found) => { takeRows(found, run?.id); handlers.rows?.(found); }, alert: onAlert, ...(run?.handlers ?? {}),
  }, onState);
};

const theme = () => document.documentElement.dataset.theme ?? "";
const setTheme = (name) => {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("theme", name); } catch { /* a browser that keeps nothing */ }
  document.dispatchEvent(new Event("themechange"));  // charts, if the page has any
};
const themeButton = h("button", { class: "plain theme", onclick: () => {
  const isDark = theme() ? theme() === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
}, title: "Light or dark", "aria-label": "Switch between light and dark" }, "◐");
const bell = h("button", { class: "plain", title: "Desktop notices of runs that end, fail or stall", "aria-label": "Allow desktop notices",
  onclick: async () => { if (await Notification.requestPermission() === "granted") notify("Desktop notices are on while this page is open."); bell.hidden = Notification.permission !== "default"; } }, "Notify me");

const nav = h("nav", { "aria-label": "Pages" });
const main = h("main", { id: "main", tabIndex: -1 });
let current = null, generation = 0;

const show = async () => {
  const path = location.pathname, mine = ++generation;
  const inner = INNER.find(([prefix]) => path.startsWith(prefix));
  const [place, , load] = inner ? [inner[1], "", inner[2]] : PAGES.find(([one]) => one === path) ?? PAGES[0];
  replace(nav, PAGES.map(([where, title]) => link(where, title, { "aria-current": where === place ? "page" : null })));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });  // on a phone it may be out of sight
  current?.close?.();
  current = null;
  stream?.close();
  try {
    const isPart = path === "/" || path.startsWith("/run/"), isKnown = known.info && (isPart || known.info.is_whole) && !LISTS.includes(path);
    const [page] = await Promise.all([load(), isKnown ? null : loadRuns({ isPart })]);
    if (mine !== generation) return;
    const made = await page.open(main, inner ? decodeURIComponent(path.slice(inner[0].length)) : "", new URLSearchParams(location.search));
    if (mine !== generation) made?.close?.();
    else current = made;
  } catch (problem) {
    if (mine !== generation) return;
    replace(main, empty("This cannot be shown", problem.message, problem.remedy ?? "", link("/", "All runs")));
    follow({});
  }
  if (mine === generation) main.dataset.ready = path;
};

document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href]");
  if (!anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const where = new URL(anchor.href);
  if (where.origin !== location.origin || anchor.target || anchor.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(where.pathname + where.search);
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest?.("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { const field = document.querySelector("input[type=search]"); if (field) { event.preventDefault(); field.focus(); } }
  const number = "1234567".indexOf(event.key);
  if (number >= 0 && event.key) go(PAGES[number][0]);
});
window.addEventListener("popstate", show);

try { setTheme(localStorage.getItem("theme") ?? ""); } catch { setTheme(""); }
bell.hidden = !("Notification" in window) || Notification.permission !== "default";
document.body.append(
  h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "To the content"),
  h("header", { class: "top" }, link("/", [h("img", { src: "/static/icon.svg", alt: "", width: 22, height: 22 }), "Stoker"], { class: "brand" }), nav,
    h("div", { class: "side" }, line, bell, themeButton)),
  main, notices,
);
show();

export const summary = () => {
  const states = {};
  for (const row of known.rows.values()) if (!row.study) states[row.state] = (states[row.state] ?? 0) + 1;
  return Object.entries(states).sort((a, b) => b[1] - a[1]).map(([state, n]) => `${n} ${state}`).join(", ") || plural(0, "run");
};

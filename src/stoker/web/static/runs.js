/* All runs in one table: only the rows on the screen are elements, so that thousands cost no more than thirty. */

import { get, post, Refused } from "./api.js";
import { follow, go, href, known, link, loadRuns, notify } from "./app.js";
import { empty, h, pill, replace, sparkline } from "./dom.js";
import * as format from "./format.js";

const STATES = ["running", "stalled", "planning", "queued", "stopped", "failed", "pruned", "handed on", "finished"];
const LIVE = ["running", "planning", "stalled"];

const eta = (row) => {
  if (!row.eta_s) return "";
  const [value, low, high, basis] = row.eta_s;
  const passed = LIVE.includes(row.state) ? Math.min(value, performance.now() / 1000 - row.received_s) : 0;
  return h("span", { title: `in 8 cases of 10 ${format.seconds(Math.max(0, low - passed))} to ${format.seconds(Math.max(0, high - passed))}, by ${basis}` },
    row.state === "running" ? [format.seconds(value - passed), h("span", { class: "interval" }, format.interval(value - passed, Math.max(0, low - passed), Math.max(0, high - passed)))] : h("span", { class: "note" }, `${format.seconds(value)} left`));
};
const moneyOf = (row) => {
  if (row.cost_usd === null || row.cost_usd === undefined) return "";
  const left = row.eta_s && row.price_per_h ? (row.eta_s[0] / 3600) * row.price_per_h : 0;
  return left ? [format.money(row.cost_usd), h("span", { class: "note" }, ` + ${format.money(left)}`)] : format.money(row.cost_usd);
};
export const progress = (row) => {
  const share = row.total_samples ? Math.min(1, row.samples / row.total_samples) : 0;
  return h("div", { class: "progress", title: `${format.count(row.samples)} of ${format.count(row.total_samples)} samples` },
    h("i", { class: `${row.state}`, style: { width: `${(100 * share).toFixed(1)}%` } }), h("span", {}, format.percent(share)));
};


const COLUMNS = [
  { key: "state", title: "state", width: "96px", of: (row) => STATES.indexOf(row.state), cell: pill },
  { key: "name", title: "run", width: "minmax(170px, 2.4fr)", of: (row) => row.name, cell: (row) => h("div", { class: "who" }, link(href("run", row.id), row.name, { title: row.name }),
    h("span", { class: "note tagged" }, h("span", {}, [row.job, row.forked_from && `from ${row.forked_from}`].filter(Boolean).join(" · "), h("span", { class: "where" }, row.launch?.place ?? row.device ?? "")), row.tags.map((tag) => h("span", { class: "tag" }, tag)))) },
  { key: "curve", title: "loss", width: "128px", cell: (row) => sparkline(row.curve ?? [], { isLive: LIVE.includes(row.state) }) },
  { key: "metric", title: "metric", width: "minmax(110px, 1fr)", isNumber: true, of: (row) => format.metricOf(row)?.[1] ?? null, cell: (row) => { const found = format.metricOf(row); return found ? h("div", { class: "who" }, h("b", {}, format.metric(...found)), h("span", { class: "note" }, found[0])) : row.problem ? h("span", { class: "note bad", title: row.problem }, row.problem) : ""; } },
  { key: "progress", title: "done", width: "112px", of: (row) => (row.total_samples ? row.samples / row.total_samples : 0), cell: progress },
  { key: "eta", title: "time to go", width: "minmax(120px, 1.1fr)", of: (row) => row.eta_s?.[0] ?? null, cell: eta },
  { key: "wall", title: "time", width: "92px", isNumber: true, of: (row) => row.wall_s, cell: (row) => format.seconds(row.wall_s) },
  { key: "cost", title: "cost + to go", width: "112px", isNumber: true, of: (row) => row.cost_usd, cell: moneyOf },
  { key: "waiting", title: "waiting", width: "68px", isNumber: true, of: (row) => row.waiting, cell: (row) => h("span", { class: row.waiting > 0.2 ? "warn" : "", title: "share of the training time that was waited for data" }, format.percent(row.waiting)) },
  { key: "device", title: "device", width: "minmax(90px, 1fr)", of: (row) => row.launch?.place ?? row.device, cell: (row) => h("span", { class: "note cut", title: row.device }, row.launch?.place ?? row.device ?? "") },
  { key: "created", title: "started", width: "104px", of: (row) => row.created_at, cell: (row) => h("span", { class: "note", title: row.created_at }, format.ago(Date.parse(row.created_at) / 1000)) },
];

/* Rows have so many characters of a note at most: a longer one would be cut by keeping it. */
const MOST_NOTE = 1999;
/* Tags of some runs; of one its note as well. */
export const annotateRuns = (ids) => {
  const row = known.rows.get(ids[0]), dialog = h("dialog", { "aria-label": "Tags" });
  const words = h("input", { type: "text", "aria-label": "Tags, separated by spaces", placeholder: "tags, separated by spaces" });
  words.value = [...new Set(ids.flatMap((id) => known.rows.get(id).tags))].join(" ");
  const note = ids.length === 1 && (row.note ?? "").length <= MOST_NOTE && h("textarea", { rows: 4, maxLength: MOST_NOTE, "aria-label": "Note", placeholder: "a note" });
  if (note) note.value = row.note ?? "";
  dialog.append(h("form", { method: "dialog", onsubmit: async (event) => {
    event.preventDefault();
    const tags = words.value.split(/[\s,]+/).filter(Boolean);
    try { for (const id of ids) await post("do/annotate", { run: id }, { tags, ...(note ? { note: note.value.trim() } : {}) }); dialog.remove(); } catch (error) { notify(error.message, "failed"); }
  } }, h("h2", {}, ids.length === 1 ? `Tags and note of ${row.name}` : `Tags of ${format.plural(ids.length, "run")}`), words, note, h("div", { class: "actions" }, h("button", {}, "Keep"), h("button", { type: "button", class: "plain", onclick: () => dialog.remove() }, "Cancel"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
};

const settings = { text: "", state: "", sort: "-created", group: "", archived: false, trials: false };

export const open = async (main, _, query) => {
  settings.text = query.get("where") ?? settings.text;
  const picked = new Set();
  let shown = [], selected = null, problem = "", asked = 0;
  const field = h("input", { type: "search", value: settings.text, placeholder: "name, tag, or status=finished lr<0.1", "aria-label": "Filter runs", autocomplete: "off", spellcheck: "false" });
  field.value = settings.text;
  const chips = h("div", { class: "chips", role: "group", "aria-label": "State" });
  const say = h("p", { class: "note say", role: "status" });
  const group = h("select", { "aria-label": "Group by", onchange: () => { settings.group = group.value; update(); } },
    [["", "no groups"], ["job", "by job"], ["state", "by state"], ["tag", "by tag"], ["device", "by device"]].map(([value, text]) => h("option", { value, selected: value === settings.group }, text)));
  /* Where the table has no head, on a phone. */
  const sort = h("select", { class: "narrow", "aria-label": "Sort by", onchange: () => { settings.sort = sort.value; update(); } },
    COLUMNS.filter((one) => one.of).map((one) => { const value = ["name", "state"].includes(one.key) ? one.key : `-${one.key}`; return h("option", { value, selected: value === settings.sort }, `by ${one.title}`); }));
  const box = (name, text) => h("label", { class: "check" }, h("input", { type: "checkbox", checked: settings[name], onchange: (event) => { settings[name] = event.target.checked; update(); } }), text);
  const compare = h("button", { disabled: true, onclick: () => go(`/compare?${[...picked].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`) }, "Compare");
  const annotate = known.info.control && h("button", { class: "plain", onclick: () => annotateRuns([...picked]) , disabled: true }, "Tag");
  const archive = known.info.control && h("button", { class: "plain", disabled: true, onclick: () => archiveAll() }, "Archive");
  const body = h("div", { class: "body", role: "rowgroup" });
  const head = h("div", { class: "row head", role: "row" });
  const view = h("div", { class: "runs", role: "table", "aria-label": "Runs" }, h("div", { role: "rowgroup" }, head), body);

  const matches = (row) => {
    if (!settings.trials && row.study) return false;
    if (row.is_archived && !settings.archived) return false;
    if (selected) return selected.has(row.id);
    const word = settings.text.trim().toLowerCase();
    return !word || `${row.name} ${row.job ?? ""} ${row.tags.join(" ")} ${row.note ?? ""} ${row.device ?? ""}`.toLowerCase().includes(word);
  };

  const groupsOf = (row) => settings.group === "tag" ? (row.tags.length ? row.tags : ["no tag"]) : [String(row[settings.group] || "none")];

  const update = () => {
    const all = [...known.rows.values()].filter(matches);
    const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
    for (const row of all) counts[row.state] = (counts[row.state] ?? 0) + 1;
    replace(chips, [["", `All ${format.count(all.length)}`], ...Object.entries(counts).filter(([state, n]) => n || state === settings.state).map(([state, n]) => [state, `${state} ${n}`])].map(([state, text]) =>
      h("button", { class: `chip ${state}`, "aria-pressed": String(settings.state === state), onclick: () => { settings.state = state; update(); } }, text)));
    const rows = all.filter((row) => !settings.state || row.state === settings.state);
    const by = settings.sort.replace(/^-/, ""), sign = settings.sort.startsWith("-") ? -1 : 1, column = COLUMNS.find((one) => one.key === by);
    const key = new Map(rows.map((row) => [row.id, column?.of?.(row) ?? null]));
    rows.sort((a, b) => {
      const left = key.get(a.id), right = key.get(b.id);
      if (left === null || right === null) return left === right ? 0 : left === null ? 1 : -1;
      return sign * (left < right ? -1 : left > right ? 1 : 0);
    });
    shown = rows;
    if (settings.group) {
      const groups = new Map();
      for (const row of rows) for (const name of groupsOf(row)) groups.set(name, [...(groups.get(name) ?? []), row]);
      shown = [...groups].sort((a, b) => b[1].length - a[1].length).flatMap(([name, members]) => [{ group: name, n: members.length }, ...members]);
    }
    const wrong = problem || known.info.problems.join(" ");
    say.textContent = wrong || (known.info.is_whole ? "" : "Reading the folders …");
    say.classList.toggle("bad", Boolean(wrong));
    replace(head, h("div", { role: "columnheader" }, h("span", { class: "hidden" }, "choose")), COLUMNS.map((one) => h("div", { role: "columnheader", class: `c-${one.key}${one.isNumber ? " number" : ""}`, "aria-sort": by === one.key ? (sign > 0 ? "ascending" : "descending") : null },
      one.of ? h("button", { class: "plain", onclick: () => { settings.sort = by === one.key ? (sign > 0 ? `-${one.key}` : one.key) : one.key === "name" || one.key === "state" ? one.key : `-${one.key}`; update(); } }, one.title, by === one.key ? (sign > 0 ? " ↑" : " ↓") : "") : one.title)));
    body.style.setProperty("height", `${shown.length * height()}px`);
    view.setAttribute("aria-rowcount", shown.length + 1);
    elements.clear();
    body.replaceChildren();
    nothing();
    draw();
  };

  const isNarrow = matchMedia("(max-width: 760px)");
  const height = () => (isNarrow.matches ? 104 : 46);
  const elements = new Map();
  const nothing = () => {
    view.hidden = !known.rows.size;
    blank.hidden = Boolean(known.rows.size || known.info.problems.length || !known.info.is_whole);
    none.hidden = !known.rows.size || Boolean(shown.length);
  };
  const rowOf = (row, index) => {
    if (row.group !== undefined) return h("div", { class: "row group", role: "row" }, h("div", { role: "cell" }, h("b", {}, row.group), h("span", { class: "note" }, ` ${format.plural(row.n, "run")}`)));
    const choose = h("input", { type: "checkbox", checked: picked.has(row.id), "aria-label": `Choose ${row.name}`, onchange: (event) => { picked[event.target.checked ? "add" : "delete"](row.id); act(); } });
    return h("div", { class: `row ${row.is_archived ? "archived" : ""}`, role: "row", "aria-rowindex": index + 2, onclick: (event) => { if (!event.target.closest("a, input, button")) go(href("run", row.id)); } },
      h("div", { role: "cell", class: "choose" }, choose), COLUMNS.map((one) => h("div", { role: "cell", class: `c-${one.key}${one.isNumber ? " number" : ""}` }, one.cell(row))));
  };
  const draw = () => {
    if (!view.isConnected) return;
    const each = height(), top = body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / each) - 8), last = Math.min(shown.length, Math.ceil((window.innerHeight - top) / each) + 8);
    for (const [index, element] of elements) if (index < first || index >= last) { element.remove(); elements.delete(index); }
    for (let index = first; index < last; index += 1) {
      if (elements.has(index)) continue;
      const element = rowOf(shown[index], index);
      element.style.setProperty("top", `${index * each}px`);
      elements.set(index, element);
      body.append(element);
    }
    document.documentElement.dataset.rows = String(shown.length);
  };
  const redraw = (ids) => {
    for (const [index, element] of elements) {
      const row = shown[index];
      if (row?.group !== undefined || !ids.has(row?.id)) continue;
      shown[index] = known.rows.get(row.id) ?? row;
      const fresh = rowOf(shown[index], index);
      fresh.style.setProperty("top", element.style.getPropertyValue("top"));
      if (!element.contains(document.activeElement)) { element.replaceWith(fresh); elements.set(index, fresh); }
    }
  };

  const act = () => {
    compare.disabled = picked.size < 2;
    compare.textContent = picked.size > 1 ? `Compare ${picked.size}` : "Compare";
    for (const button of [annotate, archive]) if (button) button.disabled = !picked.size;
  };
  const archiveAll = async () => {
    try { for (const id of picked) await post("do/annotate", { run: id }, { is_archived: !known.rows.get(id).is_archived }); picked.clear(); act(); } catch (error) { notify(error.message, "failed"); }
  };

  const filter = async () => {
    settings.text = field.value;
    go(`/${settings.text ? `?where=${encodeURIComponent(settings.text)}` : ""}`, { isSame: true });
    const mine = ++asked;
    problem = "";
    if (!/[=<>~]/.test(settings.text)) { selected = null; update(); return; }
    try {
      const ids = await get("select", { where: settings.text });
      if (mine === asked) { selected = new Set(ids); update(); }
    } catch (error) {
      if (mine !== asked || !(error instanceof Refused)) return;
      problem = `${error.message}${error.remedy ? `. ${error.remedy}` : ""}`;
      update();
    }
  };
  field.addEventListener("input", filter);

  const blank = empty("No runs yet", `Nothing was trained in ${known.info.roots.join(", ")}.`, h("pre", {}, "stoker train examples/digits.py"), "A run appears here as soon as it begins; other folders are named after `stoker ui`.");
  const none = h("p", { class: "note none" }, "No run is such.");
  replace(main, h("div", { class: "bar-top" }, h("h1", {}, "Runs"), field, chips), h("div", { class: "bar-low" }, say, h("div", { class: "actions" }, box("trials", "trials of studies"), box("archived", "archived"), sort, group, annotate, archive, compare)), view, none, blank);
  main.className = "wide";
  document.title = "Runs · Stoker";
  if (settings.text) await filter(); else update();
  act();
  let frame = null;
  const onScroll = () => { frame ??= requestAnimationFrame(() => { frame = null; draw(); }); };
  window.addEventListener("scroll", onScroll, { passive: true });
  window.addEventListener("resize", onScroll);
  isNarrow.addEventListener("change", update);
  let due = null, said = "";
  const folders = () => JSON.stringify([known.info.problems, known.info.is_whole]);
  const onRows = ({ rows, removed }) => {
    const before = new Map(shown.map((row) => [row.id, row.state]));
    if (removed.length || said !== folders() || rows.some((row) => before.get(row.id) !== row.state)) {
      said = folders();
      due ??= setTimeout(() => { due = null; if (selected) filter(); else update(); }, 50);
    } else redraw(new Set(rows.map((row) => row.id)));
  };
  said = folders();
  follow({ rows: onRows });
  const ticking = setInterval(() => redraw(new Set(shown.filter((row) => LIVE.includes(row.state)).map((row) => row.id))), 5000);
  return {
    back: async () => { await loadRuns({ isPart: true }); update(); },
    close: () => { clearInterval(ticking); clearTimeout(due); window.removeEventListener("scroll", onScroll); window.removeEventListener("resize", onScroll); isNarrow.removeEventListener("change", update); main.className = ""; },
  };
};

/* Runs over each other: curves by samples, time or money; what differs in what is learned, how, and where; seeds. */

import { get } from "./api.js";
import { follow, go, href, known, link } from "./app.js";
import { Axis, COLOURS, joined, LineChart } from "./chart.js";
import { empty, h, pill, replace, section, table, withContent } from "./dom.js";
import * as format from "./format.js";

const AXES = [["samples", "samples"], ["wall_s", "time"], ["cost", "money"]];
const LABELS = { samples: format.shortCount, wall_s: (value) => format.seconds(Math.round(value)), cost: format.money };
const GROUPS = { learned: "What is learned", executed: "How it is executed", surroundings: "Where" };

export const open = async (main, _, query) => {
  document.title = "Compare · Stoker";
  const ids = query.getAll("run").filter((id) => known.rows.has(id)).slice(0, 16);
  const chooser = h("select", { "aria-label": "Add a run", onchange: () => chooser.value && go(`/compare?${[...ids, chooser.value].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`) },
    h("option", { value: "" }, "Add a run …"), [...known.rows.values()].filter((row) => !ids.includes(row.id)).sort((a, b) => (a.created_at < b.created_at ? 1 : -1)).slice(0, 500).map((row) => h("option", { value: row.id }, row.name)));
  if (!ids.length) {
    replace(main, h("div", { class: "bar-top" }, h("h1", {}, "Compare"), chooser), empty("No runs chosen", "Choose two or more in the table of runs, or add them here."));
    follow({});
    return {};
  }
  main.className = "wide";
  let over = "samples", isClosed = false, asked = 0, found = new Map(), states = new Map();
  const colourOf = (id) => COLOURS[ids.indexOf(id) % COLOURS.length];
  const charts = new Map(), figures = h("div", { class: "figures live" }), outcomes = h("div"), differences = h("div");
  let zooming = null;
  const axis = new Axis((range) => { clearTimeout(zooming); zooming = setTimeout(() => load(range), 80); });
  axis.key = "compare";
  const rows = () => ids.map((id) => known.rows.get(id)).filter(Boolean);

  const load = async (range) => {
    const bounds = range ? { from: range[0] - (range[1] - range[0]), to: range[1] + (range[1] - range[0]) } : {};
    const mine = ++asked, of = over === "cost" ? ids.filter((id) => known.rows.get(id)?.price_per_h) : ids;
    const parts = await Promise.all(of.map((id) => get("series", { run: id, over, px: range ? 1500 : 500, ...bounds }).catch(() => null)));
    if (isClosed || mine !== asked) return; // another axis or range was chosen since
    found = new Map(of.map((id, index) => [id, parts[index]]));
    if (!range) axis.whole = [0, Math.max(1e-9, ...parts.map((part) => part?.progress.x[part.progress.x.length - 1] ?? 0))];
    draw();
  };
  const draw = () => {
    axis.label = LABELS[over]; axis.name = over;
    const curves = new Map();
    const add = (measure, id, x, y) => curves.set(measure, [...(curves.get(measure) ?? []), { id, x, y }]);
    for (const id of ids) {
      const part = found.get(id);
      if (!part) continue;
      if (part.progress.loss) add("train loss", id, part.progress.x, part.progress.loss);
      for (const [name, points] of Object.entries(over === "samples" ? states.get(id)?.evaluations ?? {} : part.evaluations ?? {})) if (points.length > 1) add(name, id, points.map((one) => one[0]), points.map((one) => one[1]));
      for (const name of ["samples_per_s", "grad_norm", "lr"]) if (part.progress[name]) add(name, id, part.progress.x, part.progress[name]);
    }
    const order = (name) => ["train loss"].indexOf(name) + 1 || (name.includes(" ") ? 2 : 3);
    for (const [measure, list] of [...curves].sort((a, b) => order(a[0]) - order(b[0])).slice(0, 30)) {
      const isFraction = format.isFraction(measure) && list.every(({ y }) => y.every((one) => one === null || (one >= 0 && one <= 1)));
      if (!charts.has(measure)) {
        const title = { samples_per_s: "Throughput, samples/s", grad_norm: "Gradient norm", lr: "Learning rate" }[measure] ?? measure.replace(/^./, (one) => one.toUpperCase());
        const made = new LineChart({ axis, series: [], title, y: isFraction ? (value) => format.percent(value, 1) : measure === "samples_per_s" ? format.shortCount : format.number, isFraction, mayBeLogarithmic: measure.endsWith("loss"), isFromZero: ["lr", "samples_per_s"].includes(measure) });
        charts.set(measure, made);
        figures.append(made.element);
      }
      const made = charts.get(measure);
      made.set(joined(list.map(({ x, y }) => [x, y])), list.map(({ id }) => ({ label: known.rows.get(id)?.name ?? id, colour: colourOf(id), points: measure !== "train loss" && measure.includes(" ") })));
      const form = (one) => (isFraction ? format.percent(one, 2) : format.number(one));
      const lasts = list.map(({ y }) => y.findLast((one) => one !== null)).filter((one) => one !== undefined);
      made.caption = lasts.length ? (lasts.length < 4 ? `last ${lasts.map(form).join(" · ")}` : `last ${form(Math.min(...lasts))} to ${form(Math.max(...lasts))}`) : "";
    }
    main.dataset.drawn = "1";
  };
  const showOutcomes = () => {
    const leave = (row) => h("button", { class: "plain", "aria-label": `Leave out ${row.name}`, onclick: () => go(`/compare?${ids.filter((id) => id !== row.id).map((id) => `run=${encodeURIComponent(id)}`).join("&")}`) }, "×");
    const columns = withContent([
      ["run", (row) => h("span", { class: "key" }, h("i", { class: "swatch", style: { background: `var(--${colourOf(row.id)})` } }), link(href("run", row.id), row.name))], ["state", pill],
      ["metric", (row) => (format.metricOf(row) ? `${format.metricOf(row)[0]} ${format.metric(...format.metricOf(row))}` : "")], ["samples", (row) => format.count(row.samples)], ["time", (row) => format.seconds(row.wall_s)],
      ["cost", (row) => format.money(row.cost_usd)], ["throughput", (row) => format.rate(row.samples_per_s)], ["", leave]], rows());
    replace(outcomes, table(columns.map(([title]) => title), rows().map((row) => columns.map(([, cell]) => cell(row))), "stacks"));
  };
  const axisChoice = h("div", { class: "chips", role: "group", "aria-label": "Axis of the charts" });
  const chooseAxis = async (name) => {
    over = name; axis.range = null;
    replace(axisChoice, h("span", { class: "note" }, "over"), AXES.filter(([one]) => one !== "cost" || rows().some((row) => row.price_per_h)).map(([one, text]) => h("button", { class: "chip", "aria-pressed": String(one === over), onclick: () => chooseAxis(one) }, text)));
    await load(null);
  };
  replace(main, h("div", { class: "bar-top" }, h("h1", {}, ids.length > 1 ? `${ids.length} runs` : "Compare"), chooser), outcomes, section("Curves", axisChoice, figures), differences);
  showOutcomes();
  const [document_] = await Promise.all([get("compare", { run: ids }), ...ids.map(async (id) => states.set(id, await get("run", { run: id }).catch(() => null)))]);
  await chooseAxis("samples");
  const names = rows().map((row) => row.name);
  replace(differences, Object.entries(GROUPS).map(([key, title]) => {
    const list = document_.differences[key];
    return section(title, list.length ? table(["", ...names], list.map(({ name, values }) => [h("b", {}, name), ...values.map((value) => value ?? h("span", { class: "note" }, "absent"))]), "differences stacks") : h("p", { class: "note" }, ids.length > 1 ? "No difference." : "Add another run."));
  }), document_.seeds.map(({ runs, metrics }) => section(`Over ${runs.length} seeds`, h("p", { class: "note" }, `${runs.join(", ")} differ in nothing but the seed.`), table(["metric", "mean", "deviation"], metrics.map(([name, mean, deviation]) => [name, format.metric(name, mean), format.isFraction(name) ? format.percent(deviation, 2) : format.number(deviation)])))),
  document_.problems.map((problem) => h("p", { class: "note bad" }, problem)));
  let due = null;
  follow({ rows: ({ rows: changed }) => {
    if (!changed.some((row) => ids.includes(row.id))) return;
    showOutcomes();
    due ??= setTimeout(async () => { due = null; await load(axis.range); }, 5000);
  } });
  return { close: () => { isClosed = true; clearTimeout(due); for (const made of charts.values()) made.destroy(); main.className = ""; } };
};

/* Studies: trials over parallel axes, what mattered, what was spent. */

import { get } from "./api.js";
import { follow, href, known, link } from "./app.js";
import { empty, fitted, h, pill, replace, section, svg, table, tile, withContent } from "./dom.js";
import * as format from "./format.js";

const value = (one) => (typeof one === "number" ? format.number(one) : String(one ?? ""));

export const open = async (main, id) => {
  document.title = `${id || "Studies"} · Stoker`;
  main.className = "wide";
  if (!id) {
    const names = known.info.studies;
    replace(main, h("h1", {}, "Studies"), names.length ? table(["study", "trials", "finished", "pruned", "running", "cost so far"], names.map((name) => {
      const rows = [...known.rows.values()].filter((row) => row.id.startsWith(`${name}/trials/`));
      return [link(href("study", name), name), rows.length, ...["finished", "pruned", "running"].map((state) => rows.filter((row) => row.state === state).length), format.money(rows.reduce((sum, row) => sum + (row.cost_usd ?? 0), 0) || null)];
    }), "list stacks") : empty("No studies here", "A study tries settings of a job, each in a run of its own.", h("pre", {}, "stoker tune examples/digits.py --space 'lr=log(0.01,1)' --trials 20")));
    follow({});
    return {};
  }
  const draw = async () => {
    const study = await get("study", { study: id });
    const done = study.trials.filter((trial) => trial.value !== null), sign = study.higher_is_better ? -1 : 1;
    const ranked = [...done].sort((a, b) => sign * (a.value - b.value)), best = ranked[0];
    const spent = study.trials.reduce((sum, trial) => sum + (trial.wall_s ?? 0), 0), cost = study.trials.reduce((sum, trial) => sum + (trial.cost_usd ?? 0), 0);
    const inState = (state) => study.trials.filter((trial) => trial.state === state).length;
    const expected = study.forecast?.pruned_s ?? study.forecast?.total_s;
    const trials = [...ranked, ...study.trials.filter((trial) => trial.value === null)].slice(0, 500);
    const columns = withContent([["trial", (trial) => link(href("run", trial.id), trial.name)], ["state", (trial) => pill(trial)], [study.objective, (trial) => (trial.value === null ? "" : format.metric(study.objective, trial.value))],
      ...study.space.map(({ name }) => [name, (trial) => value(trial.parameters[name])]), ["samples", (trial) => format.count(trial.samples)], ["time", (trial) => format.seconds(trial.wall_s)], ["cost", (trial) => format.money(trial.cost_usd)]], trials);
    replace(main,
      h("div", { class: "title" }, h("h1", {}, study.name), h("span", { class: "note" }, `${study.sampler} sampler · ${study.pruner === "none" ? "no pruner" : `${study.pruner} pruner`} · ${study.on === "here" ? "on this machine" : `on ${study.on}`}`)),
      h("div", { class: "hero" }, h("div", { class: "result" }, h("p", { class: "label" }, `best ${study.objective}`), h("p", { class: "big" }, best ? format.metric(study.objective, best.value) : "none yet"),
        best && h("p", { class: "note" }, Object.entries(best.parameters).map(([name, one]) => `${name} = ${value(one)}`).join(" · "))),
        h("div", { class: "tiles live" }, tile("trials", format.count(study.trials.length), study.planned_trials ? `of ${study.planned_trials} planned` : ""), tile("running", String(inState("running")), ["pruned", "failed"].filter(inState).map((state) => `${inState(state)} ${state}`).join(", ")),
          tile("training time", format.seconds(spent), expected ? `forecast ${format.seconds(expected.value)}` : ""), tile("cost so far", cost ? format.money(cost) : "none", study.forecast?.cost_usd ? `forecast ${format.money(study.forecast.cost_usd.value)}` : !cost && "no price is known"))),
      section("Settings and outcome", done.length > 1 ? coordinates(study, ranked) : h("p", { class: "note" }, "Two trials with a value are needed.")),
      section("What mattered", Object.keys(study.influence).length ? [h("div", { class: "influence" }, Object.entries(study.influence).map(([name, share]) => h("div", {}, h("span", {}, name), h("i", {}, h("b", { style: { width: `${100 * share}%` } })), h("span", { class: "note" }, format.percent(share))))), h("p", { class: "note" }, "Share of the order of trials that the setting alone explains; what settings do only together is not in it.")] : h("p", { class: "note" }, "Shown from five trials on.")),
      section("Trials", table(columns.map(([title]) => title), trials.map((trial) => columns.map(([, cell]) => cell(trial))), "trials")));
  };
  await draw();
  let due = null;
  follow({ rows: ({ rows }) => { if (rows.some((row) => row.study === id)) due ??= setTimeout(() => { due = null; draw(); }, 2000); } });
  return { close: () => { clearTimeout(due); main.className = ""; } };
};

/* A line for each trial over one axis for each setting, the outcome last; the best third is drawn strong. */
const coordinates = (study, ranked) => {
  const height = 300, top = 34, bottom = 24;
  const axes = [...study.space.map((one) => ({ ...one, of: (trial) => trial.parameters[one.name] })), { name: study.objective, kind: "float", of: (trial) => trial.value, form: (one) => format.metric(study.objective, one) }];
  for (const axis of axes) {
    const values = ranked.map(axis.of);
    if (axis.kind === "choice" || values.some((one) => typeof one !== "number")) {
      const names = [...new Set(values.map(String))];
      axis.y = (one) => (names.length < 2 ? 0.5 : names.indexOf(String(one)) / (names.length - 1));
      axis.ends = [names[0], names[names.length - 1]];
      axis.inner = names.length < 9 ? names.slice(1, -1) : [];
    } else {
      const scale = axis.is_log ? Math.log : (one) => one, low = Math.min(...values.map(scale)), span = Math.max(...values.map(scale)) - low || 1;
      axis.y = (one) => (scale(one) - low) / span;
      axis.ends = [Math.min(...values), Math.max(...values)];
    }
  }
  const place = (share) => top + (1 - share) * (height - top - bottom);
  const strong = Math.ceil(ranked.length / 3);
  const drawn = (width) => {
    const x = (index) => 52 + (index * (width - 104)) / Math.max(1, axes.length - 1);
    const lines = [...ranked.entries()].reverse().map(([rank, trial]) => svg("path", { class: rank === 0 ? "best" : rank < strong ? "strong" : "weak", d: `M${axes.map((axis, index) => `${x(index).toFixed(1)} ${place(axis.y(axis.of(trial))).toFixed(1)}`).join("L")}` }, svg("title", {}, document.createTextNode(`${trial.name}: ${study.objective} ${format.number(trial.value)}`))));
    const text = (at, y, words, css = "") => svg("text", { x: at, y, "text-anchor": "middle", class: css }, document.createTextNode(words));
    const end = (one) => (typeof one === "number" ? format.number(one) : one);
    return svg("svg", { class: "coordinates", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${ranked.length} trials over ${axes.length - 1} settings; the best has ${study.objective} ${format.number(ranked[0].value)}` },
      lines, axes.map((axis, index) => [svg("line", { x1: x(index), x2: x(index), y1: top, y2: height - bottom }), text(x(index), 12, axis.name, "name"), text(x(index), top - 6, (axis.form ?? end)(axis.ends[1])), text(x(index), height - 8, (axis.form ?? end)(axis.ends[0])), (axis.inner ?? []).map((name) => text(x(index), place(axis.y(name)) - 7, name, "inner"))]));
  };
  const names = Math.max(...axes.slice(1).map((axis, index) => (axis.name.length + axes[index].name.length) / 2));  // of two neighbours, not to touch
  return fitted("Parallel coordinates", 104 + Math.max(76, 6.6 * names + 8) * (axes.length - 1), drawn);
};

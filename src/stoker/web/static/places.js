/* Places: where runs are executed, in which state, at what price; and a pool, if there is one. */

import { get } from "./api.js";
import { follow, href, known, link } from "./app.js";
import { h, pill, replace, section, table, withContent } from "./dom.js";
import * as format from "./format.js";
import { poolView } from "./pool.js";
import { progress } from "./runs.js";

export const open = async (main) => {
  document.title = "Places · Stoker";
  main.className = "wide";
  const places = h("div", { class: "named" }), pool = poolView();
  replace(main, places, pool.element);
  const show = async () => {
    const found = await get("places");
    const runs = (ids) => ids.map((id) => known.rows.get(id)).filter(Boolean);
    const COLUMNS = [["run", (row) => link(href("run", row.id), row.name)], ["state", pill], ["why", (row) => row.launch?.why && h("span", { class: "note", title: row.launch.evidence ?? "" }, row.launch.why)], ["done", progress],
      ["waits", (row) => row.launch?.starts_in_s && format.seconds(row.launch.starts_in_s)], ["started again", (row) => row.launch?.restarts], ["cost", (row) => format.money(row.cost_usd)], ["limit", (row) => format.money(row.launch?.max_cost)]];
    const rows = (ids) => {
      const members = runs(ids), columns = withContent(COLUMNS, members);
      return table(columns.map(([title]) => title), members.map((row) => columns.map(([, cell]) => cell(row) || "")), "stacks");
    };
    replace(places, h("h1", {}, "Places"),
      section(`This machine, ${found.host}`, h("p", { class: "choices" }, found.devices.map((one) => h("span", {}, `${one.model}: ${one.cores} cores, ${format.bytes(one.memory_bytes)}`))), found.here.length ? rows(found.here) : h("p", { class: "note" }, "No run trains here now.")),
      found.places.map((place) => section(place.place.startsWith(place.kind) ? place.place : `${place.place} (${place.kind})`, h("p", { class: "note" }, `${format.plural(place.runs.length, "run")}, ${place.cost_usd ? `${format.money(place.cost_usd)} so far` : "no cost is known yet"}${place.max_cost ? `, at most ${format.money(place.max_cost)}` : ""}`), rows(place.runs),
        runs(place.runs).filter((row) => row.launch?.states?.length).map((row) => h("details", {}, h("summary", {}, `What ${place.place} said of ${row.name}`), h("ol", { class: "timeline" }, row.launch.states.map((state) => h("li", {}, h("time", {}, state.at.slice(0, 19).replace("T", " ")), h("span", {}, `${state.phase}: ${state.why}`)))))))),
      !found.places.length && h("p", { class: "note" }, "No run was launched elsewhere."));
  };
  await show();
  let due = null;
  follow({ rows: () => { due ??= setTimeout(() => { due = null; show(); }, 2000); } });
  return { close: () => { pool.close(); clearTimeout(due); main.className = ""; } };
};

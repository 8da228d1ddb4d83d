/* Data checks: what `stoker data check` found, as in its report. */

import { get, getText } from "./api.js";
import { follow, href, link } from "./app.js";
import { empty, fromServer, h, replace, table } from "./dom.js";
import * as format from "./format.js";

export const open = async (main, id) => {
  document.title = "Data · Stoker";
  follow({});
  main.className = "wide";
  if (!id) {
    const checks = await get("checks");
    replace(main, h("h1", {}, "Data checks"), checks.length ? table(["check", "of", "samples", "faults", "suspects", "checked"], checks.map((one) => [link(href("data", one.id), one.id), one.source ?? h("span", { class: "note bad" }, one.problem), format.count(one.samples), h("span", { class: one.faults ? "bad" : "" }, format.count(one.faults)), format.count(one.suspects), h("span", { class: "note", title: one.made_at }, format.ago(Date.parse(one.made_at) / 1000))]), "list stacks") : empty("No data checks here", "A check looks for corrupt files, duplicates, leaks and doubtful labels.", h("pre", {}, "stoker data check images/ --out runs/images-check")));
    return {};
  }
  const content = fromServer(await getText("check", { check: id }));
  for (const part of content.querySelectorAll(".scroll")) { part.tabIndex = 0; part.setAttribute("role", "region"); part.setAttribute("aria-label", "table"); }
  replace(main, h("p", {}, link("/data", "All data checks")));
  main.append(h("div", { class: "checked" }, content));
  return {};
};

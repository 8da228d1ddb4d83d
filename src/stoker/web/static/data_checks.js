/* Data checks: what `stoker data check` found, as in its report. */

import { getText } from "./api.js";
import { follow, href, known, link } from "./app.js";
import { empty, fromServer, h, replace, table } from "./dom.js";

export const open = async (main, id) => {
  document.title = "Data · Stoker";
  follow({});
  main.className = "";
  if (!id) {
    const checks = known.info.checks;
    main.className = "wide";
    replace(main, h("h1", {}, "Data checks"), checks.length ? table(["check"], checks.map((name) => [link(href("data", name), name)]), "list") : empty("No data checks here", "A check looks for corrupt files, duplicates, leaks and doubtful labels.", h("pre", {}, "stoker data check images/ --out runs/images-check")));
    return {};
  }
  const content = fromServer(await getText("check", { check: id }));
  for (const part of content.querySelectorAll(".scroll")) { part.tabIndex = 0; part.setAttribute("role", "region"); part.setAttribute("aria-label", "table"); }
  replace(main, h("p", {}, link("/data", "All data checks")));
  main.append(content);
  return {};
};

/* A run's page while the server streams events: their source, and what may be done with the run. */

import { get, getText, post } from "./api.js";
import { follow, go, href, known, link, notify } from "./app.js";
import { empty, fromServer, h, replace } from "./dom.js";
import { open as openRun } from "./run.js";
import { annotateRuns } from "./runs.js";

export const open = (main, id) => {
  const act = (what) => async () => {
    try { notify((await post(`do/${what}`, { run: id })).said); } catch (error) { notify(`${error.message} ${error.remedy ?? ""}`, "failed"); }
  };
  const button = (what, text, css) => h("button", { class: css, onclick: act(what) }, text);
  const controls = (row) => {
    const isLive = ["running", "planning", "stalled"].includes(row.state);
    return [isLive && row.state !== "planning" && button("stop", "Stop", "danger"), !isLive && ["unfinished", "failed"].includes(row.status) && button("resume", "Resume"), button("fork", "Fork", "plain"), h("button", { class: "plain", onclick: () => annotateRuns([id]) }, "Tags, note")];
  };
  return openRun(main, {
    state: () => get("run", { run: id }),
    series: (query) => get("series", { run: id, ...query }),
    confusion: async () => (known.rows.get(id)?.status === "finished" ? get("confusion", { run: id }) : []),
    picture: (file) => `/api/picture?${new URLSearchParams({ run: id, file })}`,
    row: () => known.rows.get(id),
    page: {
      sections: async () => fromServer(await getText("sections", { run: id })),
      links: (row) => [row.study && link(href("study", row.study), `of ${row.study}`),
        h("span", { class: "actions" }, link(href("plan", id), "Plan"), link(`/compare?run=${encodeURIComponent(id)}`, "Compare with"), known.info.control && controls(row))],
      gone: (row) => {
        replace(main, empty(row.name, row.problem, link("/", "All runs")));
        follow({ rows: () => go(href("run", id)) });
        return {};
      },
      follow: (place, { row, removed, event, refetch }) => follow(
        { rows: (found) => (found.removed.includes(id) ? removed() : row()) }, { id, place, handlers: { event, refetch } }),
    },
  });
};

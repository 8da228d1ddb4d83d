/* Services: rate, latency, queue and rejections of each version, over the last minutes. */

import { get } from "./api.js";
import { follow } from "./app.js";
import { Axis, LineChart } from "./chart.js";
import { empty, h, replace, section, tile } from "./dom.js";
import * as format from "./format.js";

export const open = async (main) => {
  document.title = "Services · Stoker";
  main.className = "wide";
  follow({});
  const charts = new Map(), views = new Map();
  let isClosed = false;
  const axis = new Axis();
  axis.key = "services"; axis.space = 84; axis.label = (at) => format.clock(at).slice(11); axis.name = "time";
  const show = async () => {
    const { services } = await get("services");
    if (isClosed) return;
    if (!services.length) return replace(main, h("h1", {}, "Services"), empty("No services are shown", "Name their admin ports when the page is started:", h("pre", {}, "stoker ui --service 127.0.0.1:8002")));
    const times = services.flatMap((one) => one.versions.flatMap((version) => version.history.map((row) => row[0])));
    if (times.length) axis.whole = [Math.min(...times), Math.max(...times, Math.min(...times) + 1)];
    for (const service of services) {
      if (!views.has(service.address)) {
        const said = h("p", { class: "note bad" }), view = h("div"), part = section(service.address, said, view);
        part.classList.add("named");
        views.set(service.address, { said, view, versions: new Map() });
        main.append(part);
      }
      const { said, view, versions } = views.get(service.address);
      said.textContent = service.problem || (service.versions.length ? "" : "It serves no model.");
      said.hidden = !said.textContent;
      view.hidden = !said.hidden;  // what it last said would look like now
      if (service.problem) continue;
      for (const [key, gone] of versions) {
        if (service.versions.some((version) => key === `${service.address} ${version.model} ${version.version}`)) continue;
        gone.element.remove();
        for (const made of [gone.latency, gone.rate, gone.queue]) { made.destroy(); charts.delete(`${key} ${made.title}`); }
        versions.delete(key);
      }
      for (const version of service.versions) {
        const key = `${service.address} ${version.model} ${version.version}`;
        if (!versions.has(key)) {
          const head = h("div"), figures = h("div", { class: "figures live" });
          const latency = new LineChart({ axis, series: [{ label: "p50", colour: "blue" }, { label: "p99", colour: "ember" }], title: "Latency", hasLegend: true, y: format.seconds, isFromZero: true });
          const rate = new LineChart({ axis, series: [{ label: "requests/s", colour: "teal" }], title: "Requests", y: format.shortCount, isFromZero: true });
          const queue = new LineChart({ axis, series: [{ label: "waiting", colour: "violet" }], title: "Queue", y: format.shortCount, isFromZero: true });
          figures.append(latency.element, rate.element, queue.element);
          for (const made of [latency, rate, queue]) charts.set(`${key} ${made.title}`, made);
          const element = h("div", { class: "service" }, head, figures);
          versions.set(key, { element, head, latency, rate, queue });
          view.append(element);
        }
        const { head, latency, rate, queue } = versions.get(key), history = version.history, last = history[history.length - 1];
        const rejected = Object.entries(version.rejected), refused = rejected.reduce((sum, [, n]) => sum + n, 0);
        replace(head, h("div", { class: "title" }, h("h2", {}, `${version.model}, version ${version.version}`), h("span", { class: `state ${version.is_ready ? "finished" : "failed"}` }, version.is_ready ? "ready" : "not ready"), h("span", { class: "note" }, [version.info.engine, version.info.precision].filter(Boolean).join(", "))),
          h("div", { class: "tiles live" }, tile("p50", format.seconds(version.p50_s) || "no requests", "of the last minute"), tile("p99", format.seconds(version.p99_s) || "no requests", `in the queue ${format.seconds(version.queue_p99_s) || "none"}`), tile("requests", last ? `${format.shortCount(+last[1].toPrecision(3))}/s` : "", ""), tile("batch", version.mean_rows ? format.number(version.mean_rows) : "none", "samples, mean"), tile("queue", format.count(version.queue_rows), "samples waiting"), tile("refused", format.count(refused), [...rejected.map(([why, n]) => `${why} ${n}`), ...(refused && service.versions.filter((one) => one.model === version.model).length > 1 ? ["of all versions"] : [])].join(", "), refused ? "over" : "")));
        const x = history.map((row) => row[0]);
        latency.set([x, history.map((row) => row[2]), history.map((row) => row[3])]); latency.caption = `p50 ${format.seconds(version.p50_s) || "none"} · p99 ${format.seconds(version.p99_s) || "none"}`;
        rate.set([x, history.map((row) => row[1])]); rate.caption = last ? `last ${format.shortCount(+last[1].toPrecision(3))} a second` : "";
        queue.set([x, history.map((row) => row[4])]); queue.caption = version.queue_rows === null ? "" : `${format.plural(version.queue_rows, "sample")} waiting`;
      }
    }
  };
  replace(main, h("h1", {}, "Services"));
  await show();
  const ticking = setInterval(() => { if (!document.hidden) show().catch(() => {}); }, 2000);
  return { close: () => { isClosed = true; clearInterval(ticking); for (const made of charts.values()) made.destroy(); main.className = ""; } };
};

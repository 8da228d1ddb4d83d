/* A plan: what each device or layout would take and cost, what was rejected and why; sliders for what one may spend. */

import { get } from "./api.js";
import { follow, href, known, link } from "./app.js";
import { empty, fitted, h, pill, replace, section, svg, table } from "./dom.js";
import * as format from "./format.js";

const ends = (estimate) => (estimate ? format.withInterval(estimate.value, estimate.low, estimate.high) : "");

export const open = async (main, id) => {
  document.title = `${id || "Plans"} · Stoker`;
  main.className = "wide";
  follow({});
  if (!id) {
    const plans = await get("plans");
    replace(main, h("h1", {}, "Plans"), plans.length ? table(["plan of", "state", "device", "started"], plans.map((one) => {
      const row = known.rows.get(one.id);
      return [link(href("plan", one.id), one.name), row ? pill(row) : h("span", { class: "note" }, "a file of stoker plan --json"), row?.launch?.place ?? row?.device, row && h("span", { class: "note" }, format.ago(Date.parse(row.created_at) / 1000))];
    }), "list stacks") : empty("No plans here", "Every run has one; others are shown from files in this folder.", h("pre", {}, "stoker plan job.py --on h100,l4,rtx4090 --json > runs/devices.json")));
    return {};
  }
  const plan = await get("plan", { plan: id });
  const candidates = plan.candidates.filter((one) => one.total_s);
  const costs = candidates.map((one) => one.cost_usd?.value).filter((one) => one !== undefined);
  const limits = { deadline: 1, budget: 1 };
  const times = candidates.map((one) => one.total_s.value), longest = Math.max(...times, 1), shortest = Math.min(...times, longest);
  const most = Math.max(...costs, 0.01), least = Math.min(...costs, most);
  /* Sliders are logarithmic: plans differ by factors. */
  const limit = (share, low, high) => (share >= 1 ? Infinity : low * 0.95 * (high / low / 0.95) ** share);
  const host = h("div"), answer = h("p", { class: "level", role: "status" }), rows = h("div");
  const isWithin = (one) => one.total_s.value <= limit(limits.deadline, shortest, longest) && (one.is_here || !one.cost_usd || one.cost_usd.value <= limit(limits.budget, least, most));
  const slider = (key, title, form) => {
    const output = h("b", {}, "no limit");
    const input = h("input", { type: "range", min: "0", max: "1000", "aria-label": title, oninput: () => { limits[key] = input.value / 1000; output.textContent = form(); input.setAttribute("aria-valuetext", form()); draw(); } });
    input.value = "1000";
    return h("label", { class: "slide" }, h("span", {}, title), input, output);
  };
  const draw = () => {
    const fitting = candidates.filter(isWithin);
    const hasDeadline = limits.deadline < 1;
    const best = [...fitting].sort((a, b) => (hasDeadline && a.cost_usd && b.cost_usd ? a.cost_usd.value - b.cost_usd.value : a.total_s.value - b.total_s.value))[0];
    replace(answer, best ? [h("strong", {}, best.device), `: ${ends(best.total_s)}${best.cost_usd ? `, ${format.withInterval(best.cost_usd.value, best.cost_usd.low, best.cost_usd.high, format.money)}` : ""}`, h("span", { class: "note" }, ` · ${candidates.length < 2 ? "the only plan that fits" : `${hasDeadline ? "the cheapest in time" : "the fastest"} of ${format.plural(fitting.length, "plan")} within the limits`}`)] : [h("strong", { class: "bad" }, "Nothing fits"), ` · ${format.plural(candidates.length, "plan")} are outside of the limits`]);
    replace(host, candidates.length > 1 && costs.length > 1 ? scatter(candidates, isWithin, best, { longest, shortest, most, least }) : null);
    replace(rows, table(["device", "time", "cost", "memory", "throughput", "plan", "why"], candidates.map((one) => [
      h("b", { class: one === best ? "chosen" : isWithin(one) ? "" : "out" }, one.device), ends(one.total_s), one.cost_usd ? format.withInterval(one.cost_usd.value, one.cost_usd.low, one.cost_usd.high, format.money) : one.is_here ? "here" : "no price",
      `${format.bytes(one.peak_bytes?.value)} of ${format.bytes(one.memory_bytes)}`, format.rate(one.samples_per_s?.value), h("span", { class: "note" }, one.plan), one.why]), "devices stacks"));
  };
  const shares = (title, parts, form) => parts?.length && section(title, table(["", "", "where"], parts.slice(0, 20).map((part) => [part.what, form(part.value), h("span", { class: "note" }, part.where)])));
  replace(main, h("div", { class: "title" }, h("h1", {}, plan.name), h("span", { class: "note" }, `planned in ${format.seconds(plan.took_s)}`)),
    !plan.is_settled && h("aside", { class: "notice" }, h("p", {}, "The run tries plans on its own updates; this is the one it began under.")),
    answer, candidates.length > 1 && h("div", { class: "sliders" }, slider("deadline", "deadline", () => (limits.deadline >= 1 ? "no limit" : format.seconds(limit(limits.deadline, shortest, longest)))), costs.length > 0 && slider("budget", "budget", () => (limits.budget >= 1 ? "no limit" : format.money(limit(limits.budget, least, most))))),
    host, section("Plans that fit", rows), plan.advice && h("p", { class: "advice" }, plan.advice),
    section("Why", h("ol", { class: "why" }, plan.explanation.map((line) => h("li", {}, line)))),
    plan.rejected.length > 0 && section(`${format.plural(plan.rejected.length, "plan")} rejected`, table(["device", "plan", "lost by"], plan.rejected.map((one) => [one.device, h("span", { class: "note" }, one.plan), one.reason]), "stacks")),
    plan.breakdown && h("div", { class: "figures" }, shares("Memory at the peak", plan.breakdown.peak_bytes, format.bytes), shares("Time of an update", plan.breakdown.step_s, format.seconds)));
  draw();
  return { close: () => { main.className = ""; } };
};

const ROUND_MONEY = [-2, -1, 0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
const ROUND_TIMES = [[1, [1, 2, 5, 10, 20]], [60, [0.5, 1, 2, 5, 10, 20]], [3600, [0.5, 1, 2, 4, 8]], [86400, [0.5, 1, 2, 4, 8, 16, 32, 64]]].flatMap(([unit, ones]) => ones.map((one) => one * unit));
/* Time against money, logarithmic both, with intervals. */
const scatter = (candidates, isWithin, best, { longest, shortest, most, least }) => {
  const height = 380, left = 64, bottom = 40;
  const share = (value, low, high) => (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low) || 1);
  const y = (value) => height - bottom - 24 - share(Math.max(value, least * 0.5), least, most) * (height - bottom - 60);
  const text = (at, height_, words, anchor = "middle", css = "") => svg("text", { x: at, y: height_, "text-anchor": anchor, class: css }, document.createTextNode(words));
  const priced = candidates.filter((one) => one.cost_usd);
  const ticks = (low, high, round, most_) => {
    const inside = round.filter((value) => value >= 0.8 * low && value <= 1.25 * high);
    return inside.length > 1 ? inside.filter((_, index) => index % Math.ceil(inside.length / most_) === 0) : [low, high];
  };
  const drawn = (width) => {
    const x = (value) => left + 20 + share(Math.max(value, shortest * 0.5), shortest, longest) * (width - left - Math.min(150, 0.3 * width));
    const used = priced.map((one) => [x(one.total_s.value) - 6, y(one.cost_usd.value) - 6, 12, 12]);  // boxes that no label may touch
    const SIDES = [[10, -8, "start"], [10, 17, "start"], [-10, -8, "end"], [-10, 17, "end"]];
    const labelled = (one, at, isNeeded) => {
      const wide = 7.5 * one.device.length, box = ([dx, dy, anchor]) => [at[0] + dx - (anchor === "end" ? wide : 0), at[1] + dy - 11, wide, 14];
      const free = SIDES.find((side) => { const [a, b, c, d] = box(side); return a > left && !used.some(([e, f, g, k]) => a < e + g && e < a + c && b < f + k && f < b + d); });
      if (!free && !isNeeded) return null;
      const [dx, dy, anchor] = free ?? SIDES[0];
      used.push(box(free ?? SIDES[0]));
      return text(at[0] + dx, at[1] + dy, one.device, anchor, "name");
    };
    return svg("svg", { class: "scatter", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${priced.length} plans by time and cost; chosen: ${best?.device ?? "none"}` },
      ticks(least, most, ROUND_MONEY, 6).map((value) => [svg("line", { class: "grid", x1: left, x2: width - 20, y1: y(value), y2: y(value) }), text(left - 8, y(value) + 4, format.money(value), "end")]),
      ticks(shortest, longest, ROUND_TIMES, Math.floor(width / 80)).map((value) => [svg("line", { class: "grid", x1: x(value), x2: x(value), y1: 20, y2: height - bottom }), text(x(value), height - 12, format.seconds(value))]),
      [...priced].sort((a, b) => Number(b === best) - Number(a === best)).map((one) => {
        const css = one === best ? "chosen" : isWithin(one) ? "" : "out", at = [x(one.total_s.value), y(one.cost_usd.value)];
        return svg("g", { class: css }, svg("line", { x1: Math.max(left, x(one.total_s.low)), x2: x(one.total_s.high), y1: at[1], y2: at[1] }), svg("line", { x1: at[0], x2: at[0], y1: y(one.cost_usd.low), y2: y(one.cost_usd.high) }),
          svg("circle", { cx: at[0], cy: at[1], r: one === best ? 7 : 5 }, svg("title", {}, document.createTextNode(`${one.device}: ${ends(one.total_s)}, ${format.money(one.cost_usd.value)}`))), labelled(one, at, one === best));
      }).reverse());
  };
  return h("figure", {}, h("figcaption", {}, h("b", {}, "Time against money"), h("span", {}, "bars hold 8 cases of 10; both axes are logarithmic")), fitted("Time against money", 300, drawn));
};

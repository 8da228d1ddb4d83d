/* One run: what is known at a glance, charts, what happened by the clock, and the sections of its report.

   The same on the live page and in a report. Where it all comes from is the source's matter:
   state(), series(query), confusion()   promises of the documents that reporting/run_documents.py makes
   picture(file)                         the address of a picture that the run logged
   row()                                 the newest row of the run, if rows come; else that of its state
   page                                  what only a page of a run that changes has, null for a report: sections() (its
                                         text, which stands in a report already), links(row, what may be done),
                                         gone(state), and follow(place, handlers) */

import { Axis, joined, LineChart, COLOURS } from "./chart.js";
import { h, pill, replace, section, svg, tile } from "./dom.js";
import * as format from "./format.js";

const PX = 700;
const SPAN_COLOURS = { planning: "amber", training: "ember", evaluation: "teal" };
const MARK_COLOURS = { resumed: "ember", started: "grey", settled: "good", replanned: "violet", recovered: "amber", warned: "amber", stopped: "bad", skipped: "bad", finished: "good" };
const MARK_LABELS = { resumed: "resumed", replanned: "another plan", settled: "settled" };
const AXES = [["samples", "samples"], ["wall_s", "time"], ["cost", "money"]];
const axisLabel = { samples: format.shortCount, wall_s: (value) => format.seconds(Math.round(value)), cost: format.money };

/* On paper what is folded is open. */
window.addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details:not([open])")) { details.open = true; details.classList.add("folded"); } });
window.addEventListener("afterprint", () => { for (const details of document.querySelectorAll("details.folded")) { details.open = false; details.classList.remove("folded"); } });

/* A document of a run that trains says of how much of the log it is (`offset`), and events go on coming while it is on
   its way. Those are kept here until it is there, so that it gets the ones that it lacks, and no other twice. */
class Arrivals {
  constructor() { this.events = []; this.numAwaited = 0; }

  add(event) { if (this.numAwaited) this.events.push(event); }

  /* What is asked for, and the events that came in the meantime. */
  async during(asked) {
    this.numAwaited += 1;
    try { return [await asked, this.events]; } finally { if (!(this.numAwaited -= 1)) this.events = []; }
  }
}

/* The columns of one run over one axis: all of it for the width of a chart, and more of what is zoomed into. */
class Series {
  constructor(source, over, arrivals) { this.source = source; this.over = over; this.arrivals = arrivals; this.base = null; this.detail = null; this.asked = 0; this.isThinning = false; }

  async load(scalars, price) {
    this.scalars = scalars;
    const [found, missed] = await this.arrivals.during(this.source.series({ over: this.over, px: PX, scalar: scalars }));
    this.base = found;
    this.detail = null;
    for (const event of missed) this.append(event, price);
  }

  async zoom(range, price) {
    if (!range) { this.detail = null; return true; }
    const [a, b] = range, width = b - a, mine = ++this.asked;
    if (this.detail && this.detail.from <= a && this.detail.to >= b && this.detail.to - this.detail.from < 8 * width) return false;
    const [found, missed] = await this.arrivals.during(this.source.series({ over: this.over, px: 3 * PX, from: a - width, to: b + width, scalar: this.scalars }));
    if (mine !== this.asked) return false;
    this.detail = { ...found, from: a - width, to: b + width };
    for (const event of missed) this.append(event, price);
    return true;
  }

  get shown() { return this.detail ?? this.base; }

  /* Whether there are many more points than pixels by now. */
  get isDense() { return this.base !== null && (this.base.progress.x.length > 5 * PX || Object.values(this.base.scalars).some(({ x }) => x.length > 6 * PX)); }

  /* Whether evaluations came before the first progress, which gives them their places on this axis. */
  get isUnplaced() { return this.base !== null && this.over !== "samples" && !this.base.evaluations && this.base.progress.x.length > 0; }

  /* An event that happened now: progress, an evaluation, or values of the job's own. */
  append(event, price) {
    for (const part of [this.base, this.detail]) {
      if (!part || event.offset <= part.offset) continue;
      part.offset = event.offset;
      const { x } = part.progress, newest = x[x.length - 1] ?? 0;
      if (event.kind === "progress") this.appendProgress(part, event, price);
      else if (event.kind === "evaluated" && part.evaluations) {
        for (const [name, value] of Object.entries(event.metrics)) (part.evaluations[`${event.split} ${name}`] ??= []).push([newest, value]);
      } else if (event.kind === "logged") {
        for (const [name, points] of Object.entries(event.scalars ?? {})) {
          const found = part.scalars[name];
          for (const [samples, y] of found ? points : []) {
            const at = this.over === "samples" ? samples : newest;
            if (at <= (part.to ?? Infinity) && !(at < found.x[found.x.length - 1])) { found.x.push(at); found.y.push(y); }
          }
        }
      }
    }
  }

  appendProgress(part, event, price) {
    const x = this.over === "samples" ? event.samples : this.over === "wall_s" ? event.wall_s : (event.wall_s / 3600) * (price ?? 0);
    const columns = part.progress, before = columns.x.length;
    if (x > (part.to ?? Infinity) || x < columns.x[before - 1]) return;
    columns.x.push(x);
    for (const name of ["loss", "lr", "grad_norm", "samples_per_s", "resident_bytes", "allocated_bytes"]) {
      if (typeof event[name] === "number") columns[name] ??= new Array(before).fill(null);
    }
    const split = event.split_s ?? {}, whole = Object.values(split).reduce((sum, one) => sum + one, 0);
    for (const [name, values] of Object.entries(columns)) {
      if (name === "x") continue;
      values.push(name === "waiting" ? (whole ? (split.data ?? 0) / whole : null) : typeof event[name] === "number" ? event[name] : null);
    }
    for (const [group, rate] of (event.lrs ?? []).entries()) {
      const line = (part.rates[group] ??= { x: [], y: [] });
      line.x.push(x); line.y.push(rate);
    }
  }
}

export const open = async (main, source) => {
  const { page } = source;
  let state = await source.state();
  let offset = state.offset, log = state.log, over = "samples", isClosed = false;  // where the stream of events is
  const price = () => row().price_per_h;
  const axis = new Axis((range) => { clearTimeout(zooming); zooming = setTimeout(async () => { if (await series.zoom(range, price())) draw(); }, 60); pictures(); });
  const arrivals = new Arrivals();
  let zooming = null, series = new Series(source, over, arrivals), drawing = null;
  const charts = new Map();
  const row = () => source.row() ?? state.row;
  const head = h("div", { class: "run-head" }), tiles = h("div", { class: "tiles live" }), plan = h("div"), notice = h("div");
  const grid = () => h("div", { class: "figures live" }), learning = grid(), running = grid(), own = grid(), axisChoice = h("div", { class: "chips", role: "group", "aria-label": "Axis of the charts" });
  const learningSection = section("Learning", axisChoice, learning), runningSection = section("Running", running);
  const ownSection = section("Logged", own), media = h("div"), timeline = h("div"), sections = h("div", { class: "sections", "aria-busy": "true" });
  const confusion = h("div"), events = h("ol", { class: "timeline" });

  const forecast = () => state.forecast ?? {};
  const marks = () => {
    const found = [];
    if (over === "samples") {
      for (const event of state.events) {
        if (event.samples && ["resumed", "replanned", "settled"].includes(event.kind)) found.push({ x: event.samples, colour: MARK_COLOURS[event.kind], label: MARK_LABELS[event.kind] });
      }
      if (row().state === "running") found.push({ x: row().total_samples, colour: "amber" });
    } else if (over === "wall_s" && forecast().total_s && row().status !== "finished") {
      found.push({ x: forecast().total_s[1], to: forecast().total_s[2], colour: "amber" });
    }
    return found;
  };
  const chart = (key, host, options) => {
    if (!charts.has(key)) {
      const made = new LineChart({ axis, marks, hasLegend: true, series: [], ...options });
      charts.set(key, made);
      host.append(made.element);
    }
    return charts.get(key);
  };
  const last = (values) => { for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index]; return null; };
  const extremes = (values) => { let low = Infinity, high = -Infinity; for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); } return [low, high]; };

  /* A ring round the best evaluation, which its position in samples identifies. */
  const bestOf = (measure, points, write) => {
    const value = state.best?.metrics[measure];
    if (typeof value !== "number" || measure === "loss") return [];
    for (const [name, along] of Object.entries(points)) {
      const index = name.split(" ").slice(1).join(" ") === measure ? (state.evaluations[name] ?? []).findIndex(([x, y]) => x === state.best.samples && y === value) : -1;
      if (index >= 0 && along[index]) return [{ x: along[index][0], y: value, label: `best ${write(value)}` }];
    }
    return [];
  };
  const draw = () => {
    drawing = null;
    if (isClosed || !series.shown) return;
    const { progress, scalars } = series.shown, all = series.base.progress;
    const points = over === "samples" ? state.evaluations : series.base.evaluations ?? {};
    const end = Math.max(all.x[all.x.length - 1] ?? 0, ...Object.values(points).map((values) => values[values.length - 1]?.[0] ?? 0));
    const expected = over === "samples" && row().status === "unfinished" ? row().total_samples : over === "wall_s" && row().status === "unfinished" ? forecast().total_s?.[2] ?? 0 : 0;
    axis.whole = [all.x.length && over !== "samples" ? Math.min(0, all.x[0]) : 0, Math.max(end, Math.min(expected, end * 3), 1e-9)];
    axis.label = axisLabel[over]; axis.name = over;
    const columns = (names) => names.map(([, x, y]) => [x, y]);
    const lines = (measure) => {
      const found = [];
      if (measure === "loss" && progress.loss) found.push(["train", progress.x, progress.loss]);
      for (const [name, values] of Object.entries(points)) {
        const [split, ...rest] = name.split(" ");
        if (rest.join(" ") === measure) found.push([split, values.map((one) => one[0]), values.map((one) => one[1])]);
      }
      return found;
    };
    const drawn = new Set();
    const measures = ["loss", ...new Set(Object.keys(points).map((name) => name.split(" ").slice(1).join(" ")).filter((name) => name !== "loss"))].slice(0, 100);
    for (const measure of measures) {
      const found = lines(measure).filter(([, , y]) => y.some((value) => value !== null));
      if (!found.length) continue;
      drawn.add(`metric ${measure}`);
      const isFraction = format.isFraction(measure) && found.every(([, , y]) => y.every((one) => one === null || (one >= 0 && one <= 1)));
      const made = chart(`metric ${measure}`, learning, { title: measure === "loss" ? "Loss" : measure.replaceAll("_", " ").replace(/^./, (one) => one.toUpperCase()), y: isFraction ? (value) => format.percent(value, 1) : format.number, isFraction, mayBeLogarithmic: measure === "loss" });
      made.set(joined(columns(found)), found.map(([label], index) => ({ label, colour: label === "train" ? "blue" : label === "test" ? "teal" : ["ember", "violet", "good"][(index + (found[0][0] === "train" ? 2 : 3)) % 3], points: label !== "train" })));
      const write = (value) => (isFraction ? format.percent(value, 2) : format.number(value));
      made.rings = bestOf(measure, points, write);
      made.caption = [...found.map(([label, , y]) => (measure !== "loss" || y.length < 2 ? `${label} ${write(last(y))}` : label === "train" ? `train ${write(y.find((value) => value !== null))} to ${write(last(y))}` : `${label} ${write(last(y))}${last(y) > extremes(y)[0] ? `, lowest ${write(extremes(y)[0])}` : ""}`)),
        ...made.rings.map(({ label }) => `${label} at ${format.count(state.best.samples)} samples`), ...(made.isLogarithmic() ? ["logarithmic"] : [])].join(" · ");
    }
    for (const [key, made] of charts) if (key.startsWith("metric ")) made.element.hidden = !drawn.has(key);  // of another axis
    const one = (key, host, title, name, options, words) => {
      if (!progress[name]?.some((value) => value !== null)) return;
      const made = chart(key, host, { title, ...options });
      made.bands = options.bands ?? [];
      made.set([progress.x, progress[name]], [{ label: title.toLowerCase(), colour: options.colour ?? "blue" }]);
      made.caption = words(all[name]);
    };
    const rate = forecast().samples_per_s, memory = forecast().peak_bytes;
    const isNarrow = (estimate) => estimate && estimate[2] < 4 * estimate[1];  // a wide band would flatten the curve
    one("rate", running, "Throughput", "samples_per_s", { y: (value) => format.shortCount(value), isFromZero: true, bands: isNarrow(rate) ? [{ low: rate[1], high: rate[2], value: rate[0] }] : [] },
      (values) => `last ${format.rate(last(values))}${rate ? `; forecast ${format.shortCount(rate[1])} to ${format.shortCount(rate[2])}${isNarrow(rate) ? "" : ", too wide to draw"}` : ""}`);
    const [memoryTitle, memoryColumn] = all.allocated_bytes ? ["Memory of the device", "allocated_bytes"] : ["Memory", "resident_bytes"];  // as the forecast counts it
    one("memory", running, memoryTitle, memoryColumn, { y: format.bytes, isFromZero: true, bands: isNarrow(memory) ? [{ low: memory[1], high: memory[2], value: memory[0] }] : [] },
      (values) => `highest ${format.bytes(extremes(values)[1])}${memory ? `; forecast ${format.bytes(memory[0])}` : ""}`);
    one("waiting", running, "Waiting for data", "waiting", { y: (value) => format.percent(value, 1), isFromZero: true, isFraction: true, colour: "violet" }, (values) => `last ${format.percent(last(values), 1)} of the training time`);
    one("lr", running, "Learning rate", "lr", { isFromZero: true, colour: "teal" }, (values) => `highest ${format.number(extremes(values)[1])}, last ${format.number(last(values))}`);
    const groups = series.shown.rates.filter((group) => group.x.length);
    if (groups.length) {
      const made = chart("groups", running, { title: "Learning rates by group", isFromZero: true });
      made.set(joined(groups.map((group) => [group.x, group.y])), groups.map((_, index) => ({ label: `group ${index}`, colour: COLOURS[index % COLOURS.length] })));
      made.caption = format.plural(groups.length, "group of parameters", "groups of parameters");
    }
    one("norm", running, "Gradient norm", "grad_norm", { isFromZero: true, colour: "violet" }, (values) => `before clipping, of one update each; highest ${format.number(extremes(values)[1])}, last ${format.number(last(values))}`);
    for (const [index, name] of state.scalars.slice(0, 60).entries()) {
      const found = scalars[name];
      if (!found) continue;
      const made = chart(`own ${name}`, own, { title: name });
      made.set([found.x, found.y], [{ label: name, colour: COLOURS[index % COLOURS.length] }]);
      made.caption = `last ${format.number(last(found.y))}`;
    }
    learningSection.hidden = !learning.children.length;
    runningSection.hidden = !running.children.length;
    ownSection.hidden = !state.scalars.length && !state.images.length && !state.texts.length;
    for (const made of charts.values()) made.axis.draw();
    main.dataset.drawn = String(all.x.length);
  };
  const soon = () => { drawing ??= setTimeout(draw, 20); };

  const loadSeries = async () => {
    await series.load(state.scalars.slice(0, 60), price());
    draw();
  };

  /* ----------------------------------------------------------------------------------------------------- the head */
  const showHead = () => {
    const now = row(), found = format.metricOf(now);
    document.title = `${now.name} · Stoker`;
    replace(head,
      h("div", { class: "title" }, h("h1", {}, now.name), pill(now), (now.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)), page?.links(now)),
      now.note && h("p", { class: "note" }, now.note),
      h("div", { class: "hero" },
        h("div", { class: "result" }, h("p", { class: "label" }, found ? found[0].replace("/", " ") : "done"), h("p", { class: "big" }, found ? format.metric(...found) : format.percent(now.total_samples ? now.samples / now.total_samples : 0)),
          h("div", { class: "progress wide", title: format.percent(now.samples / (now.total_samples || 1), 1) }, h("i", { class: now.state, style: { width: `${(100 * Math.min(1, now.samples / (now.total_samples || 1))).toFixed(2)}%` } })),
          h("p", { class: "note" }, `${format.count(now.samples)} of ${format.count(now.total_samples)} samples`), (state.notes ?? []).map((note) => h("p", { class: "note" }, note))), tiles));
    showTiles();
    const last = state.events.findLast((event) => ["started", "stopped", "finished"].includes(event.kind));
    const isAway = now.status === "unfinished" && (!page || now.state === "stopped");
    const saved = state.saved && h("p", {}, `The last checkpoint holds ${format.count(state.saved)} samples; the same command continues from there.`);
    replace(notice, now.status === "failed" && h("aside", { class: "notice failed" }, h("h2", {}, `Training failed at ${format.count(now.samples)} samples`), h("pre", {}, now.failure || "no reason was recorded"), saved),
      page && now.state === "pruned" && h("aside", { class: "notice" }, h("h2", {}, "Its study ended this trial early"), h("p", {}, `${now.trial.reason}: others were better by then. ${format.count(now.samples)} of ${format.count(now.total_samples)} samples are done.`)),
      page && now.state === "handed on" && h("aside", { class: "notice" }, h("h2", {}, "This trial's interval is over"), h("p", {}, "Another trial of the population goes on from its weights.")),
      isAway && h("aside", { class: "notice" }, h("h2", {}, `${format.count(now.samples)} of ${format.count(now.total_samples)} samples are done`), last?.kind === "stopped" ? h("p", {}, last.text) : page && h("p", {}, now.launch ? "Its place has not said why: it may train on if the place does not answer." : state.is_whole ? "Its process is gone and has not said why: it was killed, or its machine went down." : ""), saved),
      now.has_nan && h("aside", { class: "notice failed" }, h("h2", {}, "The loss is not a number")),
      now.state === "stalled" && h("aside", { class: "notice" }, h("h2", {}, "Nothing was heard for a while"), h("p", {}, "Its process holds the run and writes nothing; a hang is broken off by its own watchdog.")),
      now.problem && h("aside", { class: "notice failed" }, h("h2", {}, "This run cannot be read"), h("pre", {}, now.problem)),
      state.num_damaged > 0 && h("aside", { class: "notice" }, h("p", {}, `${format.plural(state.num_damaged, "line")} of its log cannot be read and ${state.num_damaged === 1 ? "is" : "are"} left out.`)));
    const current = state.plans[state.plans.length - 1];
    replace(plan, current && h("p", { class: "choices" }, current.plan.split(" · ").map((word) => h("span", {}, word))), now.trying && h("p", { class: "note" }, `trying plans: ${now.trying}`));
  };
  const showTiles = () => {
    const now = row(), passed = now.state === "running" && now.received_s ? performance.now() / 1000 - now.received_s : 0;
    const list = [];
    const total = forecast().total_s;
    if (now.status === "unfinished" && now.eta_s) {
      const [value, low, high, basis] = now.eta_s.map((one) => (typeof one === "number" ? Math.max(0, one - passed) : one));
      list.push(tile("time to go", format.seconds(value), low < high ? `${format.seconds(low)} to ${format.seconds(high)} in 8 cases of 10, by ${basis}` : `by ${basis}`));
    }
    list.push(tile("time", format.seconds(now.wall_s + (now.state === "running" ? passed : 0)), total ? `forecast ${format.withInterval(...total)}` : ""));
    if (now.price_per_h) {
      const left = now.eta_s ? (now.eta_s[0] / 3600) * now.price_per_h : 0;
      list.push(tile("cost", format.money(now.cost_usd), `${left ? `${format.money(left)} to go, ` : ""}at ${format.money(now.price_per_h)} an hour${now.launch?.max_cost ? `, at most ${format.money(now.launch.max_cost)}` : ""}`, now.launch?.max_cost && now.cost_usd > now.launch.max_cost ? "over" : ""));
    } else if (page) list.push(tile("cost", "none", "no price is known for this device"));
    const speed = forecast().samples_per_s;
    list.push(tile("throughput", format.rate(now.samples_per_s), speed ? `forecast ${format.shortCount(speed[1])} to ${format.shortCount(speed[2])}` : ""));
    const peak = forecast().peak_bytes;
    const [memoryLabel, memoryBytes] = typeof now.allocated_bytes === "number" ? ["memory of the device", now.allocated_bytes] : ["memory", now.resident_bytes];
    list.push(tile(memoryLabel, format.bytes(memoryBytes), peak ? `forecast peak ${format.bytes(peak[0])}` : ""));
    const wasted = state.superseded_s && now.wall_s ? `; ${format.percent(state.superseded_s / (now.wall_s + state.superseded_s), 1)} done again after stops` : "";
    list.push(tile("waiting", format.percent(now.waiting, 1), `of the time, for data${wasted}`, now.waiting > 0.2 ? "over" : ""));
    list.push(tile("device", now.launch?.place ?? now.device ?? "", now.launch ? `${now.launch.phase}: ${now.launch.why}` : state.machine ?? (now.at ? `${now.status === "finished" ? "ended" : "heard"} ${format.ago(now.at)}` : "")));
    replace(tiles, list);
  };

  /* ------------------------------------------------------------------------------------------ what happened, by clock */
  const showTimeline = () => {
    const spans = state.spans, dots = state.events.filter((event) => MARK_COLOURS[event.kind] && !["started", "warned"].includes(event.kind));
    const begins = spans.map((span) => span[0]).concat(dots.map((one) => one.at));
    if (!begins.length) return replace(timeline);
    const now = row().state === "running" ? Date.now() / 1000 : 0;
    const low = Math.min(...begins), high = Math.max(now, ...spans.map((span) => span[1]), ...dots.map((one) => one.at), low + 1);
    const width = 1000, x = (at) => ((Math.min(Math.max(at, low), high) - low) / (high - low)) * width;
    const shownSpans = spans.map((span) => (span[2] === "training" && now && span === [...spans].reverse().find((one) => one[2] === "training") ? [span[0], now, span[2]] : span));
    const words = `From ${format.clock(low)} over ${format.seconds(high - low)}: ${format.plural(shownSpans.filter((one) => one[2] === "training").length, "stretch", "stretches")} of training, ${format.plural(dots.filter((one) => one.kind === "resumed").length, "resume")}`;
    replace(timeline, section("By the clock",
      svg("svg", { class: "clock", viewBox: `0 0 ${width} 44`, preserveAspectRatio: "none", role: "img", "aria-label": words },
        svg("rect", { class: "room", x: 0, y: 10, width, height: 20, rx: 3 }),
        shownSpans.map(([from, to, what]) => svg("rect", { x: x(from), y: what === "evaluation" ? 10 : 14, width: Math.max(1.2, x(to) - x(from)), height: what === "evaluation" ? 20 : 12, fill: `var(--${SPAN_COLOURS[what]})` }, svg("title", {}, document.createTextNode(`${what}: ${format.seconds(to - from)}`)))),
        dots.map((event) => svg("line", { x1: x(event.at), x2: x(event.at), y1: 4, y2: 36, stroke: `var(--${MARK_COLOURS[event.kind]})`, "stroke-width": 2.5, "vector-effect": "non-scaling-stroke" }, svg("title", {}, document.createTextNode(event.text))))),
      h("p", { class: "ends" }, h("span", {}, format.clock(low)), h("span", {}, format.seconds(high - low)), h("span", {}, now ? "now" : format.clock(high))),
      h("ul", { class: "keys inline" }, [["planning", "amber"], ["training", "ember"], ["evaluation", "teal"], ["plan settled, finished", "good"], ["another plan", "violet"], ["stopped", "bad"]].map(([text, name]) => h("li", {}, h("i", { class: "swatch", style: { background: `var(--${name})` } }), text)))));
  };
  const showEvents = () => replace(events, [...state.events].reverse().slice(0, 200).map((event) => h("li", { class: event.kind }, h("time", { title: format.clock(event.at) }, format.clock(event.at).slice(11)), h("span", {}, event.text))));

  /* --------------------------------------------------------------------------------------------- pictures and texts */
  let shownAt = null;
  const pictures = () => {
    if (!state.images.length && !state.texts.length) return replace(media);
    const positions = [...new Set([...state.images, ...state.texts].map((one) => one[1]))].sort((a, b) => a - b);
    const at = shownAt !== null && positions.includes(shownAt) ? shownAt : positions[positions.length - 1];
    const slider = h("input", { type: "range", min: "0", max: String(positions.length - 1), "aria-label": "Position of pictures and texts", "aria-valuetext": `${format.count(at)} samples` });
    slider.value = String(positions.indexOf(at));
    slider.addEventListener("input", () => { shownAt = positions[slider.value]; draw_(); });
    const label = h("span", { class: "note" }), grid = h("div", { class: "samples" }), words = h("div", { class: "texts" });
    const draw_ = () => {
      const position = shownAt ?? at;
      label.textContent = `at ${format.count(position)} samples, ${positions.indexOf(position) + 1} of ${positions.length}`;
      slider.setAttribute("aria-valuetext", `${format.count(position)} samples`);
      replace(grid, state.images.filter((one) => one[1] === position).map(([name, , file]) => h("figure", { class: "sample" }, h("img", { src: source.picture(file), alt: `${name} at ${format.count(position)} samples`, loading: "lazy" }), h("b", {}, name))));
      replace(words, state.texts.filter((one) => one[1] === position).map(([name, , text]) => h("figure", {}, h("figcaption", {}, h("b", {}, name)), h("pre", {}, text))));
    };
    draw_();
    slider.hidden = positions.length < 2;
    replace(media, h("div", { class: "slide" }, slider, label), grid, words);
  };

  const showConfusion = async () => {
    const matrices = await source.confusion();
    replace(confusion, matrices.map(({ split, counts, classes, words }) => {
      const totals = counts.map((line) => line.reduce((sum, one) => sum + one, 0) || 1);
      return section(`Confusion, ${split}`, h("p", { class: "note" }, words), h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": `Confusion, ${split}` }, h("table", { class: "confusion" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "wanted ↓ found →"), classes.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, counts.map((line, index) => h("tr", {}, h("th", { scope: "row" }, classes[index]), line.map((cell, column) => h("td", { style: { "--share": (cell / totals[index]).toFixed(3) }, class: `${cell / totals[index] > 0.5 ? "strong" : ""}`, title: `${cell} of ${classes[index]} taken for ${classes[column]} (${format.percent(cell / totals[index], 1)})` }, cell ? format.count(cell) : ""))))))));
    }));
  };
  const showSections = async () => {
    if (!page) return;
    try {
      const content = await page.sections();
      if (isClosed) return;
      content.querySelector(".timeline")?.closest("section").remove();  // what happened stands below, and goes on there
      for (const part of content.querySelectorAll(".scroll")) { part.tabIndex = 0; part.setAttribute("role", "region"); part.setAttribute("aria-label", part.closest("section")?.querySelector("h2")?.textContent ?? "table"); }
      const isOpen = [...sections.querySelectorAll("details")].map((one) => one.open);
      sections.replaceChildren(content);
      [...sections.querySelectorAll("details")].forEach((one, index) => { one.open = isOpen[index] ?? false; });
      sections.removeAttribute("aria-busy");
      sectionsAt = Date.now();
    } catch (error) {
      if (!isClosed && state.is_whole) replace(sections, h("p", { class: "note" }, `The report's sections cannot be shown: ${error.message}`));
    }
  };
  let sectionsAt = 0, again = null, sectionsDue = null;
  const refetch = (wait_ms = 250) => { clearTimeout(again); again = setTimeout(async () => {
    try {
      const [found, missed] = await arrivals.during(source.state());
      state = found;
      for (const event of missed) note(event);
      await series.load(state.scalars.slice(0, 60), price());
    } catch (error) {
      if (!isClosed && !error.status) refetch(Math.min(2 * wait_ms, 15000));  // the server is away
      return;
    }
    if (isClosed) return;
    showHead(); showTimeline(); showEvents(); pictures(); draw();
    await showSections();
  }, wait_ms); };
  const sectionsSoon = () => { clearTimeout(sectionsDue); sectionsDue = setTimeout(showSections, Math.max(1500, sectionsAt + 15000 - Date.now())); };
  const thin = async () => {
    series.isThinning = true;
    try { await series.load(state.scalars.slice(0, 60), price()); } catch { /* the next event asks again */ } finally { series.isThinning = false; }
    soon();
  };

  /* What an event adds to the state, unless that has it. */
  const note = (event) => {
    if (event.offset <= state.offset) return;
    state.offset = event.offset;
    if (event.kind === "progress") {
      const span = state.spans.findLast((one) => one[2] === "training");
      if (span) span[1] = Math.max(span[1], event.at);
      for (const name of ["samples", "samples_per_s", "resident_bytes", "allocated_bytes"]) if (typeof event[name] === "number") row()[name] = event[name];  // rows come more rarely
      return;
    }
    if (event.kind !== "logged" && event.kind !== "checkpointed") { state.events.push(event); if (state.events.length > 400) state.events.splice(40, 1); }
    if (event.kind !== "evaluated") return;
    for (const [name, value] of Object.entries(event.metrics)) {
      const points = (state.evaluations[`${event.split} ${name}`] ??= []);
      while (points.length && points[points.length - 1][0] >= event.samples) points.pop();
      points.push([event.samples, value]);
    }
    if (event.is_best) state.best = { samples: event.samples, metrics: event.metrics };
    state.spans.push([event.at - (event.took_s ?? 0), event.at, "evaluation"]);
  };

  const take = (event) => {
    if (event.offset <= offset) return;
    offset = event.offset;
    main.dataset.offset = String(offset);
    arrivals.add(event);
    note(event);
    series.append(event, price());
    if ((series.isDense || series.isUnplaced) && !series.isThinning) thin();
    soon();
    if (event.kind === "progress") return;
    if (event.kind !== "logged" && event.kind !== "checkpointed") showEvents();
    if (event.kind === "logged" && (event.has_media || Object.keys(event.scalars ?? {}).some((name) => !state.scalars.includes(name)))) refetch();
    if (["resumed", "settled", "replanned", "finished", "stopped", "started", "planned"].includes(event.kind)) refetch();
    if (event.kind === "finished") setTimeout(showConfusion, 2500);
    if (["settled", "replanned", "recovered", "finished", "stopped"].includes(event.kind)) sectionsSoon();
    showTimeline();
  };

  /* ------------------------------------------------------------------------------------------------------- the page */
  const chooseAxis = async (name) => {
    over = name;
    axis.range = null;
    series = new Series(source, over, arrivals);
    replace(axisChoice, h("span", { class: "note" }, "over"), AXES.filter(([one]) => one !== "cost" || row().price_per_h).map(([one, text]) => h("button", { class: "chip", "aria-pressed": String(one === over), onclick: () => chooseAxis(one) }, text)),
      h("span", { class: "note hint" }, "drag: zoom · shift-drag: pan · double click: all · keys: arrows + − 0"));
    await loadSeries();
  };
  if (state.row.problem && state.row.status === "unreadable") return page.gone(state.row);
  const parts = [learningSection, runningSection, ownSection, timeline, confusion];
  if (page) {
    main.className = "wide";
    replace(main, head, notice, plan, parts, sections, section("Events", h("div", { class: "log", role: "log", "aria-label": "Events, the newest first", tabIndex: 0 }, events)));
  } else replace(main, head, notice, parts);
  ownSection.append(media);
  showHead(); showTimeline(); showEvents(); pictures();
  await chooseAxis("samples");
  page?.follow(() => ({ from: offset, log }), {
    row: showHead,
    removed: () => replace(notice, h("aside", { class: "notice failed" }, h("h2", {}, "This run's directory is gone"), h("p", {}, "It was moved or removed; what is shown is what was known."))),
    event: take,
    refetch: (found) => { log = found.log; offset = found.offset; refetch(); },
  });
  showSections().then(showConfusion).catch(() => {});
  const ticking = setInterval(() => { if (page && row().state === "running") showTiles(); }, 1000);
  return { close: () => { isClosed = true; clearInterval(ticking); clearTimeout(again); clearTimeout(sectionsDue); for (const made of charts.values()) made.destroy(); main.className = ""; } };
};

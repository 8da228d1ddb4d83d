/* Line charts over one shared axis: drag to zoom, shift-drag or arrow keys to pan, wheel or + and - to zoom, 0 for all. */

import uPlot from "./vendor/uPlot.js";
import { h, replace } from "./dom.js";
import * as format from "./format.js";

export const COLOURS = ["blue", "ember", "teal", "violet", "amber", "good", "bad", "grey"];

let styles = null;
export const colour = (name) => (styles ??= getComputedStyle(document.documentElement)).getPropertyValue(`--${name}`).trim();
const charts = new Set();
const repaint = () => { styles = null; for (const chart of charts) chart.rebuild(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.addEventListener("themechange", repaint);

/* On paper charts are light, fit one of two columns, and have twice the pixels; style sheets halve them again. */
const PAPER = { width: 300, height: 180, scale: 2 };
let paper = null, themeBefore;
const print = (isPrinting) => {
  const { dataset } = document.documentElement;
  if (isPrinting) [themeBefore, dataset.theme] = [dataset.theme, "light"];
  else if (themeBefore === undefined) delete dataset.theme;
  else dataset.theme = themeBefore;
  paper = isPrinting ? PAPER : null;
  repaint();
};
window.addEventListener("beforeprint", () => print(true));
window.addEventListener("afterprint", () => print(false));

const onScreen = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting } of changes) target.chart.show(isIntersecting);
}, { rootMargin: "120px" });
const resized = new ResizeObserver((changes) => {
  for (const { target } of changes) target.chart.resize();
});

/* Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten; over many decades the powers alone, then some of them.
   uPlot's own never end where the axis begins a little below a power of ten. */
const logTicks = (low, high) => {
  const first = Math.floor(Math.log10(low)), last = Math.floor(Math.log10(high)), ticks = [];
  const parts = last - first < 4 ? [1, 2, 5] : [1], step = Math.ceil((last - first + 1) / 8);
  for (let power = first; power <= last; power += step) ticks.push(...parts.map((part) => Number(`${part}e${power}`)));
  return ticks.filter((tick) => low <= tick && tick <= high);
};
/* Whether a column has one value, which no line can show. */
const isAlone = (values) => { let n = 0; for (const value of values) if (value !== null && value !== undefined && (n += 1) > 1) return false; return n === 1; };
/* Steps of an axis in bytes. */
const BINARY = Array.from({ length: 44 }, (_, power) => 2 ** power);

/* The stretch of the axis that several charts show; null ends are all there is. `space` is that of long labels [pixels]. */
export class Axis {
  constructor(onChange) { this.charts = new Set(); this.range = null; this.whole = [0, 1]; this.onChange = onChange; this.label = format.shortCount; this.name = "samples"; this.space = 0; }

  get shown() { return this.range ?? this.whole; }

  set(range) {
    if (range) {
      const [low, high] = this.whole, width = Math.min(high - low, Math.max(range[1] - range[0], (high - low) * 1e-7));
      const start = Math.min(Math.max(low, range[0]), high - width);
      range = width >= (high - low) * 0.999 ? null : [start, start + width];
    }
    this.range = range;
    this.draw();
    this.onChange?.(range);
  }

  pan(share) { const [a, b] = this.shown; this.set([a + share * (b - a), b + share * (b - a)]); }

  zoom(factor, at = 0.5) {
    const [a, b] = this.shown, centre = a + at * (b - a);
    this.set([centre - (centre - a) * factor, centre + (b - centre) * factor]);
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      for (const chart of this.charts) chart.draw();
    });
  }
}

/* options: title, words, axis, y (format of a value), series [{label, colour, width, points, dash}], isFromZero,
   bands [{low, high, value}] across, marks() [{x, colour, label, to}] upright, rings [{x, y, label}], hasLegend. */
export class LineChart {
  constructor(options) {
    Object.assign(this, { y: format.number, bands: [], rings: [], marks: () => [], ...options });
    this.data = [[]];
    this.readout = h("span", {}, this.words ?? "");
    this.host = h("div", { class: "plot live", tabIndex: 0, role: "img", "aria-label": `${this.title}: ${this.words ?? ""}` });
    this.host.chart = this;
    this.legend = this.hasLegend && h("p", { class: "legend" });
    this.element = h("figure", {}, h("figcaption", {}, h("b", {}, this.title), this.readout), this.legend, this.host);
    this.host.addEventListener("keydown", (event) => this.key(event));
    this.host.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.axis.charts.add(this);
    charts.add(this);
    onScreen.observe(this.host);
    resized.observe(this.host);
  }

  set caption(words) {
    if (this.words === words) return;
    this.words = words;
    this.host.setAttribute("aria-label", `${this.title}: ${words}`);
    if (!this.isPointed) this.readout.textContent = words;
  }

  show(isVisible) {
    this.isVisible = isVisible;
    if (isVisible && this.isStale) this.draw();
  }

  /* data: uPlot's aligned columns, x first. */
  set(data, series = this.series) {
    const isOther = series.length !== this.series.length || series.some((one, index) => one.label !== this.series[index].label);
    this.data = data;
    this.series = series;
    this.hasNew = true;
    if (this.legend && (isOther || !this.legend.childElementCount)) {
      this.legend.hidden = series.length < 2;
      replace(this.legend, series.map((one) => h("span", {}, h("i", { class: "swatch", style: { background: `var(--${one.colour})` } }), one.label)));
    }
    if (isOther || this.isLogarithmic() !== this.wasLogarithmic) this.rebuild();
    this.axis.draw();
  }

  get extent() {
    let low = Infinity, high = -Infinity;
    for (const column of this.data.slice(1)) for (const value of column) if (value !== null && value !== undefined) { if (value < low) low = value; if (value > high) high = value; }
    return [low, high];
  }

  isLogarithmic() {
    if (!this.mayBeLogarithmic) return false;
    const [low, high] = this.extent;
    return low > 0 && high > 6 * low;
  }

  get hasContent() { return this.data[0].length || this.bands.length; }

  get scale() { return paper?.scale ?? 1; }

  get size() {
    return paper ? { width: paper.width * paper.scale, height: paper.height * paper.scale } : { width: Math.max(80, this.host.clientWidth), height: Math.max(80, this.host.clientHeight) };
  }

  build() {
    const line = colour("line"), grid = colour("grid"), muted = colour("muted"), { scale } = this, font = `${12 * scale}px system-ui, sans-serif`;
    const isLog = (this.wasLogarithmic = this.isLogarithmic());
    const limits = (u, low, high) => {
      if (isLog) { const [least, most] = low > 0 ? [low, high] : this.extent; return [least * 0.92, most * 1.08]; }
      for (const band of this.bands) { if (band.isWithin !== false) { low = Math.min(low, band.low ?? low); high = Math.max(high, band.high ?? high); } }
      if (this.isFraction) return [this.isFromZero ? 0 : Math.max(0, low - (high - low) * 0.06 - 0.002), Math.min(1, high + (high - low) * 0.06 + 0.002)];
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      return [this.isFromZero ? Math.min(0, low) : low - pad, high + pad];
    };
    this.plot = new uPlot({
      ...this.size, padding: [8 * scale, (this.axis.space ? 32 : 12) * scale, 0, 0], legend: { show: false }, select: { show: true },
      cursor: { sync: { key: this.axis.key ?? "run" }, drag: { x: true, y: false, setScale: false, dist: 5 }, points: { size: 7, width: 1.5 } },
      scales: { x: { time: false, auto: false, range: () => this.axis.shown }, y: { distr: isLog ? 3 : 1, range: limits } },
      axes: [
        { stroke: muted, font, size: 30 * scale, ticks: { stroke: line, size: 4 * scale, width: scale }, grid: { show: false }, values: (_, ticks) => ticks.map(this.axis.label).map((text, index, all) => (text === all[index - 1] ? "" : text)), space: (this.axis.space || 64) * scale },
        { stroke: muted, font, size: (u, values) => scale * (16 + 7 * Math.max(3, ...(values ?? []).map((one) => (one ?? "").length))), ticks: { show: false }, grid: { stroke: grid, width: scale },
          values: (_, ticks) => ticks.map((tick) => (tick === null ? null : this.y(tick))), space: 34 * scale, ...(this.y === format.bytes ? { incrs: BINARY } : {}),
          splits: isLog ? (u, axis, low, high) => logTicks(low, high) : undefined,
          filter: isLog ? (u, ticks) => ticks : undefined },
      ],
      series: [{}, ...this.series.map((one) => ({
        label: one.label, stroke: colour(one.colour), width: (one.width ?? 1.6) * scale, spanGaps: true, dash: one.dash,
        points: { show: one.points ? (u, index, a, b) => b - a < 300 : (u, index) => isAlone(u.data[index]), size: 6 * scale, fill: colour("surface") },
      }))],
      hooks: {
        drawClear: [(u) => this.drawBands(u)],
        draw: [(u) => this.drawMarks(u)],
        setCursor: [(u) => this.point(u)],
        setSelect: [(u) => {
          if (u.select.width > 4) this.axis.set([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, this.data, this.host);
    this.plot.over.addEventListener("dblclick", () => this.axis.set(null));
    this.plot.over.addEventListener("pointerdown", (event) => this.startPan(event), true);
    this.hasNew = false;
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (!paper) this.axis.draw();
    else if (this.hasContent) this.build();  // at once: on the screen or not, and before the frame that is printed
  }

  resize() {
    if (this.plot && this.host.clientWidth && !paper) this.plot.setSize(this.size);
  }

  draw() {
    if (paper) return;
    if (!this.isVisible || !this.host.isConnected) { this.isStale = true; return; }
    this.isStale = false;
    if (!this.plot) return this.hasContent ? this.build() : undefined;
    const [min, max] = this.axis.shown;
    this.plot.batch(() => {
      if (this.hasNew) this.plot.setData(this.data, false);
      this.hasNew = false;
      this.plot.setScale("x", { min, max });
    });
  }

  drawBands(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    for (const band of this.bands) {
      const y1 = u.valToPos(band.high, "y", true), y2 = u.valToPos(band.low, "y", true);
      ctx.globalAlpha = 0.16; ctx.fillStyle = colour("amber"); ctx.fillRect(left, y1, width, Math.max(1, y2 - y1));
      if (band.value !== undefined) {
        const y = u.valToPos(band.value, "y", true);
        ctx.globalAlpha = 0.9; ctx.strokeStyle = colour("amber"); ctx.setLineDash([6, 5]); ctx.lineWidth = devicePixelRatio * this.scale;
        ctx.beginPath(); ctx.moveTo(left, y); ctx.lineTo(left + width, y); ctx.stroke();
      }
    }
    ctx.restore();
  }

  drawMarks(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    const pixel = devicePixelRatio * this.scale;
    let labelled = -Infinity;
    ctx.font = `${11 * pixel}px system-ui, sans-serif`;
    for (const mark of this.marks()) {
      const x = u.valToPos(mark.x, "x", true);
      if (mark.to !== undefined) {
        const end = u.valToPos(mark.to, "x", true);
        ctx.globalAlpha = 0.14; ctx.fillStyle = colour(mark.colour); ctx.fillRect(x, top, Math.max(1, end - x), height);
        continue;
      }
      if (x < left || x > left + width) continue;
      ctx.globalAlpha = 0.85; ctx.strokeStyle = colour(mark.colour); ctx.lineWidth = pixel; ctx.setLineDash(mark.dash ?? [2 * pixel, 3 * pixel]);
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      const room = mark.label ? ctx.measureText(mark.label).width + 8 * pixel : Infinity;
      if (x > labelled && x + room < left + width) {
        ctx.globalAlpha = 1; ctx.fillStyle = colour("muted"); ctx.textAlign = "left"; ctx.fillText(mark.label, x + 4 * pixel, top + 11 * pixel);
        labelled = x + room;
      }
    }
    ctx.restore();
    ctx.save();
    ctx.font = `${12 * pixel}px system-ui, sans-serif`;
    for (const ring of this.rings) {
      const x = u.valToPos(ring.x, "x", true), y = u.valToPos(ring.y, "y", true), isLate = x > left + 0.6 * width;
      if (x < left || x > left + width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour("good"); ctx.lineWidth = 2.5 * pixel; ctx.setLineDash([]);
      ctx.beginPath(); ctx.arc(x, y, 7 * pixel, 0, 2 * Math.PI); ctx.stroke();
      ctx.textAlign = isLate ? "right" : "left"; ctx.fillText(ring.label, x, y + (y > top + 0.8 * height ? -14 : 24) * pixel);
    }
    ctx.restore();
  }

  point(u) {
    const index = u.cursor.idx;
    this.isPointed = index !== null && index !== undefined && u.cursor.left >= 0;
    if (!this.isPointed) { this.readout.textContent = this.words ?? ""; return; }
    const x = u.data[0][index];
    const values = this.series.map((one, number) => {
      const column = u.data[number + 1];
      let at = index;
      while (at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
      const value = column[at];
      return value === null || value === undefined ? null : `${one.label} ${this.y(value)}`;
    });
    this.readout.textContent = [`${this.axis.label(x)}${this.axis.name === "samples" ? " samples" : ""}`, ...values.filter(Boolean)].join(" · ");
  }

  startPan(event) {
    if (!event.shiftKey && event.button !== 1 && event.pointerType !== "touch") return;
    event.stopImmediatePropagation();
    event.preventDefault();
    const begun = event.clientX, [a, b] = this.axis.shown, width = this.plot.over.clientWidth;
    const move = (one) => { const by = ((begun - one.clientX) / width) * (b - a); this.axis.set([a + by, b + by]); };
    const end = () => { window.removeEventListener("pointermove", move); window.removeEventListener("pointerup", end); };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this.host) return;
    event.preventDefault();
    const box = this.plot?.over.getBoundingClientRect();
    if (!box) return;
    if (event.shiftKey) this.axis.pan((event.deltaX || event.deltaY) / 1000);
    else this.axis.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.axis.pan(-0.1), ArrowRight: () => this.axis.pan(0.1), "+": () => this.axis.zoom(1 / 1.5),
      "=": () => this.axis.zoom(1 / 1.5), "-": () => this.axis.zoom(1.5), 0: () => this.axis.set(null), Escape: () => this.axis.set(null),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }

  destroy() {
    this.plot?.destroy();
    onScreen.unobserve(this.host); resized.unobserve(this.host);
    this.axis.charts.delete(this); charts.delete(this);
  }
}

export const joined = (tables) => uPlot.join(tables.map((columns) => (columns[0].length ? columns : [[], ...columns.slice(1).map(() => [])])));

"use strict";
/* Draws the figures, repaints them when the browser turns dark or light, and prints them light. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { displayModeBar: false, displaylogo: false };

  const painted = (value, colours) => {
    if (typeof value === "string") return colours[value] || value;
    if (Array.isArray(value)) return value.map((item) => painted(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, colours)]));
  };

  /* Sizes [CSS pixels] of a figure on A4 or Letter paper, by the number of columns it stands in. */
  const paper = { n1: { width: 640, height: 190 }, n2: { width: 304, height: 190 }, n3: { width: 190, height: 150 } };

  const paperSize = (plot) => {
    const columns = Object.keys(paper).find((name) => plot.closest(`.${name}`));
    return { ...paper[columns], autosize: false };
  };

  const draw = (isDark, isPaper = false) => {
    const colours = isDark ? data.dark : {};
    for (const [key, figure] of Object.entries(data.figures)) {
      const { data: traces, layout } = painted(figure, colours);
      const plot = document.getElementById(key);
      Plotly.react(plot, traces, isPaper ? { ...layout, ...paperSize(plot) } : { ...layout, autosize: true }, config);
    }
  };

  draw(darkness.matches);

  /* A figure is as wide as its card, whatever changes that: the window, a scroll bar, zoom; on paper it has its own. */
  let isPrinting = false;
  const fitting = new ResizeObserver((changes) => {
    for (const { target } of isPrinting ? [] : changes) Plotly.relayout(target, { autosize: true });
  });
  for (const key of Object.keys(data.figures)) fitting.observe(document.getElementById(key));

  darkness.addEventListener("change", (change) => draw(change.matches));

  /* On paper a figure fits its column, and what is folded is open. */
  window.addEventListener("beforeprint", () => {
    isPrinting = true;
    draw(false, true);
    for (const svg of document.querySelectorAll(".plot .main-svg")) {
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
    }
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.classList.add("folded");
    }
  });
  window.addEventListener("afterprint", () => {
    for (const svg of document.querySelectorAll(".plot .main-svg")) svg.removeAttribute("viewBox");
    for (const details of document.querySelectorAll("details.folded")) details.open = false;
    isPrinting = false;
    draw(darkness.matches);
  });
})();

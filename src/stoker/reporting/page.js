"use strict";
/* Draws the figures, repaints them when the browser turns dark or light, and prints them light. */
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { displayModeBar: false, displaylogo: false, responsive: true };

  const painted = (value, colours) => {
    if (typeof value === "string") return colours[value] || value;
    if (Array.isArray(value)) return value.map((item) => painted(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, colours)]));
  };

  const draw = (isDark) => {
    const colours = isDark ? data.dark : {};
    for (const [key, figure] of Object.entries(data.figures)) {
      const { data: traces, layout } = painted(figure, colours);
      Plotly.react(document.getElementById(key), traces, layout, config);
    }
  };

  draw(darkness.matches);
  darkness.addEventListener("change", (change) => draw(change.matches));
  window.addEventListener("beforeprint", () => draw(false));
  window.addEventListener("afterprint", () => draw(darkness.matches));
})();

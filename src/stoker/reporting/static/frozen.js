/* A report: the page of a run, with all that it was ever sent inside of it. */

import { repaint } from "./chart.js";
import { open } from "./run.js";

const { state, series, confusion } = JSON.parse(document.getElementById("data").textContent);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
open(document.getElementById("charts"), {
  state: async () => state, series: async ({ over }) => series[over], confusion: async () => confusion,
  picture: () => "", row: () => null, page: null,
});

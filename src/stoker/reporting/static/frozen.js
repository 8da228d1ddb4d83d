/* A report: the page of a run, with all that it was ever sent inside of it. */

import { open } from "./run.js";

const { state, series, confusion } = JSON.parse(document.getElementById("data").textContent);

/* Series over time as series over money. */
const priced = ({ progress, rates, scalars, evaluations }, price) => {
  const cost = (seconds) => (seconds / 3600) * price, along = (columns) => ({ ...columns, x: columns.x.map(cost) });
  const each = (table, change) => Object.fromEntries(Object.entries(table).map(([name, value]) => [name, change(value)]));
  return { progress: along(progress), rates: rates.map(along), scalars: each(scalars, along), evaluations: each(evaluations ?? {}, (points) => points.map(([x, y]) => [cost(x), y])) };
};

open(document.getElementById("run"), {
  state: async () => state,
  series: async ({ over }) => (over === "cost" ? priced(series.wall_s, state.row.price_per_h) : series[over]),
  confusion: async () => confusion,
  picture: () => "", row: () => null, page: null,
});

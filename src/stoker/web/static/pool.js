/* A pool on the page of places: offers, this user's leases and wallet, and the log; asked for while somebody looks. */

import { get } from "./api.js";
import { href, known, link } from "./app.js";
import { h, replace, section, svg, table, tile } from "./dom.js";
import * as format from "./format.js";

const ASK_MS = 5000, LIVE = ["funded", "running", "suspect", "reclaiming"], SILENT_S = 30;
/* States of offers and leases in the colours of states of runs. */
const LOOK = { free: "finished", taken: "running", lapsed: "stopped", clashes: "stopped", away: "stopped", open: "queued", funded: "queued", running: "running", suspect: "stalled", reclaiming: "preempted", closed: "stopped", disputed: "stalled", slashed: "failed", refunded: "failed", final: "finished" };
const state = (word, title) => h("span", { class: `state ${LOOK[word] ?? ""}`, title }, word);

/* Internal credits: no currency, as few digits as say something. */
const credits = (value) => (value === null || value === undefined ? "unknown" : value === 0 ? "0" : value >= 0.995 ? value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : `${+value.toPrecision(2)}`);
const flops = (value) => (value ? `${format.shortCount(value)}FLOP/s` : "");
const perSecond = (value) => (value ? `${format.bytes(value)}/s` : "");
const two = (first, ...notes) => h("div", { class: "two" }, h("span", {}, first), notes.filter(Boolean).map((note) => h("span", { class: "note" }, note)));
const words = (...parts) => parts.filter(Boolean).join(" · ");

/* Probability that a machine is lost within a day, from its losses an hour, with the interval that holds 8 of 10. */
const risk = (hazard) => {
  const [value, low, high] = hazard.map((rate) => 1 - Math.exp(-24 * rate)), x = (share) => (2 + 86 * share).toFixed(1);
  const text = `${format.percent(low)} to ${format.percent(high)}`;
  return h("div", { class: "risk", title: `${format.number(hazard[0])} losses an hour, in 8 cases of 10 ${format.number(hazard[1])} to ${format.number(hazard[2])}` },
    svg("svg", { width: 90, height: 14, viewBox: "0 0 90 14", "aria-hidden": "true" }, svg("line", { class: "track", x1: 2, x2: 88, y1: 7, y2: 7 }), svg("line", { class: "interval", x1: x(low), x2: x(high), y1: 7, y2: 7 }), svg("circle", { cx: x(value), cy: 7, r: 4 })),
    h("span", {}, h("b", {}, format.percent(value)), h("span", { class: "note" }, ` ${text}`)));
};

const evidence = (one) => {
  const { finished, lost, left, reclaimed, slashed, passed, failed, wrong_verdicts, ran_s } = one.record;
  if (!ran_s && !finished) return two("none yet", "no lease of it has run");
  return two(words(`${format.count(finished)} finished`, lost + left > 0 && `${format.count(lost + left)} lost`, reclaimed > 0 && `${format.count(reclaimed)} taken back`),
    words(`${format.count(passed)} replayed right${failed ? `, ${format.count(failed)} wrong` : ""}`, `ran ${format.seconds(ran_s)}`),
    slashed + wrong_verdicts > 0 && h("span", { class: "bad" }, words(slashed > 0 && `${format.plural(slashed, "bond")} cut`, wrong_verdicts > 0 && `${format.plural(wrong_verdicts, "verdict")} contradicted`)));
};

const offerRow = (hasState) => (one) => {
  const { device, measured } = one, speed = flops(measured.bf16_flop_per_s || measured.fp32_flop_per_s);
  return [
    two(h("b", {}, one.offer_id), one.is_own ? "yours" : `of ${one.agent}`), ...(hasState ? [state(one.status)] : []),
    two(`${device.count > 1 ? `${device.count} × ` : ""}${device.kind}`, device.memory_bytes ? `${format.bytes(device.memory_bytes)}${device.count > 1 ? " each" : ""}` : ""),
    h("b", {}, credits(one.price)), one.isolation,
    speed ? two(`${speed} in ${measured.bf16_flop_per_s ? "bf16" : "fp32"}`, words(perSecond(measured.bytes_per_s), measured.cores > 0 && format.plural(measured.cores, "core"))) : h("span", { class: "note" }, words("not measured", measured.cores > 0 && format.plural(measured.cores, "core"))),
    one.download_bytes_per_s || one.upload_bytes_per_s ? two(`↓ ${perSecond(one.download_bytes_per_s) || "unknown"}`, `↑ ${perSecond(one.upload_bytes_per_s) || "unknown"}`) : h("span", { class: "note" }, "not measured"),
    evidence(one), risk(one.hazard),
    two(`${format.seconds(one.reclaim_s)} notice`, words(`${format.seconds(one.max_s)} at most`, one.hours && `${one.hours[0]} to ${one.hours[1]} h UTC`)),
  ];
};

/* The name of a lease is the renter's key, the run's name, a digest, and a number. */
const NAME = /\b[0-9a-f]{16}-(\S+)-[0-9a-f]{10}\.(\d+)/;
const leaseName = (one) => {
  const parts = NAME.exec(one.lease_id);
  const run = parts && [...known.rows.values()].find((row) => row.launch?.kind === "pool" && row.name.startsWith(parts[1]));
  return two(h("b", { title: one.lease_id }, run ? link(href("run", run.id), run.name) : parts?.[1] ?? one.lease_id), words(parts && `lease ${Number(parts[2]) + 1}`, one.role === "lent" ? "lent by you" : `at ${one.offer_id}`));
};

const checked = (one) => {
  const blocks = one.num_blocks === undefined || one.num_blocks === null ? "" : format.plural(one.num_blocks, "block");
  if (!one.check_fraction) return two("nothing is replayed", blocks);
  const { equal = 0, unequal = 0, open = 0 } = one.replays ?? {};
  const found = words(equal > 0 && `${format.count(equal)} equal`, open > 0 && `${format.count(open)} at work`);
  return two(unequal > 0 ? h("b", { class: "bad" }, `${format.count(unequal)} unequal`) : found || (one.replays ? "no replay yet" : "replays: unknown"), unequal > 0 && found, words(blocks, `${format.percent(one.check_fraction)} replayed after the end`));
};

const meter = (one) => h("div", { class: "meter", title: `${credits(one.so_far)} of a deposit of ${credits(one.limit)}; forecast ${credits(one.forecast)}` },
  h("span", {}, h("b", {}, credits(one.so_far)), h("span", { class: "note" }, ` of ${credits(one.limit)} at most`)),
  h("div", { class: "progress wide" }, h("i", { class: LIVE.includes(one.state) ? "running" : "", style: { width: `${(100 * Math.min(1, one.so_far / (one.limit || 1))).toFixed(1)}%` } })));

const heard = (one) => {
  if (!LIVE.includes(one.state)) return one.closed_s ? h("span", { class: "note" }, "ended ", h("time", { "data-at": one.closed_s })) : "";
  return one.heard_s ? h("time", { "data-at": one.heard_s, class: "heard" }) : h("span", { class: "note" }, "not accepted yet");
};
/* How long ago, rewritten every second without rebuilding anything else. */
const tick = (host, now) => {
  for (const one of host.querySelectorAll("time[data-at]")) {
    const text = format.ago(+one.dataset.at, now);
    if (one.textContent !== text) one.textContent = text;
    if (one.classList.contains("heard")) one.classList.toggle("warn", now - one.dataset.at > SILENT_S);
  }
};

const leaseRow = (one) => [
  leaseName(one), two(state(one.outcome || one.state), one.reclaim_by_s && LIVE.includes(one.state) ? `ends by ${format.clock(one.reclaim_by_s).slice(11)}` : one.reason),
  `${one.num_devices > 1 ? `${one.num_devices} × ` : ""}${one.device}`,
  two(format.seconds(one.running_s), one.forecast_h ? `forecast ${format.seconds(3600 * one.forecast_h)}` : ""), meter(one), heard(one), checked(one),
];

const logWords = ({ log }) => {
  if (log.problem) return h("aside", { class: "notice failed" }, h("h2", {}, "The log does not check"), h("p", {}, `${log.problem[0].toUpperCase()}${log.problem.slice(1)}.`), h("p", { class: "note" }, "Deposit nothing more, keep your receipts, and audit a copy: stoker pool ledger --export log.jsonl; stoker pool audit log.jsonl"));
  const number = log.last - log.first + 1;
  const which = number >= log.seq ? `each of its ${format.plural(log.seq, "event")}` : `each of the newest ${format.count(number)} of ${format.plural(log.seq, "event")}`;
  return h("p", { class: "checks" }, h("b", { class: "good" }, "✓ The log holds"), `: ${which} names the hash of the one before, and is signed by its actor. `, h("span", { class: "note" }, "Balances are checked by stoker pool audit. Beats of meters and their co-signatures are left out below."));
};

/* Fill a host only if what it shows has changed, and leave what is scrolled and focused as it was. */
const refill = (host, shown, make) => {
  const text = JSON.stringify(shown);
  if (host.shown === text) return;
  host.shown = text;
  const before = [...host.querySelectorAll(".scroll, .log")].map((one) => [one.scrollLeft, one.scrollTop, one === document.activeElement]);
  const focused = host.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  replace(host, make());
  [...host.querySelectorAll(".scroll, .log")].forEach((one, index) => {
    const [left, top, hasFocus] = before[index] ?? [0, 0, false];
    one.scrollLeft = left; one.scrollTop = top;
    if (hasFocus) one.focus({ preventScroll: true });
  });
  if (focused !== null) [...host.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus({ preventScroll: true });
};

export const poolView = () => {
  const parts = Object.fromEntries(["head", "leases", "offers", "log"].map((name) => [name, h("div")]));
  let showsAll = false, last = null, isAsking = false, isClosed = false;
  const all = h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => { showsAll = event.target.checked; if (last) draw(last); } }), "taken, lapsed and absent ones too");
  const offers = h("div", { hidden: true }, h("div", { class: "title" }, h("h3", {}, "Offers"), h("span", { class: "actions" }, all)), parts.offers);
  const element = section("", parts.head, parts.leases, offers, parts.log);
  element.classList.add("pool");

  const draw = (found) => {
    last = found;
    const isKnown = found.at !== undefined, now = Date.now() / 1000 + (found.clock_off_s ?? 0);
    const trouble = found.problem && h("aside", { class: "notice failed" }, h("h2", {}, isKnown ? `The pool cannot be asked now; below is what it said ${format.ago(found.at)}` : "The pool cannot be shown"), h("p", {}, `${found.problem[0].toUpperCase()}${found.problem.slice(1)}${/[.?!]$/.test(found.problem) ? "" : "."}`), found.remedy && h("p", { class: "note" }, found.remedy));
    offers.hidden = !isKnown;
    if (!found.is_configured) {
      return refill(parts.head, "none", () => [h("h2", {}, "Pool"), h("p", { class: "note" }, "No pool is configured. Its operator has its address: start the page with ", h("code", {}, "stoker ui --pool URL#KEY"), ", or set ", h("code", {}, "STOKER_POOL"), ".")]);
    }
    if (!isKnown) return refill(parts.head, found, () => [h("h2", {}, "Pool"), trouble]);
    const { wallet } = found, live = found.leases.filter((one) => LIVE.includes(one.state)), rented = live.filter((one) => one.role === "rented");
    const free = found.offers.filter((one) => one.status === "free");
    const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
    refill(parts.head, [trouble && [found.problem, format.ago(found.at)], found.address, found.rules, wallet, found.num_free, found.num_offers, free[0]?.price, live.map((one) => one.so_far)], () => [
      h("div", { class: "title" }, h("h2", {}, `Pool ${found.rules.name}`), h("span", { class: "note", title: `its key is ${found.key}` }, `${found.address}, ${found.rules.is_open ? "open to anyone" : "for admitted keys"}`)), trouble,
      h("div", { class: "tiles live" },
        tile("free offers", format.count(found.num_free), `of ${format.count(found.num_offers)} that are listed`),
        tile("cheapest", free.length ? credits(free[0].price) : "none", free.length ? "credits an hour" : "is free now"),
        tile("running leases", format.count(live.length), rented.length ? `${credits(sum(rented.map((one) => one.so_far)))} so far, ${credits(sum(rented.map((one) => one.limit)))} at most` : "of your key"),
        tile("your balance", wallet ? credits(wallet.balance) : "no key", !wallet ? "stoker pool wallet makes one" : wallet.is_admitted ? `credits; ${credits(wallet.in_escrow)} in escrow, ${credits(wallet.bonds)} in bonds` : "the key is not admitted yet: its operator runs stoker pool wallet --grant", wallet && !wallet.is_admitted ? "over" : ""))]);
    refill(parts.leases, found.leases, () => [h("h3", {}, "Your leases"), found.leases.length ? table(["lease", "state", "device", "meter", "credits so far", "last heard", "replays"], found.leases.map(leaseRow), "leases stacks") : h("p", { class: "note" }, found.account ? "None. A run takes an offer with stoker train job.py --on pool." : "You have no key yet, and so no leases: stoker pool wallet makes one.")]);
    const shown = showsAll ? found.offers : free;
    refill(parts.offers, [showsAll, shown], () => [shown.length ? table(["offer", ...(showsAll ? ["state"] : []), "device", "credits an hour", "isolation", "measured by its agent", "link", "evidence", "lost within a day", "terms"], shown.map(offerRow(showsAll)), "offers stacks") : h("p", { class: "note" }, found.num_offers ? "No offer is free now." : "Nothing is offered. Lend a device: stoker pool offer --price 0.40usd/h"),
      shown.length > 0 && h("p", { class: "note" }, "Losses, machines that were taken back included, are estimated from the agent's record and a prior of one in 48 hours; bars hold 8 cases of 10. What a job would cost on each: ", h("code", {}, "stoker pool offers --for job.py")),
      showsAll && found.num_offers > found.offers.length && h("p", { class: "note" }, `${format.count(found.num_offers - found.offers.length)} more are listed.`)]);
    refill(parts.log, [found.events, found.log], () => [h("h3", {}, "Ledger"), logWords(found), h("div", { class: "log", role: "region", "aria-label": "Events of the pool, the newest first", tabIndex: 0 }, h("ol", { class: "ledger" }, found.events.map((one) => h("li", {}, h("span", { class: "note" }, format.count(one.seq)), h("time", { title: format.clock(one.at) }, format.clock(one.at).slice(5)), h("b", {}, one.kind), h("span", { class: one.is_own ? "" : "note" }, one.is_own ? "you" : one.actor), h("span", { title: one.text }, one.text.replace(NAME, (_, run, number) => `${run} (${Number(number) + 1})`))))))]);
    tick(element, now);
  };
  const ask = async () => {
    if (isAsking || document.hidden) return;
    isAsking = true;
    try {
      const found = await get("pool");
      if (!isClosed) draw(found);
    } catch { /* the line says that the server does not answer; it is asked again */ }
    isAsking = false;
  };
  replace(parts.head, h("h2", {}, "Pool"), h("p", { class: "note", role: "status" }, "Asking …"));
  const asking = setInterval(() => { if (last?.is_configured !== false) ask(); }, ASK_MS);
  const ticking = setInterval(() => { if (last?.is_configured && !document.hidden) tick(element, Date.now() / 1000 + (last.clock_off_s ?? 0)); }, 1000);
  ask();
  return { element, close: () => { isClosed = true; clearInterval(asking); clearInterval(ticking); } };
};

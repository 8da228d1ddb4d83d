/* Requests, and the stream of events: it goes on after the last event that was taken, whichever side was away. */

export class Refused extends Error {
  constructor(message, remedy, status) { super(message); this.remedy = remedy; this.status = status; }
}

const query = (values) => {
  const pairs = Object.entries(values).flatMap(([name, value]) =>
    Array.isArray(value) ? value.map((one) => [name, one]) : value === null || value === undefined ? [] : [[name, value]]);
  return pairs.length ? `?${new URLSearchParams(pairs)}` : "";
};

const answered = async (answer) => {
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({ error: answer.status === 401 ? "This page's token is no longer valid." : `HTTP ${answer.status}` }));
  throw new Refused(said.error, said.remedy, answer.status);
};

export const get = async (path, values = {}, signal) => (await answered(await fetch(`/api/${path}${query(values)}`, { signal }))).json();
export const getText = async (path, values = {}) => (await answered(await fetch(`/api/${path}${query(values)}`))).text();
export const post = async (path, values, body = {}) =>
  (await answered(await fetch(`/api/${path}${query(values)}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  }))).json();

/* `place` returns where to go on ({from, log, since}); it is asked at each new connection. */
export class Stream {
  constructor(values, place, handlers, onState) {
    this.values = values; this.place = place; this.handlers = handlers; this.onState = onState;
    this.onVisibility = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.onVisibility);
    if (!document.hidden) this.open();
  }

  open() {
    if (this.source || this.isClosed) return;
    clearTimeout(this.again);
    const source = (this.source = new EventSource(`/api/events${query({ ...this.values, ...this.place() })}`));
    source.onopen = () => this.onState("live");
    source.onerror = () => {
      this.onState("lost");
      this.pause();
      this.again = setTimeout(() => this.open(), 1000);
    };
    for (const [kind, handle] of Object.entries(this.handlers)) {
      source.addEventListener(kind, (message) => {
        if (this.source === source) handle(JSON.parse(message.data), message.lastEventId);
      });
    }
  }

  pause() { this.source?.close(); this.source = null; clearTimeout(this.again); }

  close() {
    this.isClosed = true;
    this.pause();
    document.removeEventListener("visibilitychange", this.onVisibility);
  }
}

"use strict";
// How busy the server is: its metrics, once a second while the page is seen.

const METRICS = {
  generated: "turbojax_generated_tokens_total",
  running: "turbojax_requests_running",
  waiting: "turbojax_requests_waiting",
  pool: "kv_cache_usage_ratio",
};
const POLL_MS = 1000;
const SLOW_POLL_MS = 5000; // while the server does not answer
const NUM_RATES = 60;

const monitor = {
  rates: [],
  before: null,

  async poll() {
    let delay = POLL_MS;
    try {
      if (!document.hidden) this.show(await api.metrics(), performance.now());
    } catch (error) {
      this.fail(error);
      delay = SLOW_POLL_MS;
    }
    setTimeout(() => this.poll(), delay);
  },

  show(samples, now) {
    const value = (name) => samples.get(METRICS[name]);
    const generated = value("generated");
    if (this.before && generated >= this.before.generated) {
      const rate = ((generated - this.before.generated) * 1000) / (now - this.before.now);
      this.rates = [...this.rates, rate].slice(-NUM_RATES);
      put("rate", figure(rate));
      this.draw();
    }
    this.before = { generated, now };
    put("running", figure(value("running")));
    put("waiting", figure(value("waiting")));
    this.showPool(value("pool"));
    document.getElementById("server-note").hidden = true;
    const busy = value("running") + value("waiting");
    put("glance", busy ? `${figure(this.rates.at(-1))} tokens/s · ${figure(value("running"))} running` : "");
  },

  showPool(ratio) {
    if (ratio === undefined) return;
    const percent = Math.round(ratio * 1000) / 10;
    put("pool", `${percent.toFixed(percent < 10 ? 1 : 0)} %`);
    const bar = document.getElementById("pool-bar");
    bar.setAttribute("aria-valuenow", String(percent));
    bar.firstElementChild.style.width = `${percent}%`;
  },

  draw() {
    const top = Math.max(...this.rates, 1);
    const points = this.rates.map((rate, index) => {
      const x = 120 - (this.rates.length - 1 - index) * (120 / (NUM_RATES - 1));
      return `${x.toFixed(1)} ${(31 - (rate / top) * 30).toFixed(1)}`;
    });
    document.querySelector("#spark path").setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  },

  fail(error) {
    for (const id of ["rate", "running", "waiting", "pool"]) put(id, "–");
    put("glance", "");
    this.before = null;
    const note = document.getElementById("server-note");
    note.textContent =
      error.status === 401 ? "The figures need an API key." : "The server does not answer; trying again.";
    note.hidden = false;
  },
};

function put(id, text) {
  const place = document.getElementById(id);
  if (place.textContent !== text) place.textContent = text;
}

function figure(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

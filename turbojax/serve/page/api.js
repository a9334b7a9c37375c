"use strict";
// What goes between this page and the server.

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const api = {
  key: sessionStorage.getItem("key") || "",

  async fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (!response.ok) throw new ServerError(await messageOf(response), response.status);
    return response;
  },

  async models() {
    const list = await (await this.fetch("v1/models")).json();
    return list.data.map((model) => model.id);
  },

  async metrics() {
    return samplesOf(await (await this.fetch("metrics")).text());
  },

  async *chat(body, signal) {
    const response = await this.fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const event of eventsOf(response)) {
      if (event.error) throw new ServerError(event.error.message, event.error.code);
      yield event;
    }
  },
};

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`;
  }
}

// Server-sent events, each of them JSON, until [DONE].
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The connection ended before the answer did.");
      const events = (pending + value).split(/\r?\n\r?\n/);
      pending = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Prometheus' text format: the sum over all labels, by name.
function samplesOf(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)/.exec(line);
    if (found) samples.set(found[1], (samples.get(found[1]) || 0) + Number(found[2]));
  }
  return samples;
}

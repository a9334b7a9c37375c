"use strict";
// The page: what its fields and buttons do.

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const NARROW = matchMedia("(max-width: 56rem)");
const TOUCH = matchMedia("(pointer: coarse)");

let messages = []; // of the conversation, in OpenAI's form
let running = null; // the AbortController of the answer that comes
let unanswered = []; // what shows a message that got no answer; the next one takes its place
let takeResults = null; // writes down what the tools of the last answer gave

function requestBody() {
  const body = { model: $("model").value, messages: [...messages] };
  const system = $("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = $(name).valueAsNumber;
  const tools = toolsOf($("tools").value);
  if (tools) body.tools = tools;
  return body;
}

function toolsOf(text) {
  if (!text.trim()) return null;
  const tools = JSON.parse(text);
  if (!Array.isArray(tools) || !tools.length) throw new SyntaxError("a JSON list is expected");
  return tools;
}

// The first setting that cannot be sent is shown and gets the focus.
function settingsAreValid() {
  const wrong = NUMBERS.map($).find((field) => !field.checkValidity());
  let problem = "";
  try {
    toolsOf($("tools").value);
  } catch (error) {
    problem = `Tools: ${error.message}`;
  }
  $("tools-error").textContent = problem;
  $("tools-error").hidden = !problem;
  if (!wrong && !problem) return true;
  showPanel(true);
  if (wrong) wrong.reportValidity();
  else $("tools").focus();
  return false;
}

function takeDelta(reply, delta) {
  reply.content += delta.content || "";
  reply.reasoning += delta.reasoning_content || "";
  for (const part of delta.tool_calls || []) {
    const call = (reply.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= part.id || "";
    call.function.name += part.function?.name || "";
    call.function.arguments += part.function?.arguments || "";
  }
}

async function answer() {
  const view = new AnswerView($("chat"));
  const reply = { content: "", reasoning: "", tool_calls: [] };
  const clock = { start: performance.now(), first: 0, last: 0, numTokens: 0, isExact: false };
  const mine = (running = new AbortController());
  let isDrawn = true;
  const draw = () => {
    isDrawn = true;
    follow(() => {
      view.show(reply);
      if (clock.first) view.figures.textContent = speedOf(clock);
    });
  };
  setBusy(true);
  follow(() => {}, true);
  let reason = null;
  try {
    for await (const event of api.chat(requestBody(), mine.signal)) {
      if (event.usage) [clock.numTokens, clock.isExact] = [event.usage.completion_tokens, true];
      for (const choice of event.choices) {
        reason = choice.finish_reason || reason;
        takeDelta(reply, choice.delta);
        clock.last = performance.now();
        clock.first ||= clock.last;
        clock.numTokens += clock.isExact ? 0 : 1; // about one a piece until the usage comes
      }
      if (isDrawn) requestAnimationFrame(draw);
      isDrawn = false;
    }
    draw();
    finish(view, reply, reason, clock);
  } catch (error) {
    if (mine !== running) return; // a new chat has begun
    draw();
    if (mine.signal.aborted) finish(view, reply, "stopped", clock);
    else fail(view, error);
  } finally {
    if (mine === running) setBusy(false);
  }
}

function finish(view, reply, reason, clock) {
  const message = { role: "assistant", content: reply.content };
  const calls = reply.tool_calls;
  if (calls.length && reason === "tool_calls") {
    message.tool_calls = calls;
    const read = view.askResults(calls, () => {
      takeResults();
      answer();
    });
    takeResults = () => {
      takeResults = null;
      const results = read();
      calls.forEach((call, i) => messages.push({ role: "tool", tool_call_id: call.id, content: results[i] }));
    };
  }
  if (message.content || message.tool_calls) {
    messages.push(message);
    unanswered = [];
  } else unanswered.push(view.turn);
  const ends = { length: " · cut off at its most tokens", stopped: " · stopped", timeout: " · out of time" };
  follow(() => {
    view.note(speedOf(clock) + (ends[reason] || ""));
    view.offerCopy(reply.content);
  });
  $("status").textContent = reason === "stopped" ? "Stopped." : "The answer is complete.";
}

function fail(view, error) {
  const needsKey = error.status === 401;
  const isLost = error instanceof TypeError; // what fetch raises where nobody answers
  const message = isLost ? "The server cannot be reached." : error.message;
  unanswered.push(view.turn);
  follow(() =>
    view.fail(needsKey ? `${message} The key goes into Settings.` : message, () => {
      view.turn.remove();
      answer();
    }),
  );
}

function speedOf({ start, first, last, numTokens, isExact }) {
  if (!first) return "";
  const seconds = (last - first) / 1000;
  const speed = seconds > 0.05 && numTokens > 1 ? ` · ${figure((numTokens - 1) / seconds)} tokens/s` : "";
  const about = isExact ? "" : "about ";
  const wait = first - start < 1000 ? `${Math.round(first - start)} ms` : `${figure((first - start) / 1000)} s`;
  return `${about}${figure(numTokens)} token${numTokens === 1 ? "" : "s"}${speed} · first after ${wait}`;
}

// Changes the conversation, and stays at its end where the reader was there.
function follow(change, always = false) {
  const chat = $("chat");
  const isAtEnd = always || chat.scrollHeight - chat.scrollTop - chat.clientHeight < 48;
  change();
  if (isAtEnd) chat.scrollTop = chat.scrollHeight;
}

function setBusy(isBusy) {
  if (!isBusy) running = null;
  $("chat").setAttribute("aria-busy", String(isBusy)); // screen readers read an answer once it is whole
  $("stop").hidden = !isBusy;
  $("send").hidden = isBusy;
  if (isBusy) $("status").textContent = "The model answers.";
  showSendable();
}

function showSendable() {
  $("send").disabled = !$("prompt").value.trim();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running || !settingsAreValid()) return;
  $("welcome").hidden = true;
  $("prompt").value = "";
  takeResults?.();
  if (messages.at(-1)?.role === "user") {
    messages.pop();
    for (const turn of unanswered) turn.remove();
  }
  messages.push({ role: "user", content: text });
  const turn = element("article", "turn user", text);
  turn.setAttribute("aria-label", "You");
  $("chat").append(turn);
  unanswered = [turn];
  answer();
}

function newChat() {
  const old = running;
  setBusy(false);
  old?.abort();
  messages = [];
  takeResults = null;
  for (const turn of [...$("chat").querySelectorAll(".turn")]) turn.remove();
  $("welcome").hidden = false;
  $("status").textContent = "A new chat.";
  $("prompt").focus();
}

function showPanel(isShown) {
  $("panel").hidden = !isShown;
  $("panel-toggle").setAttribute("aria-expanded", String(isShown));
  const covers = isShown && NARROW.matches;
  $("main").inert = $("top").inert = covers;
}

function closePanel() {
  showPanel(false);
  $("panel-toggle").focus();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", String(name === "dark"));
}

async function loadModels() {
  try {
    const names = await api.models();
    $("model").replaceChildren(...names.map((name) => new Option(name)));
    $("model").disabled = names.length < 2;
    document.title = `${names[0]} · turbojax`;
  } catch {
    $("model").replaceChildren(new Option("no model found", ""));
  }
}

function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(localStorage.getItem("theme") || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => {
    if (!localStorage.getItem("theme")) setTheme(dark.matches ? "dark" : "light");
  });
  $("theme").addEventListener("click", () => {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("theme", name);
    setTheme(name);
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("input", showSendable);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (NARROW.matches && !$("panel").hidden) closePanel();
    else running?.abort();
  });
  $("stop").addEventListener("click", () => {
    running?.abort();
    $("prompt").focus();
  });
  $("new-chat").addEventListener("click", newChat);
  $("panel-toggle").addEventListener("click", () => {
    showPanel($("panel").hidden);
    if (NARROW.matches && !$("panel").hidden) $("panel-close").focus();
  });
  $("panel-close").addEventListener("click", closePanel);
  $("key").value = api.key;
  $("key").addEventListener("change", () => {
    api.key = $("key").value.trim();
    sessionStorage.setItem("key", api.key);
    loadModels();
  });
  NARROW.addEventListener("change", () => showPanel(!NARROW.matches));
  showPanel(!NARROW.matches);
  setBusy(false);
  loadModels();
  monitor.poll();
}

begin();

"use strict";
// How a conversation looks. Whatever a model says becomes text nodes; nothing here reads it as HTML.

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(className, text, onclick) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onclick);
  return made;
}

// Paragraphs, headings and fenced code; an open fence is code up to the end.
function blocksOf(text) {
  const blocks = [];
  text.split(/^```[^\n`]*\n?/m).forEach((part, index) => {
    if (index % 2) blocks.push({ kind: "code", text: part.replace(/\n$/, "") });
    else
      for (const paragraph of part.split(/\n{2,}/)) {
        const trimmed = paragraph.replace(/^\n+|\s+$/g, "");
        const heading = /^#{1,6} ([^\n]+)$/.exec(trimmed);
        if (heading) blocks.push({ kind: "heading", text: heading[1] });
        else if (trimmed) blocks.push({ kind: "text", text: trimmed });
      }
  });
  return blocks;
}

function blockElement({ kind, text }) {
  if (kind === "code") {
    const pre = element("pre");
    pre.tabIndex = 0; // scrolls sideways, by keys too
    pre.append(element("code", "", text));
    return pre;
  }
  const made = element(kind === "heading" ? "h4" : "p");
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`.+`$/.test(part)) made.append(element("code", "", part.slice(1, -1)));
    else if (/^\*\*.+\*\*$/.test(part)) made.append(element("strong", "", part.slice(2, -2)));
    else if (part) made.append(part);
  }
  return made;
}

// Blocks that have not changed keep their elements, so that a selection in them survives the next token.
function showBlocks(parent, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const source = `${block.kind}:${block.text}`;
    const old = parent.children[index];
    if (old && old.source === source) return;
    const made = blockElement(block);
    made.source = source;
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

// One answer while it comes and after.
class AnswerView {
  constructor(parent) {
    this.turn = element("article", "turn assistant");
    this.turn.setAttribute("aria-label", "Answer");
    this.waiting = element("span", "waiting");
    this.waiting.setAttribute("aria-hidden", "true");
    this.waiting.append(element("i"), element("i"), element("i"));
    this.reasoning = element("details");
    this.reasoning.open = true;
    this.thoughts = element("div");
    this.reasoning.append(element("summary", "", "Reasoning"), this.thoughts);
    this.reasoning.hidden = true;
    this.content = element("div", "content");
    this.calls = element("div");
    this.meta = element("div", "meta");
    this.figures = element("span");
    this.meta.append(this.figures);
    this.turn.append(this.reasoning, this.content, this.calls, this.waiting, this.meta);
    parent.append(this.turn);
  }

  show(reply) {
    this.waiting.hidden = Boolean(reply.content || reply.reasoning || reply.tool_calls.length);
    this.reasoning.hidden = !reply.reasoning;
    if (this.thoughts.textContent !== reply.reasoning) this.thoughts.textContent = reply.reasoning;
    showBlocks(this.content, reply.content);
    this.showCalls(reply.tool_calls);
  }

  showCalls(calls) {
    calls.forEach((call, index) => {
      let box = this.calls.children[index];
      if (!box) {
        box = element("div", "call");
        const pre = element("pre");
        pre.append(element("code"));
        box.append(element("h5"), pre);
        this.calls.append(box);
      }
      box.querySelector("h5").textContent = `Calls ${call.function.name}`;
      box.querySelector("code").textContent = call.function.arguments;
    });
  }

  // Fields for what the tools answered; returns how to read them, which closes them.
  askResults(calls, onsend) {
    const fields = calls.map((call, index) => {
      const label = element("label", "", `What ${call.function.name} answered`);
      const field = element("textarea");
      field.rows = 2;
      label.append(field);
      this.calls.children[index].append(label);
      return field;
    });
    const send = button("quiet retry", "Send to the model", onsend);
    this.calls.append(send);
    fields[0].focus();
    return () => {
      send.remove();
      for (const field of fields) field.readOnly = true;
      return fields.map((field) => field.value);
    };
  }

  note(text) {
    this.waiting.hidden = true;
    this.figures.textContent = text;
  }

  fail(message, onretry) {
    this.waiting.hidden = true;
    const problem = element("p", "problem", message);
    problem.setAttribute("role", "alert");
    const retry = button("quiet retry", "Try again", () => {
      problem.remove();
      retry.remove();
      onretry();
    });
    this.turn.append(problem, retry);
  }

  offerCopy(text) {
    if (!text || !navigator.clipboard) return;
    const copy = button("quiet", "Copy", async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    });
    this.meta.prepend(copy);
  }
}

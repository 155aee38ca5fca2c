// The playground: a conversation with the model, streamed, with its counts and times.

import { Failure, getJson, stream } from "./api.js";
import { byId, count, el, seconds } from "./dom.js";

export class Playground {
  constructor() {
    this.messages = [];
    this.running = null;
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("form").addEventListener("change", () => this.clear());
    byId("parameters").addEventListener("submit", (event) => event.preventDefault());
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    byId("playground").addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  async loadModels(signal) {
    const chosen = byId("model").value;
    try {
      const names = (await getJson("v1/models", signal)).data.map((model) => model.id);
      byId("model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      if (names.includes(chosen)) byId("model").value = chosen;
    } catch {
      // the fleet view says what is wrong; the next visit tries again
    }
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    byId("conversation").replaceChildren();
  }

  async send() {
    const input = byId("message");
    const text = input.value;
    if (this.running || !text.trim() || !byId("parameters").reportValidity()) return;
    const chat = byId("form").value === "chat";
    if (!chat) this.messages = [];
    input.value = "";
    this.messages.push({ role: "user", content: text });
    this.show("user", "you", text);
    this.busy(true);
    // the server was away, or the key was missing, when the page asked
    if (!byId("model").value) await this.loadModels(this.running.signal);
    const answer = new Answer(byId("model").value || "no model");
    const request = chat ? this.chatRequest() : { ...this.parameters(), prompt: text };
    await answer.read(chat ? "v1/chat/completions" : "v1/completions", request, this.running.signal);
    if (answer.text && chat) this.messages.push({ role: "assistant", content: answer.text });
    else if (chat) this.messages.pop();
    // to be sent again
    if (answer.failure && !answer.text && !input.value) input.value = text;
    byId("said").textContent = answer.summary();
    this.busy(false);
  }

  busy(on) {
    this.running = on ? new AbortController() : null;
    byId("stop").disabled = !on;
    byId("send").disabled = on;
    if (!on) byId("message").focus();
  }

  chatRequest() {
    const system = byId("system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    return { ...this.parameters(), messages };
  }

  parameters() {
    const given = Object.fromEntries(new FormData(byId("parameters")));
    const request = { model: given.model, stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (given[name] !== "") request[name] = Number(given[name]);
    }
    if (given.stop) request.stop = given.stop;
    return request;
  }

  show(role, who, text) {
    append(el("article", { class: `message ${role}` }, el("div", { class: "who" }, who), el("div", { class: "text" }, text)));
  }
}

function append(article) {
  const place = byId("conversation");
  place.append(article);
  place.scrollTop = place.scrollHeight;
}

/** Do what makes the conversation longer; its end stays in sight where it was. */
function following(work) {
  const place = byId("conversation");
  const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  work();
  if (atEnd) place.scrollTop = place.scrollHeight;
}

/** One answer as it comes. */
class Answer {
  constructor(model) {
    this.text = "";
    this.began = performance.now();
    this.first = this.last = null;
    this.usage = this.finish = this.failure = this.id = null;
    this.node = document.createTextNode("");
    this.facts = el("div", { class: "facts" });
    this.article = el("article", { class: "message assistant", "aria-busy": "true" },
      el("div", { class: "who" }, model), el("div", { class: "text" }, this.node), this.facts);
    append(this.article);
  }

  async read(path, request, signal) {
    try {
      for await (const chunk of stream(path, request, signal)) this.take(chunk);
    } catch (error) {
      if (signal.aborted) this.finish = "stopped here";
      else this.failure = error instanceof Failure ? error.message : "the stream broke off";
    }
    this.article.setAttribute("aria-busy", "false");
    this.article.classList.toggle("failed", this.failure !== null);
    this.tell();
  }

  take(chunk) {
    this.id = chunk.id;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const piece = choice.delta ? choice.delta.content : choice.text;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (!piece) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.text += piece;
    following(() => this.node.appendData(piece));
  }

  tell() {
    const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, value));
    const facts = [];
    if (this.failure) facts.push(el("span", {}, this.failure));
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(fact("prompt", `${count(this.usage.prompt_tokens)} tokens${cached ? ` (${count(cached)} cached)` : ""}`));
      facts.push(fact("answer", `${count(this.usage.completion_tokens)} tokens`));
    }
    if (this.first !== null) {
      facts.push(fact("first token", seconds((this.first - this.began) / 1000)));
      const later = (this.usage?.completion_tokens ?? 0) - 1;
      if (later > 0 && this.last > this.first) facts.push(fact("speed", `${count((later * 1000) / (this.last - this.first))} tokens/s`));
      facts.push(fact("in all", seconds((this.last - this.began) / 1000)));
    }
    if (this.finish) facts.push(fact("end", this.finish));
    if (this.id) facts.push(el("span", { class: "mono" }, this.id));
    following(() => this.facts.replaceChildren(...facts));
  }

  summary() {
    if (this.failure) return `Failed: ${this.failure}`;
    return `Answer complete${this.usage ? `, ${this.usage.completion_tokens} tokens` : ""}: ${this.text.slice(0, 300)}`;
  }
}

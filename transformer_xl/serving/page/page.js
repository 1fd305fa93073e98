// Reads a text with the model, token by token: surprise as colour, alternatives on a tap or with the arrow keys.
"use strict";

const byId = (id) => document.getElementById(id);
const ALTERNATIVES = 8;
const BITS = Math.LOG2E;
let tokens = []; // {name, text, logProb, top, written, offset}
let chosen = -1;
let whole = ""; // the text of all tokens
let running = null;
let again = false; // the memory was changed while a text was read
let readings = { prompt: null, lines: [] };

function headers() {
  const token = byId("token").value;
  return { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
}

async function start() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (answer.status === 401) {
    byId("lock").hidden = false;
    return say("This server needs a token.");
  }
  const model = (await answer.json()).data[0];
  const most = model.attn_len ? model.attn_len - 1 : model.mem_len;
  byId("model").textContent = model.id;
  byId("about").textContent = `${model.vocab}, a memory of ${most} tokens. What does it expect, and how far back does it look?`;
  const slider = byId("mem_len");
  slider.max = Math.ceil(Math.log2(most)) + 1;
  slider.dataset.most = most;
  slider.value = slider.max;
  showMemory();
  say("");
}

// The slider doubles the memory with each step; the last step is the model as it was trained.
function memory() {
  const slider = byId("mem_len");
  return slider.value === slider.max ? null : Math.min(2 ** slider.value, Number(slider.dataset.most));
}

function showMemory() {
  const value = memory();
  const words = value === null ? "as far back as the model can" : value === 1 ? "the token before it" : `${value} tokens before it`;
  byId("memory").textContent = words;
  byId("mem_len").setAttribute("aria-valuetext", words);
}

function say(words) { byId("status").textContent = words; }

function number(id) { return byId(id).value === "" ? null : Number(byId(id).value); }

async function run(write) {
  if (running) return;
  again = false;
  if (write) chosen = -1;
  running = new AbortController();
  const asked = {
    prompt: byId("prompt").value, echo: true, stream: true, logprobs: ALTERNATIVES, store: false,
    max_tokens: write ? number("max_tokens") ?? 0 : 0, temperature: number("temperature") ?? 1,
    top_k: number("top_k") ?? 0, seed: number("seed"), mem_len: memory(),
  };
  begin();
  try {
    const answer = await fetch("/v1/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(asked), signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    await follow(answer.body.getReader());
    finish(asked);
    if (chosen >= 0) choose(chosen);
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : error.message);
  }
  running = null;
  setBusy(false);
  if (again) await run(false);
}

// Another memory reads the text again; a text that is being read or written is given up.
function readAgain() {
  if (running) { again = true; running.abort(); } else if (tokens.length) run(false);
}

function begin() {
  tokens = [];
  whole = "";
  byId("tokens").replaceChildren();
  byId("detail").replaceChildren();
  byId("result").hidden = false;
  setBusy(true);
  say("Reading …");
}

function setBusy(busy) {
  byId("read").disabled = byId("write").disabled = busy;
  byId("stop").hidden = !busy;
}

// Server-sent events: blocks between empty lines, each with one line of data.
async function follow(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new Error(content.error.message);
      const found = content.choices[0]?.logprobs;
      whole += content.choices[0]?.text ?? "";
      for (let i = 0; found && i < found.tokens.length; i++) {
        add(found.tokens[i], found.token_logprobs[i], found.top_logprobs[i], found.text_offset[i]);
      }
    }
    say(`${tokens.length} tokens`);
  }
}

function readable(name) { return name.startsWith("bytes:") ? "�" : name; }

function add(name, logProb, top, offset) {
  const written = offset >= [...byId("prompt").value].length;
  const token = { name, text: readable(name), logProb, top: top || {}, written, offset };
  const span = document.createElement("span");
  span.textContent = token.text === "\n" ? "↵\n" : token.text;
  if (apart()) span.textContent += token.text === "<eos>" ? "\n" : " ";
  span.className = written ? "new" : "";
  span.setAttribute("role", "option");
  span.dataset.index = tokens.length;
  const bits = logProb === null ? 0 : -logProb * BITS;
  span.style.backgroundColor = `rgba(var(--heat), ${Math.min(bits / 10, 0.85).toFixed(3)})`;
  tokens.push(token);
  byId("tokens").append(span);
}

function apart() { return / (words|ids),/.test(byId("about").textContent); } // tokens with spaces between them

function finish(asked) {
  const scored = tokens.filter((token) => !token.written && token.logProb !== null);
  const bits = scored.reduce((sum, token) => sum - token.logProb * BITS, 0);
  const mean = scored.length ? (bits / scored.length).toFixed(3) : "–";
  if (readings.prompt !== asked.prompt) readings = { prompt: asked.prompt, lines: [] };
  readings.lines.unshift(`memory ${asked.mem_len ?? "whole"}: ${mean} bits a token over ${scored.length} tokens`);
  byId("history").replaceChildren(...readings.lines.slice(0, 8).map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
  say(`The text costs ${mean} bits a token. Choose a token to see what else was expected.`);
}

function choose(index) {
  if (!tokens.length) return;
  chosen = Math.max(0, Math.min(index, tokens.length - 1));
  byId("tokens").querySelector("[aria-selected=true]")?.removeAttribute("aria-selected");
  const span = byId("tokens").children[chosen];
  span.setAttribute("aria-selected", "true");
  span.scrollIntoView({ block: "nearest" });
  showDetail(tokens[chosen]);
}

function visible(name) { return name.startsWith("bytes:") ? name : JSON.stringify(name).slice(1, -1).replace(/\\"/g, '"').replace(/ /g, "␣"); }

function showDetail(token) {
  const title = document.createElement("p");
  const cost = token.logProb === null ? "the first token has no cost" : `${(-token.logProb * BITS).toFixed(2)} bits`;
  title.textContent = `“${visible(token.name)}”: ${cost}. A choice writes on from it.`;
  const table = document.createElement("table");
  for (const [name, logProb] of Object.entries(token.top).sort((a, b) => b[1] - a[1])) {
    const row = table.insertRow();
    row.className = name === token.name ? "here" : "";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = visible(name);
    button.disabled = name.startsWith("bytes:");
    button.onclick = () => replaceWith(name);
    row.insertCell().append(button);
    const meter = document.createElement("meter");
    meter.value = Math.exp(logProb);
    meter.setAttribute("aria-label", "probability");
    row.insertCell().append(meter);
    row.insertCell().textContent = `${(100 * Math.exp(logProb)).toFixed(1)} %`;
  }
  byId("detail").replaceChildren(title, table);
}

// The text up to the chosen token, then another one. Words and ids are joined; other tokens may be parts of characters.
function replaceWith(name) {
  const words = [...tokens.slice(0, chosen).map((token) => token.text), name];
  const before = [...whole].slice(0, tokens[chosen].offset).join("");
  byId("prompt").value = apart() ? words.join(" ") : before + name;
  run(true);
}

byId("form").addEventListener("submit", (event) => { event.preventDefault(); run(false); });
byId("write").addEventListener("click", () => run(true));
byId("stop").addEventListener("click", () => running?.abort());
byId("mem_len").addEventListener("input", showMemory);
byId("mem_len").addEventListener("change", readAgain);
byId("token").addEventListener("change", start);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(event.shiftKey); }
});
byId("tokens").addEventListener("click", (event) => {
  if (event.target.dataset.index) choose(Number(event.target.dataset.index));
});
byId("tokens").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  const jump = { Home: 0, End: tokens.length - 1 }[event.key];
  if (step === undefined && jump === undefined) return;
  event.preventDefault();
  choose(jump ?? chosen + step);
});
start().catch((error) => say(error.message));

// Keeps the page up to date while the run goes on: parts come as lines of JSON and take the place of older ones.
// The key stands behind the # of the address, which is never sent; it goes along as a header.

const HEARTBEAT_MS = 20000;
const key = new URLSearchParams(location.hash.slice(1)).get("key") || "";
const state = document.getElementById("connection");
let chartView = null;

function say(text, kind) {
  state.textContent = text;
  state.className = `connection ${kind}`;
}

function take(news) {
  for (const [name, html] of Object.entries(news)) {
    const place = document.querySelector(`[data-part="${name}"]`);
    if (!place) continue;
    if (name === "chart" && place.firstElementChild) {
      renewTable(place, html);
      continue;
    }
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    const scrolled = [...place.querySelectorAll(".scroll")].map((one) => one.scrollTop);
    place.innerHTML = html; // escaped by brim; the page's policy runs no script but this one
    place.querySelectorAll("details").forEach((one, i) => { one.open = Boolean(open[i]); });
    place.querySelectorAll(".scroll").forEach((one, i) => { one.scrollTop = scrolled[i] || 0; });
  }
  if (news.title) document.title = news.title;
  if (news.data) {
    load(news.data);
    if (chartView) chartView.renew();
    else if (document.getElementById("chart") && data.x.length) chartView = start();
  }
  wireEvents();
}

// The curve stays, with what the pointer reads in it; only the table behind it is new.
function renewTable(place, html) {
  const fresh = document.createElement("template");
  fresh.innerHTML = html;
  for (const part of ["details .scroll", "figcaption"]) {
    const now = place.querySelector(part), next = fresh.content.querySelector(part);
    if (now && next) now.replaceChildren(...next.childNodes);
  }
}

function wireEvents() {
  for (const button of document.querySelectorAll("button[data-copy]:not([data-wired])")) {
    button.dataset.wired = "yes";
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(button.dataset.copy).then(() => { button.textContent = "copied"; }, () => {});
    });
  }
}

async function listen() {
  const gone = new AbortController();
  let timer = setTimeout(() => gone.abort(), HEARTBEAT_MS);
  const answer = await fetch("/stream", { headers: { "X-Brim-Key": key }, cache: "no-store", signal: gone.signal });
  if (answer.status === 403) return "refused";
  if (!answer.ok) throw new Error(String(answer.status));
  say("live", "on");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", over = false;
  for (;;) {
    const { value, done } = await reader.read();
    clearTimeout(timer);
    if (done) return over ? "over" : "cut";
    timer = setTimeout(() => gone.abort(), HEARTBEAT_MS);
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line) continue;
      const news = JSON.parse(line);
      over = news.over || over;
      take(news);
    }
  }
}

async function stayConnected() {
  for (let pause = 500; ; pause = Math.min(pause * 2, 10000)) {
    try {
      const how = await listen();
      if (how === "refused") return say("The key in the address is missing or wrong.", "off");
      if (how === "over") return say("the run has ended", "over");
      pause = 500;
    } catch {
      // the server is not there: tried again
    }
    say("not connected, trying again", "off");
    await new Promise((resume) => { setTimeout(resume, pause); });
  }
}

if (state) stayConnected();

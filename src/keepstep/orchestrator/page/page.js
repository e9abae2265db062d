// The live page. It draws the board that the orchestrator makes (GET /v1/board) and reckons nothing
// of its own. Each decision (GET /v1/events, server-sent) asks for the next board; so does a second
// without one, for the pace of the steps. The token lives in this tab's session storage and travels
// in a header. Text from the cluster is only ever set as text.

import { FleetMap, ranks, readColours, sample } from "./map.js";

const TOKEN = "keepstep-token";
const REFRESH_MS_MIN = 200;
const REFRESH_MS = 1000;
const RETRY_MS = 1000;
const STREAM_SILENT_MS_MAX = 12000;
const DECISIONS_MAX = 60;
const ROWS_MAX = 100;
const CARDS_MAX = 4; // of jobs that run; those in trouble all have one, the others a line
const WIDE_NODES = 512; // from here on the map comes before the jobs
const KEYS = "Arrow keys go from node to node, Page Up and Page Down from rack to rack, Home and End to the first and the last; Enter shows a node's devices.";

const byId = (id) => document.getElementById(id);
const map = new FleetMap(byId("map-canvas"));
const state = { board: null, fleet: null, version: "", at: 0, after: -1, chosen: "", known: null };

// ------------------------------------------------------------------ asking

class Refused extends Error {}
class Hurried extends Error {}
class Follows extends Error {}

async function ask(path, more = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { headers, cache: "no-store", redirect: "manual", ...more });
  // One that follows sends us to its leader, where our own policy does not let us go.
  if (reply.type === "opaqueredirect") throw new Follows("this orchestrator follows another");
  if (reply.status === 401 || reply.status === 403) {
    askForToken(token ? "That token was refused, or may not see the whole cluster." : "");
    throw new Refused(`the orchestrator answered ${reply.status}`);
  }
  if (reply.status === 429) throw new Hurried("asked too often");
  if (!reply.ok) throw new Error(`the orchestrator answered ${reply.status}`);
  return reply;
}

function askForToken(wrong) {
  const dialog = byId("token");
  if (wrong) {
    byId("token-why").textContent = wrong;
    byId("token-why").className = "wrong";
    sessionStorage.removeItem(TOKEN);
  }
  if (!dialog.open) dialog.showModal();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token-text").value.trim());
  byId("token-text").value = "";
  byId("token").close();
  refresh();
});
byId("token").addEventListener("cancel", (event) => event.preventDefault());
// Browsers close it at a second Esc all the same, and without a token there is nothing to show.
byId("token").addEventListener("close", () => { if (!sessionStorage.getItem(TOKEN)) askForToken(""); });

let asking = false;
let timer = 0;

async function refresh() {
  clearTimeout(timer);
  if (asking || byId("token").open) return;
  asking = true;
  let wait = REFRESH_MS;
  try {
    const reply = await ask(`v1/board?fleet=${state.version}`);
    const board = await reply.json();
    take(board);
  } catch (error) {
    wait = error instanceof Hurried ? 3 * RETRY_MS : RETRY_MS;
    if (!(error instanceof Refused || error instanceof Hurried)) away(error);
  } finally {
    asking = false;
  }
  if (!document.hidden) timer = setTimeout(refresh, wait);
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, Math.max(0, state.at + REFRESH_MS_MIN - performance.now()));
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });

// Browsers' own EventSource cannot send a header, and a token has no place in an address.
async function listen() {
  for (;;) {
    if (state.after < 0 || byId("token").open || document.hidden) {
      await pause(REFRESH_MS_MIN);
      continue;
    }
    const stop = new AbortController();
    let silent = setTimeout(() => stop.abort(), STREAM_SILENT_MS_MAX);
    try {
      const reply = await ask(`v1/events?after=${state.after}`, { signal: stop.signal });
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        clearTimeout(silent);
        silent = setTimeout(() => stop.abort(), STREAM_SILENT_MS_MAX);
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        parts.forEach(hear);
      }
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Hurried)) away(error);
    } finally {
      clearTimeout(silent);
      stop.abort();
    }
    await pause(RETRY_MS);
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function hear(part) {
  if (part.includes("event: gap\n")) {
    // Some decisions are not told any more: the next board shows what became of them.
    state.after = Number(part.match(/^id: (\d+)$/m)[1]);
    soon();
    return;
  }
  const line = part.split("\n").find((text) => text.startsWith("data: "));
  if (!line) return;
  const decision = JSON.parse(line.slice(6));
  state.after = Math.max(state.after, decision.seq);
  if (decision.why) tellDecision(decision);
  soon();
}

// ------------------------------------------------------------------ elements

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Elements are kept while their item is: focus, scroll and what was opened stay as they are.
function keyed(parent, items, id, build, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = id(item);
    let child = before.get(key);
    if (!child) {
      child = build(item);
      child.dataset.key = key;
    }
    before.delete(key);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const child of before.values()) child.remove();
}

const seconds = (value) => value < 1 ? `${Math.round(value * 1000)} ms`
  : value < 120 ? `${value.toFixed(1)} s` : value < 7200 ? `${(value / 60).toFixed(1)} min`
  : `${(value / 3600).toFixed(1)} h`;
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const count = (value) => value.toLocaleString("en");
const ratio = (value) => `${(100 * value).toFixed(value >= 0.9995 ? 0 : 2)}%`;
const plural = (many, word) => `${count(many)} ${word}${many === 1 ? "" : "s"}`;

// ------------------------------------------------------------------ the board

function take(board) {
  state.at = performance.now();
  state.board = board;
  if (state.after < 0) state.after = Math.max(0, board.seq - DECISIONS_MAX);
  const news = board.fleet !== null;
  if (news) [state.fleet, state.version] = [board.fleet, board.fleet_version];
  put(byId("link"), "live");
  byId("link").className = "pill good";
  showBanner(board);
  showTiles(board);
  showIncidents(board);
  showJobs(board);
  if (news) showFleet();
  showTaints(board);
  announce(board);
  tick();
  if (document.body.dataset.ready) return;
  document.body.dataset.ready = "yes";
  performance.mark("ready");
}

function away(error) {
  if (error instanceof Follows) {
    showLeader().catch(away);
    return;
  }
  put(byId("link"), "no answer");
  byId("link").className = "pill bad";
  const old = state.board ? ` What is shown is from ${clock(state.board.now)}.` : "";
  const banner = byId("banner");
  put(banner, `The orchestrator does not answer; trying again. Training goes on without it.${old}`);
  banner.title = String(error);
  banner.hidden = false;
}

async function showLeader() {
  const reply = await fetch("healthz", { cache: "no-store", redirect: "manual" });
  const leader = new URL((await reply.json()).leader);
  const banner = byId("banner");
  put(byId("link"), "follows");
  byId("link").className = "pill busy";
  if (!/^https?:$/.test(leader.protocol) || banner.querySelector("a")?.href === leader.href) return;
  const link = make("a", "", leader.origin);
  link.href = leader.href;
  banner.className = "banner busy";
  banner.title = "";
  banner.replaceChildren("This orchestrator does not lead any more. The cluster is shown by its leader: ", link);
  banner.hidden = false;
}

function showBanner(board) {
  const banner = byId("banner");
  const text = board.trouble || (board.frozen ? `FROZEN since ${clock(board.frozen.since)}: ${board.frozen.why}` : "");
  banner.className = board.trouble ? "banner" : "banner busy";
  put(banner, text);
  banner.hidden = !text;
}

function showTiles(board) {
  const { totals } = board;
  const unwell = totals.nodes - totals.nodes_ready;
  const jobs = board.jobs.filter((job) => !job.over).length + board.jobs_not_shown;
  const open = board.open.length;
  const tiles = [
    ["Nodes", count(totals.nodes), unwell ? `${count(unwell)} not ready` : "all ready", unwell ? "busy" : ""],
    ["Devices training", count(totals.devices_training), `of ${count(totals.devices)}`, ""],
    ["Spares", count(totals.standbys_ready), `warm; ${plural(totals.devices_free, "free device")}`, ""],
    ["Open incidents", count(open), open ? board.open.map((story) => story.job).join(", ") : "nothing is wrong", open ? "busy" : "good"],
    goodputTile(board.account),
    liveTile(board.account),
  ];
  put(byId("headline"), `${plural(jobs, "job")} · term ${board.term}`);
  keyed(byId("tiles"), tiles, (tile) => tile[0], (tile) => {
    const box = make("div");
    box.append(make("dt", "", tile[0]), make("dd"), make("dd", "sub"));
    return box;
  }, (box, [, value, sub, tone]) => {
    box.children[1].className = tone;
    put(box.children[1], value);
    put(box.children[2], sub);
  });
}

function goodputTile(account) {
  if (!account || account.goodput === null) return ["Goodput", "–", "nothing was paid for yet", "none"];
  return ["Goodput", ratio(account.goodput), "of all jobs, to date", ""];
}

function liveTile(account) {
  if (!account || account.live_ratio === null) return ["Resolved live", "–", "no failure counts so far", "none"];
  return ["Resolved live", ratio(account.live_ratio), `of ${plural(account.failures, "failure")}`, ""];
}

function promise({ live_ratio: live, target_ratio: target, failures }) {
  const promised = target === null ? "" : `, promised ${ratio(target)}`;
  return `${ratio(live)} of ${plural(failures, "failure")} resolved live${promised}`;
}

// ------------------------------------------------------------------ incidents

function showIncidents(board) {
  keyed(byId("open"), board.open, (story) => story.id, () => {
    const box = make("article", "story open");
    const header = make("header");
    header.append(make("h3"), make("span", "pill"), make("span", "for"));
    box.append(header, ...storyParts());
    return box;
  }, (box, story) => {
    const [title, pill, lasted] = box.firstChild.children;
    box.classList.toggle("bad", story.tone === "bad");
    box.setAttribute("aria-label", `Incident ${story.id} of job ${story.job}`);
    put(title, `${story.job} · incident ${story.id}`);
    pill.className = `pill ${story.tone}`;
    put(pill, (story.phases.find((step) => step.state === "now") || { name: story.outcome }).name);
    lasted.dataset.since = String(story.lasted_seconds);
    updateStory(box, story);
  });
  const quiet = byId("quiet");
  quiet.hidden = board.open.length > 0;
  put(quiet, board.closed.length ? "Nothing is wrong now. What was:" : "Nothing was wrong so far.");
  keyed(byId("closed"), board.closed, (story) => story.id, () => {
    const box = make("details", "story");
    const summary = make("summary");
    summary.append(make("h3"), make("span", "pill"), make("span", "when"), make("span", "for"));
    box.append(summary, ...storyParts());
    return box;
  }, (box, story) => {
    const [title, pill, when, lasted] = box.firstChild.children;
    put(title, `${story.job} · ${story.id}`);
    pill.className = `pill ${story.tone}`;
    put(pill, story.outcome);
    put(when, clock(story.opened_at));
    put(lasted, story.pause_seconds === null ? "" : `pause ${seconds(story.pause_seconds)}`);
    updateStory(box, story);
  });
}

function storyParts() {
  const phases = make("ol", "phases");
  phases.setAttribute("aria-label", "Phases");
  const told = make("ol", "told");
  told.setAttribute("aria-label", "What was decided, and why");
  told.tabIndex = 0;
  return [make("ul", "seen"), phases, told];
}

function updateStory(box, story) {
  const seen = box.querySelector(".seen");
  keyed(seen, story.seen.map((line, at) => ({ line, at })), (item) => String(item.at), () => make("li"), (li, { line }) => {
    li.className = line.startsWith(" ") ? "more" : "";
    put(li, line.trim());
  });
  keyed(box.querySelector(".phases"), story.phases, (step) => step.name, (step) => {
    const li = make("li");
    li.append(make("b", "", step.name), make("span"));
    return li;
  }, (li, step) => {
    li.className = step.state === "to come" ? "" : step.state;
    li.title = `${step.name}: ${step.state}`;
    if (step.state === "now") li.setAttribute("aria-current", "step");
    else li.removeAttribute("aria-current");
    put(li.lastChild, step.state === "to come" ? " " : seconds(step.seconds));
  });
  const told = box.querySelector(".told");
  const atEnd = told.scrollTop + told.clientHeight >= told.scrollHeight - 8;
  keyed(told, story.told.map((line, at) => ({ ...line, at: at + story.told_before })), (line) => String(line.at), () => {
    const li = make("li");
    li.append(make("span", "at"), make("span", "ph"), make("span", "why"));
    return li;
  }, (li, line) => {
    put(li.children[0], `+${line.after_seconds.toFixed(3)}s`);
    put(li.children[1], line.phase);
    put(li.children[2], line.why);
  });
  if (atEnd) told.scrollTop = told.scrollHeight;
}

// Said aloud by screen readers: that something began, and how it ended. Not every sentence.
function announce(board) {
  const open = new Map(board.open.map((story) => [story.id, story]));
  const before = state.known;
  state.known = open;
  if (!before) return;
  const said = [];
  for (const [id, story] of open) {
    if (!before.has(id)) said.push(`Incident ${id} began in job ${story.job}: ${story.seen[0] || ""}`);
  }
  for (const id of before.keys()) {
    const over = board.closed.find((story) => story.id === id);
    if (over) said.push(`Incident ${id} is over: ${over.outcome}${over.pause_seconds === null ? "" : ` after ${seconds(over.pause_seconds)}`}.`);
  }
  if (said.length) put(byId("announce"), said.join(" "));
}

// ------------------------------------------------------------------ jobs

function showJobs(board) {
  const parent = byId("jobs");
  const width = Math.max(200, parent.clientWidth);
  if (!board.jobs.length) {
    keyed(parent, [1], () => "none", () => make("p", "quiet", "No jobs. `keepstep run` starts one."), () => {});
    return;
  }
  const troubled = board.jobs.filter((job) => !job.over && job.tone !== "good").length;
  const cards = board.jobs.length <= 2 * CARDS_MAX ? board.jobs.length : Math.max(CARDS_MAX, troubled);
  keyed(parent, board.jobs.slice(0, cards), (job) => `job ${job.id}`, buildJob, (box, job) => updateJob(box, job, board, width));
  const others = board.jobs.slice(cards);
  byId("jobs-others").hidden = !others.length;
  rows(byId("jobs-table"), others.map((job) => [job.id, job.state, count(job.pace.step), job.pace.step_seconds ? seconds(job.pace.step_seconds) : "–",
    count(job.world), `${job.spares_ready} of ${job.spares_wanted}`, count(job.incidents)]));
  const more = byId("jobs-more");
  more.hidden = !board.jobs_not_shown;
  put(more, `… and ${plural(board.jobs_not_shown, "more job")}`);
}

function buildJob() {
  const box = make("article", "job");
  const header = make("header");
  header.append(make("h3"), make("span", "pill"), make("span", "pill busy"), make("span", "pill busy"));
  const grid = make("canvas");
  grid.setAttribute("role", "img");
  box.append(header, make("dl", "facts"), grid, make("p", "words"), make("ul", "notes"));
  return box;
}

function updateJob(box, job, board, width) {
  const [title, pill, mode, busy] = box.firstChild.children;
  box.classList.toggle("over", job.over);
  put(title, job.id);
  pill.className = `pill ${job.tone}`;
  put(pill, job.state);
  put(mode, job.mode === "act" ? "" : `mode ${job.mode}`);
  mode.hidden = job.mode === "act";
  put(busy, job.pace.busy ? `busy: ${job.pace.busy}` : "");
  busy.hidden = !job.pace.busy;
  const facts = [
    ["step", job.pace.step < 0 ? "none yet" : count(job.pace.step)],
    ["per step", job.pace.step_seconds ? seconds(job.pace.step_seconds) : "–"],
    ["ranks", count(job.world)],
    ["generation", count(job.generation)],
    ["spares", `${job.spares_ready} of ${job.spares_wanted}`],
    ["incidents", count(job.incidents)],
  ];
  if (job.fallbacks) facts.push(["fallbacks", count(job.fallbacks)]);
  if (job.account && job.account.goodput !== null) facts.push(["goodput", ratio(job.account.goodput)]);
  if (job.account && job.account.live_ratio !== null) facts.push(["guarantee", promise(job.account)]);
  keyed(box.querySelector(".facts"), facts, (fact) => fact[0], (fact) => {
    const pair = make("div");
    pair.append(make("dt", "", fact[0]), make("dd"));
    return pair;
  }, (pair, fact) => put(pair.lastChild, fact[1]));
  const words = Object.entries(job.counts).map(([word, many]) => `${count(many)} ${word}`).join(", ");
  put(box.querySelector(".words"), words ? `ranks: ${words}` : "");
  showRanks(box.querySelector("canvas"), job, board, width, words);
  keyed(box.querySelector(".notes"), job.notes.map((note, at) => ({ note, at })), (item) => String(item.at), () => make("li"), (li, { note }) => put(li, note));
}

function showRanks(grid, job, board, width, words) {
  const drawn = `${job.ranks} ${width} ${state.paint || 0}`;
  if (grid.dataset.drawn === drawn) return;
  grid.dataset.drawn = drawn;
  grid.hidden = !job.ranks;
  grid.setAttribute("aria-label", `${plural(job.ranks.length, "rank")}: ${words}`);
  if (job.ranks) ranks(grid, job.ranks, board.rank_words, width);
}

// ------------------------------------------------------------------ the fleet

function showFleet() {
  const { fleet, board } = state;
  const canvas = byId("map-canvas");
  document.body.classList.toggle("wide", board.totals.nodes > WIDE_NODES);
  map.draw(fleet, Math.max(200, byId("map").clientWidth));
  const words = board.totals.by_word;
  const said = words.map(({ word, many }) => `${count(many)} ${word}`).join(", ");
  canvas.setAttribute("aria-label", `${plural(board.totals.nodes, "node")}, ${plural(board.totals.devices, "device")}: ${said || "none"}. ${KEYS}`);
  keyed(byId("legend"), words, (item) => item.word, (item) => {
    const li = make("li");
    li.append(make("canvas"), make("span", "", item.word), make("b"));
    return li;
  }, (li, item) => {
    sample(li.firstChild, item.tone);
    put(li.lastChild, count(item.many));
  });
  showTables(fleet);
  if (state.chosen) choose(map.indexOf(state.chosen));
}

function showTables(fleet) {
  const unwell = map.places.filter((place) => place.mark !== "." || isWrong(place.cells));
  const more = unwell.length > ROWS_MAX ? `, ${ROWS_MAX} shown` : "";
  put(byId("unwell-count"), unwell.length ? `${plural(unwell.length, "node")} to look at${more}` : "all nodes well");
  if (!byId("unwell-part").open) return;
  rows(byId("unwell"), unwell.slice(0, ROWS_MAX).map((place) => [place.name, place.group, fleet.marks[place.mark].word, inWords(place.cells)]));
  const racks = fleet.groups.slice(0, ROWS_MAX).map((group) => [
    group.name, count(group.nodes.length), count([...group.marks].filter((mark) => mark !== ".").length), inWords(group.cells.join("")),
  ]);
  rows(byId("racks"), racks);
  put(byId("racks-more"), fleet.groups.length > ROWS_MAX ? `… and ${count(fleet.groups.length - ROWS_MAX)} more racks` : "");
}

byId("unwell-part").addEventListener("toggle", () => { if (state.fleet) showTables(state.fleet); });

function rows(table, lines) {
  keyed(table.tBodies[0], lines, (line) => line[0], (line) => {
    const row = make("tr");
    line.forEach((_, at) => row.append(at ? make("td") : make("th")));
    row.firstChild.scope = "row";
    return row;
  }, (row, line) => line.forEach((text, at) => put(row.children[at], text)));
}

const isWrong = (cells) => [...cells].some((letter) => ["bad", "taint"].includes(state.fleet.cells[letter].tone));

function inWords(cells) {
  const found = new Map();
  for (const letter of cells) found.set(letter, (found.get(letter) || 0) + 1);
  return [...found].map(([letter, many]) => `${many} ${state.fleet.cells[letter].word}`).join(", ");
}

function describe(place) {
  const mark = place.mark === "." ? "" : ` · ${state.fleet.marks[place.mark].word}`;
  const where = place.group === place.name ? "" : ` · ${place.group}`;
  return `${place.name}${where}${mark} · ${inWords(place.cells)}`;
}

function choose(at) {
  const place = map.places[at];
  const cursor = byId("map-cursor");
  cursor.hidden = !place;
  if (!place) return;
  state.chosen = place.name; // and not its number, which changes as nodes come and go
  put(byId("map-note"), describe(place));
  Object.assign(cursor.style, {
    left: `${place.x - 3}px`, top: `${place.y - 3}px`, width: `${place.w + 4}px`, height: `${place.h + 4}px`,
  });
}

async function showNode(place) {
  const panel = make("div", "panel");
  const reply = await ask(`v1/nodes/${encodeURIComponent(place.name)}`);
  const node = await reply.json();
  const lines = node.uses.map((use) => {
    const who = use.job ? `${use.job}, ${use.standby ? "standby" : `rank ${use.rank}`}` : "free";
    return `device ${use.slot}: ${who}${use.fenced ? ", fenced" : ""}${use.taint ? `; tainted: ${use.taint}` : ""}`;
  });
  const why = [node.drained && `drained: ${node.drained}`, node.taint && `tainted: ${node.taint}`, node.faults && plural(node.faults, "fault")];
  panel.append(make("h3", "", `${node.id} at ${node.address}`), ...[...why.filter(Boolean), ...lines].map((line) => make("p", "", line)));
  byId("node").replaceChildren(panel);
}

const canvas = byId("map-canvas");
canvas.addEventListener("mousemove", (event) => {
  const place = map.places[map.at(event.offsetX, event.offsetY)];
  if (place) put(byId("map-note"), describe(place));
});
canvas.addEventListener("click", (event) => {
  const at = map.at(event.offsetX, event.offsetY);
  if (at < 0) return;
  choose(at);
  showNode(map.places[at]).catch(away);
});
canvas.addEventListener("keydown", (event) => {
  const last = map.places.length - 1;
  if (last < 0) return;
  const from = map.indexOf(state.chosen);
  const wanted = {
    ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Enter: from,
    PageDown: map.rackFrom(from, 1), PageUp: map.rackFrom(from, -1), Home: 0, End: last,
  }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  const to = Math.min(last, Math.max(0, wanted));
  choose(to);
  byId("map-cursor").scrollIntoView({ block: "nearest" });
  if (event.key === "Enter") showNode(map.places[to]).catch(away);
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const at = map.indexOf(byId("find-name").value.trim());
  if (at < 0) {
    put(byId("map-note"), "No node is called so.");
    return;
  }
  choose(at);
  byId("map-cursor").scrollIntoView({ block: "nearest" });
  showNode(map.places[at]).catch(away);
});

function showTaints(board) {
  const part = byId("taints-part");
  const many = board.taints.length + board.taints_not_shown;
  part.hidden = !many;
  put(byId("taints-count"), `${plural(many, "tainted place")}${board.taints_not_shown ? `, ${board.taints.length} shown` : ""}`);
  rows(byId("taints"), board.taints.map((taint) => [taint.place, taint.severity, seconds(taint.left_seconds), taint.source, taint.reason]));
}

// ------------------------------------------------------------------ decisions, and the time

function tellDecision(decision) {
  const list = byId("decisions");
  const li = make("li");
  const body = make("p");
  const jobs = Object.entries(decision.phases || {}).map(([job, phase]) => `${job} [${phase}]`).join(" ");
  body.append(make("b", "", `${jobs || decision.node || "cluster"} `), decision.why);
  li.append(make("time", "", clock(decision.at)), body);
  list.prepend(li);
  while (list.children.length > DECISIONS_MAX) list.lastChild.remove();
}

function tick() {
  if (!state.board) return;
  const since = (performance.now() - state.at) / 1000;
  put(byId("clock"), clock(state.board.now + since));
  for (const lasted of document.querySelectorAll(".story.open .for")) {
    put(lasted, `for ${seconds(Number(lasted.dataset.since) + since)}`);
  }
}

function repaint() {
  readColours();
  state.paint = (state.paint || 0) + 1;
  if (!state.board) return;
  showJobs(state.board);
  showFleet();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(repaint, 100); });
setInterval(tick, 250);
readColours();
refresh();
listen();

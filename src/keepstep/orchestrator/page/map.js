// The fleet map and the grids of ranks: letters in, a canvas out. Nothing is reckoned here but
// where to draw. A letter's word and tone come with the board; each tone has a colour and a shape.

const GAP = 6;
const SIZES = [22, 18, 15, 12, 10, 8, 7, 6, 5, 4, 3, 2];
const HEIGHT_MAX = 640;
const LOUD_SIZE = 6; // what is wrong is never drawn smaller
const NAMED_MAX = 48; // nodes: with more of them there is no room for names

let colours = {};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["good", "busy", "bad", "spare", "free", "taint", "dim", "text", "soft", "card", "line"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function prepared(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
}

// One device or rank. Large enough, it also has a shape: colour alone tells nothing to some.
function cell(pen, x, y, size, tone) {
  pen.fillStyle = colours[tone] || colours.dim;
  if (size < 9) {
    pen.fillRect(x, y, size, size);
    return;
  }
  const inset = tone === "free" ? 1 : 0;
  pen.beginPath();
  pen.roundRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset, Math.min(4, size / 5));
  if (tone === "free" || tone === "dim") {
    pen.strokeStyle = pen.fillStyle;
    pen.lineWidth = 1.5;
    pen.stroke();
    if (tone === "dim") pen.fillRect(x + size * 0.25, y + size / 2 - 1, size * 0.5, 2);
    return;
  }
  pen.fill();
  pen.strokeStyle = pen.fillStyle = colours.card;
  pen.lineWidth = Math.max(1.5, size / 10);
  const [a, b, m] = [size * 0.3, size * 0.7, size * 0.5];
  pen.beginPath();
  if (tone === "bad") {
    pen.moveTo(x + a, y + a); pen.lineTo(x + b, y + b);
    pen.moveTo(x + b, y + a); pen.lineTo(x + a, y + b);
    pen.stroke();
  } else if (tone === "busy") {
    pen.arc(x + m, y + m, size * 0.14, 0, 7);
    pen.fill();
  } else if (tone === "spare") {
    pen.moveTo(x + m, y + a); pen.lineTo(x + m, y + b);
    pen.moveTo(x + a, y + m); pen.lineTo(x + b, y + m);
    pen.stroke();
  } else if (tone === "taint") {
    pen.moveTo(x + m, y + a); pen.lineTo(x + m, y + m + 1);
    pen.stroke();
    pen.fillRect(x + m - 1, y + b - 1, 2, 2);
  }
}

export function sample(canvas, tone) {
  cell(prepared(canvas, 14, 14), 0, 0, 14, tone);
}

// ------------------------------------------------------------------ ranks

export function ranks(canvas, letters, words, width) {
  const many = letters.length;
  let size = 26;
  for (const wanted of [26, 18, 14, 10, 8, 6, 5, 4, 3, 2]) {
    size = wanted;
    const across = Math.max(1, Math.floor(width / (size + step(size))));
    if (Math.ceil(many / across) * (size + step(size)) <= 130) break;
  }
  const pitch = size + step(size);
  const across = Math.max(1, Math.floor(width / pitch));
  const pen = prepared(canvas, Math.min(many, across) * pitch, Math.ceil(many / across) * pitch);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let rank = 0; rank < many; rank++) {
    const [x, y] = [(rank % across) * pitch, Math.floor(rank / across) * pitch];
    const tone = words[letters[rank]].tone;
    if (size >= 18) {
      numbered(pen, x, y, size, tone, rank);
    } else {
      cell(pen, x, y, size, tone);
    }
  }
}

function numbered(pen, x, y, size, tone, rank) {
  pen.beginPath();
  pen.roundRect(x, y, size, size, 5);
  const hollow = tone === "bad" || tone === "dim";
  pen.fillStyle = pen.strokeStyle = colours[tone];
  pen.lineWidth = 2;
  if (hollow) {
    // Nobody sits there: an outline, crossed out if that is bad.
    pen.stroke();
    pen.fillStyle = colours[tone];
  } else {
    pen.fill();
    pen.fillStyle = tone === "busy" ? "#1b1400" : colours.card;
  }
  pen.font = `600 ${Math.min(13, size / 2)}px system-ui, sans-serif`;
  pen.fillText(String(rank), x + size / 2, y + size / 2 + 0.5);
}

const step = (size) => (size >= 15 ? 4 : size >= 8 ? 2 : size >= 4 ? 1 : 0);

// ------------------------------------------------------------------ the fleet

export class FleetMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.places = []; // one per node: {name, group, rack, mark, cells, x, y, w, h}
    this.fleet = null;
  }

  draw(fleet, width) {
    this.fleet = fleet;
    const nodes = fleet.groups.reduce((sum, group) => sum + group.nodes.length, 0);
    const named = nodes <= NAMED_MAX ? longest(fleet.groups) : 0;
    let laid = null;
    for (const size of SIZES) {
      laid = layout(fleet.groups, size, width, named);
      if (laid.height <= HEIGHT_MAX) break;
    }
    this.places = laid.places;
    const pen = prepared(this.canvas, width, Math.max(laid.height, 10));
    pen.textBaseline = "middle";
    for (const title of laid.titles) {
      pen.fillStyle = colours.soft;
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(clip(pen, title.text, title.w), title.x, title.y);
    }
    for (const place of laid.places) this.node(pen, place, laid, named);
    if (laid.size < LOUD_SIZE) for (const place of laid.places) this.loud(pen, place, laid);
  }

  // One device among 100,000 is two pixels wide. What should be seen is drawn again, larger.
  loud(pen, place, laid) {
    const { size, pitch, strip } = laid;
    const tone = this.fleet.marks[place.mark].tone;
    if (tone === "bad" || tone === "busy" || tone === "taint") {
      pen.fillStyle = colours.card;
      pen.fillRect(place.x - 2, place.y + size / 2 - LOUD_SIZE / 2 - 1, place.w + 2, LOUD_SIZE + 2);
      pen.fillStyle = colours[tone];
      pen.fillRect(place.x - 1, place.y + size / 2 - LOUD_SIZE / 2, place.w, LOUD_SIZE);
    }
    for (let slot = 0; slot < place.cells.length; slot++) {
      const wrong = this.fleet.cells[place.cells[slot]].tone;
      if (wrong !== "bad" && wrong !== "taint") continue;
      if (place.mark !== ".") continue;
      const [x, y] = [place.x + strip + slot * pitch + size / 2, place.y + size / 2];
      pen.fillStyle = colours.card;
      pen.fillRect(x - LOUD_SIZE / 2 - 1, y - LOUD_SIZE / 2 - 1, LOUD_SIZE + 2, LOUD_SIZE + 2);
      pen.fillStyle = colours[wrong];
      pen.fillRect(x - LOUD_SIZE / 2, y - LOUD_SIZE / 2, LOUD_SIZE, LOUD_SIZE);
    }
  }

  node(pen, place, laid, named) {
    const { size, pitch, strip, label } = laid;
    const tone = this.fleet.marks[place.mark].tone;
    if (place.mark !== ".") {
      pen.fillStyle = colours[tone];
      pen.fillRect(place.x, place.y, Math.max(1, strip - 1), size);
    }
    if (named) {
      pen.fillStyle = colours.text;
      pen.font = "13px system-ui, sans-serif";
      pen.fillText(clip(pen, place.name, label - 10), place.x + strip + 2, place.y + size / 2);
    }
    const from = place.x + strip + label;
    if (pitch === size) {
      // No gaps between them: neighbours of one kind are one stroke.
      for (let slot = 0, end = 0; slot < place.cells.length; slot = end) {
        for (end = slot + 1; place.cells[end] === place.cells[slot];) end++;
        pen.fillStyle = colours[this.fleet.cells[place.cells[slot]].tone];
        pen.fillRect(from + slot * pitch, place.y, (end - slot) * pitch, size);
      }
      return;
    }
    for (let slot = 0; slot < place.cells.length; slot++) {
      cell(pen, from + slot * pitch, place.y, size, this.fleet.cells[place.cells[slot]].tone);
    }
  }

  at(x, y) {
    return this.places.findIndex((p) => x >= p.x && x < p.x + p.w && y >= p.y && y < p.y + p.h);
  }

  indexOf(name) {
    return this.places.findIndex((place) => place.name === name);
  }

  // The first node of the rack that is so many further on: a fleet has too many nodes for one by one.
  rackFrom(at, further) {
    const rack = at < 0 ? 0 : this.places[at].rack + further;
    const to = Math.min(this.fleet.groups.length - 1, Math.max(0, rack));
    return this.places.findIndex((place) => place.rack === to);
  }
}

// Room for the longest name, within reason.
function longest(groups) {
  const names = groups.flatMap((group) => group.nodes);
  return Math.min(220, Math.max(24, ...names.map((name) => 8.5 * name.length))) + 14;
}

// Racks side by side, their nodes below each other, a node's devices in a row.
function layout(groups, size, width, named) {
  const pitch = size + step(size);
  const strip = size >= 8 ? 5 : 2;
  const label = named;
  const titled = size >= 8 ? 18 : 0;
  const gap = size >= 8 ? 3 * GAP : size >= 4 ? GAP : 4;
  const [places, titles] = [[], []];
  let [x, y, tall] = [0, 0, 0];
  for (const [rack, group] of groups.entries()) {
    let most = 1;
    for (const cells of group.cells) most = Math.max(most, cells.length);
    const w = strip + label + most * pitch;
    const h = titled + group.nodes.length * pitch;
    if (x > 0 && x + w > width) {
      [x, y, tall] = [0, y + tall + gap, 0];
    }
    if (titled) titles.push({ text: group.name, x, y: y + titled / 2 - 2, w: w + gap - 4 });
    for (let n = 0; n < group.nodes.length; n++) {
      places.push({
        name: group.nodes[n], group: group.name, rack, mark: group.marks[n], cells: group.cells[n],
        x, y: y + titled + n * pitch, w, h: pitch,
      });
    }
    tall = Math.max(tall, h);
    x += w + gap;
  }
  return { places, titles, size, pitch, strip, label, height: y + tall };
}

function clip(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}

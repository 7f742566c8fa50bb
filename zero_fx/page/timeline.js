// Lanes, memory below them, and the strip of the whole step. Times in nanoseconds of the step.

const ROWS = { phases: [0, 18], ruler: [18, 18], compute: [42, 42], copy: [90, 22], communication: [118, 36], memory: [176, 216] };
const HEIGHT = 400, GUTTER = 112;

function showTimeline(data, showLine) {
  const canvas = $("timeline"), context = canvas.getContext("2d"), strip = $("overview"), small = strip.getContext("2d");
  const state = { data, canvas, context, strip, small, from: 0, to: data.end, hover: null, chosen: -1, lanes: byLane(data), colors: {} };
  state.peak = peakOf(data);
  const redraw = () => { if (!state.queued) { state.queued = true; requestAnimationFrame(() => { state.queued = false; draw(state); }); } };
  const resize = () => { fit(canvas, context, HEIGHT); fit(strip, small, 44); readColors(state); draw(state); drawStrip(state); };
  state.look = (from, to) => {
    const least = Math.min(data.end, 200), size = Math.max(least, Math.min(data.end, to - from));
    state.from = Math.max(0, Math.min(data.end - size, from));
    state.to = state.from + size;
    redraw();
    drawStrip(state);
  };
  state.redraw = redraw;
  state.choose = (index) => { state.chosen = index; showChosen(state, index, showLine); redraw(); };
  legend(data);
  viewButtons(state);
  listen(state);
  listenStrip(state);
  new ResizeObserver(resize).observe($("stage"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
  resize();
  return state;
}

function fit(canvas, context, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(canvas.clientWidth * scale);
  canvas.height = Math.round(height * scale);
  context.setTransform(scale, 0, 0, scale, 0, 0);
}

function readColors(state) {
  for (const name of [...state.data.span_kinds, "text", "dim", "line", "faint", "card", "accent", "bad"]) state.colors[name] = style(`--${name}`);
  for (const [, color] of MEMORY) state.colors[color] = style(color);
}

// Numbers of the spans of each lane, in the order of time.
function byLane(data) {
  const { lane, start } = data.spans, found = data.lanes.map(() => []);
  for (let i = 0; i < lane.length; i++) found[lane[i]].push(i);
  for (const one of found) one.sort((a, b) => start[a] - start[b]);
  return found.map((spans) => ({ spans, starts: spans.map((i) => start[i]) }));
}

function peakOf(data) {
  const half = data.halves.reduce((a, b) => (b.peak_bytes > (a ? a.peak_bytes : -1) ? b : a), null);
  return half && { half, at: timeOf(half, half.peak_event), event: half.peak_event };
}

// When an event runs: the middle of it.
function timeOf(half, event) {
  const end = half.ends[Math.max(0, event)] || 0, begin = event > 0 ? half.ends[event - 1] : 0;
  return half.start + (begin + end) / 2;
}

function legend(data) {
  const used = new Set(data.spans.kind);
  for (const [i, kind] of data.span_kinds.entries()) {
    if (used.has(i)) $("legend").append(make("span", {}, make("i", { style: `background:var(--${kind})` }), KIND_NAMES[kind]));
  }
  for (const [name, color] of MEMORY) {
    $("memory-legend").append(make("span", {}, make("i", { style: `background:var(${color})` }), name));
  }
}

function viewButtons(state) {
  const { data } = state, views = [["whole step", 0, data.end], ...data.halves.slice(0, 4).map((h) => [h.label, h.start, h.end])];
  if (state.peak) {
    const size = data.end / 40;
    views.push(["peak", state.peak.at - size, state.peak.at + size]);
  }
  for (const [name, from, to] of views) $("views").append(make("button", { textContent: name, onclick: () => state.look(from, to) }));
  for (const [name, factor, title] of [["−", 2, "zoom out"], ["+", 0.5, "zoom in"]]) {
    $("views").append(make("button", { textContent: name, title, onclick: () => zoom(state, (state.from + state.to) / 2, factor) }));
  }
}

function zoom(state, at, factor) {
  state.look(at - (at - state.from) * factor, at + (state.to - at) * factor);
}

const gutter = (state) => (state.canvas.clientWidth > 640 ? GUTTER : 0);
const toX = (state, t) => gutter(state) + (t - state.from) / (state.to - state.from) * (state.canvas.clientWidth - gutter(state));
const toTime = (state, x) => state.from + (x - gutter(state)) / (state.canvas.clientWidth - gutter(state)) * (state.to - state.from);

// --- drawing

function draw(state) {
  const { context: c, canvas, colors, data } = state, width = canvas.clientWidth, left = gutter(state);
  c.clearRect(0, 0, width, HEIGHT);
  c.textBaseline = "middle";
  c.save();
  c.beginPath();
  c.rect(left, 0, width - left, HEIGHT);
  c.clip();
  drawRuler(state, width);
  data.lanes.forEach((name, lane) => drawLane(state, state.lanes[lane], ROWS[name], width));
  drawMemory(state, width);
  if (state.hover) {
    c.fillStyle = colors.text;
    c.globalAlpha = 0.55;
    c.fillRect(Math.round(state.hover.x), ROWS.ruler[0], 1, HEIGHT);
    c.globalAlpha = 1;
  }
  if (state.range) {
    c.globalAlpha = 0.16;
    c.fillStyle = colors.accent;
    c.fillRect(Math.min(...state.range), 0, Math.abs(state.range[1] - state.range[0]), HEIGHT);
    c.globalAlpha = 1;
  }
  c.restore();
  drawLabels(state, left);
}

function drawRuler(state, width) {
  const { context: c, colors, data, from, to } = state;
  const phases = [...data.halves.map((h) => [h.label, h.start, h.end]), ["optimizer", data.halves.length ? data.halves.at(-1).end : 0, data.end]];
  phases.forEach(([name, begin, end], i) => {
    const a = Math.max(toX(state, begin), gutter(state)), b = Math.min(toX(state, end), width);
    if (b <= a) return;
    c.fillStyle = colors.faint;
    c.fillRect(a, ROWS.phases[0], b - a - 1, ROWS.phases[1] - 3);
    if (i && begin > from) { c.fillStyle = colors.dim; c.globalAlpha = 0.5; c.fillRect(a - 1, 0, 1, HEIGHT); c.globalAlpha = 1; }
    label(c, `${name}  ${seconds(end - begin)}`, a + 6, ROWS.phases[0] + 8, b - a - 10, colors.text, "600 11px system-ui, sans-serif");
  });
  const step = niceStep((to - from) / Math.max(2, (width - gutter(state)) / 110));
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    const x = toX(state, t);
    c.fillStyle = colors.line;
    c.fillRect(Math.round(x), ROWS.ruler[0] + 14, 1, HEIGHT);
    label(c, axis(t, step), x + 3, ROWS.ruler[0] + 9, 90, colors.dim, "11px system-ui, sans-serif");
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least);
}

function axis(t, step) {
  const [unit, size] = step >= 1e8 ? ["s", 1e9] : step >= 1e4 ? ["ms", 1e6] : ["µs", 1e3];
  return `${(t / size).toLocaleString("en-US", { maximumFractionDigits: Math.max(0, Math.ceil(Math.log10(size / step))) })} ${unit}`;
}

function label(c, text, x, y, room, color, font) {
  c.font = font;
  if (room < 18) return;
  if (c.measureText(text).width > room) {
    const fits = Math.floor(text.length * room / c.measureText(text).width) - 1;
    if (fits < 3) return;
    text = text.slice(0, fits) + "…";
  }
  c.fillStyle = color;
  c.fillText(text, x, y);
}

// Spans wider than a pixel one by one; of what shares a pixel column the kind that takes most of it.
function drawLane(state, lane, [top, height], width) {
  const { context: c, colors, data, from, to } = state, { start, dur, kind, name } = data.spans;
  const first = Math.max(0, above(lane.starts, from) - 1), last = above(lane.starts, to);
  let column = -1, shares = {};
  const flush = () => {
    const found = Object.entries(shares);
    if (column >= 0 && found.length) {
      const [most] = found.reduce((a, b) => (b[1] > a[1] ? b : a));
      const covered = Math.min(1, found.reduce((sum, [, share]) => sum + share, 0));
      c.globalAlpha = 0.25 + 0.75 * covered;
      c.fillStyle = colors[most];
      c.fillRect(column, top, 1, height);
      c.globalAlpha = 1;
    }
    shares = {};
  };
  for (let n = first; n < last; n++) {
    const i = lane.spans[n], x = toX(state, start[i]), w = toX(state, start[i] + dur[i]) - x, what = data.span_kinds[kind[i]];
    if (w < 1.5) {
      const here = Math.floor(x);
      if (here !== column) { flush(); column = here; }
      shares[what] = (shares[what] || 0) + w;
      continue;
    }
    const a = Math.max(x, -2), b = Math.min(x + w, width + 2);
    c.fillStyle = colors[what];
    c.fillRect(a, top, Math.max(1, b - a - (w > 4 ? 1 : 0)), height);
    if (what === "wait") hatch(c, a, top, b - a, height, colors.card);
    if (i === state.chosen) { c.strokeStyle = colors.text; c.lineWidth = 2; c.strokeRect(a + 1, top + 1, b - a - 3, height - 2); }
    if (b - a > 46) label(c, data.strings[name[i]], Math.max(a, gutter(state)) + 5, top + height / 2, b - Math.max(a, gutter(state)) - 10, "#fff", "500 11px system-ui, sans-serif");
  }
  flush();
}

function hatch(c, x, y, width, height, color) {
  c.save();
  c.beginPath();
  c.rect(x, y, width, height);
  c.clip();
  c.strokeStyle = color;
  c.globalAlpha = 0.45;
  c.lineWidth = 1.5;
  c.beginPath();
  for (let at = x - height; at < x + width; at += 6) { c.moveTo(at, y + height); c.lineTo(at + height, y); }
  c.stroke();
  c.restore();
}

// Bytes at time t: [total, {name: bytes}, half, event].
function memoryAt(data, t) {
  const named = { parameters: data.always[0], "optimizer states": data.always[1] };
  const half = data.halves.find((one) => t >= one.start && t <= one.end);
  let event = -1;
  if (half) {
    event = Math.min(above(half.ends, t - half.start), half.ends.length - 1);
    data.kinds.forEach((kind, i) => { named[kind] = half.live[i][event]; });
  }
  return [Object.values(named).reduce((a, b) => a + b, 0), named, half, event];
}

// Largest memory of the events between two times, so that no peak falls between pixels.
function mostBetween(data, a, b) {
  const half = data.halves.find((one) => b >= one.start && a <= one.end);
  if (!half || !half.ends.length) return null;
  const first = Math.min(above(half.ends, a - half.start), half.ends.length - 1);
  const last = Math.min(above(half.ends, b - half.start), half.ends.length - 1);
  let best = -1, most = -1;
  for (let event = first; event <= last; event++) {
    let sum = 0;
    for (const kind of half.live) sum += kind[event];
    if (sum > most) { most = sum; best = event; }
  }
  return data.kinds.map((_, i) => half.live[i][best]);
}

function memoryScale(data) {
  const peak = data.summary.peak_bytes, device = data.summary.device_bytes;
  return device < peak * 2.2 ? Math.max(device, peak) * 1.06 : peak * 1.12;
}

function drawMemory(state, width) {
  const { context: c, colors, data } = state, [top, height] = ROWS.memory, left = gutter(state), most = memoryScale(data) || 1;
  const y = (size) => top + height - size / most * height;
  const columns = Math.max(1, Math.ceil(width - left)), order = MEMORY.map(([name]) => data.kinds.indexOf(name));
  const stacks = MEMORY.map(() => new Float64Array(columns + 1));
  for (let x = 0; x <= columns; x++) {
    const live = mostBetween(data, toTime(state, left + x), toTime(state, left + x + 1));
    let sum = 0;
    for (let n = 0; n < MEMORY.length; n++) {
      sum += order[n] < 0 ? data.always[n] || 0 : live ? live[order[n]] : 0;
      stacks[n][x] = sum;
    }
  }
  for (let n = MEMORY.length - 1; n >= 0; n--) {
    c.fillStyle = colors[MEMORY[n][1]];
    c.beginPath();
    c.moveTo(left, top + height);
    for (let x = 0; x <= columns; x++) { c.lineTo(left + x, y(stacks[n][x])); c.lineTo(left + x + 1, y(stacks[n][x])); }
    c.lineTo(left + columns + 1, top + height);
    c.fill();
  }
  limit(state, "device", data.summary.device_bytes, most, width, y);
  if (data.summary.budget) limit(state, "budget", data.summary.budget, most, width, y);
  if (state.peak) {
    const x = toX(state, state.peak.at), at = y(data.summary.peak_bytes), text = `peak ${bytes(data.summary.peak_bytes)}`;
    c.fillStyle = colors.text;
    c.beginPath();
    c.arc(x, at, 3.5, 0, 7);
    c.fill();
    c.font = "600 11px system-ui, sans-serif";
    const room = c.measureText(text).width;
    c.fillText(text, Math.min(x + 7, width - room - 6), Math.max(at - 9, top - 4));
  }
}

function limit(state, name, size, most, width, y) {
  if (size > most) return;
  const { context: c, colors } = state;
  c.strokeStyle = colors.bad;
  c.setLineDash([5, 4]);
  c.beginPath();
  c.moveTo(gutter(state), y(size));
  c.lineTo(width, y(size));
  c.stroke();
  c.setLineDash([]);
  label(c, `${name} ${bytes(size)}`, gutter(state) + 6, y(size) + 9, 160, colors.bad, "11px system-ui, sans-serif");
}

function drawLabels(state, left) {
  const { context: c, colors, data } = state, [top, height] = ROWS.memory;
  for (const name of data.lanes) {
    const [y, tall] = ROWS[name];
    if (left) label(c, name, 0, y + tall / 2, left - 8, colors.text, "500 12px system-ui, sans-serif");
    else tag(c, name, 2, y + 1, colors);
    const lane = state.lanes[data.lanes.indexOf(name)];
    if (!lane.spans.length) label(c, "none", left + 6, y + tall / 2, 60, colors.dim, "11px system-ui, sans-serif");
  }
  const most = memoryScale(data), step = niceStep(most / GIB * 1000 / 5) / 1000;
  if (!left) tag(c, "memory", 2, top - 14, colors);
  for (let g = 0; g * GIB < most; g += step) {
    const y = top + height - g * GIB / most * height;
    if (left) {
      if (y < top + height - 12) { c.fillStyle = colors.dim; c.textAlign = "right"; c.font = "11px system-ui, sans-serif"; c.fillText(`${+g.toFixed(3)} GiB`, left - 8, y); c.textAlign = "left"; }
    } else if (g) tag(c, `${+g.toFixed(3)} GiB`, 2, y - 7, colors);
  }
  if (left) label(c, "memory", 0, top + height - 8, 60, colors.text, "500 12px system-ui, sans-serif");
}

function tag(c, text, x, y, colors) {
  c.font = "10px system-ui, sans-serif";
  c.globalAlpha = 0.82;
  c.fillStyle = colors.card;
  c.fillRect(x, y, c.measureText(text).width + 6, 13);
  c.globalAlpha = 1;
  c.fillStyle = colors.text;
  c.fillText(text, x + 3, y + 7);
}

function drawStrip(state) {
  const { small: c, strip, data, colors } = state, width = strip.clientWidth, most = data.summary.peak_bytes * 1.05 || 1;
  c.clearRect(0, 0, width, 44);
  for (let x = 0; x < width; x++) {
    const live = mostBetween(data, data.end * x / width, data.end * (x + 1) / width) || [];
    const sum = live.reduce((a, b) => a + b, 0) + data.always[0] + data.always[1];
    c.fillStyle = colors["--m-saved"];
    c.globalAlpha = 0.6;
    c.fillRect(x, 44 - sum / most * 34, 1, sum / most * 34);
  }
  c.globalAlpha = 1;
  const { start, dur, kind } = data.spans, wait = data.span_kinds.indexOf("wait");
  c.fillStyle = colors.wait;
  for (let i = 0; i < start.length; i++) if (kind[i] === wait) c.fillRect(start[i] / data.end * width, 2, Math.max(0.7, dur[i] / data.end * width), 6);
  const a = state.from / data.end * width, b = state.to / data.end * width;
  c.fillStyle = colors.card;
  c.globalAlpha = 0.62;
  c.fillRect(0, 0, a, 44);
  c.fillRect(b, 0, width - b, 44);
  c.globalAlpha = 1;
  c.strokeStyle = colors.accent;
  c.lineWidth = 2;
  c.strokeRect(a + 1, 1, Math.max(3, b - a - 2), 42);
}

// What the pointer does on the timeline: hover, drag, zoom, click; and the strip below it.

function listen(state) {
  const { canvas } = state, pointers = new Map();
  let moved = 0, ruler = null, pinch = 0;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = at(event);
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, x);
    moved = 0;
    ruler = y < ROWS.compute[0] - 4 ? x : null;
    if (pointers.size === 2) pinch = spread(pointers);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event), before = pointers.get(event.pointerId);
    if (before === undefined) return hover(state, x, y);
    moved += Math.abs(x - before);
    pointers.set(event.pointerId, x);
    if (pointers.size === 2) {
      const now = spread(pointers), middle = toTime(state, [...pointers.values()].reduce((a, b) => a + b) / 2);
      zoom(state, middle, pinch / Math.max(now, 1));
      pinch = now;
    } else if (ruler !== null) {
      state.range = [ruler, x];
      state.redraw();
    } else if (moved > 3) {
      canvas.classList.add("drag");
      const shift = toTime(state, before) - toTime(state, x);
      state.look(state.from + shift, state.to + shift);
    }
  });
  const up = (event) => {
    const [x, y] = at(event);
    if (!pointers.delete(event.pointerId)) return;
    canvas.classList.remove("drag");
    if (state.range && moved > 6) {
      const ends = state.range.map((one) => toTime(state, one)).sort((a, b) => a - b);
      state.range = null;
      state.look(...ends);
    } else if (moved <= 3 && event.type === "pointerup") {
      hover(state, x, y);
      if (state.hover && state.hover.span >= 0) state.choose(state.hover.span);
    }
    state.range = null;
    state.redraw();
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => { if (!pointers.size) { state.hover = null; $("tip").style.visibility = "hidden"; state.redraw(); } });
  canvas.addEventListener("dblclick", (event) => zoom(state, toTime(state, at(event)[0]), 0.33));
  canvas.addEventListener("wheel", (event) => {
    const [x] = at(event);
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(state, toTime(state, x), Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.01))));
    } else if (event.deltaX) {
      event.preventDefault();
      const shift = event.deltaX / canvas.clientWidth * (state.to - state.from);
      state.look(state.from + shift, state.to + shift);
    }
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const size = state.to - state.from, middle = (state.from + state.to) / 2;
    const act = {
      ArrowLeft: () => state.look(state.from - size / 8, state.to - size / 8), ArrowRight: () => state.look(state.from + size / 8, state.to + size / 8),
      "+": () => zoom(state, middle, 0.5), "=": () => zoom(state, middle, 0.5), "-": () => zoom(state, middle, 2), 0: () => state.look(0, state.data.end),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
}

function spread(pointers) {
  const [a, b] = [...pointers.values()];
  return Math.abs(a - b);
}

function listenStrip(state) {
  const { strip, data } = state;
  let down = false;
  const move = (event) => {
    const box = strip.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * data.end, half = (state.to - state.from) / 2;
    state.look(at - half, at + half);
  };
  strip.addEventListener("pointerdown", (event) => { down = true; strip.setPointerCapture(event.pointerId); move(event); });
  strip.addEventListener("pointermove", (event) => { if (down) move(event); });
  strip.addEventListener("pointerup", () => { down = false; });
}

// The span under the pointer: the nearest within two pixels.
function spanAt(state, x, y) {
  const { data } = state, { start, dur } = data.spans;
  const lane = data.lanes.findIndex((name) => y >= ROWS[name][0] && y < ROWS[name][0] + ROWS[name][1]);
  if (lane < 0) return -1;
  const { spans, starts } = state.lanes[lane], t = toTime(state, x), near = (state.to - state.from) / state.canvas.clientWidth * 2;
  const n = above(starts, t) - 1;
  const found = [n, n + 1].filter((k) => k >= 0 && k < spans.length).map((k) => spans[k])
    .map((i) => [i, Math.max(start[i] - t, t - start[i] - dur[i], 0)]).filter(([, away]) => away <= near).sort((a, b) => a[1] - b[1]);
  return found.length ? found[0][0] : -1;
}

function hover(state, x, y) {
  if (x < gutter(state)) { state.hover = null; $("tip").style.visibility = "hidden"; return state.redraw(); }
  const span = spanAt(state, x, y), t = toTime(state, x);
  state.hover = { x, y, span };
  state.canvas.style.cursor = span >= 0 ? "pointer" : y < ROWS.compute[0] - 4 ? "col-resize" : "";
  const tip = $("tip");
  tip.replaceChildren(...(span >= 0 ? aboutSpan(state.data, span) : y >= ROWS.memory[0] - 10 ? aboutMemory(state, t, x) : []));
  tip.style.visibility = tip.childNodes.length ? "visible" : "hidden";
  const room = state.canvas.clientWidth, wide = tip.offsetWidth;
  tip.style.left = `${x + 14 + wide < room ? x + 14 : Math.max(0, x - wide - 14)}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 14, HEIGHT - tip.offsetHeight + 60))}px`;
  state.redraw();
}

const line = (name, value, color, kind) => make("tr", { className: kind || "" },
  make("td", {}, ...(color ? [make("i", { style: `background:var(${color})` })] : []), name), make("td", {}, value));

function aboutSpan(data, i) {
  const s = data.spans, half = data.halves[s.half[i]], kind = data.span_kinds[s.kind[i]];
  const place = half ? data.strings[half.event_place[s.event[i]]] : "";
  return [make("b", {}, data.strings[s.name[i]]), make("table", {},
    line(KIND_NAMES[kind], seconds(s.dur[i]), `--${kind}`), line(`begins, in ${half ? half.label : "the optimizer"}`, seconds(s.start[i])),
    ...(place ? [line("from", place)] : []))];
}

function aboutMemory(state, t) {
  const { data } = state, [total, named, half, event] = memoryAt(data, t), rows = [];
  for (const [name, color] of [...MEMORY].reverse()) if (named[name]) rows.push(line(name, bytes(named[name]), color));
  if (half) {
    const largest = largestAt(data, half, event).slice(0, 7);
    if (largest.length) rows.push(line("largest of it", "", null, "head"));
    for (const [name, size, n] of largest) rows.push(line(n > 1 ? `${n} × ${name}` : name, bytes(size), null, "sub"));
    rows.push(line("while this runs", "", null, "head"));
    rows.push(line(`${data.strings[half.event_name[event]]} ${data.strings[half.event_place[event]]}`, "", null, "sub"));
  }
  return [make("b", {}, `${bytes(total)} at ${seconds(t)}`), make("table", {}, ...rows)];
}

// What lives at an event: [[name, bytes, how many], ...], largest first; those of all blocks together.
function largestAt(data, half, event) {
  const { first, last, bytes: size, name } = half.life, groups = new Map();
  for (let i = 0; i < size.length; i++) {
    if (first[i] > event || last[i] < event) continue;
    const key = data.strings[name[i]].replace(/\b\d+\.(?=\w)|\.\d+(?= )/g, (part) => part.replace(/\d+/, "*"));
    const group = groups.get(key) || [key, 0, 0];
    group[1] += size[i];
    group[2] += 1;
    groups.set(key, group);
  }
  return [...groups.values()].sort((a, b) => b[1] - a[1]);
}

function showChosen(state, i, showLine) {
  const { data } = state, box = $("chosen"), half = data.spans.half[i], event = data.spans.event[i];
  box.hidden = false;
  const words = aboutSpan(data, i);
  box.replaceChildren(words[0], ...[...words[1].rows].map((row) => ` · ${row.cells[0].textContent} ${row.cells[1].textContent}`));
  if (half >= 0 && data.halves[half].line_of_event[event] >= 0) {
    box.append(make("button", { textContent: "show in the graph", onclick: () => showLine(half, data.halves[half].line_of_event[event]) }));
  }
}

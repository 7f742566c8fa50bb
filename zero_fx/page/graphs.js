// The graph before and after each pass. Only the rows that are seen exist.

const ROW = 20, AROUND = 3; // pixels of a row; kept lines shown around a change

function showGraphs(data) {
  const state = { data, lines: data.texts.map(() => null), run: -1, opened: new Set(), rows: [], fold: true, split: innerWidth > 760, target: -1 };
  const scroller = $("scroller");
  const labels = [...new Set(data.passes.map((run) => run.graph))];
  for (const name of labels) {
    $("passes").append(make("h3", { textContent: name }));
    data.passes.forEach((run, i) => {
      if (run.graph !== name) return;
      const changed = changesOf(data, run, state);
      run.button = make("button", { onclick: () => select(state, i), ariaPressed: "false", title: `${run.ms.toFixed(1)} ms` },
        make("span", { textContent: run.name }), make("span", { textContent: changed ? `${changed.toLocaleString("en-US")} lines` : "—" }));
      $("passes").append(run.button);
    });
  }
  scroller.addEventListener("scroll", () => render(state));
  new ResizeObserver(() => render(state)).observe(scroller);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render(state));
  const toggle = (button, key) => () => {
    state[key] = !state[key];
    button.ariaPressed = String(state[key]);
    layout(state);
  };
  $("fold").onclick = toggle($("fold"), "fold");
  $("split").onclick = toggle($("split"), "split");
  $("split").ariaPressed = String(state.split);
  $("next").onclick = () => jump(state, 1);
  $("previous").onclick = () => jump(state, -1);
  $("map").onclick = (event) => { scroller.scrollTop = event.offsetY / $("map").clientHeight * state.rows.length * ROW - 200; };
  const start = data.passes.findIndex((run) => run.name === "shard_params" && run.before !== run.after);
  const first = start >= 0 ? start : data.passes.findIndex((run) => run.before !== run.after);
  if (data.passes.length) select(state, Math.max(0, first));
  return (half, line) => showLine(state, half, line);
}

function linesOf(state, text) {
  state.lines[text] ??= state.data.texts[text].split("\n");
  return state.lines[text];
}

function changesOf(data, run, state) {
  if (run.before === run.after) return 0;
  const kept = run.blocks.reduce((sum, [, , size]) => sum + size, 0);
  return linesOf(state, run.before).length + linesOf(state, run.after).length - 2 * kept;
}

function select(state, i) {
  if (state.run >= 0) state.data.passes[state.run].button.ariaPressed = "false";
  const run = state.data.passes[i];
  state.run = i;
  state.opened = new Set();
  state.target = -1;
  run.button.ariaPressed = "true";
  const did = Object.entries(run.stats).filter(([, n]) => n).map(([what, n]) => `${n.toLocaleString("en-US")} ${what.replaceAll("_", " ")}`);
  $("did").replaceChildren(make("b", {}, `${run.name} on ${run.graph}: `), did.join(", ") || "changed nothing");
  $("scroller").scrollTop = 0;
  layout(state);
}

// Rows: [old line or -1, new line or -1, mark], or ["gap", index of the block, lines left out].
function layout(state) {
  const run = state.data.passes[state.run], old = linesOf(state, run.before), now = linesOf(state, run.after);
  const moved = [new Set(run.moved.map(([a]) => a)), new Set(run.moved.map(([, b]) => b))], rows = [];
  let a = 0, b = 0;
  const same = run.before === run.after;
  run.blocks.concat([[old.length, now.length, 0]]).forEach(([i, j, size], block) => {
    for (let n = 0; state.split ? n < Math.max(i - a, j - b) : n < i - a + j - b; n++) {
      if (state.split) rows.push([a + n < i ? a + n : -1, b + n < j ? b + n : -1, 1]);
      else rows.push(n < i - a ? [a + n, -1, 1] : [-1, b + n - (i - a), 1]);
    }
    const head = block && !same ? AROUND : 0, tail = block < run.blocks.length - 1 || i + size < old.length || j + size < now.length ? AROUND : 0;
    const hidden = state.fold && !same && !state.opened.has(block) ? size - head - tail : 0;
    for (let n = 0; n < size; n++) {
      if (hidden > 1 && n === head) { rows.push(["gap", block, hidden]); n += hidden - 1; continue; }
      rows.push([i + n, j + n, 0]);
    }
    a = i + size;
    b = j + size;
  });
  Object.assign(state, { rows, moved, old, now });
  const wide = Math.max(...[old, now].map((lines) => lines.reduce((most, text) => Math.max(most, Math.min(text.length, 160)), 0)));
  $("sizer").style.height = `${rows.length * ROW}px`;
  $("sizer").style.minWidth = state.split ? `max(100%, ${innerWidth > 760 ? 0 : 720}px)` : `max(100%, ${wide}ch)`;
  $("sizer").style.width = "100%";
  $("lines").className = state.split ? "" : "one";
  $("heads").style.display = state.split && innerWidth > 760 ? "" : "none";
  $("before-head").textContent = `before: ${old.length.toLocaleString("en-US")} lines`;
  $("after-head").textContent = `after: ${now.length.toLocaleString("en-US")} lines`;
  state.starts = rows.map((row, i) => i).filter((i) => rows[i][2] === 1 && (!i || rows[i - 1][2] !== 1));
  $("change-count").textContent = same ? "" : `${state.starts.length.toLocaleString("en-US")} places`;
  render(state);
  drawMap(state);
}

function render(state) {
  const scroller = $("scroller"), first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 10);
  const shown = state.rows.slice(first, first + Math.ceil(scroller.clientHeight / ROW) + 20);
  $("lines").style.transform = `translateY(${first * ROW}px)`;
  $("lines").style.width = "100%";
  $("lines").replaceChildren(...shown.map((row, n) => rowOf(state, row, first + n)));
}

function rowOf(state, row, number) {
  if (row[0] === "gap") {
    return make("div", { className: "row gap", onclick: () => { state.opened.add(row[1]); layout(state); } },
      make("span", { textContent: `⋯ ${row[2].toLocaleString("en-US")} lines that stayed` }));
  }
  const [a, b, changed] = row, found = make("div", { className: number === state.target ? "row target" : "row" });
  const before = a >= 0 ? cell(state, state.old[a], changed ? (state.moved[0].has(a) ? "move" : "minus") : "", a, 0) : null;
  const after = b >= 0 ? cell(state, state.now[b], changed ? (state.moved[1].has(b) ? "move" : "plus") : "", b, 1) : null;
  if (state.split) found.append(before || make("span", { className: "none" }), after || make("span", { className: "none" }));
  else found.append(after || before);
  return found;
}

const COLORED = { all_gather: "gather", gather_held: "gather", gather_param: "gather", reduce_scatter: "reduce", all_reduce: "reduce", all_to_all: "reduce", reduce_grad: "reduce", wait: "wait" };

// "%3: f32[2] = op(...)", number and type dimmed; its module and source line where they are known.
function cell(state, text, kind, line, side) {
  const run = state.data.passes[state.run], found = make("span", { className: kind });
  const parts = /^(%\d+: \S+ = )([\w.]+)(.*)$/s.exec(text);
  if (parts) found.append(make("s", {}, parts[1]), make("em", { className: COLORED[parts[2]] || "" }, parts[2]), parts[3]);
  else found.append(text);
  const half = state.data.halves.find((one) => one.text === (side ? run.after : run.before));
  const place = half ? state.data.strings[half.places[line]] : "";
  found.title = (kind === "move" ? "moved. " : "") + (place ? `${place}\n` : "") + (text.length > 60 ? text : "");
  return found;
}

function jump(state, direction) {
  const scroller = $("scroller"), middle = scroller.scrollTop / ROW + 4;
  const next = direction > 0 ? state.starts.find((i) => i > middle + 0.5) : state.starts.findLast((i) => i < middle - 0.5);
  if (next !== undefined) scroller.scrollTop = (next - 4) * ROW;
}

// The graph as it runs, at one line.
function showLine(state, half, line) {
  const text = state.data.halves[half].text, run = state.data.passes.findLastIndex((one) => one.after === text);
  if (run < 0) return;
  select(state, run);
  state.fold = false;
  $("fold").ariaPressed = "false";
  layout(state);
  state.target = state.rows.findIndex((row) => row[1] === line);
  $("scroller").scrollTop = (state.target - 8) * ROW;
  render(state);
  $("graphs").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function drawMap(state) {
  const canvas = $("map"), context = canvas.getContext("2d"), height = canvas.clientHeight, colors = [style("--minus-text"), style("--plus-text"), style("--move-text")];
  fit(canvas, context, height);
  const scale = height / Math.max(state.rows.length, height / ROW);
  state.rows.forEach(([a, b, changed], i) => {
    if (changed !== 1) return;
    const at = i * scale, tall = Math.max(1, scale);
    context.fillStyle = (a >= 0 && state.moved[0].has(a)) || (b >= 0 && state.moved[1].has(b)) ? colors[2] : colors[0];
    if (a >= 0) context.fillRect(1, at, 5, tall);
    context.fillStyle = b >= 0 && state.moved[1].has(b) ? colors[2] : colors[1];
    if (b >= 0) context.fillRect(6, at, 5, tall);
  });
}

// Searchable table of all parameters, with a strip that shows when each is gathered; and the start of the page.

const SHOWN = 400; // rows at once; search finds the others

const COLUMNS = [ // name, value to sort by, text, right-aligned
  ["parameter", (p) => p[0], (p) => p[0]], ["shape", (p) => p[1].reduce((a, b) => a * b, 1), (p) => p[1].join(" × ") || "scalar", true],
  ["dtype", (p) => p[2], (p) => (p[2] === p[3] ? p[2] : `${p[2]} → ${p[3]}`)], ["placement", (p) => p[4], (p) => p[4]],
  ["rows here", (p) => p[5], (p) => count(p[5]), true], ["bytes here", (p) => p[6], (p) => bytes(p[6]), true],
  ["travels with", (p) => members(p), (p) => (p[7].length ? (members(p) > 1 ? `${members(p) - 1} others` : "alone") : "—"), true],
];
const members = (p) => Math.max(0, ...p[7].map((stay) => stay[3]));

function showParameters(data, timeline) {
  const state = { sort: -1, down: false }, body = $("parameters").tBodies[0];
  const lower = data.parameters.map((p) => COLUMNS.map((column) => column[2](p)).join(" ").toLowerCase());
  const draw = () => {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = data.parameters.map((_, i) => i).filter((i) => words.every((word) => lower[i].includes(word)));
    if (state.sort >= 0) {
      const value = COLUMNS[state.sort][1], sign = state.down ? -1 : 1;
      found = found.sort((a, b) => sign * (value(data.parameters[a]) < value(data.parameters[b]) ? -1 : value(data.parameters[a]) > value(data.parameters[b]) ? 1 : 0));
    }
    const more = found.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    $("parameter-count").textContent = `${count(found.length)} of ${count(data.parameters.length)}${more}`;
    body.replaceChildren(...found.slice(0, SHOWN).map((i) => parameterRow(data, data.parameters[i], timeline)));
  };
  const heads = COLUMNS.map(([name, , , right], i) => make("th", { textContent: name, className: right ? "n" : "", onclick: () => {
    state.down = state.sort === i && !state.down;
    state.sort = i;
    draw();
  } }));
  $("parameters").tHead.append(make("tr", {}, ...heads, make("th", { textContent: "gathered, over the step" })));
  $("search").addEventListener("input", draw);
  draw();
}

function parameterRow(data, p, timeline) {
  const strip = make("div", { className: "strip" });
  for (const half of data.halves.slice(1)) strip.append(make("u", { style: `left:${100 * half.start / data.end}%` }));
  for (const [, start, end] of p[7]) {
    strip.append(make("i", { style: `left:${100 * start / data.end}%;width:${100 * (end - start) / data.end}%` }));
  }
  strip.title = p[7].map(([half, start, end, n]) => `${data.halves[half].label}: gathered at ${seconds(start)}, released at ${seconds(end)}` +
    (n > 1 ? `, in a bucket of ${n}` : "")).join("\n") || "never gathered";
  if (p[7].length) {
    strip.style.cursor = "pointer";
    strip.onclick = () => {
      const [, start, end] = p[7][0], room = (end - start) * 0.2;
      timeline.look(start - room, end + room);
      $("timeline-title").scrollIntoView({ behavior: "smooth" });
    };
  }
  return make("tr", {}, ...COLUMNS.map(([, , text, right]) => make("td", { textContent: text(p), className: right ? "n" : "" })), make("td", {}, strip));
}

load().then((data) => {
  showHead(data);
  let showLine = () => {};
  const timeline = showTimeline(data, (half, number) => showLine(half, number));
  showLine = showGraphs(data);
  showParameters(data, timeline);
  document.documentElement.dataset.ready = Math.round(performance.now());
}).catch((error) => {
  $("notices").append(make("p", { className: "notice", textContent: `This page could not be shown: ${error.message}` }));
  throw error;
});

// Title, figures, notices, footer.

function showHead(data) {
  const s = data.summary;
  $("title").textContent = s.model;
  const what = [
    `${short(s.parameters)} parameters`, `stage ${s.stage}`, s.precision ? `computed in ${s.precision}` : null,
    `rank ${s.rank} of ${count(s.world)}` + (s.nodes > 1 ? ` on ${count(s.nodes)} nodes` : " on one node"), s.hardware,
  ];
  $("subtitle").textContent = what.filter(Boolean).join(" · ");
  for (const notice of s.notices || []) $("notices").append(make("p", { className: "notice", textContent: notice }));
  const halves = data.halves.map((half) => [`${half.label} ${seconds(half.seconds * 1e9)}`, half.seconds,
    half.label === "backward" ? "--attention" : "--matmul"]);
  tile("Step", seconds(s.step_s * 1e9), "", [...halves, [`optimizer ${seconds(s.optimizer_s * 1e9)}`, s.optimizer_s, "--optimizer"]]);
  const over = s.peak_bytes > s.device_bytes;
  const where = `in ${s.peak_half}` + (s.peak_at ? `, at ${s.peak_at}` : "");
  tile("Peak memory", bytes(s.peak_bytes), `of ${bytes(s.device_bytes)}`,
    MEMORY.map(([name, color]) => ["", s.memory[name] || 0, color]), over ? `does not fit; ${where}` : where,
    Math.max(s.device_bytes, s.peak_bytes), over);
  tile("Communication", seconds(s.links_s * 1e9), "", [
    [`${seconds(s.exposed_s * 1e9)} exposed`, s.exposed_s, "--wait"], ["the rest hidden behind compute", s.links_s - s.exposed_s, "--gather"]]);
  tile("Model flops utilisation", `${(s.utilisation * 100).toFixed(1)}%`, "", [["", s.utilisation, "--matmul"]],
    "of the device's peak, if kernels reach it", 1);
  const sent = Object.entries(s.elements_sent);
  tile("Elements sent by a rank", short(sent.reduce((sum, [, value]) => sum + value, 0)), "",
    sent.map(([kind, value]) => [`${kind} ${short(value)}`, value, kind === "all_gather" ? "--gather" : "--reduce"]));
  const captured = s.captured === "all" ? "captured whole" : `captured from ${s.captured}, whose graphs repeat`;
  $("footer").textContent = (s.measured ? "" : "Predicted: nothing was run. ") + `Rates of ${s.hardware}: ${s.source}. ` +
    `The model was ${captured}, in ${s.inspect_s.toFixed(1)} s.`;
}

function tile(name, value, small, parts, text, whole, bad) {
  const sum = whole || parts.reduce((total, [, size]) => total + size, 0) || 1;
  const bar = make("div", { className: "parts" });
  for (const [, size, color] of parts) {
    if (size > 0) bar.append(make("i", { style: `width:${100 * size / sum}%;background:var(${color})` }));
  }
  const words = text || parts.map(([label]) => label).filter(Boolean).join(", ");
  $("tiles").append(make("div", { className: bad ? "tile bad" : "tile" }, make("h3", { textContent: name }),
    make("div", { className: "value" }, value + " ", make("small", { textContent: small })), bar, make("p", { textContent: words })));
}

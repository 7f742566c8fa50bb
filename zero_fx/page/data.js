"use strict";
// The report's data and what all parts of the page use.

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in element && key !== "list") element[key] = value; else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

async function load() {
  const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(stream).text());
  data.end = 0; // of the step, nanoseconds
  for (let i = 0; i < data.spans.start.length; i++) data.end = Math.max(data.end, data.spans.start[i] + data.spans.dur[i]);
  const reasons = ["parameters", "optimizer states"];
  data.always = reasons.map((name) => data.summary.memory[name] || 0);
  for (const half of data.halves) {
    half.end = half.start + (half.ends.length ? half.ends[half.ends.length - 1] : 0);
    half.live = living(half, data.kinds.length);
  }
  return data;
}

// Bytes of each kind at each event, from the lives of storages.
function living(half, kinds) {
  const count = half.ends.length, life = half.life;
  const found = Array.from({ length: kinds }, () => new Float64Array(count + 1));
  for (let i = 0; i < life.bytes.length; i++) {
    const one = found[life.kind[i]];
    one[Math.max(life.first[i], 0)] += life.bytes[i];
    one[life.last[i] + 1] -= life.bytes[i];
  }
  for (const one of found) for (let i = 1; i <= count; i++) one[i] += one[i - 1];
  return found;
}

// First index of a sorted array whose value is above `value`.
function above(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

const GIB = 2 ** 30;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const count = (value) => Math.round(value).toLocaleString("en-US");

function bytes(value) {
  for (const [unit, size] of [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (value >= size) return `${(value / size).toLocaleString("en-US", { maximumFractionDigits: value / size < 10 ? 2 : 1 })} ${unit}`;
  }
  return `${count(value)} B`;
}

function seconds(ns) {
  if (ns >= 1e9) return `${(ns / 1e9).toLocaleString("en-US", { maximumFractionDigits: 2 })} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(ns < 1e7 ? 2 : 1)} ms`;
  return ns >= 1e3 ? `${(ns / 1e3).toFixed(ns < 1e4 ? 2 : 1)} µs` : `${count(ns)} ns`;
}

function short(value) {
  for (const [unit, size] of [[" trillion", 1e12], [" billion", 1e9], [" million", 1e6]]) {
    if (value >= size) return (value / size).toLocaleString("en-US", { maximumFractionDigits: 2 }) + unit;
  }
  return count(value);
}

const MEMORY = [ // from the bottom: name, colour
  ["parameters", "--m-parameters"], ["optimizer states", "--m-states"], ["gathered parameters", "--m-gathered"],
  ["gradients", "--m-gradients"], ["saved activations", "--m-saved"], ["workspace", "--m-workspace"],
];
const KIND_NAMES = {
  matmul: "matrix products", attention: "attention", pointwise: "other compute", copy: "copies and casts",
  wait: "waiting for the links", gather: "gathers", reduce: "reductions", optimizer: "optimizer",
};

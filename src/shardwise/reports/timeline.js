// The timeline of a report: modules, collectives and what is under way, a few lanes for each rank.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas"), tip = document.getElementById("tip"), pen = canvas.getContext("2d");
const LANE = 13, GAP = 8, LEFT = 62;

const MODULE = 0, OP = 3; // kinds of events; 1 is a collective, 2 one that is under way

async function numbers(text, Kind) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Kind(await new Response(unpacked).arrayBuffer());
}

async function unpack(r) {
  const [site, start, long] = await Promise.all([0, 1, 2].map((i) => numbers(r.arrays[i], i ? Uint32Array : Uint16Array)));
  for (let i = 1; i < start.length; i++) start[i] += start[i - 1];
  return { rank: r.rank, site, start, long };
}

let ranks = [], first = 0, from = 0, to = Math.max(1, data.length);

// Modules nest: each goes below those it is inside of. Ops, collectives and what is under way come below them.
function arrange(r) {
  r.depth = new Uint8Array(r.site.length);
  const open = [];
  let most = 0;
  for (let i = 0; i < r.site.length; i++) {
    if (data.sites[r.site[i]][0] !== MODULE) continue;
    while (open.length && open[open.length - 1] <= r.start[i]) open.pop();
    r.depth[i] = Math.min(open.length, 3);
    most = Math.max(most, r.depth[i]);
    open.push(r.start[i] + r.long[i]);
  }
  r.first = most + (hasOps ? 2 : 1); // the lane of collectives
  r.lanes = r.first + (hasUnderWay ? 2 : 1);
}
const hasOps = data.sites.some((site) => site[0] === OP), hasUnderWay = data.sites.some((site) => site[0] === 2);

function colour(site) {
  const text = site[1] + site[2] + site[3];
  let hash = 7;
  for (let i = 0; i < text.length; i++) hash = (hash * 31 + text.charCodeAt(i)) % 360;
  const quiet = site[0] === MODULE || site[0] === OP;
  return `hsl(${hash} ${quiet ? 30 : 65}% ${quiet ? 62 : 50}% / ${site[0] === 2 ? 0.5 : 0.9})`;
}
const colours = data.sites.map(colour);

function layout() {
  let y = 20;
  for (const r of ranks) { r.y = y; y += r.lanes * LANE + GAP; }
  return y;
}

// Round times in what is shown, at most so many; in the unit that suits the distance between them.
function ticks(most) {
  const long = (to - from) * data.unit, rough = long / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= rough * 0.999);
  const [name, size] = step >= 0.1 ? ["s", 1] : step >= 1e-4 ? ["ms", 1e-3] : ["us", 1e-6];
  const found = [], digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  for (let k = Math.ceil((from * data.unit) / step - 1e-9); k * step <= to * data.unit; k++)
    found.push([(k * step) / data.unit, `${((k * step) / size).toFixed(digits)} ${name}`]);
  return found;
}

function draw() {
  const height = layout(), width = canvas.parentNode.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px monospace";
  const ink = getComputedStyle(document.body).color, scale = (width - LEFT) / (to - from);
  pen.fillStyle = ink;
  for (const [at, label] of ticks(Math.max(1, Math.floor((width - LEFT) / 110)))) {
    const x = LEFT + (at - from) * scale;
    pen.globalAlpha = 0.15;
    pen.fillRect(x, 16, 1, height - 16);
    pen.globalAlpha = 1;
    pen.fillText(label, Math.min(x, width - 6.7 * label.length), 12);
  }
  for (const r of ranks) {
    pen.fillStyle = ink;
    pen.fillText("rank " + r.rank, 4, r.y + 11);
    let ends = new Float64Array(8).fill(-1);
    for (let i = 0; i < r.site.length; i++) {
      const a = r.start[i], b = a + r.long[i];
      if (b < from || a > to) continue;
      const x = LEFT + Math.max(0, (a - from) * scale), end = LEFT + Math.min(to - from, b - from) * scale;
      const lane = laneOf(r, i);
      if (end <= ends[lane] && end - x < 1) continue; // a pixel that is painted already
      ends[lane] = Math.max(ends[lane], Math.max(end, x + 1));
      pen.fillStyle = colours[r.site[i]];
      pen.fillRect(x, r.y + lane * LANE, Math.max(1, end - x), LANE - 1);
    }
  }
}

function laneOf(r, i) {
  const kind = data.sites[r.site[i]][0];
  return kind === MODULE ? r.depth[i] : kind === OP ? r.first - 1 : r.first + kind - 1;
}

function find(x, y) {
  const width = canvas.parentNode.clientWidth, at = from + ((x - LEFT) / (width - LEFT)) * (to - from);
  const slack = ((to - from) / (width - LEFT)) * 1.5;
  for (const r of ranks) {
    const lane = Math.floor((y - r.y) / LANE);
    if (lane < 0 || lane >= r.lanes) continue;
    for (let i = r.site.length - 1; i >= 0; i--)
      if (laneOf(r, i) === lane && r.start[i] - slack <= at && at <= r.start[i] + r.long[i] + slack) return [r, i];
  }
  return null;
}

function show(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const found = find(x, y);
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  const [r, i] = found, s = data.sites[r.site[i]];
  const ms = (r.long[i] * data.unit * 1e3).toFixed(3);
  const lines = [`rank ${r.rank}: ${s[1]}${s[0] === MODULE || s[0] === OP ? "" : ": " + s[2]}${s[8] ? " (backward)" : ""}${s[9] ? " (wait)" : ""}, ${ms} ms`];
  if (s[4]) lines.push(s[4]);
  if (s[5]) lines.push(s[5]);
  if (s[6] && s[0] !== MODULE) lines.push("in module " + s[6]);
  if (s[7]) lines.push(s[7].toLocaleString() + " bytes on " + s[3]);
  tip.textContent = lines.join("\n");
  tip.style.left = Math.min(x + 12, box.width * 0.5) + "px";
  tip.style.top = y + 14 + "px";
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = canvas.getBoundingClientRect(), part = Math.max(0, (event.clientX - box.left - LEFT) / (box.width - LEFT));
  const at = from + part * (to - from), factor = event.deltaY > 0 ? 1.25 : 0.8;
  const long = Math.min(data.length, Math.max(20, (to - from) * factor));
  from = Math.max(0, at - part * long); to = from + long;
  draw();
}, { passive: false });
let held = null;
canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, from, to]; });
window.addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("pointermove", (event) => {
  if (!held) return show(event);
  const by = ((held[0] - event.clientX) / (canvas.clientWidth - LEFT)) * (held[2] - held[1]);
  from = Math.max(0, held[1] + by); to = from + held[2] - held[1];
  draw();
});
canvas.addEventListener("dblclick", () => { from = first; to = Math.max(1, data.length); draw(); });
window.addEventListener("resize", draw);

Promise.all(data.ranks.map(unpack)).then((found) => {
  ranks = found;
  ranks.forEach(arrange);
  const starts = ranks.filter((r) => r.start.length).map((r) => r.start[0]); // older events may be left out
  first = from = starts.length ? Math.min(...starts) : 0;
  draw();
  document.body.dataset.ready = Math.round(performance.now()); // milliseconds since the page was opened
});

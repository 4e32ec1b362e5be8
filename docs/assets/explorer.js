// Who holds what, and what a move costs: the arithmetic of layouts, as the library does it.
// tests/test_explorer.py runs `moveOf` and `tilesOf` against the library on 1,000 random cases.

function chunk(n, parts, i) { // as torch.chunk cuts n indices
  const size = Math.max(1, Math.ceil(n / parts));
  return [Math.min(n, i * size), Math.min(n, (i + 1) * size)];
}

// Placements are written R, S0, S1, ..., P. The interval of each dim that the rank at these coordinates holds.
function tilesOf(shape, mesh, places, coords) {
  const held = shape.map((n) => [0, n]);
  places.forEach((place, axis) => {
    if (place[0] !== "S") return;
    const dim = Number(place.slice(1)), [start, stop] = held[dim];
    const [a, b] = chunk(stop - start, mesh[axis], coords[axis]);
    held[dim] = [start + a, start + b];
  });
  return held;
}

function volume(box) { return box.reduce((v, [a, b]) => v * Math.max(0, b - a), 1); }
function common(one, other) { return one.map(([a, b], d) => [Math.max(a, other[d][0]), Math.min(b, other[d][1])]); }

function everyone(mesh) { // the last axis fastest
  return mesh.reduce((found, k) => found.flatMap((c) => [...Array(k).keys()].map((i) => [...c, i])), [[]]);
}

// Bytes that each rank receives in the cheapest move, its name, or null where it takes more than one step.
function moveOf(shape, mesh, from, to, itemsize) {
  const differ = mesh.map((k, a) => k > 1 && from[a] !== to[a]);
  const reduced = mesh.map((k, a) => a).filter((a) => differ[a] && from[a] === "P");
  if (mesh.some((k, a) => differ[a] && to[a] === "P")) return null;
  if (reduced.length > 1 || (reduced.length && differ.filter(Boolean).length > 1)) return null;
  const ranks = everyone(mesh);
  if (!reduced.length) {
    const bytes = ranks.map((c) => {
      const target = tilesOf(shape, mesh, to, c);
      return itemsize * (volume(target) - volume(common(target, tilesOf(shape, mesh, from, c))));
    });
    return { kind: bytes.some(Boolean) ? "exchange of tiles" : "nothing moves", bytes };
  }
  const axis = reduced[0], k = mesh[axis];
  if (to[axis] !== "R" && to.some((place, a) => a !== axis && place === to[axis] && mesh[a] > 1)) return null; // the cuts nest
  const bytes = ranks.map((c) => {
    const target = tilesOf(shape, mesh, to, c), source = tilesOf(shape, mesh, from, c);
    if (to[axis] === "R") return Math.floor((2 * (k - 1) * volume(source) * itemsize) / k);
    return itemsize * (k - 1) * volume(target);
  });
  return { kind: to[axis] === "R" ? "all-reduce" : "reduce-scatter", bytes };
}

// What people write: sizes, and placements as R, S0, P or as Replicate(), Shard(0), Partial(). [values, what is wrong].
function sizesIn(text) {
  const found = text.split(/[\s,x()\[\]]+/i).filter(Boolean), bad = found.find((word) => !/^\d+$/.test(word));
  return [found.map(Number), bad === undefined ? "" : `"${bad}" is no size: write numbers, as 10, 64`];
}

function placesIn(text) {
  const names = { S: "S", SHARD: "S", R: "R", REPLICATE: "R", P: "P", PARTIAL: "P" };
  let bad = "";
  const found = text.split(/[\s,\[\]]+/).filter(Boolean).map((word) => {
    const parts = word.toUpperCase().match(/^([A-Z]+?)\(?(?:DIM=)?(\d+|SUM)?\)?$/), kind = parts && names[parts[1]];
    const dim = parts && parts[2] !== undefined && parts[2] !== "SUM" ? Number(parts[2]) : null;
    if (!kind || (kind === "S") !== (dim !== null)) bad = bad || `"${word}" is no placement: write R, S0, S1, ... or P`;
    return kind === "S" ? `S${dim}` : kind;
  });
  return [found, bad];
}

// What is wrong with a question, or "".
function problemOf([shape, badShape], [mesh, badMesh], [from, badFrom], [to, badTo], itemsize) {
  const ranks = mesh.reduce((a, b) => a * b, 1);
  if (badShape || badMesh || badFrom || badTo) return badShape || badMesh || badFrom || badTo;
  if (!mesh.length || ranks < 1 || ranks > 4096) return "the mesh must have 1 to 4,096 ranks";
  if (!(itemsize >= 1)) return "an element has 1 byte or more";
  for (const [name, places] of [["from", from], ["to", to]]) {
    if (places.length !== mesh.length) return `"${name}" must have ${mesh.length} placement${mesh.length > 1 ? "s" : ""}, one for each axis of the mesh; it has ${places.length}`;
    const cut = places.find((p) => p[0] === "S" && Number(p.slice(1)) >= shape.length);
    if (cut) return `${cut} cuts dim ${cut.slice(1)}, and the tensor has ${shape.length} dim${shape.length === 1 ? "" : "s"}`;
  }
  return "";
}

if (typeof module !== "undefined") module.exports = { tilesOf, moveOf, everyone, sizesIn, placesIn, problemOf };
if (typeof document !== "undefined") document.addEventListener("DOMContentLoaded", start);

function start() {
  const form = document.getElementById("explorer-form");
  if (!form) return;
  const text = (name) => form.querySelector(`[name=${name}]`).value;
  const say = (id, html) => { document.getElementById(id).innerHTML = html; };
  const named = (ranks, most) => ranks.slice(0, most).join(", ") + (ranks.length > most ? ` and ${ranks.length - most} more` : "");

  // The ranks that hold a box, as many as it has room for.
  function labelOf(ranks, before, width) {
    const tries = [ranks.length <= 3 ? before + ranks.join(", ") : `${before}${ranks.slice(0, 3).join(", ")}, … (${ranks.length} ranks)`, `${before}${ranks[0]}${ranks.length > 1 ? " …" : ""}`];
    return tries.find((said) => said.length * 6.4 + 4 <= width) || "";
  }

  function picture(shape, mesh, places) {
    const dims = shape.length, rows = dims > 1 ? shape[dims - 2] : 1, cols = dims ? shape[dims - 1] : 1;
    const width = 420, height = dims > 1 ? 240 : 50, boxes = new Map();
    everyone(mesh).forEach((coords, rank) => {
      const held = tilesOf(shape, mesh, places, coords);
      if (dims > 2 && held.slice(0, dims - 2).some(([a]) => a > 0)) return; // the first slice
      if (!volume(held)) return;
      const [r, c] = [dims > 1 ? held[dims - 2] : [0, 1], dims ? held[dims - 1] : [0, 1]], key = [r, c].join();
      if (!boxes.has(key)) boxes.set(key, { r, c, ranks: [] });
      boxes.get(key).ranks.push(rank);
    });
    const parts = places.some((p, a) => p === "P" && mesh[a] > 1), line = boxes.size > 400 ? 0.15 : 0.6;
    const rects = [...boxes.values()].map(({ r, c, ranks }) => {
      const x = (c[0] / cols) * width, y = (r[0] / rows) * height, w = ((c[1] - c[0]) / cols) * width, h = ((r[1] - r[0]) / rows) * height;
      const hue = (ranks[0] * 137.5 + 209) % 360, label = h > 12 ? labelOf(ranks, parts ? "Σ " : "", w) : "";
      return `<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${w.toFixed(2)}" height="${h.toFixed(2)}" fill="hsl(${hue} 62% 55%)" fill-opacity=".5" stroke="currentColor" stroke-opacity="${line}"><title>[${dims > 1 ? `${r.join(":")}, ` : ""}${c.join(":")}] is held by ${ranks.length > 1 ? "ranks" : "rank"} ${named(ranks, 16)}</title></rect>` +
        (label && `<text x="${x + w / 2}" y="${y + h / 2 + 4}" text-anchor="middle" font-size="11" fill="currentColor">${label}</text>`);
    });
    const idle = everyone(mesh).map((coords, rank) => [volume(tilesOf(shape, mesh, places, coords)), rank]).filter(([held]) => !held).map(([, rank]) => rank);
    const note = idle.length ? `<div><small>holding nothing: ${idle.length > 1 ? "ranks" : "rank"} ${named(idle, 8)}</small></div>` : "";
    if (!rects.length) return "<p>no elements</p>";
    return `<svg viewBox="-1 -1 ${width + 2} ${height + 2}" style="width:100%;max-width:${width}px">${rects.join("")}</svg>${note}`;
  }

  function show() {
    const asked = [sizesIn(text("shape")), sizesIn(text("mesh")), placesIn(text("from")), placesIn(text("to"))], itemsize = Number(text("itemsize"));
    const bad = problemOf(...asked, itemsize), [shape, mesh, from, to] = asked.map(([found]) => found);
    document.getElementById("problem").textContent = bad;
    if (bad) return ["before", "after", "cost"].forEach((id) => say(id, ""));
    say("before", picture(shape, mesh, from));
    say("after", picture(shape, mesh, to));
    const move = moveOf(shape, mesh, from, to, itemsize);
    if (!move) return say("cost", "This move reduces on the way and has several ways: ask <code>plan_move(source, target)</code>.");
    const most = Math.max(...move.bytes), sum = move.bytes.reduce((a, b) => a + b, 0);
    say("cost", `<b id="kind">${move.kind}</b>: the busiest rank receives <b id="most">${most.toLocaleString("en")}</b> bytes, all ranks together <b id="sum">${sum.toLocaleString("en")}</b>.`);
  }
  form.addEventListener("input", show);
  show();
}

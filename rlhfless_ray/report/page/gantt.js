"use strict";
// The lease timeline on two canvases: a window of the run, and below it the whole run to choose the window from.
function drawGantt(root, data, palette, dark) {
  const ROW = data.lanes.length > 32 ? 13 : 24, TOP = 22, BAR = ROW - 8, HEAD = 18;
  const [begin, end] = data.range, count = data.from.length;
  let colour = palette(), hatches = {}, view = [begin, end], hover = -1, frame = 0;
  const element = (tag, attributes, ...children) => {
    const node = Object.assign(document.createElement(tag), attributes);
    node.append(...children);
    return node;
  };
  // Lanes of a pool lie together in a band, below a line with its name.
  const bands = [], bandOf = [];
  data.pools.forEach(([name, lanes], i) => { bands.push({ name, first: bandOf.length, lanes }); for (let k = 0; k < lanes; k++) bandOf.push(i); });
  const topOf = row => TOP + row * ROW + (bands.length ? (bandOf[row] + 1) * HEAD : 0);
  const laneAt = y => data.lanes.findIndex((_, row) => y >= topOf(row) && y < topOf(row) + ROW);
  const bottomOfLanes = () => topOf(data.lanes.length - 1) + ROW;
  const bandName = name => name === "own" ? "own nodes" : `pool ${name}`;
  const kindName = i => data.kinds[i].replace("_", " ");
  const kindColour = (i, opacity) => colour(["prefill", "rollout", "agent", "score", "reference", "critic", "learn", "eval", "warm_start"].includes(data.kinds[i]) ? data.kinds[i] : "other", opacity);
  const seconds = ms => ms < 1000 ? `${+ms.toPrecision(3)} ms` : ms < 120000 ? `${(ms / 1000).toFixed(2)} s` : `${(ms / 60000).toFixed(1)} min`;
  const clock = (ms, unit) => unit >= 1000 ? `${Math.round(ms / 1000)} s` : `${(ms / 1000).toFixed(unit >= 100 ? 1 : 2)} s`;

  // Toolbar: windows of some steps, the whole run, and the legend.
  const buttons = element("div", {}), legend = element("div", { className: "legend" });
  const main = element("canvas", { className: "main", tabIndex: 0 }), over = element("canvas", { className: "overview" });
  main.setAttribute("aria-label", "Lease timeline; arrow keys move it, plus and minus zoom");
  const tip = element("div", { className: "tip", hidden: true });
  root.append(element("div", { className: "bars" }, buttons, legend), main, over, tip);
  const choices = [5, 20, 60].filter(n => n < data.steps.length * 0.8);
  const windows = [...choices.map(n => [`${n} steps`, () => around(n)]), ["all", () => go(begin, end)]];
  if (choices.length) windows.unshift(["◀", () => shift(-0.8)]) && windows.push(["▶", () => shift(0.8)]);
  for (const [label, act] of windows) {
    const button = element("button", { type: "button", textContent: label, onclick: () => { act(); press(label); } });
    if (label === "◀" || label === "▶") button.setAttribute("aria-label", label === "◀" ? "earlier" : "later");
    buttons.append(button, " ");
  }
  function press(label) {
    for (const button of buttons.querySelectorAll("button")) {
      if (button.textContent === label && !"◀▶".includes(label)) button.setAttribute("aria-pressed", "true");
      else if (!"◀▶".includes(label)) button.removeAttribute("aria-pressed");
    }
  }
  function around(n) {
    const middle = (view[0] + view[1]) / 2;
    let at = data.steps.findIndex(step => step[2] >= middle);
    if (at < 0) at = data.steps.length - 1;
    const first = Math.max(0, Math.min(data.steps.length - n, at - Math.floor(n / 2))), last = Math.min(data.steps.length, first + n) - 1;
    const pad = 0.01 * (data.steps[last][2] - data.steps[first][1]);
    go(data.steps[first][1] - pad, data.steps[last][2] + pad);
  }
  function go(from, to) {
    const span = Math.min(end - begin, Math.max(to - from, 20));
    from = Math.max(begin, Math.min(end - span, from));
    view = [from, from + span];
    redraw();
  }
  const shift = share => go(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
  const zoom = (factor, at) => { go(at - (at - view[0]) * factor, at + (view[1] - at) * factor); press(""); };

  // Segments of a lane in order of time, so that a redraw touches only what is in view.
  const lanes = data.lanes.map(() => ({ leased: [], parked: [] }));
  const leases = data.activities.map(name => name !== "parked" && name !== "unleased");
  for (let i = 0; i < count; i++) lanes[data.lane[i]][leases[data.activity[i]] ? "leased" : "parked"].push(i);
  const firstIn = list => {  // the first segment that ends inside the view
    let low = 0, high = list.length;
    while (low < high) { const mid = (low + high) >> 1; if (data.to[list[mid]] < view[0]) low = mid + 1; else high = mid; }
    return low;
  };

  function hatch(pen, base, stroke) {
    const key = base + stroke;
    if (!hatches[key]) {
      const tile = element("canvas", { width: 6, height: 6 }), ink = tile.getContext("2d");
      ink.fillStyle = base; ink.fillRect(0, 0, 6, 6);
      ink.strokeStyle = stroke; ink.lineWidth = 1.2;
      ink.beginPath(); ink.moveTo(-1, 7); ink.lineTo(7, -1); ink.moveTo(-1, 1); ink.lineTo(1, -1); ink.moveTo(5, 7); ink.lineTo(7, 5); ink.stroke();
      hatches[key] = pen.createPattern(tile, "repeat");
    }
    return hatches[key];
  }
  function paint(pen, i) {
    const activity = data.activities[data.activity[i]], kind = data.kind[i];
    if (activity === "idle") return colour("idle", 0.6);
    if (activity === "start") return hatch(pen, kindColour(kind, 0.2), kindColour(kind, 0.75));
    return kindColour(kind, { work: 1, transfer: 0.55, parked: 0.45 }[activity] || 0.7);
  }

  function prepare(canvas, height) {
    const ratio = devicePixelRatio || 1, width = root.clientWidth;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, 'Segoe UI', Arial, sans-serif"; pen.textBaseline = "middle";
    return [pen, width];
  }
  let left = 60, width = 0;
  const toX = ms => left + (ms - view[0]) / (view[1] - view[0]) * (width - left);
  const toMs = x => view[0] + (x - left) / (width - left) * (view[1] - view[0]);

  function drawMain() {
    const bottom = bottomOfLanes(), height = bottom + 22;
    const [pen, full] = prepare(main, height);
    width = full;
    left = Math.min(150, 12 + Math.max(...["whole run", ...data.lanes].map(lane => pen.measureText(lane).width)));
    bands.forEach((band, i) => {
      const top = topOf(band.first) - HEAD;
      if (i % 2) { pen.fillStyle = colour("score", 0.08); pen.fillRect(0, top, width, HEAD + band.lanes * ROW); }
      pen.fillStyle = colour("line"); pen.fillRect(0, top, width, 1);
    });
    pen.save(); pen.beginPath(); pen.rect(left, 0, width - left, height); pen.clip();
    pen.textAlign = "center";
    let labelled = -Infinity;
    data.steps.forEach(([step, from, to], i) => {
      if (to < view[0] || from > view[1]) return;
      const a = toX(from), b = toX(to);
      if (i % 2 && b - a > 3) { pen.fillStyle = colour("grid", 0.6); pen.fillRect(a, TOP, b - a, bottom - TOP); }
      const middle = (Math.max(a, left) + Math.min(b, width)) / 2, text = b - a > 52 ? `step ${step}` : `${step}`;
      const half = pen.measureText(text).width / 2;
      if (middle - half > labelled + 12 && middle - half >= left && middle + half <= width) {
        pen.fillStyle = colour("muted"); pen.fillText(text, middle, TOP / 2); labelled = middle + half;
      }
    });
    lanes.forEach((lane, row) => {
      const y = topOf(row) + 3;
      for (const [list, top, tall] of [[lane.parked, y + BAR + 1, 3], [lane.leased, y, BAR]]) {
        let covered = -1;
        for (let at = firstIn(list); at < list.length && data.from[list[at]] <= view[1]; at++) {
          const i = list[at], a = Math.max(toX(data.from[i]), left - 2), b = Math.min(toX(data.to[i]), width + 2);
          if (b < covered + 0.35 && b - a < 0.35) continue;  // less than a third of a pixel: its neighbour is there already
          pen.fillStyle = paint(pen, i);
          pen.fillRect(a, top, Math.max(b - a, 0.5), tall);
          covered = b;
          if (i === hover) { pen.strokeStyle = colour("ink"); pen.lineWidth = 1.5; pen.strokeRect(a, top, Math.max(b - a, 1), tall); }
        }
      }
    });
    pen.strokeStyle = colour("bad"); pen.lineWidth = 2;
    for (const [row, end] of data.marks) {
      const x = toX(end), y = topOf(row) + 3 + BAR / 2, r = Math.min(5, BAR / 2);
      if (end < view[0] || end > view[1]) continue;
      pen.beginPath(); pen.moveTo(x - r, y - r); pen.lineTo(x + r, y + r); pen.moveTo(x - r, y + r); pen.lineTo(x + r, y - r); pen.stroke();
    }
    pen.fillStyle = pen.strokeStyle = colour("muted");
    const span = view[1] - view[0], raw = span / Math.max(2, (width - left) / 110), scale = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].map(step => step * scale).find(step => step >= raw);
    for (let at = Math.ceil(view[0] / unit) * unit; at <= view[1]; at += unit) {
      const x = toX(at), text = clock(at, unit), half = pen.measureText(text).width / 2;
      pen.fillRect(x, bottom, 1, 4);
      if (x - half >= left && x + half <= width) pen.fillText(text, x, bottom + 13);
    }
    pen.restore();
    pen.textAlign = "right"; pen.fillStyle = colour("ink");
    data.lanes.forEach((lane, row) => pen.fillText(lane, left - 8, topOf(row) + 3 + BAR / 2));
    pen.fillStyle = colour("line"); pen.fillRect(left, bottom, width - left, 1);
    pen.fillStyle = colour("muted"); pen.textAlign = "left";
    for (const band of bands) pen.fillText(bandName(band.name), 4, topOf(band.first) - HEAD / 2 + 1);
  }

  function drawOver() {  // leased slots over the whole run, stacked by kind
    const height = 52, [pen, full] = prepare(over, height), columns = Math.max(1, Math.floor(full - left)), wide = (end - begin) / columns;
    const load = data.kinds.map(() => new Float64Array(columns + 1));
    for (let i = 0; i < count; i++) {
      if (!leases[data.activity[i]]) continue;
      const a = (data.from[i] - begin) / wide, b = (data.to[i] - begin) / wide;
      for (let x = Math.floor(a); x <= Math.min(columns, Math.floor(b)); x++) load[data.kind[i]][x] += Math.max(0, Math.min(b, x + 1) - Math.max(a, x));
    }
    for (let x = 0; x < columns; x++) {
      let y = height - 1;
      load.forEach((column, kind) => {
        const tall = column[x] / data.lanes.length * (height - 4);
        pen.fillStyle = kindColour(kind, 0.8); pen.fillRect(left + x, y - tall, 1, tall); y -= tall;
      });
    }
    const [a, b] = view.map(ms => left + (ms - begin) / (end - begin) * (full - left));
    pen.fillStyle = colour("paper", 0.62); pen.fillRect(left, 0, a - left, height); pen.fillRect(b, 0, full - b, height);
    pen.strokeStyle = colour("ink"); pen.lineWidth = 1.5; pen.strokeRect(Math.max(a, left) + 0.75, 0.75, Math.max(4, b - a - 1.5), height - 1.5);
    pen.fillStyle = colour("muted"); pen.textAlign = "right"; pen.fillText("whole run", left - 8, height / 2);
  }
  function redraw() { cancelAnimationFrame(frame); frame = requestAnimationFrame(() => { drawMain(); drawOver(); }); }

  function drawLegend() {
    legend.replaceChildren();
    const add = (text, background) => {
      const swatch = element("i", {}); swatch.style.background = background;
      legend.append(element("span", {}, swatch, text));
    };
    const stripes = (base, ink) => `repeating-linear-gradient(135deg, ${ink} 0 1.5px, ${base} 1.5px 5px)`;
    data.kinds.forEach((_, i) => add(kindName(i), kindColour(i)));
    if (data.activities.includes("transfer")) add("transfer: paler", kindColour(0, 0.55));
    if (data.activities.includes("start")) add("start: striped", stripes(kindColour(0, 0.2), kindColour(0, 0.8)));
    if (data.activities.includes("idle")) add("idle", colour("idle", 0.6));
    if (data.marks.length) add("preempted: ✕", colour("bad"));
  }

  // Pointer: hover shows a segment, dragging moves the window.
  let drag = null;
  const place = event => { const box = event.target.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  function find(x, y) {
    const row = laneAt(y), ms = toMs(x), slack = 1.5 * (view[1] - view[0]) / (width - left);
    if (row < 0 || x < left) return -1;
    const inLane = y - topOf(row), list = inLane > BAR + 3 ? lanes[row].parked : lanes[row].leased;
    for (let at = firstIn(list); at < list.length && data.from[list[at]] <= ms + slack; at++) if (data.to[list[at]] >= ms - slack) {
      if (data.from[list[at]] <= ms && ms <= data.to[list[at]] || at + 1 >= list.length || data.from[list[at + 1]] > ms) return list[at];
    }
    return -1;
  }
  main.addEventListener("pointermove", event => {
    const [x, y] = place(event);
    if (drag) { go(drag[1] - (x - drag[0]) * drag[2], drag[1] - (x - drag[0]) * drag[2] + drag[3]); press(""); return; }
    const i = find(x, y);
    if (i !== hover) { hover = i; redraw(); }
    tip.hidden = i < 0;
    if (i < 0) return;
    const step = data.step[i] === null ? "" : `step ${data.step[i]}, `;
    const lines = [`${kindName(data.kind[i])}, ${data.activities[data.activity[i]]}`];
    lines.push(`${step}${seconds(data.to[i] - data.from[i])} from ${(data.from[i] / 1000).toFixed(2)} s`, data.instances[data.instance[i]]);
    tip.textContent = lines.join("\n");
    tip.style.left = Math.max(0, Math.min(x + 14, root.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = main.offsetTop + y + 16 + "px";
  });
  main.addEventListener("pointerdown", event => {
    drag = [place(event)[0], view[0], (view[1] - view[0]) / (width - left), view[1] - view[0]];
    main.setPointerCapture(event.pointerId); tip.hidden = true;
  });
  main.addEventListener("pointerup", () => { drag = null; });
  main.addEventListener("pointerleave", () => { hover = -1; tip.hidden = true; redraw(); });
  main.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return;  // plain scrolling belongs to the page
    event.preventDefault(); zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, toMs(place(event)[0]));
  }, { passive: false });
  main.addEventListener("keydown", event => {
    const middle = (view[0] + view[1]) / 2;
    const act = {
      ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2), "+": () => zoom(0.7, middle), "-": () => zoom(1.4, middle),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const jump = event => {
    const at = begin + (place(event)[0] - left) / (root.clientWidth - left) * (end - begin), half = (view[1] - view[0]) / 2;
    go(at - half, at + half);
  };
  over.addEventListener("pointerdown", event => { over.setPointerCapture(event.pointerId); jump(event); });
  over.addEventListener("pointermove", event => { if (event.buttons) jump(event); });
  dark.addEventListener("change", () => { colour = palette(); hatches = {}; drawLegend(); redraw(); });
  new ResizeObserver(redraw).observe(root);

  drawLegend();
  if (choices.length) {
    const steps = data.steps, fitting = choices.find(n => n === 20) || choices[choices.length - 1];
    const middle = steps[Math.floor(steps.length / 2)];
    view = [middle[1], middle[2]];
    around(fitting); press(`${fitting} steps`);
  } else press("all");
  drawMain(); drawOver();
}

"use strict";
// Draws a start. All texts come from outside: they are set as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const report = data.report, labels = data.labels, tick = data.tickS;
  const $ = (id) => document.getElementById(id);
  const GUTTER = 150, MAP = 16, MIN_ROW = 3, MAX_ROW = 26, AXIS = 24;

  // ---- colours ------------------------------------------------------------------------------------------------
  const COLORS = {
    light: {
      queue: "#8d99ae", allocate: "#b08968", image: "#2f7fe0", env: "#0e9f8e", caches: "#84b817", backoff: "#d9c9a3", rendezvous: "#c4ccd8",
      spawn: "#e9ae06", import: "#e8622c", checkpoint: "#8b52d6", first_step: "#5d7390", other: "#c2559c",
      peers: "#d6dee9", waiting: "#dbe0e8", late: "#aab3c2", unseen: "#d9dde4",
    },
    dark: {
      queue: "#76839a", allocate: "#a98560", image: "#4a97f2", env: "#1fb8a5", caches: "#97c93a", backoff: "#6b5d3a", rendezvous: "#4f5b6e",
      spawn: "#efba2e", import: "#f47a47", checkpoint: "#a678ea", first_step: "#7f97b8", other: "#d673b2",
      peers: "#364356", waiting: "#333d4c", late: "#566275", unseen: "#3a4453",
    },
  };
  const MEANING = {
    peers: "for the last rank; inferred, as no rank continued before it arrived", waiting: "nothing observed", late: "this node had not begun", unseen: "in the script, first step not observed",
    first_step: "the rest of the script until the first step",
  };
  const SHORT = {
    peers: "waiting for the last rank", late: "node not begun", waiting: "nothing observed",
    first_step: "rest of the script", unseen: "no first step observed",
  };
  const HATCHED = new Set(["peers", "waiting", "late", "unseen"]);
  const root = document.documentElement;
  let theme = "light", fills = [], hatches = {}, css = {};

  function setTheme(name) {
    theme = name;
    root.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "Light" : "Dark";
    $("theme").setAttribute("aria-label", name === "dark" ? "Use light colours" : "Use dark colours");
    const style = getComputedStyle(root);
    css = {};
    for (const each of ["ink", "soft", "line", "faint", "accent", "lane", "card", "focus"])
      css[each] = style.getPropertyValue("--" + each).trim();
    hatches = {};
    fills = labels.map((label) => COLORS[theme][label] || COLORS[theme].other);
    for (const each of document.querySelectorAll("[data-stage]")) each.style.background = colorOf(each.dataset.stage);
    for (const each of document.querySelectorAll("[data-ink]")) each.style.color = inkOn(each.dataset.ink);
    redraw();
  }
  const colorOf = (label) => COLORS[theme][label] || COLORS[theme].other;
  function inkOn(label) {
    const hex = colorOf(label);
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#141a24" : "#ffffff";
  }
  function hatch(context, label) {
    if (!hatches[label]) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const draw = tile.getContext("2d");
      draw.fillStyle = colorOf(label);
      draw.fillRect(0, 0, 8, 8);
      draw.strokeStyle = css.card;
      draw.globalAlpha = 0.55;
      draw.lineWidth = 1.6;
      draw.beginPath();
      for (const shift of [-8, 0, 8]) { draw.moveTo(shift, 8); draw.lineTo(shift + 8, 0); }
      draw.stroke();
      hatches[label] = context.createPattern(tile, "repeat");
    }
    return hatches[label];
  }

  // ---- words --------------------------------------------------------------------------------------------------
  function seconds(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 0.0995) return (value * 1000).toPrecision(2) + " ms";
    if (size < 0.995) return value.toFixed(2) + " s";
    return size < 1000 ? value.toFixed(1) + " s" : Math.round(value).toLocaleString("en") + " s";
  }
  const count = (value) => value.toLocaleString("en");
  const plural = (value, what) => count(value) + " " + what + (value === 1 ? "" : "s");
  function hours(value) {
    return value >= 3600 ? (value / 3600).toLocaleString("en", { maximumFractionDigits: 1 }) + " h" : seconds(value);
  }
  function make(name, text, parent, className) {
    const found = document.createElement(name);
    if (text !== undefined && text !== null) found.textContent = text;
    if (className) found.className = className;
    if (parent) parent.append(found);
    return found;
  }
  function swatch(label, parent) {
    const found = make("span", "", parent, "swatch");
    found.dataset.stage = label;
    found.style.background = colorOf(label);
    return found;
  }
  const where = (node, rank) => (rank === null || rank === undefined ? node : "rank " + rank + " on " + node);
  const title = (label) => (MEANING[label] ? label + " (" + MEANING[label] + ")" : label);

  // ---- head ---------------------------------------------------------------------------------------------------
  function fillHead() {
    const began = new Date(Math.min(report.first_event_unix_s, 2.5e11) * 1000);
    const when = began.toISOString().replace("T", " ").slice(0, 19) + " UTC";
    let clock = "";
    if (report.clock.kind === "job") clock = " · clocks of nodes agree within " + seconds(report.clock.error_s);
    if (report.clock.kind === "nodes") clock = " · no common clock: each node begins at its own first event";
    $("subtitle").textContent =
      plural(report.ranks, "rank") + " on " + plural(report.nodes, "node") + " · begun " + when + clock;
    card(seconds(report.start_s), report.first_step_s !== null ? "from the job's first event to the last first step"
      : report.first_steps ? "first step of " + count(report.first_steps) + " of " + plural(report.ranks, "rank")
      : "as far as the start was seen; no first step was observed");
    if (report.lost.ranks) {
      card(hours(report.lost.total_s), "of accelerator time lost by " + plural(report.lost.ranks, "rank"));
      card((100 * report.lost.straggler_share).toFixed(1) + " %",
        "of the start due to stragglers: " + seconds(report.lost.straggler_s));
    }
    const longest = longestOnPath();
    if (longest) card(seconds(longest[1]), longest[0] + ": longest stage of the critical path");
    for (const line of report.slow) make("li", line, $("slow-lines"));
    if (!report.stragglers && !report.open.length) $("slow").classList.add("calm");
  }
  function card(value, text) {
    const found = make("div", null, $("cards"), "card");
    make("b", value, found);
    make("span", text, found);
  }
  function longestOnPath() {
    const totals = new Map();
    for (const each of report.path) totals.set(each.stage, (totals.get(each.stage) || 0) + each.end_s - each.begin_s);
    return [...totals].sort((a, b) => b[1] - a[1])[0];
  }
  function fillPath() {
    if (!report.path.length) { $("path-section").hidden = true; return; }
    const total = report.path[report.path.length - 1].end_s;
    for (const each of report.path) {
      const took = each.end_s - each.begin_s, share = took / total;
      const part = make("div", share > 0.05 ? each.stage : "", $("path"));
      part.dataset.stage = part.dataset.ink = each.stage;
      part.style.flex = share + " 0 0";
      part.title = title(each.stage) + ", " + where(each.node, each.rank) + ", " + seconds(took);
      if (share < 0.002) continue; // still in the picture and in the text
      const step = make("li", null, $("steps"));
      swatch(each.stage, step);
      make("span", seconds(took) + " " + each.stage + " · " + where(each.node, each.rank), step);
    }
  }

  // ---- lanes --------------------------------------------------------------------------------------------------
  const ranks = data.ranks, nodes = data.nodes, nLabels = labels.length;
  const times = new Float64Array(ranks.length * nLabels); // of each rank by label, in ticks
  const ends = new Float64Array(ranks.length);
  const odd = new Float64Array(ranks.length); // how much a rank stands out, in ticks
  const nodeRanks = nodes.map(() => []);
  let lastEnd = Math.max(1, Math.round(data.endS / tick));
  const CALM = new Set(["backoff", "rendezvous", "waiting", "peers", "first_step", "unseen"]);
  const isSlow = (index) => (ranks[index][2] & 2) !== 0 || nodes[ranks[index][1]][2] === 1;
  const hasFailed = (index) => (ranks[index][2] & 4) !== 0;

  function measure() {
    ranks.forEach((rank, index) => {
      nodeRanks[rank[1]].push(index);
      let reached = 0;
      for (let at = 0; at < rank[3].length; at += 2) {
        times[index * nLabels + rank[3][at]] += rank[3][at + 1] - reached;
        reached = rank[3][at + 1];
      }
      ends[index] = reached;
    });
    const column = new Float64Array(ranks.length);
    for (let label = 0; label < nLabels; label++) {
      for (let index = 0; index < ranks.length; index++) column[index] = times[index * nLabels + label];
      if (CALM.has(labels[label])) continue;
      const sorted = column.slice().sort();
      const middle = sorted.length ? sorted[(sorted.length - 1) >> 1] : 0;
      for (let index = 0; index < ranks.length; index++) odd[index] = Math.max(odd[index], column[index] - middle);
    }
    for (let index = 0; index < ranks.length; index++) {
      if (isSlow(index)) odd[index] += 1e12;
      if (hasFailed(index)) odd[index] += 1e13;
      lastEnd = Math.max(lastEnd, Math.min(ends[index], lastEnd * 1.5));
    }
  }

  // Rows: ranks as their index, agents as -1 - place of the node.
  let rows = [];
  const view = { low: 0, high: lastEnd, top: 0, row: 1, picked: null, stage: -1, pointer: null };
  function arrange() {
    const by = $("order").value;
    const order = ranks.map((_, index) => index);
    if (by === "odd") order.sort((a, b) => odd[b] - odd[a] || a - b);
    else if (by === "end") order.sort((a, b) => ends[b] - ends[a] || a - b);
    else if (by.startsWith("stage:")) {
      const label = Number(by.slice(6));
      order.sort((a, b) => times[b * nLabels + label] - times[a * nLabels + label] || a - b);
    }
    rows = order;
    $("agents-label").hidden = by !== "rank";
    if (by === "rank" && $("agents").checked) {
      rows = [];
      const seen = new Set();
      for (const index of order) {
        const place = ranks[index][1];
        if (!seen.has(place)) { seen.add(place); rows.push(-1 - place); }
        rows.push(index);
      }
      nodes.forEach((_, place) => { if (!seen.has(place)) rows.push(-1 - place); });
    }
  }

  // ---- drawing ------------------------------------------------------------------------------------------------
  const area = $("area"), lanes = $("lanes");
  let width = 0, laneHeight = 0, areaHeight = 120, pending = false;
  function redraw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  }
  function size(canvas, height) {
    const scale = window.devicePixelRatio || 1;
    const wide = Math.round(width * scale), high = Math.round(height * scale);
    if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
    canvas.style.height = height + "px";
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }
  const plotWidth = () => width - GUTTER - MAP - 8;
  const toX = (time) => GUTTER + ((time - view.low) / (view.high - view.low)) * plotWidth();
  const toTime = (x) => view.low + ((x - GUTTER) / plotWidth()) * (view.high - view.low);
  const fitRow = () => Math.min(MAX_ROW, (laneHeight - AXIS) / Math.max(1, rows.length));
  const bucketOf = () => (view.row >= MIN_ROW ? 1 : Math.ceil(MIN_ROW / view.row));
  const visibleRows = () => (laneHeight - AXIS) / view.row;

  function layOut() {
    width = Math.max(360, $("stack").clientWidth);
    const room = Math.max(320, Math.min(700, window.innerHeight - 300));
    laneHeight = Math.min(room, Math.max(4, rows.length) * MAX_ROW + AXIS);
    areaHeight = ranks.length > 3 ? 110 : 0;
    area.hidden = !areaHeight;
    clamp();
  }
  function clamp() {
    const least = fitRow();
    view.row = Math.min(MAX_ROW, Math.max(least, view.row));
    view.top = Math.max(0, Math.min(view.top, rows.length - visibleRows()));
    const span = Math.max(10, Math.min(lastEnd, view.high - view.low));
    view.low = Math.max(0, Math.min(view.low, lastEnd - span));
    view.high = view.low + span;
  }
  function draw() {
    if (!width) layOut();
    drawArea();
    drawLanes();
    describe();
  }
  function fill(context, label, isHatched) {
    const isDim = view.stage >= 0 && view.stage !== label;
    context.globalAlpha = isDim ? 0.16 : 1;
    context.fillStyle = isHatched && HATCHED.has(labels[label]) ? hatch(context, labels[label]) : fills[label];
  }

  function drawArea() {
    if (!areaHeight) return;
    const context = size(area, areaHeight);
    const bins = Math.max(50, Math.round(plotWidth() / 2));
    const changes = labels.map(() => new Int32Array(bins + 1));
    const scale = bins / (view.high - view.low);
    for (const rank of ranks) {
      let begin = 0;
      const pieces = rank[3];
      for (let at = 0; at < pieces.length; at += 2) {
        const end = pieces[at + 1];
        const from = Math.max(0, Math.ceil((begin - view.low) * scale - 0.5));
        const to = Math.min(bins, Math.ceil((end - view.low) * scale - 0.5));
        if (to > from) { changes[pieces[at]][from]++; changes[pieces[at]][to]--; }
        begin = end;
      }
    }
    const top = 6, high = areaHeight - top - 4, base = new Float64Array(bins);
    const step = plotWidth() / bins;
    context.fillStyle = css.lane;
    context.fillRect(GUTTER, top, plotWidth(), high);
    for (let label = nLabels - 1; label >= 0; label--) {
      const change = changes[label];
      if (!change.some((each) => each !== 0)) continue;
      fill(context, label, false);
      let now = 0;
      for (let bin = 0; bin < bins; bin++) {
        now += change[bin];
        if (!now) continue;
        const size_ = (now / ranks.length) * high;
        const x = Math.floor(GUTTER + bin * step);
        context.fillRect(x, top + high - base[bin] - size_, Math.floor(GUTTER + (bin + 1) * step) - x, size_);
        base[bin] += size_;
      }
    }
    context.globalAlpha = 1;
    context.fillStyle = css.soft;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("all " + plural(ranks.length, "rank"), GUTTER - 10, top + 6);
    context.fillText("none", GUTTER - 10, top + high - 5);
    crosshair(context, areaHeight);
  }

  function laneOf(first, bucket) {
    // Of rows that share a line the one that stands out most.
    let best = rows[first];
    for (let at = first + 1; at < Math.min(rows.length, first + bucket); at++) {
      const other = rows[at];
      if (other >= 0 && (best < 0 || odd[other] > odd[best])) best = other;
    }
    return best;
  }
  function drawLanes() {
    const context = size(lanes, laneHeight);
    const high = laneHeight - AXIS, bucket = bucketOf(), gap = view.row >= 7 ? 1 : 0;
    context.fillStyle = css.lane;
    context.fillRect(GUTTER, 0, plotWidth(), high);
    drawAxis(context, high);
    context.save();
    context.beginPath();
    context.rect(0, 0, width, high);
    context.clip();
    let first = Math.floor(view.top / bucket) * bucket;
    let lastNode = -1;
    const names = [];
    for (; first < rows.length; first += bucket) {
      // On whole pixels: seams between flat rows would look like stripes.
      const y = Math.round((first - view.top) * view.row);
      if (y > high) break;
      const tall = Math.max(1, Math.round((first + bucket - view.top) * view.row) - y);
      const row = laneOf(first, bucket);
      if (row < 0) drawAgent(context, -1 - row, y, tall - gap);
      else drawRank(context, row, y, tall - gap);
      const node = row < 0 ? -1 - row : ranks[row][1];
      const isMarked = row >= 0 && (isSlow(row) || hasFailed(row));
      const isNew = node !== lastNode;
      lastNode = node;
      if (isMarked) {
        context.fillStyle = css.accent;
        context.fillRect(GUTTER - 6, y, 4, Math.max(1.5, tall - gap));
      }
      if (view.row >= 12) drawName(context, row, isNew, y + tall / 2, isMarked);
      else if (isNew && y >= 0) names.push([isMarked ? 0 : 1, y + Math.min(tall, 8) / 2, row]);
      if (view.picked !== null && inBucket(view.picked, first, bucket)) {
        context.strokeStyle = css.focus;
        context.lineWidth = 2;
        context.strokeRect(GUTTER - 6, y - 1, plotWidth() + 7, Math.max(4, tall - gap + 2));
      }
    }
    // Where not every row has room for its name: those that stand out first.
    const taken = [];
    for (const [order, y, row] of names.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
      if (taken.some((each) => Math.abs(each - y) < (order ? 26 : 13))) continue;
      taken.push(y);
      drawName(context, row, true, Math.max(7, Math.min(high - 7, y)), order === 0);
    }
    context.restore();
    if (report.first_steps) {
      const x = toX(Math.round(report.start_s / tick));
      if (x >= GUTTER && x <= GUTTER + plotWidth() + 1) {
        context.fillStyle = css.ink;
        context.fillRect(x - 0.75, 0, 1.5, high);
      }
    }
    drawMap(context, high);
    crosshair(context, high);
  }
  const inBucket = (row, first, bucket) => {
    for (let at = first; at < Math.min(rows.length, first + bucket); at++) if (rows[at] === row) return true;
    return false;
  };
  function drawRank(context, index, y, high) {
    const pieces = ranks[index][3];
    let begin = 0, drawn = -1;
    const right = GUTTER + plotWidth();
    for (let at = 0; at < pieces.length; at += 2) {
      const end = pieces[at + 1];
      const from = Math.max(GUTTER, toX(begin)), to = Math.min(right, toX(end));
      begin = end;
      if (to <= GUTTER || from >= right) continue;
      // Too short to see is still drawn, once a pixel.
      if (to - from < 0.4 && from - drawn < 0.8) continue;
      drawn = from;
      fill(context, pieces[at], high >= 5);
      context.fillRect(from, y, Math.max(0.8, to - from), high);
    }
    context.globalAlpha = 1;
    if ((ranks[index][2] & 1) === 0) {
      const x = toX(begin);
      if (x > GUTTER && x < right && high >= 3) {
        context.fillStyle = css.accent;
        context.fillRect(x - 1.5, y, 3, high);
      }
    }
  }
  function drawAgent(context, place, y, high) {
    const spans = nodes[place][3], reached = [], right = GUTTER + plotWidth();
    const tracks = [];
    for (let at = 0; at < spans.length; at += 5) {
      const end = spans[at + 3] < 0 ? lastEnd : spans[at + 3];
      let track = reached.findIndex((until) => until <= spans[at + 2]);
      if (track < 0) track = reached.length;
      reached[track] = end;
      tracks.push(track);
    }
    const tall = high / Math.max(1, reached.length);
    for (let at = 0; at < spans.length; at += 5) {
      const end = spans[at + 3] < 0 ? lastEnd : spans[at + 3];
      const from = Math.max(GUTTER, toX(spans[at + 2])), to = Math.min(right, toX(end));
      if (to <= GUTTER || from >= right) continue;
      fill(context, spans[at], false);
      context.globalAlpha *= 0.75;
      context.fillRect(from, y + tracks[at / 5] * tall + 0.5, Math.max(1, to - from), Math.max(1, tall - 1));
    }
    context.globalAlpha = 1;
  }
  function drawName(context, row, isNew, y, isMarked) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.font = (row < 0 || isMarked ? "600 " : "") + "12px system-ui, sans-serif";
    context.fillStyle = isMarked ? css.accent : row < 0 ? css.ink : css.soft;
    const node = nodes[row < 0 ? -1 - row : ranks[row][1]][0];
    const hasAgents = $("agents").checked && $("order").value === "rank";
    let name = shorten(node);
    if (row >= 0 && view.row >= 12) name = (isNew && !hasAgents ? shorten(node, 13) + " · " : "") + "rank " + ranks[row][0];
    else if (row >= 0 && ((isMarked && (ranks[row][2] & 2)) || $("order").value !== "rank")) name = shorten(node, 13) + " · " + ranks[row][0];
    context.fillText(name, GUTTER - 11, y, GUTTER - 14);
  }
  function shorten(text, most = 20) {
    return text.length <= most ? text : text.slice(0, Math.ceil(most / 2) - 1) + "…" + text.slice(-Math.floor(most / 2));
  }
  function drawAxis(context, high) {
    const span = (view.high - view.low) * tick, rough = span / Math.max(3, plotWidth() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    for (let at = Math.ceil((view.low * tick) / step) * step; at <= view.high * tick + 1e-9; at += step) {
      const x = toX(at / tick);
      context.fillStyle = css.line;
      context.fillRect(x - 0.5, 0, 1, high + 4);
      context.fillStyle = css.soft;
      context.textAlign = x > width - 60 ? "right" : "center";
      context.fillText(at.toFixed(digits) + " s", x, high + 18);
    }
  }
  function drawMap(context, high) {
    // All rows, with those that stand out; nothing is out of sight.
    const x = width - MAP;
    context.fillStyle = css.lane;
    context.fillRect(x, 0, MAP, high);
    context.fillStyle = css.accent;
    const scale = high / Math.max(1, rows.length);
    rows.forEach((row, at) => {
      if (row >= 0 && (isSlow(row) || hasFailed(row))) context.fillRect(x + 3, at * scale - 0.75, MAP - 6, Math.max(1.5, scale));
    });
    if (visibleRows() < rows.length - 0.01) {
      context.strokeStyle = css.soft;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, view.top * scale + 0.75, MAP - 1.5, Math.max(6, visibleRows() * scale) - 1.5);
    }
  }
  function crosshair(context, high) {
    if (!view.pointer || view.pointer.x < GUTTER || view.pointer.x > GUTTER + plotWidth()) return;
    context.fillStyle = css.soft;
    context.globalAlpha = 0.7;
    context.fillRect(view.pointer.x - 0.5, 0, 1, high);
    context.globalAlpha = 1;
  }
  function describe() {
    const bucket = bucketOf(), shown = Math.min(rows.length, Math.ceil(visibleRows()));
    $("lod").textContent = bucket > 1
      ? "Each line stands for " + bucket + " rows and shows the one that stands out most; the marks at the right are all that do. Zoom rows to see each."
      : shown < rows.length ? count(shown) + " of " + plural(rows.length, "row") + " in sight." : "";
  }

  // ---- pointing -----------------------------------------------------------------------------------------------
  function rowAt(y) {
    const bucket = bucketOf();
    const first = Math.floor((view.top + y / view.row) / bucket) * bucket;
    if (y < 0 || y > laneHeight - AXIS || first < 0 || first >= rows.length) return null;
    return { row: laneOf(first, bucket), first, bucket: Math.min(bucket, rows.length - first) };
  }
  function pieceAt(row, time) {
    if (row < 0) {
      const spans = nodes[-1 - row][3], found = [];
      for (let at = 0; at < spans.length; at += 5) {
        const end = spans[at + 3] < 0 ? lastEnd : spans[at + 3];
        if (spans[at + 2] <= time && time < end) {
          const name = data.names[spans[at + 1]];
          found.push([spans[at], spans[at + 2], spans[at + 3], name, spans[at + 4]]);
        }
      }
      return found;
    }
    const pieces = ranks[row][3];
    let begin = 0;
    for (let at = 0; at < pieces.length; at += 2) {
      if (time < pieces[at + 1]) return time < begin ? [] : [[pieces[at], begin, pieces[at + 1], "", 0]];
      begin = pieces[at + 1];
    }
    return [];
  }
  const rowName = (row) => (row < 0 ? "agent of " + nodes[-1 - row][0] : where(nodes[ranks[row][1]][0], ranks[row][0]));
  function showTip(event) {
    const box = lanes.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    view.pointer = { x, y };
    const found = rowAt(y), tip = $("tip");
    if (!found || x < GUTTER || x > GUTTER + plotWidth()) { tip.hidden = true; redraw(); return; }
    tip.textContent = "";
    make("b", rowName(found.row), tip);
    if (found.bucket > 1) make("div", "stands out most of " + found.bucket + " rows here", tip, "soft");
    const time = toTime(x);
    const parts = pieceAt(found.row, time);
    for (const [label, begin, end, name, failed] of parts) {
      const line = make("div", null, tip, "row");
      swatch(labels[label], line);
      make("span", labels[label] + (name && name !== labels[label] ? ": " + name : "") + (failed ? ", failed" : ""), line);
      make("span", end < 0 ? "never ended" : seconds((end - begin) * tick), line);
      if (MEANING[labels[label]]) make("div", MEANING[labels[label]], tip, "soft");
      make("div", seconds(begin * tick) + " to " + (end < 0 ? "?" : seconds(end * tick)), tip, "soft");
    }
    if (!parts.length) make("div", "at " + seconds(time * tick) + (found.row >= 0 && time >= ends[found.row] ? ": past its first step, or ended" : ""), tip, "soft");
    tip.hidden = false;
    const wide = tip.offsetWidth, offset = lanes.offsetTop;
    tip.style.left = Math.max(0, x + 18 + wide > width ? x - wide - 14 : x + 18) + "px";
    tip.style.top = Math.max(0, Math.min(offset + y + 16, offset + laneHeight - tip.offsetHeight)) + "px";
    redraw();
  }
  function pick(row, isKept) {
    view.picked = row;
    const box = $("picked");
    box.hidden = row === null;
    box.textContent = "";
    if (row !== null) {
      make("b", rowName(row), box);
      const grid = make("div", null, box, "grid");
      const line = (label, text, value) => {
        const part = make("div", null, grid, "row");
        swatch(label, part);
        make("span", text, part);
        make("span", value, part);
      };
      if (row < 0) {
        const spans = nodes[-1 - row][3];
        for (let at = 0; at < spans.length; at += 5)
          line(labels[spans[at]], data.names[spans[at + 1]] + (spans[at + 4] ? ", failed" : ""),
            spans[at + 3] < 0 ? "never ended" : seconds((spans[at + 3] - spans[at + 2]) * tick));
      } else {
        const pieces = ranks[row][3];
        let begin = 0;
        for (let at = 0; at < pieces.length; at += 2) {
          line(labels[pieces[at]], labels[pieces[at]], seconds((pieces[at + 1] - begin) * tick));
          begin = pieces[at + 1];
        }
        const flags = ranks[row][2];
        make("div", (flags & 1 ? "first step after " : "no first step was observed; seen until ") + seconds(begin * tick), box, "soft");
      }
      if (!isKept) reveal(row);
    }
    redraw();
  }
  function reveal(row) {
    const at = rows.indexOf(row);
    if (at < 0) return;
    if (at < view.top || at >= view.top + visibleRows() - 1) view.top = at - visibleRows() / 2;
    clamp();
  }
  function zoomTime(factor, x = GUTTER + plotWidth() / 2) {
    const time = toTime(x), span = (view.high - view.low) * factor;
    view.low = time - ((time - view.low) / (view.high - view.low)) * span;
    view.high = view.low + span;
    clamp();
    redraw();
  }
  function zoomRows(factor, y = anchor()) {
    const at = view.top + y / view.row;
    view.row = Math.min(MAX_ROW, Math.max(fitRow(), view.row * factor));
    view.top = at - y / view.row;
    clamp();
    redraw();
  }
  function anchor() {
    // Rows grow around the chosen one; where they are ordered by something, from the top.
    const at = view.picked === null ? -1 : (rows.indexOf(view.picked) - view.top + 0.5) * view.row;
    if (at >= 0 && at <= laneHeight - AXIS) return at;
    return $("order").value === "rank" ? (laneHeight - AXIS) / 2 : 0;
  }
  function reset() {
    view.low = 0;
    view.high = lastEnd;
    view.top = 0;
    view.row = 0;
    clamp();
    redraw();
  }
  function step(by) {
    const at = view.picked === null ? -1 : rows.indexOf(view.picked);
    const jump = at < 0 ? 0 : by * (Math.abs(by) === 1 ? bucketOf() : 1);
    let next = Math.max(0, Math.min(rows.length - 1, at < 0 ? Math.floor(view.top) : at + jump));
    if (bucketOf() > 1) next = rows.indexOf(laneOf(Math.floor(next / bucketOf()) * bucketOf(), bucketOf()));
    pick(rows[next]);
  }

  let drag = null;
  lanes.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, low: view.low, high: view.high, top: view.top, moved: false };
    lanes.setPointerCapture(event.pointerId);
  });
  lanes.addEventListener("pointermove", (event) => {
    if (!drag) { showTip(event); return; }
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) > 4) { drag.moved = true; lanes.classList.add("grabbing"); $("tip").hidden = true; }
    if (!drag.moved) return;
    const shift = (dx / plotWidth()) * (drag.high - drag.low);
    view.low = drag.low - shift;
    view.high = drag.high - shift;
    view.top = drag.top - dy / view.row;
    clamp();
    redraw();
  });
  lanes.addEventListener("pointerup", (event) => {
    lanes.classList.remove("grabbing");
    const was = drag;
    drag = null;
    if (!was || was.moved) return;
    const box = lanes.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    if (x > width - MAP) {
      view.top = (y / (laneHeight - AXIS)) * rows.length - visibleRows() / 2;
      clamp();
      redraw();
      return;
    }
    const found = rowAt(y);
    pick(found ? found.row : null, true);
  });
  lanes.addEventListener("pointercancel", () => { drag = null; lanes.classList.remove("grabbing"); });
  lanes.addEventListener("pointerleave", () => { view.pointer = null; $("tip").hidden = true; redraw(); });
  lanes.addEventListener("dblclick", (event) => {
    const box = lanes.getBoundingClientRect();
    zoomTime(0.5, event.clientX - box.left);
    zoomRows(2, event.clientY - box.top);
  });
  lanes.addEventListener("wheel", (event) => {
    const box = lanes.getBoundingClientRect(), by = event.deltaY || event.deltaX;
    if (event.ctrlKey || event.metaKey) zoomTime(by > 0 ? 1.25 : 0.8, event.clientX - box.left);
    else if (event.altKey) zoomRows(by > 0 ? 0.8 : 1.25, event.clientY - box.top);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = ((event.deltaX || event.deltaY) / plotWidth()) * (view.high - view.low);
      view.low += shift;
      view.high += shift;
      clamp();
      redraw();
    } else {
      // At its ends the page scrolls on.
      const before = view.top;
      view.top += event.deltaY / view.row;
      clamp();
      if (view.top === before) return;
      redraw();
    }
    event.preventDefault();
  }, { passive: false });
  lanes.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = view.high - view.low;
    const move = (by) => { view.low += by * span; view.high += by * span; clamp(); redraw(); };
    const keys = {
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15),
      ArrowUp: () => (event.shiftKey ? zoomRows(0.7) : step(-1)),
      ArrowDown: () => (event.shiftKey ? zoomRows(1.4) : step(1)),
      PageUp: () => step(-Math.max(2, Math.floor(visibleRows()))), PageDown: () => step(Math.max(2, Math.floor(visibleRows()))),
      Home: () => { view.top = 0; step(-rows.length - 2); }, End: () => step(rows.length + 2),
      "+": () => zoomTime(0.7), "=": () => zoomTime(0.7), "-": () => zoomTime(1.4), "0": reset,
      Escape: () => pick(null),
    };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });

  // ---- controls -----------------------------------------------------------------------------------------------
  function fillControls() {
    const used = labels.map((_, label) => ranks.some((__, index) => times[index * nLabels + label] > 0)
      || nodes.some((node) => node[3].some((value, at) => at % 5 === 0 && value === label)));
    const option = (value, text) => { make("option", text, $("order")).value = value; };
    option("rank", "by rank");
    option("odd", "what stands out first");
    option("end", "last first step first");
    labels.forEach((label, index) => {
      if (!used[index]) return;
      option("stage:" + index, "longest " + label + " first");
      const button = make("button", null, $("legend"));
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      swatch(label, button);
      make("span", SHORT[label] ? label + " · " + SHORT[label] : label, button);
      if (MEANING[label]) button.title = MEANING[label];
      button.addEventListener("click", () => {
        view.stage = view.stage === index ? -1 : index;
        [...$("legend").children].forEach((each) => each.setAttribute("aria-pressed", String(each === button && view.stage >= 0)));
        redraw();
      });
    });
    $("agents").checked = ranks.length + nodes.length <= 96;
    const again = () => { arrange(); layOut(); reset(); };
    $("order").addEventListener("change", again);
    $("agents").addEventListener("change", again);
    $("time-in").addEventListener("click", () => zoomTime(0.6));
    $("time-out").addEventListener("click", () => zoomTime(1.7));
    $("rows-in").addEventListener("click", () => zoomRows(2));
    $("rows-out").addEventListener("click", () => zoomRows(0.5));
    $("reset").addEventListener("click", reset);
    $("find").addEventListener("input", () => {
      const text = $("find").value.trim().toLowerCase();
      if (!text) { pick(null); return; }
      const number = /^(rank\s*)?\d+$/.test(text) ? Number(text.replace(/\D/g, "")) : -1;
      let found = number >= 0 ? ranks.findIndex((rank) => rank[0] === number) : -1;
      if (found < 0) {
        const is = (test) => ranks.findIndex((rank) => test(nodes[rank[1]][0].toLowerCase()));
        found = is((name) => name === text);
        if (found < 0) found = is((name) => name.includes(text));
      }
      if (found < 0) { pick(null); $("picked").hidden = false; $("picked").textContent = "no rank or node of that name"; return; }
      if (view.row < MIN_ROW) { view.row = 8; clamp(); }
      view.top = rows.indexOf(found) - visibleRows() / 2;
      clamp();
      pick(found);
    });
    $("theme").addEventListener("click", () => { isChosen = true; setTheme(theme === "dark" ? "light" : "dark"); });
  }

  // ---- tables -------------------------------------------------------------------------------------------------
  // columns: {name, of: row -> sortable, show: row -> text, left, hot: row -> whether to bring it out}
  function table(element, columns, records, sorted, most, more) {
    let by = sorted, isDown = sorted >= 0, shown = most;
    element.textContent = "";
    const head = make("tr", null, make("thead", null, element)), body = make("tbody", null, element);
    columns.forEach((column, index) => {
      const cell = make("th", null, head, column.left ? "left" : "");
      cell.scope = "col";
      const button = make("button", column.name, cell);
      button.type = "button";
      button.addEventListener("click", () => {
        isDown = by === index ? !isDown : !column.left;
        by = index;
        fillBody();
      });
    });
    function fillBody() {
      [...head.children].forEach((cell, index) => {
        if (index === by) cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
      let order = records.slice();
      if (by >= 0) {
        const key = columns[by].of;
        order.sort((a, b) => {
          const x = key(a), y = key(b);
          if (x === null || y === null) return (x === null) - (y === null);
          const sign = x < y ? -1 : x > y ? 1 : 0;
          return isDown ? -sign : sign;
        });
      }
      body.textContent = "";
      for (const record of order.slice(0, shown)) {
        const line = make("tr", null, body);
        columns.forEach((column) => {
          const cell = make("td", column.show(record), line, column.left ? "left" : "");
          if (column.hot && column.hot(record)) cell.classList.add("hot");
          if (column.fill) column.fill(cell, record);
        });
      }
      if (more) {
        more.hidden = shown >= records.length;
        more.textContent = "Show more: " + count(records.length - shown) + " not shown";
      }
    }
    if (more) more.addEventListener("click", () => { shown += 200; fillBody(); });
    fillBody();
  }
  function fillTables() {
    const lost = report.lost, slowest = (row, at) => row.slowest[at] || null;
    const widest = Math.max(1e-9, ...report.stages.map((row) => row.lost_s || 0));
    table($("stages"), [
      { name: "stage", left: true, of: (row) => labels.indexOf(row.stage), show: () => "",
        fill: (cell, row) => { swatch(row.stage, cell); make("span", " " + row.stage, cell); } },
      { name: "median", of: (row) => row.median_s, show: (row) => seconds(row.median_s) },
      { name: "max", of: (row) => row.max_s, show: (row) => seconds(row.max_s) },
      { name: "max/median", of: (row) => row.max_over_median,
        show: (row) => (row.max_over_median === null ? "–" : row.max_over_median.toFixed(2)),
        hot: (row) => row.max_over_median >= 1.5 && row.max_s - row.median_s > 0.03 * report.start_s && row.stage !== "rendezvous" },
      { name: "accelerator time lost", of: (row) => row.lost_s, show: (row) => (row.lost_s === null ? "–" : hours(row.lost_s)),
        fill: (cell, row) => {
          if (!row.lost_s) return;
          const bar = make("span", "", cell, "share");
          bar.dataset.stage = row.stage;
          bar.style.background = colorOf(row.stage);
          bar.style.width = Math.max(1, (80 * row.lost_s) / widest) + "px";
        } },
      { name: "observed", of: (row) => row.observed, show: (row) => count(row.observed) + " of " + count(row.of) + " " + row.places },
      { name: "slowest", left: true, of: (row) => slowest(row, 0).node,
        show: (row) => row.slowest.slice(0, 2).map((each) => where(each.node, each.rank) + " " + seconds(each.seconds)).join(", ") },
    ], report.stages, -1, 100);
    const rest = Object.entries(lost.by_stage).filter(([stage]) => !report.stages.some((row) => row.stage === stage));
    let text = lost.ranks ? "Lost: from the job's first event to each rank's own first step; each moment counts for one stage." : "";
    for (const [stage, value] of rest) text += " " + title(stage) + ": " + hours(value) + ".";
    if (lost.ranks_without_first_step)
      text += " Besides " + hours(lost.without_first_step_s) + " of " + plural(lost.ranks_without_first_step, "rank") + " without a first step.";
    $("lost").textContent = text;

    const records = nodes.map((node, place) => {
      const found = { name: node[0], begin: node[1] * tick, slow: node[2] === 1, place, times: {}, ranks: nodeRanks[place].length };
      for (let at = 0; at < node[4].length; at += 2) found.times[labels[node[4][at]]] = node[4][at + 1] * tick;
      const own = nodeRanks[place];
      found.end = own.length && own.every((index) => ranks[index][2] & 1) ? Math.max(...own.map((index) => ends[index])) * tick : null;
      found.odd = own.reduce((most, index) => Math.max(most, odd[index]), 0);
      return found;
    });
    const medians = Object.fromEntries(report.stages.map((row) => [row.stage, row.median_s]));
    const columns = labels.filter((label) => records.some((each) => label in each.times));
    records.sort((a, b) => b.odd - a.odd);
    table($("nodes"), [
      { name: "node", left: true, of: (row) => row.name, show: (row) => row.name, hot: (row) => row.slow },
      { name: "ranks", of: (row) => row.ranks, show: (row) => count(row.ranks) },
      { name: "begins", of: (row) => row.begin, show: (row) => seconds(row.begin) },
      ...columns.map((label) => ({
        name: label, of: (row) => (label in row.times ? row.times[label] : null),
        show: (row) => (label in row.times ? seconds(row.times[label]) : "–"),
        hot: (row) => !CALM.has(label) && row.times[label] >= 1.5 * medians[label]
          && row.times[label] - medians[label] > Math.max(0.1, 0.03 * report.start_s),
      })),
      { name: "first step", of: (row) => row.end, show: (row) => seconds(row.end) },
    ], records, -1, 25, $("more"));
  }
  function fillAttempts() {
    const every = report.every, ended = every.flatMap((each) => each.failed.map((rank) => [each.attempt, rank]));
    $("attempts-section").hidden = every.length < 2 && !ended.length;
    if ($("attempts-section").hidden) return;
    const step = (row) => (row.first_step_s !== null ? seconds(row.first_step_s)
      : row.first_steps ? count(row.first_steps) + " of " + count(row.ranks) : "–");
    table($("attempts"), [
      { name: "attempt", of: (row) => row.attempt, show: (row) => row.attempt + (row.attempt === report.attempt ? " (shown)" : "") },
      { name: "ranks", of: (row) => row.ranks, show: (row) => count(row.ranks) },
      { name: "nodes", of: (row) => row.nodes, show: (row) => count(row.nodes) },
      { name: "first step", of: (row) => row.first_step_s, show: step },
      { name: "rank seconds lost", of: (row) => row.lost_s, show: (row) => row.lost_s.toFixed(1) },
      { name: "seen until", of: (row) => row.end_s, show: (row) => seconds(row.end_s) },
      { name: "ranks that failed", of: (row) => row.failed.length, show: (row) => count(row.failed.length), hot: (row) => row.failed.length > 0 },
    ], every, -1, 25, null);
    for (const [attempt, rank] of ended.slice(0, 50))
      make("li", "attempt " + attempt + ": " + where(rank.node, rank.rank) + (rank.status < 0 ? " was ended by signal " + -rank.status
        : " ended with status " + rank.status) + " after " + seconds(rank.after_s), $("ended"));
  }
  function fillRest() {
    const lines = (items, list, section) => {
      for (const each of items) make("li", each, $(list));
      $(section).hidden = !items.length;
    };
    const span = (each, what) => each.stage + " (" + each.name + "), " + where(each.node, each.rank) + ", begun at "
      + seconds(each.begin_s) + ": " + what;
    lines([
      ...report.open.map((each) => span(each, "never ended")),
      ...report.failed.map((each) => span(each, each.error || "failed")),
      ...report.fallbacks.map((line) => "fell back to the normal path: " + line),
      ...report.hangs,
      ...report.rules,
      ...report.checks.map((line) => "health check: " + line),
    ], "troubles", "troubles-section");
    lines(report.notes, "notes", "notes-section");
    const amount = (each, value) => {
      if (each.unit === "s") return seconds(value);
      if (each.unit !== "bytes") return value.toLocaleString("en", { maximumFractionDigits: 2 });
      for (const unit of ["B", "kB", "MB", "GB"]) {
        if (Math.abs(value) < 999.5) return Number(value.toPrecision(3)) + " " + unit;
        value /= 1000;
      }
      return Number(value.toPrecision(3)) + " TB";
    };
    const facts = [
      ...report.ways.map((each) => ({ stage: each.stage, name: each.name + ": " + each.value, nodes: each.count, median: null })),
      ...report.facts,
    ];
    $("facts-section").hidden = !facts.length;
    if (!facts.length) return;
    const number = (key) => ({ of: (row) => (row.median === null ? null : row[key]), show: (row) => (row.median === null ? "" : amount(row, row[key])) });
    table($("facts"), [
      { name: "stage", left: true, of: (row) => row.stage, show: (row) => row.stage },
      { name: "what", left: true, of: (row) => row.name, show: (row) => row.name },
      { name: "times", of: (row) => row.nodes, show: (row) => count(row.nodes) },
      { name: "median", ...number("median") },
      { name: "max", ...number("max") },
      { name: "total", ...number("total") },
    ], facts, -1, 200);
  }

  // ---- go -----------------------------------------------------------------------------------------------------
  let isChosen = false;
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  wish.addEventListener("change", () => { if (!isChosen) setTheme(wish.matches ? "dark" : "light"); });
  theme = wish.matches ? "dark" : "light";
  measure();
  view.high = lastEnd;
  fillHead();
  fillPath();
  fillControls();
  arrange();
  fillTables();
  fillAttempts();
  fillRest();
  setTheme(theme);
  layOut();
  reset();
  new ResizeObserver(() => { const was = width; layOut(); if (was !== width) redraw(); }).observe($("stack"));
  root.dataset.ready = "yes";
})();

"use strict";
// Keeps the page of a job up to date. All texts come from outside: they are set as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  const job = document.body.dataset.job;
  const base = "/api/v1/jobs/" + encodeURIComponent(job);
  const ROWS = 64, MAX_LOG = 200, REPORT_MS = 2000, RETRY_MS = 5000, CELL = 14, GAP = 2;
  const OF_START = { // as in the page of a report
    queue: "#8d99ae", allocate: "#b08968", image: "#2f7fe0", env: "#0e9f8e", caches: "#84b817", backoff: "#d9c9a3", rendezvous: "#c4ccd8",
    spawn: "#e9ae06", import: "#e8622c", checkpoint: "#8b52d6", first_step: "#5d7390", peers: "#d6dee9", waiting: "#dbe0e8",
  };
  const LOOKS = [ // of a rank: name, colour, meaning
    ["ok", "--ok", "makes steps"], ["late", "--late", "later than usual"], ["worse", "--worse", "far later than usual"],
    ["wait", "--wait", "no step yet, or steps unknown"], ["ended", "--ended", "has ended"],
    ["stopped", "--stopped", "stopped, or in the kernel"], ["bad", "--bad", "failed"],
  ];
  const LATE_STEPS = 3, WORSE_STEPS = 10, LATE_S = 2; // steps without a step, and at least so long
  let logged = 0, detail = null, report = null, chosen = -1, first = 0, layout = null, looks = [];
  const fresh = [];
  const page = window.bootseer = { updates: 0, events: 0, lastMs: 0, resets: 0, shown: () => detail, report: () => report };

  // ---- words ----------------------------------------------------------------------------------------------------
  function make(name, text, parent, className) {
    const found = document.createElement(name);
    if (text !== undefined && text !== null) found.textContent = text;
    if (className) found.className = className;
    if (parent) parent.append(found);
    return found;
  }
  const isNumber = (value) => typeof value === "number" && isFinite(value);
  const count = (value) => value.toLocaleString("en");
  const plural = (value, what) => count(value) + " " + what + (value === 1 ? "" : "s");
  const figure = (value) => (isNumber(value) ? (Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(3)))) : "–");
  const cores = (value) => (isNumber(value) ? value.toFixed(value < 9.95 ? 2 : 0) : "–");
  function seconds(value) {
    if (!isNumber(value)) return "–";
    if (value < 0.0995) return Math.round(value * 1000) + " ms";
    if (value < 1000) return value.toFixed(value < 0.995 ? 2 : 1) + " s";
    return value < 7200 ? Math.round(value / 60) + " min" : (value / 3600).toFixed(1) + " h";
  }
  function bytes(value) {
    if (!isNumber(value)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
    return value.toFixed(at && value < 100 ? 1 : 0) + " " + units[at];
  }
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const known = (values) => values.filter(isNumber);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  function median(values) {
    const sorted = known(values).sort((a, b) => a - b);
    return sorted.length ? sorted[sorted.length >> 1] : null;
  }
  const show = (id, is) => { $(id).hidden = !is; };
  function setText(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }

  // ---- the head -------------------------------------------------------------------------------------------------
  function fillHead() {
    const parts = [detail.script, "bootrun " + figure(detail.pid).replaceAll(",", "") + " on " + detail.host];
    if (detail.waits_for) parts.push("waits for " + detail.waits_for);
    setText("subtitle", parts.filter(Boolean).join(" · "));
    setText("stale", !detail.is_running ? "This job has ended: this is its last state."
      : detail.why ? "No newer state: " + detail.why : "");
    show("stale", !detail.is_running || detail.why);
    const ranks = detail.ranks, steps = known(ranks.steps), since = known(ranks.since_step_s);
    const rates = known(ranks.steps_per_s), used = known(ranks.cores), memory = known(ranks.rss_bytes);
    const found = [
      [detail.is_running ? detail.state : "ended", "attempt " + figure(detail.attempt) + (isNumber(detail.attempt_runs_s) ? ", for " + seconds(detail.attempt_runs_s) : "")],
      [count(ranks.rank.length), "ranks on " + plural(detail.nodes || 0, "node")],
      [steps.length ? count(most(steps)) : "–", "steps of the first rank in this attempt"],
      [rates.length ? figure(median(rates)) : "–", "steps a second, median of ranks"],
      [since.length ? seconds(most(since)) : "–", "since the last step of the slowest rank"],
      [figure(detail.restarts || 0), "restarts of " + figure(detail.max_restarts)],
    ];
    if (used.length) found.push([cores(sum(used)), "cores of CPU, " + plural(used.length, "rank")]);
    if (memory.length) found.push([bytes(sum(memory)), "memory, " + plural(memory.length, "rank")]);
    const cards = $("cards");
    while (cards.children.length > found.length) cards.lastChild.remove();
    found.forEach(([value, what], at) => {
      const card = cards.children[at] || make("div", null, cards, "card");
      if (card.children.length !== 2) { card.textContent = ""; make("b", "", card); make("span", "", card); }
      if (card.children[0].textContent !== value) card.children[0].textContent = value;
      if (card.children[1].textContent !== what) card.children[1].textContent = what;
    });
    show("hang", detail.hang);
    setText("hang-line", detail.hang || "");
    fillList("checks", detail.checks);
    show("checks-section", detail.checks.length);
  }
  const most = (values) => values.reduce((found, value) => (value > found ? value : found), -Infinity);
  function fillList(id, lines) {
    const list = $(id), text = lines.join("\n");
    if (list.dataset.text === text) return;
    list.dataset.text = text;
    list.textContent = "";
    for (const line of lines) make("li", line, list);
  }

  // ---- the grid of ranks ----------------------------------------------------------------------------------------
  function lookOf(at, usual) {
    const ranks = detail.ranks, state = ranks.state[at], since = ranks.since_step_s[at];
    if (state === "failed") return 6;
    if (["stopped", "traced", "in the kernel"].includes(state)) return 5;
    if (state === "succeeded" || state === "ended" || state === "lingering" || !detail.is_running) return 4;
    if (!isNumber(since)) return 3;
    const each = isNumber(ranks.steps_per_s[at]) && ranks.steps_per_s[at] > 0 ? 1 / ranks.steps_per_s[at] : usual;
    const steps = since / Math.max(each || 1, 1e-6);
    if (since > LATE_S && steps > WORSE_STEPS) return 2;
    return since > LATE_S && steps > LATE_STEPS ? 1 : 0;
  }
  function findLooks() {
    const rate = median(detail.ranks.steps_per_s), usual = rate ? 1 / rate : null;
    looks = detail.ranks.rank.map((_, at) => lookOf(at, usual));
    fillKeys();
  }
  function fillKeys() {
    const counts = LOOKS.map((_, kind) => looks.reduce((n, look) => n + (look === kind), 0));
    const text = counts.join();
    if ($("keys").dataset.text === text) return;
    $("keys").dataset.text = text;
    $("keys").textContent = "";
    LOOKS.forEach(([, tone, meaning], kind) => {
      if (!counts[kind]) return;
      const item = make("li", null, $("keys"));
      make("span", "", item, "swatch").style.background = "var(" + tone + ")";
      make("span", count(counts[kind]) + " " + meaning, item);
    });
  }
  function drawGrid() {
    const canvas = $("cells"), total = looks.length;
    const width = Math.max(200, $("grid").clientWidth - 6), ratio = window.devicePixelRatio || 1;
    let cell = CELL;
    while (cell > 5 && Math.ceil(total / Math.floor(width / cell)) * cell > 620) cell -= 1;
    const across = Math.max(1, Math.floor(width / cell)), down = Math.ceil(total / across);
    layout = { cell, across };
    const height = down * cell;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    const draw = canvas.getContext("2d"), gap = cell > 7 ? GAP : 1;
    draw.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw.clearRect(0, 0, width, height);
    LOOKS.forEach(([, tone], kind) => {
      draw.fillStyle = color(tone);
      for (let at = 0; at < total; at += 1)
        if (looks[at] === kind) draw.fillRect((at % across) * cell, Math.floor(at / across) * cell, cell - gap, cell - gap);
    });
    if (chosen >= 0 && chosen < total) {
      draw.strokeStyle = color("--ink");
      draw.lineWidth = 2;
      draw.strokeRect((chosen % across) * cell - 1, Math.floor(chosen / across) * cell - 1, cell - gap + 2, cell - gap + 2);
    }
  }
  function fillPicked(isSaid) {
    const ranks = detail.ranks;
    if (chosen < 0 || chosen >= ranks.rank.length) return;
    setText("picked", "rank " + ranks.rank[chosen] + " on " + ranks.node[chosen] + ": " + ranks.state[chosen] + ", "
      + LOOKS[looks[chosen]][2] + "; step " + figure(ranks.step[chosen] ?? ranks.steps[chosen]) + ", " + figure(ranks.steps_per_s[chosen])
      + " steps/s, last step " + seconds(ranks.since_step_s[chosen]) + " ago, " + cores(ranks.cores[chosen]) + " cores, " + bytes(ranks.rss_bytes[chosen]));
    if (isSaid) setText("said", $("picked").textContent); // to screen readers: not with each update
  }
  function choose(at) {
    if (!detail || !detail.ranks.rank.length) return;
    chosen = Math.max(0, Math.min(detail.ranks.rank.length - 1, at));
    first = Math.floor(chosen / ROWS) * ROWS;
    drawGrid();
    fillPicked(true);
    fillTable();
  }
  function fillTable() {
    const ranks = detail.ranks, total = ranks.rank.length, table = $("ranks");
    first = Math.min(first, Math.max(0, Math.floor((total - 1) / ROWS) * ROWS));
    if (!table.tHead) {
      const row = make("tr", null, make("thead", null, table));
      for (const name of ["rank", "node", "state", "steps", "step", "steps/s", "last step", "cores", "memory"])
        make("th", name, row).scope = "col";
    }
    const body = table.tBodies[0] || make("tbody", null, table), shown = Math.min(ROWS, total - first);
    while (body.rows.length > shown) body.lastChild.remove();
    for (let line = 0; line < shown; line += 1) {
      const at = first + line, row = body.rows[line] || make("tr", null, body);
      const since = ranks.since_step_s[at];
      const cells = [String(ranks.rank[at]), ranks.node[at], ranks.state[at], figure(ranks.steps[at]), figure(ranks.step[at]),
        figure(ranks.steps_per_s[at]), isNumber(since) ? seconds(since) + " ago" : "–", cores(ranks.cores[at]), bytes(ranks.rss_bytes[at])];
      cells.forEach((text, place) => {
        const cell = row.cells[place] || make("td", "", row);
        if (cell.textContent !== text) cell.textContent = text;
      });
      row.cells[6].classList.toggle("hot", looks[at] === 1 || looks[at] === 2);
      row.cells[2].classList.toggle("hot", looks[at] >= 5);
    }
    setText("ranks-note", total > ROWS ? "ranks " + count(first + 1) + " to " + count(first + shown) + " of " + count(total) : "");
    show("earlier", first > 0);
    show("later", first + ROWS < total);
  }

  // ---- the start, attempts, hangs, from the report ------------------------------------------------------------------
  const tone = (stage) => OF_START[stage] || "#c2559c";
  function swatch(stage, parent) { make("span", "", parent, "swatch").style.background = tone(stage); }
  const where = (node, rank) => (isNumber(rank) ? "rank " + rank + " on " + node : node);
  // Before the first steps: the stages of the rank that is furthest behind; fewer stages, then more time in them.
  function pathSoFar() {
    const behind = report.rank_rows.filter((each) => each.first_step_s === null);
    const order = (each) => [Object.keys(each.stages).length, -sum(Object.values(each.stages))];
    const last = behind.reduce((found, each) => {
      const [a, b] = [order(each), order(found)];
      return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]) ? each : found;
    }, behind[0]);
    let at = 0;
    return last ? Object.entries(last.stages).map(([stage, took]) => ({
      stage, node: last.node, rank: last.rank, begin_s: at, end_s: (at += took) })) : [];
  }
  function fillReport() {
    const isDone = report.first_step_s !== null, shown = report.path.length ? report.path : pathSoFar();
    show("start-section", report.stages.length || shown.length || report.open.length);
    setText("start-line", "attempt " + report.attempt + ": " + (isDone ? "all first steps after " + seconds(report.first_step_s)
      : report.first_steps + " of " + plural(report.ranks, "first step") + " so far, after " + seconds(report.start_s)
        + (shown.length && !report.path.length ? "; furthest behind: " + where(shown[0].node, shown[0].rank) : "")));
    const path = $("path"), steps = $("steps"), total = sum(shown.map((each) => each.end_s - each.begin_s)) || 1;
    path.textContent = steps.textContent = "";
    for (const each of shown) {
      const part = make("div", "", path);
      part.style.background = tone(each.stage);
      part.style.width = (100 * (each.end_s - each.begin_s)) / total + "%";
      const item = make("li", null, steps);
      swatch(each.stage, item);
      make("b", each.stage, item);
      make("span", seconds(each.end_s - each.begin_s) + ", " + where(each.node, each.rank), item);
    }
    for (const each of report.open) {
      const item = make("li", null, steps);
      swatch(each.stage, item);
      make("b", each.stage, item);
      make("span", "runs since " + seconds(each.begin_s) + ", " + where(each.node, each.rank), item);
    }
    fillRows("stages", ["stage", "seen by", "median", "longest", "where"], report.stages.map((each) => [
      each.stage, count(each.observed) + " of " + plural(each.of, each.places.slice(0, -1)), seconds(each.median_s), seconds(each.max_s),
      each.slowest.length ? where(each.slowest[0].node, each.slowest[0].rank) : ""]));
    fillAttempts();
    fillHangs();
    fillList("fallbacks", report.fallbacks.map((each) => each.line));
    show("fallbacks-section", report.fallbacks.length);
    const sizes = report.facts.filter((each) => each.unit === "bytes");
    show("bytes-section", sizes.length);
    fillRows("bytes", ["what", "stage", "in all", "most on one node"], sizes.map((each) => [
      each.name.replaceAll("_", " "), each.stage, bytes(each.total), bytes(each.max) + " (" + each.max_node + ")"]));
  }
  function fillRows(id, names, rows) {
    const table = $(id);
    table.textContent = "";
    const head = make("tr", null, make("thead", null, table)), body = make("tbody", null, table);
    for (const name of names) make("th", name, head).scope = "col";
    for (const cells of rows) {
      const row = make("tr", null, body);
      for (const text of cells) make("td", text, row);
    }
  }
  function fillAttempts() {
    const list = $("attempts"), longest = Math.max(...report.attempts.map((each) => each.end_s), 1);
    show("attempts-section", report.attempts.length > 1);
    list.textContent = "";
    for (const each of report.attempts.slice(-50)) {
      const failed = each.failed.map((rank) => "rank " + rank.rank + " on " + rank.node
        + (rank.status < 0 ? " was ended by signal " + -rank.status : " ended with status " + rank.status) + " after " + seconds(rank.after_s));
      const item = make("li", "attempt " + each.attempt + ": " + plural(each.ranks, "rank") + ", "
        + (each.first_step_s === null ? "no first step of all ranks" : "first steps after " + seconds(each.first_step_s))
        + (failed.length ? "; " + failed.slice(0, 3).join(", ") + (failed.length > 3 ? " and " + (failed.length - 3) + " more" : "") : ""), list);
      const track = make("div", null, item, "track"), start = make("div", "", track), rest = make("div", "", track);
      track.setAttribute("aria-hidden", "true");
      start.style.background = "var(--late)";
      rest.style.background = failed.length ? "var(--bad)" : "var(--ok)";
      const startS = each.first_step_s === null ? each.end_s : each.first_step_s;
      start.style.width = (100 * startS) / longest + "%";
      rest.style.width = (100 * Math.max(0, each.end_s - startS)) / longest + "%";
    }
  }
  function fillHangs() {
    const box = $("hangs"), hangs = report.hangs || [];
    show("hangs-section", hangs.length);
    for (const each of hangs.slice(box.children.length)) {
      const item = make("details", null, box);
      make("summary", "attempt " + each.attempt + ", after " + seconds(each.after_s) + ": " + each.line, item);
      const text = make("pre", "", item);
      text.tabIndex = 0;
      item.addEventListener("toggle", () => { if (item.open) showStacks(each.report, text); });
    }
  }
  async function showStacks(name, into) {
    if (into.textContent) return;
    const answer = await fetch(base + "/hangs/" + encodeURIComponent(String(name).split("/").pop()));
    into.textContent = answer.ok ? await answer.text() : "The report " + name + " is not readable here.";
  }

  // ---- updates --------------------------------------------------------------------------------------------------
  function update(found) {
    const began = performance.now();
    detail = found;
    fillHead();
    const total = detail.ranks.rank.length;
    show("ranks-section", total);
    if (total) {
      show("grid-box", true);
      findLooks();
      drawGrid();
      fillPicked(false);
      fillTable();
    }
    if (!page.updates && detail.has_events) askReport();
    page.updates += 1;
    page.lastMs = performance.now() - began;
  }
  let reportTimer = 0, isAsking = false;
  function askReport() {
    if (reportTimer) return;
    reportTimer = setTimeout(async () => {
      if (isAsking) { reportTimer = 0; setTimeout(askReport, 200); return; }
      isAsking = true;
      reportTimer = 0;
      try {
        const answer = await fetch(base + "/report");
        if (answer.ok) { report = await answer.json(); fillReport(); }
        if (report && report.first_step_s === null && detail && detail.is_running) setTimeout(askReport, REPORT_MS);
      } catch { /* the server is gone; the stream connects again */ } finally { isAsking = false; }
    }, report ? REPORT_MS : 0);
  }
  const QUIET = new Set(["begin", "scalar"]);
  let logTimer = 0;
  function note(event) {
    page.events += 1;
    askReport();
    if (QUIET.has(event.kind)) return;
    fresh.push(new Date(event.wall_ns / 1e6).toISOString().slice(11, 19) + " " + where(event.node, event.rank) + ": "
      + [event.stage, event.name.replaceAll("_", " ")].filter(Boolean).join(" ") + (event.error ? ": " + event.error : ""));
    if (!logTimer) logTimer = setTimeout(fillLog, 100);
  }
  function fillLog() {
    logTimer = 0;
    const list = $("log");
    list.tabIndex = 0;
    for (const line of fresh.splice(0)) {
      const item = document.createElement("li");
      item.textContent = line;
      item.value = ++logged;
      list.prepend(item);
    }
    while (list.children.length > MAX_LOG) list.lastChild.remove();
    show("log-section", list.children.length);
  }
  function beginAnew() {
    page.resets += 1;
    fresh.length = logged = 0;
    report = null;
    for (const id of ["log", "hangs"]) $(id).textContent = "";
    for (const id of ["log-section", "hangs-section", "attempts-section", "start-section"]) show(id, false);
  }
  function listen() {
    const source = new EventSource(base + "/events");
    source.addEventListener("state", (message) => update(JSON.parse(message.data)));
    source.addEventListener("event", (message) => note(JSON.parse(message.data)));
    source.addEventListener("reset", beginAnew);
    source.addEventListener("error", () => {
      setText("stale", "No connection to bootseer serve: trying again.");
      show("stale", true);
      // After an answer that is an error, the browser gives up.
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
    });
    page.source = source;
  }

  // ---- keys and colours -------------------------------------------------------------------------------------------
  function setTheme(name) {
    root.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "Light" : "Dark";
    $("theme").setAttribute("aria-label", name === "dark" ? "Use light colours" : "Use dark colours");
    if (detail && detail.ranks.rank.length) drawGrid();
  }
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(isDark.matches ? "dark" : "light");
  isDark.addEventListener("change", () => setTheme(isDark.matches ? "dark" : "light"));
  $("theme").hidden = false;
  $("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  $("grid").addEventListener("keydown", (event) => {
    const across = layout ? layout.across : 1;
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(chosen < 0 ? (event.key === "End" ? move : 0) : chosen + move);
  });
  $("cells").addEventListener("click", (event) => {
    const box = $("cells").getBoundingClientRect();
    choose(Math.floor((event.clientY - box.top) / layout.cell) * layout.across + Math.floor((event.clientX - box.left) / layout.cell));
  });
  $("earlier").addEventListener("click", () => { first -= ROWS; fillTable(); });
  $("later").addEventListener("click", () => { first += ROWS; fillTable(); });
  window.addEventListener("resize", () => { if (detail && detail.ranks.rank.length) drawGrid(); });
  listen();
})();

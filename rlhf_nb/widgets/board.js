// The board: a table of runs, and some of them laid over each other. Stands behind charts.js in one module; shows text only.
const STATES = {running: "▶", paused: "⏸", ended: "●", silent: "▲", waiting: "○"};
const ago = seconds => {
  const d = Math.max(0, Date.now() / 1000 - seconds);
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (d >= size) return `${Math.floor(d / size)} ${name} ago`;
  return "now";
};
const button = (text, does, kind = "") => { const b = el("button", kind, text); b.type = "button"; b.onclick = does; return b; };
const fold = (title, open, ...inside) => {
  const d = el("details", "rb-part");
  d.open = open;
  d.append(el("summary", "", title), ...inside);
  return d;
};

// Runs in a table: filter, sort, open one, choose several.
class Table {
  constructor(host, open, change = null) {
    Object.assign(this, {open, change, all: [], made: [], averaged: false, sort: "date", up: false, chosen: new Set(), unfolded: new Set()});
    this.word = el("input");
    Object.assign(this.word, {type: "search", placeholder: "filter by name, method, state, tag"});
    this.word.setAttribute("aria-label", "filter");
    this.word.oninput = () => this.draw();
    this.count = el("span", "rb-note");
    this.count.setAttribute("role", "status");
    this.go = button("compare", () => this.open([...this.chosen]), "rb-main");
    const bar = el("div", "rb-bar"), wrap = el("div", "rb-scroll");
    this.mean = button("mean over seeds", () => { this.averaged = !this.averaged; this.draw(); });
    bar.append(this.word, this.go, this.mean, this.count);
    wrap.tabIndex = 0;
    wrap.setAttribute("role", "region");
    wrap.setAttribute("aria-label", "runs");
    this.table = el("table", "rb-runs");
    wrap.append(this.table);
    this.plane = el("div");
    host.append(bar, wrap, fold("reward over KL, every run", false, this.plane));
  }

  // `made`: a row for each experiment of several seeds, with means and half the width of their intervals.
  update(rows, made) { this.all = rows; this.made = made; this.draw(); }

  get rows() {
    if (!this.averaged) return this.all;
    const inside = new Set(this.made.flatMap(r => r.stages.map(s => s.name)));
    return [...this.made, ...this.all.filter(r => !inside.has(r.name))];
  }

  value(row, key) { return key === "tags" ? row.tags.join() : key in row ? row[key] : row.numbers[key] ?? -Infinity; }

  draw() {
    const words = this.word.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = r => [r.name, r.kind, r.method, r.model, r.state, r.note, ...r.tags, ...r.stages.map(s => s.name)].join(" ").toLowerCase();
    const rows = this.rows.filter(r => words.every(w => text(r).includes(w)));
    const numbers = [...new Set(this.rows.flatMap(r => Object.keys(r.numbers)))], said = this.change || this.rows.some(r => r.note || r.tags.length);
    const columns = [["name", "run"], ["method", "method"], ...(this.rows.some(r => r.model) ? [["model", "model"]] : []), ["state", "state"], ["share", "progress"],
      ...numbers.map(n => [n, n]), ...(said ? [["tags", "tags"], ["note", "note"]] : []), ["date", "changed"]];
    const sign = this.up ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [this.value(a, this.sort), this.value(b, this.sort)];
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
    const head = el("tr"), body = el("tbody"), thead = el("thead");
    head.append(el("td"));
    for (const [key, title] of columns) {
      const th = el("th"), on = key === this.sort;
      th.scope = "col";
      th.setAttribute("aria-sort", on ? (this.up ? "ascending" : "descending") : "none");
      th.append(button(title + (on ? (this.up ? " ▲" : " ▼") : ""), () => {
        this.up = on ? !this.up : ["name", "method", "model", "state", "tags", "note"].includes(key);
        this.sort = key;
        this.draw();
      }));
      head.append(th);
    }
    for (const row of rows) {
      body.append(this.row(row, columns, false));
      if (this.unfolded.has(row.name)) body.append(...row.stages.map(s => this.row(s, columns, true)));
    }
    thead.append(head);
    this.table.replaceChildren(thead, body);
    this.count.textContent = rows.length === this.rows.length ? `${rows.length} runs` : `${rows.length} of ${this.rows.length} runs`;
    this.mean.hidden = !this.made.length;
    this.mean.setAttribute("aria-pressed", this.averaged);
    this.scatter(rows);
    this.go.disabled = this.chosen.size < 2;
    this.go.textContent = this.chosen.size < 2 ? "choose two to compare" : `compare ${this.chosen.size}`;
  }

  // The newest reward (gold where it is measured) of each run over its KL: which run bought most with its nats?
  scatter(rows) {
    const runs = rows.flatMap(r => r.kind === "seeds" || !r.stages.length ? [r] : r.stages).filter(r => r.numbers.KL != null);
    const key = runs.some(r => r.numbers.gold != null) ? "gold" : "reward", dots = runs.filter(r => r.numbers[key] != null);
    this.plane.parentElement.hidden = !dots.length;
    if (!dots.length) return;
    const svg = (tag, at, text) => {
      const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [k, v] of Object.entries(at)) e.setAttribute(k, v);
      if (text !== undefined) e.textContent = text;
      return e;
    };
    const [W, H, L, B] = [640, 300, 52, 34], methods = [...new Set(dots.map(r => r.method))];
    const colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
    const axis = (get, from, to) => {
      const v = dots.map(get), low = Math.min(...v), high = Math.max(...v), room = (high - low || Math.abs(high) || 1) * 0.06;
      return [low - room, high + room, x => from + (x - low + room) / (high - low + 2 * room) * (to - from)];
    };
    const [x0, x1, px] = axis(r => r.numbers.KL, L, W - 12), [y0, y1, py] = axis(r => r.numbers[key], H - B, 12);
    const page = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", class: "rb-plane"});
    page.append(svg("title", {}, `${key} over KL of ${dots.length} runs`));
    const places = (low, high) => {
      const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find(m => m * power >= raw) * power;
      return [...Array(12).keys()].map(k => (Math.ceil(low / step) + k) * step).filter(x => x <= high);
    };
    for (const y of places(y0, y1)) page.append(svg("path", {d: `M${L} ${py(y)}H${W - 12}`, class: "rb-grid"}), svg("text", {x: L - 6, y: py(y) + 4, "text-anchor": "end"}, short(y)));
    for (const x of places(x0, x1)) page.append(svg("text", {x: px(x), y: H - B + 16, "text-anchor": "middle"}, short(x)));
    page.append(svg("text", {x: (L + W) / 2, y: H - 4, "text-anchor": "middle"}, "KL to the start, nats per answer"), svg("text", {x: 4, y: 11}, key));
    for (const r of dots) {
      const at = {cx: px(r.numbers.KL), cy: py(r.numbers[key]), r: 5, fill: colors[methods.indexOf(r.method) % 6], class: this.chosen.has(r.name) ? "rb-chosen" : ""};
      const dot = svg("circle", at);
      dot.append(svg("title", {}, `${r.name} (${r.method}): ${key} ${short(r.numbers[key])}, KL ${short(r.numbers.KL)}`));
      dot.onclick = () => this.open(r.stages.length ? r.stages.map(s => s.name) : [r.name]);
      page.append(dot);
    }
    const names = el("div", "rb-bar");
    names.append(...methods.map((m, i) => {
      const one = el("span", "rb-note"), mark = el("span", "", "● ");
      mark.style.color = colors[i % 6];
      one.append(mark, m);
      return one;
    }));
    this.plane.replaceChildren(page, names);
  }

  // Tags and note of a run, edited.
  edit(row) {
    const box = el("dialog", "rb-dialog"), tags = el("input"), note = el("textarea"), said = el("p", "rb-note"), bar = el("div", "rb-bar");
    Object.assign(tags, {value: row.tags.join(", "), maxLength: 800});
    Object.assign(note, {value: row.note, maxLength: 2000, rows: 5});
    const part = (text, field) => { const l = el("label", "", text); l.append(field); return l; };
    bar.append(button("keep", async () => {
      try { await this.change({run: row.name, request: "remark", tags: tags.value, note: note.value}); box.close(); }
      catch (e) { said.textContent = `${e.message || e}`; }
    }, "rb-main"), button("leave it", () => box.close()));
    box.append(el("b", "", row.name), part("tags, with commas between", tags), part("note", note), said, bar);
    box.onclose = () => box.remove();
    this.table.parentElement.append(box);
    box.showModal();
  }

  row(row, columns, inside) {
    const tr = el("tr", inside ? "rb-inside" : ""), pick = el("td");
    if (row.stages.length) {
      const on = this.unfolded.has(row.name);
      const b = button(on ? "▾" : "▸", () => { if (!this.unfolded.delete(row.name)) this.unfolded.add(row.name); this.draw(); });
      b.setAttribute("aria-expanded", on);
      b.setAttribute("aria-label", `stages of ${row.name}`);
      pick.append(b);
    } else {
      const box = el("input");
      box.type = "checkbox";
      box.checked = this.chosen.has(row.name);
      box.setAttribute("aria-label", `choose ${row.name}`);
      box.onchange = () => { box.checked ? this.chosen.add(row.name) : this.chosen.delete(row.name); this.draw(); };
      pick.append(box);
    }
    tr.append(pick);
    for (const [key] of columns) {
      const td = el("td", ["name", "method", "model", "state", "date"].includes(key) ? "" : ["tags", "note"].includes(key) ? "rb-said" : "rb-number");
      if (key === "name") td.append(button(row.name, () => this.open(row.stages.length ? row.stages.map(s => s.name) : [row.name]), "rb-link"));
      else if (key === "tags") {
        td.append(...row.tags.map(t => button(t, () => { this.word.value = t; this.draw(); }, "rb-tag")));
        if (this.change && row.kind !== "seeds") {
          const b = button("✎", () => this.edit(row), "rb-link");
          b.setAttribute("aria-label", `tags and note of ${row.name}`);
          td.append(b);
        }
      } else if (key === "note") td.textContent = row.note;
      else if (key === "state") { td.append(el("span", `rb-${row.state}`, STATES[row.state] || ""), ` ${row.state}`); td.title = row.status; }
      else if (key === "share") {
        const bar = el("progress");
        bar.max = 1;
        bar.value = row.share;
        bar.setAttribute("aria-label", "progress");
        td.append(bar, row.total ? ` ${row.step.toLocaleString("en")} / ${row.total.toLocaleString("en")}` : ` ${row.step.toLocaleString("en")}`);
      } else if (key === "date") { td.textContent = ago(row.date); td.title = new Date(row.date * 1000).toLocaleString(); }
      else td.textContent = key in row ? row[key] : row.numbers[key] == null ? "" : short(row.numbers[key]) + (row.half && row.half[key] != null ? ` ± ${short(row.half[key])}` : "");
      if (!(key in row)) td.dataset.name = key;  // beside the number where a narrow page has no columns
      tr.append(td);
    }
    return tr;
  }
}

// One run, or several laid over each other.
class Compare {
  constructor(host, ask, change = null) {
    Object.assign(this, {host, ask, change, charts: new Map(), key: `rc-${Math.random()}`, window: null});
    this.lights = el("div"); this.steer = el("div", "rb-bar"); this.curves = el("div"); this.below = el("div");
    this.steer.hidden = true;
    this.said = el("span", "rb-note");
    this.said.setAttribute("role", "status");
    host.append(this.lights, this.steer, this.curves, this.below);
  }

  // Asked of the run itself: only where the page knows the word.
  async send(what) {
    try { this.said.textContent = await this.change({run: this.told.members[0], ...what}); }
    catch (e) { this.said.textContent = `${e.message || e}`; }
  }

  tools() {
    const going = ["running", "paused"].includes(this.told.runs[0].state);
    if (going === this.going) return;
    this.going = going;
    this.steer.hidden = false;
    this.steer.replaceChildren(...(going ? ["pause", "resume", "save", "evaluate", "stop"].map(r => button(r, () => this.send({request: r}))) : []), this.said);
  }

  update(told) {
    this.told = told;
    const several = told.runs.length > 1;
    this.lights.replaceChildren(...told.runs.map(run => {
      const box = el("div", "rb-run"), head = el("div");
      head.append(el("b", "", run.name), ` ${run.status}`);
      box.append(head);
      const lights = el("div", "rb-lights");
      for (const light of run.lights) {
        const line = el("div", `rb-light rb-${light.state}`);
        line.append(el("i", "", {ok: "●", watch: "▲", bad: "■"}[light.state] || "○"), el("b", "", light.name), ` ${light.text}`);
        if (light.remedy && this.change && told.members.length === 1) line.append(" ", button(light.remedy.text, () => this.send(light.remedy)));
        lights.append(line);
      }
      if (run.lights.length) box.append(several ? fold("lights", false, lights) : lights);
      return box;
    }));
    for (const group of told.groups) {
      let charts = this.charts.get(group.name);
      if (!charts) {
        const inside = el("div", "rc-charts");
        this.curves.append(fold(group.name, group.name === "overview", inside));
        charts = new Charts(inside, {key: this.key, onpin: (this.ask || told.moments?.length) && (step => this.pin(step)), onzoom: z => this.zoom(z)});
        inside.charts = charts;
        this.charts.set(group.name, charts);
      }
      if (!this.window) charts.update({panels: group.panels, axis: told.axis});
    }
    if (this.change && !several && told.members.length === 1) this.tools();
    if (this.pinned == null) this.texts();
  }

  texts() {
    const told = this.told, open = new Set([...this.below.querySelectorAll("details[open]")].map(d => d.firstChild.textContent));
    const parts = [];
    if (told.answers.length) parts.push(fold(this.pinned == null ? "sampled answers" : `sampled answers at step ${this.pinned.toLocaleString("en")}`, true, this.answers(told.answers)));
    if (told.paired.length) parts.push(fold("what the other setting did (pairs of one seed)", true, this.grid("paired differences", ["runs", "number", "difference", "pairs"], told.paired.map(p => {
      const tr = el("tr"), sure = p.half != null && Math.abs(p.gap) > p.half;
      tr.append(el("td", "", p.what), el("td", "", p.metric), el("td", "rb-number" + (sure ? " rb-sure" : ""), `${p.gap > 0 ? "+" : ""}${short(p.gap)} ${p.half == null ? "(one pair: no interval)" : `± ${short(p.half)}`}`), el("td", "rb-number", p.pairs));
      return tr;
    }))));
    const differ = told.settings.filter(s => s.differs);
    if (told.runs.length > 1) parts.push(fold(`settings that differ (${differ.length})`, true, this.settings("settings that differ", differ)));
    parts.push(fold("all settings", false, this.settings("all settings", told.settings)));
    if (told.events.length) parts.push(fold("events", false, this.list(told.events)));
    for (const part of parts) if (open.has(part.firstChild.textContent)) part.open = true;
    this.below.replaceChildren(...parts);
  }

  grid(name, heads, rows) {
    const wrap = el("div", "rb-scroll"), table = el("table"), top = el("tr");
    for (const h of heads) { const th = el("th", "", h); th.scope = "col"; top.append(th); }
    table.append(top, ...rows);
    wrap.tabIndex = 0;
    wrap.setAttribute("role", "region");
    wrap.setAttribute("aria-label", name);
    wrap.append(table);
    return wrap;
  }

  answers(answers) {
    return this.grid("answers", ["prompt", ...this.told.members], answers.map(a => {
      const tr = el("tr"), prompt = el("td", "rb-said", a.prompt);
      tr.append(prompt, ...a.answers.map(x => {
        const td = el("td", "rb-said");
        if (x) td.append(x.answer, el("div", "rb-note", `step ${x.step}` + (x.score ? `, score ${x.score}` : "")));
        return td;
      }));
      return tr;
    }));
  }

  settings(name, rows) {
    return this.grid(name, ["setting", ...this.told.members], rows.map(s => {
      const tr = el("tr", s.differs && this.told.members.length > 1 ? "rb-differs" : "");
      tr.append(el("td", "", s.key), ...s.values.map(v => el("td", "rb-said", v ?? "–")));
      return tr;
    }));
  }

  list(events) {
    return this.grid("events", ["step", "type", "what"], events.map(e => {
      const tr = el("tr");
      tr.append(el("td", "rb-number", e.step), el("td", "", e.type), el("td", "rb-said", e.what));
      return tr;
    }));
  }

  // The samples of a step beside its line in every panel.
  async pin(step) {
    this.pinned = step;
    if (this.change && this.told.members.length === 1) this.tools();
    for (const c of this.charts.values()) { c.pinned = step; c.plots.forEach(p => p.u && p.u.redraw(false)); }
    const found = this.ask ? await this.ask({step}) : moment(this.told.moments, step) || {answers: []};
    if (this.pinned !== step) return;
    this.told.answers = found.answers;
    this.texts();
  }

  // Long runs come thinned; what is zoomed into is asked for again, with all its points.
  zoom(range) {
    clearTimeout(this.later);
    const thinned = this.told.groups.some(g => g.panels.some(p => p.lines.some(l => l.mx)));
    if (!this.ask || this.told.axis !== "step" || (!range && !this.window) || (range && !thinned)) return;
    if (range && this.window && range[0] === this.window[0] && range[1] === this.window[1]) return;
    this.later = setTimeout(async () => {
      const told = range ? await this.ask({from: range[0], to: range[1]}) : this.told;
      this.window = range;
      for (const g of told.groups) this.charts.get(g.name)?.update({panels: g.panels, axis: told.axis});
      if (!range) this.charts.forEach(c => c.whole());
    }, 300);
  }
}

// The page of `rlhf-nb board`: where one is stands in the address, so that a reload comes back to it.
async function board(host) {
  const ask = async (path, query = []) => {
    const response = await fetch(`api/${path}?${new URLSearchParams(query)}`);
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  };
  const word = new URLSearchParams(location.search).get("word");
  const change = word && (async what => {
    const response = await fetch("api/change", {method: "POST", headers: {"X-Word": word}, body: JSON.stringify(what)}), said = await response.text();
    if (!response.ok) throw new Error(said);
    show(false);
    return said;
  });
  const note = el("p", "rb-note"), home = el("div"), away = el("div"), way = el("p", "rb-note");
  note.setAttribute("role", "status");
  home.append(way);
  host.append(note, home, away);
  const go = (runs, by = "step", pooled = true) => {
    location.hash = new URLSearchParams([...runs.map(r => ["run", r]), ["by", by], ["pooled", pooled ? 1 : 0]]).toString();
  };
  const table = new Table(home, runs => go(runs), change);
  let view = null, turn = 0, held = false;  // a page that is drawn anew under a pressed button loses the click
  for (const [kind, on] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) addEventListener(kind, () => { held = on; }, true);
  async function show(fresh) {
    const at = new URLSearchParams(location.hash.slice(1)), runs = at.getAll("run"), mine = ++turn;
    home.hidden = runs.length > 0;
    away.hidden = !runs.length;
    try {
      if (!runs.length) {
        const told = await ask("runs");
        if (mine !== turn || (held && !fresh)) return;
        document.title = `Runs in ${told.folder}`;
        table.update(told.runs, told.experiments);
        if (told.labels && !way.childNodes.length) { const a = el("a", "", "label pairs of answers"); a.href = `label${location.search}`; way.append(a); }
      } else {
        const query = [...at], told = await ask("compare", query);
        if (mine !== turn || (held && !fresh)) return;
        document.title = told.members.join(", ");
        if (fresh || !view) {
          away.replaceChildren();
          const bar = el("div", "rb-bar"), by = at.get("by") || "step", pooled = at.get("pooled") !== "0";
          bar.append(button("← all runs", () => { location.hash = ""; }));
          for (const [key, text] of [["step", "by step"], ["time", "by minutes"], ["kl", "by KL"]]) {
            const b = button(text, () => go(runs, key, pooled));
            b.setAttribute("aria-pressed", key === by);
            bar.append(b);
          }
          if (told.poolable) {
            const b = button("mean and 95 % interval over seeds", () => go(runs, by, !pooled));
            b.setAttribute("aria-pressed", pooled);
            bar.append(b);
          }
          const place = el("div");
          away.append(bar, place);
          if (runs.length === 1) {
            const line = el("p", "rb-note", "in a notebook: ");
            line.append(el("code", "", told.line));
            away.append(line);
          }
          view = new Compare(place, more => ask("compare", [...query, ...Object.entries(more)]), change);
          view.go = runs => go(runs);
        }
        view.update(told);
      }
      note.textContent = "";
    } catch (e) { note.textContent = `${e.message || e}`; }
  }
  addEventListener("hashchange", () => show(true));
  await show(true);
  setInterval(() => { if (!document.hidden) show(false); }, 3000);
}

for (const host of document.querySelectorAll(".rc-board, .rc-compare, .rc-runs")) {
  if (host.filled) continue;
  host.filled = true;
  if (host.matches(".rc-board")) { board(host); continue; }
  const told = JSON.parse(host.querySelector("script[type='application/json']").textContent);
  const still = host.querySelector(".rc-still");
  if (still) still.remove();
  host.classList.add("rb-page");
  if (host.matches(".rc-compare")) { new Compare(host, null).update(told); continue; }
  const line = el("p", "rb-note"), place = el("div");
  const table = new Table(place, runs => {
    line.replaceChildren("in the next cell: ", el("code", "", `Runs(${JSON.stringify(told.folder)}).compare(${runs.map(r => JSON.stringify(r)).join(", ")})`));
  });
  host.append(place, line);
  table.update(told.runs, told.experiments);
}

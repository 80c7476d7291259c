// Charts one can touch: panels of curves by uPlot, whose text stands before this one in the same module.
// What a run's files say becomes text (textContent), never markup.
const el = (tag, kind, text) => {
  const e = document.createElement(tag);
  if (kind) e.className = kind;
  if (text !== undefined) e.textContent = text;
  return e;
};
const short = v => {
  if (v == null || !isFinite(v)) return "–";
  const a = Math.abs(v);
  if (a && (a < 1e-3 || a >= 1e13)) return v.toExponential(2).replace("e+", "e");
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (a >= Math.max(size, 1e4)) return +(v / size).toPrecision(4) + letter;
  return v.toLocaleString("en", {maximumSignificantDigits: 4});
};
const faded = (color, by) => {
  if (color[0] === "#") return color + Math.round(by * 255).toString(16).padStart(2, "0");
  const n = color.match(/[\d.]+/g) || [128, 128, 128];
  return `rgba(${n[0]},${n[1]},${n[2]},${by})`;
};

// An exponential moving average over steps without bias at the beginning; half is its half-life.
function smooth(xs, ys, half) {
  if (!(half > 0)) return ys;
  let total = 0, weight = 0, last = xs[0];
  return ys.map((y, i) => {
    if (y == null) return null;
    const fade = 0.5 ** ((xs[i] - last) / half);
    last = xs[i]; total = fade * total + y; weight = fade * weight + 1;
    return total / weight;
  });
}

class Plot {
  constructor(charts) {
    this.charts = charts;
    this.hidden = new Set();
    this.log = this.smoothing = null;  // null: as the panel says
    this.u = null; this.shape = ""; this.width = 0; this.zoomed = false;
    this.root = el("section", "rc-panel");
    const head = el("header"), tools = el("span", "rc-tools");
    this.name = el("div", "rc-title");
    this.name.setAttribute("role", "heading");
    this.name.setAttribute("aria-level", 2);
    this.range = el("input");
    Object.assign(this.range, {type: "range", min: 0, max: 1, step: 0.05, title: "smoothing"});
    this.range.oninput = () => { this.smoothing = +this.range.value; this.draw(); };
    this.logs = el("button", "", "log");
    this.logs.title = "logarithmic axis";
    this.logs.onclick = () => { this.log = !this.isLog(); this.draw(); };
    this.whole = el("button", "", "whole");
    this.whole.title = "the whole run again (or double click)";
    this.whole.onclick = () => this.charts.whole();
    this.ask = el("button", "", "?");
    this.ask.onclick = () => this.explain(this.means.hidden);
    for (const b of [this.ask, this.logs, this.whole]) b.type = "button";
    tools.append(this.range, this.ask, this.logs, this.whole);
    head.append(this.name, tools);
    this.means = el("p", "rc-means");
    this.explain(false);
    this.legend = el("div", "rc-legend");
    this.box = el("div", "rc-box");
    this.tip = el("div", "rc-tip");
    this.tip.hidden = true;
    this.root.append(head, this.means, this.legend, this.box);
    new ResizeObserver(() => this.fit()).observe(this.box);
  }

  isLog() { return this.log ?? this.panel.log; }

  // What the panel's title means, below it.
  explain(open) {
    this.means.hidden = !open;
    this.ask.setAttribute("aria-expanded", open);
  }

  update(panel, smoothing) {
    this.panel = panel;
    this.given = smoothing;
    this.name.textContent = panel.title;
    const keys = [...new Set(panel.lines.map(l => l.key).filter(Boolean))].join(", ");
    this.name.title = keys;
    this.ask.hidden = !panel.means;
    this.ask.title = `what ${panel.title} means`;
    this.ask.setAttribute("aria-label", this.ask.title);
    this.means.textContent = `${panel.means || ""}${keys ? ` In metrics.jsonl: ${keys}.` : ""}`;
    this.range.setAttribute("aria-label", `smoothing of ${panel.title}`);
    this.logs.setAttribute("aria-label", `log axis of ${panel.title}`);
    this.draw();
  }

  // Columns for uPlot: steps, then for each line the faint one, the bold one and the ends of its band.
  columns() {
    const log = this.isLog(), amount = this.smoothing ?? this.given, tables = [], series = [];
    const kept = ys => log ? ys.map(y => y > 0 ? y : null) : ys;
    this.panel.lines.forEach((line, n) => {
      let [xs, ys] = [line.x, line.y];
      const mx = line.mx || xs, my = line.my || ys, half = 0.1 * amount * (mx.at(-1) - mx[0]);
      const soft = mx.length > 9 && half > 0;
      if (soft || line.error) {
        tables.push([xs, kept(ys)]); series.push({n, faint: true});
        [xs, ys] = [mx, soft ? smooth(mx, my, half) : my];
      }
      tables.push([xs, kept(ys)]); series.push({n, bold: true, few: ys.filter(y => y != null).length < 2});
      if (line.error) {
        const edge = sign => kept(ys.map((y, i) => y == null ? null : y + sign * (line.error[i] ?? 0)));
        tables.push([xs, edge(1)], [xs, edge(-1)]); series.push({n, high: true}, {n, low: true});
      }
    });
    return {data: tables.length ? uPlot.join(tables) : [[]], series};
  }

  draw() {
    const {data, series} = this.columns(), log = this.isLog();
    this.range.value = this.smoothing ?? this.given;
    this.logs.setAttribute("aria-pressed", log);
    const shape = JSON.stringify([log, series, this.panel.lines.map(l => [l.label, l.color, l.kind])]);
    if (!this.u || shape !== this.shape) this.build(data, series, log, shape);
    else this.u.setData(data, !this.zoomed);
    if (this.zoomed) this.u && this.u.redraw();
    this.tell();
  }

  // The vertical axis: what is bold and visible, and most of what is faint. Series and log are those that u was made
  // with, as u draws once more when another has taken its place: a linear range on its log axis would never end.
  span(u, lines, series, log, lowest, highest) {
    let low = lowest ?? (log ? 0.1 : 0), high = highest ?? 1;
    const faint = [];
    series.forEach((s, i) => {
      if (!s.faint || this.hidden.has(lines[s.n].label)) return;
      const ys = u.data[i + 1], [from, to] = u.series[0].idxs || [0, ys.length - 1];
      const leap = Math.max(1, Math.floor((to - from) / 500));
      for (let k = from; k <= to; k += leap) if (ys[k] != null) faint.push(ys[k]);
    });
    if (faint.length) {
      faint.sort((a, b) => a - b);
      low = Math.min(low, faint[Math.floor(0.02 * (faint.length - 1))]);
      high = Math.max(high, faint[Math.ceil(0.98 * (faint.length - 1))]);
    }
    if (log) return uPlot.rangeLog(low, high === low ? low * 10 : high, 10, false);
    for (const band of this.panel.bands) {
      if (isFinite(band.high)) high = Math.max(high, band.high);
      if (isFinite(band.low)) low = Math.min(low, band.low);
    }
    const near = 0.1 * (high - low), {low: floor, high: roof} = this.panel;
    if (floor != null && low > floor - near) low = floor;
    if (roof != null && high < roof + near) high = roof;
    const [a, b] = uPlot.rangeNum(low, high === low ? low + (Math.abs(low) || 1) * 0.1 : high, 0.06, true);
    return [floor === low ? low : a, roof === high ? high : b];
  }

  build(data, made, log, shape) {
    const width = this.box.clientWidth;
    if (!width) return;  // folded away: built when it is seen
    const scale = this.u && this.zoomed ? {min: this.u.scales.x.min, max: this.u.scales.x.max} : null;
    if (this.u) this.u.destroy();
    this.series = made;
    this.shape = shape;
    this.width = width;
    const ink = () => getComputedStyle(this.root).color, font = "11px system-ui, sans-serif";
    const axis = {stroke: ink, font, grid: {stroke: () => faded(ink(), 0.14), width: 1}, ticks: {show: false}};
    const lines = this.panel.lines, bands = [];
    const series = made.map((s, i) => {
      const line = lines[s.n], show = !this.hidden.has(line.label);
      if (s.high) bands.push({series: [i + 1, i + 2], fill: faded(line.color, 0.18)});
      const common = {show, spanGaps: true, auto: !!s.bold, points: {show: false}};
      if (s.faint) return {...common, stroke: faded(line.color, 0.3), width: 1};
      if (!s.bold) return {...common, stroke: "transparent", width: 0};
      const dots = line.kind === "dots" || s.few;
      return {...common, stroke: line.color, width: line.kind === "dots" ? 0 : 1.7, dash: line.kind === "dash" ? [6, 3] : undefined,
        points: {show: dots, size: 6, fill: line.color, stroke: line.color}};
    });
    this.u = new uPlot({
      width, height: this.charts.height, padding: [6, 10, 0, 0], legend: {show: false}, bands,
      scales: {x: {time: false}, y: {distr: log ? 3 : 1, range: (u, a, b) => this.span(u, lines, made, log, a, b)}},
      axes: [
        {...axis, size: 26, space: 70, values: (u, vs) => vs.map(short)},
        {...axis, size: 48, space: 34, values: (u, vs) => vs.map(v => v == null ? "" : short(v))},
      ],
      series: [{}, ...series],
      cursor: {
        sync: {key: this.charts.key, setSeries: false}, focus: {prox: -1}, points: {size: 6}, drag: {x: true, y: false, dist: 5},
        dataIdx: (u, n, at) => {
          const ys = u.data[n];
          if (!n || ys[at] != null) return at;
          for (let d = 1; d < ys.length; d++) {
            if (ys[at - d] != null) return at - d;
            if (ys[at + d] != null) return at + d;
          }
          return at;
        },
      },
      hooks: {
        drawClear: [u => this.behind(u)],
        draw: [u => this.marks(u)],
        setCursor: [u => this.tell(u)],
        setScale: [(u, key) => {
          if (key !== "x") return;
          const xs = u.data[0], {min, max} = u.scales.x;
          this.zoomed = xs.length > 1 && (min > xs[0] || max < xs.at(-1));
          this.root.classList.toggle("rc-zoomed", this.zoomed);
          if (this.charts.onzoom) this.charts.onzoom(this.zoomed ? [min, max] : null);
        }],
      },
    }, data, this.box);
    this.u.over.append(this.tip);
    this.u.over.addEventListener("click", () => this.pin());
    if (scale) this.u.setScale("x", scale);
  }

  fit() {
    const width = this.box.clientWidth;
    if (!width || !this.panel) return;
    if (!this.u) this.draw();
    else if (Math.abs(width - this.width) > 1) { this.width = width; this.u.setSize({width, height: this.charts.height}); }
  }

  behind(u) {
    for (const band of this.panel.bands) {
      const y = v => u.valToPos(Math.min(Math.max(v, u.scales.y.min), u.scales.y.max), "y", true);
      const top = y(band.high ?? Infinity), bottom = y(band.low ?? -Infinity), {left, width} = u.bbox;
      u.ctx.fillStyle = faded(band.color, 0.12);
      u.ctx.fillRect(left, top, width, bottom - top);
    }
  }

  marks(u) {
    const {left, top, width, height} = u.bbox, ctx = u.ctx;
    ctx.save();
    ctx.setLineDash([3, 4]);
    const line = (x, color) => {
      const at = u.valToPos(x, "x", true);
      if (at < left || at > left + width) return;
      ctx.strokeStyle = color === "currentColor" ? getComputedStyle(this.root).color : color;
      ctx.beginPath(); ctx.moveTo(at, top); ctx.lineTo(at, top + height); ctx.stroke();
    };
    for (const mark of this.panel.marks) line(mark.step, mark.color);
    ctx.setLineDash([]);
    if (this.charts.pinned != null) line(this.charts.pinned, "currentColor");
    ctx.restore();
  }

  // The legend, and beside the mouse all lines at its step.
  tell(u) {
    const at = u && u.cursor.idx, lines = this.panel.lines, values = lines.map(() => null);
    if (this.u) this.series.forEach((s, i) => {
      if (!s.bold) return;
      const ys = this.u.data[i + 1];
      let k = at == null ? ys.length - 1 : u.cursor.idxs[i + 1] ?? at;
      while (at == null && k > 0 && ys[k] == null) k--;
      values[s.n] = ys[k];
    });
    this.entries(lines, values);
    const over = u && at != null && u.over.matches(":hover");
    this.tip.hidden = !over;
    if (!over) return;
    const x = u.data[0][at], near = this.panel.marks.filter(m => Math.abs(u.valToPos(m.step, "x") - u.cursor.left) < 6);
    const rows = lines.map((line, n) => this.hidden.has(line.label) ? null : [line, values[n]]).filter(Boolean);
    const head = `${this.charts.axis} ${this.charts.axis === "step" ? x.toLocaleString("en") : short(x)}`;
    this.tip.replaceChildren(el("b", "", head), ...rows.map(([line, v]) => {
      const row = el("div"), dot = el("i");
      dot.style.background = line.color;
      row.append(dot, el("span", "", line.label), el("b", "", short(v)));
      return row;
    }), ...near.map(m => el("div", "rc-mark", m.text)));
    const room = document.documentElement.clientWidth, wide = this.tip.offsetWidth, edge = u.over.getBoundingClientRect().left;
    const right = edge + u.cursor.left + 14 + wide > room - 4, at0 = right ? u.cursor.left - 14 - wide : u.cursor.left + 14;
    this.tip.style.left = `${Math.max(4 - edge, at0)}px`;
  }

  entries(lines, values) {
    if (this.legend.children.length !== lines.length || this.names !== lines.map(l => l.label).join("\n")) {
      this.names = lines.map(l => l.label).join("\n");
      this.legend.replaceChildren(...lines.map(line => {
        const b = el("button"), dot = el("i", line.kind === "dash" ? "rc-dash" : "");
        b.type = "button";
        b.title = `${line.key || line.label}: click to hide or show`;
        dot.style.color = line.color;
        b.append(dot, el("span", "", line.label), el("b"));
        b.onclick = () => this.toggle(line.label);
        return b;
      }));
    }
    [...this.legend.children].forEach((b, n) => {
      b.setAttribute("aria-pressed", !this.hidden.has(lines[n].label));
      b.lastChild.textContent = short(values[n]);
    });
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    if (this.u) this.u.batch(() => this.series.forEach((s, i) => {
      if (this.panel.lines[s.n].label === label) this.u.setSeries(i + 1, {show: !this.hidden.has(label)});
    }));
    this.tell();
  }

  pin() {
    const at = this.u.cursor.idx;
    if (at == null || !this.charts.onpin) return;
    this.charts.pin(this.u.data[0][at]);
  }
}

// Panels in a grid; what a person did to one (hidden lines, zoom, smoothing) stays when data come.
export class Charts {
  constructor(host, options = {}) {
    Object.assign(this, {height: 190, axis: "step", key: `rc-${Math.random()}`, plots: new Map(), pinned: null}, options);
    this.grid = el("div", "rc-grid");
    this.beside = el("div", "rc-beside");
    this.beside.setAttribute("role", "status");
    host.append(this.grid, this.beside);
    const again = () => this.plots.forEach(p => p.u && p.u.redraw(false));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(again, 50));
    new MutationObserver(() => setTimeout(again, 50)).observe(document.body, {attributes: true});
  }

  update({panels, smoothing = 0.3, axis = "step", moments = []}) {
    this.axis = axis;
    this.moments = moments;
    if (moments.length) this.onpin ??= step => this.answers(step);
    const seen = new Set();
    for (const panel of panels) {
      seen.add(panel.title);
      let plot = this.plots.get(panel.title);
      if (!plot) { plot = new Plot(this); this.plots.set(panel.title, plot); this.grid.append(plot.root); }
      plot.update(panel, smoothing);
    }
    for (const [title, plot] of this.plots) if (!seen.has(title)) { plot.root.remove(); if (plot.u) plot.u.destroy(); this.plots.delete(title); }
  }

  // A pinned step's answers, below the panels.
  answers(step) {
    const at = moment(this.moments, step), head = el("b", "", at ? `sampled answers at step ${at.step.toLocaleString("en")}` : "no answer was sampled until this step");
    this.beside.replaceChildren(head, ...(at ? at.answers : []).map(a => {
      const box = el("div", "rc-answer");
      box.append(el("p", "rc-asked", a.prompt), ...a.answers.filter(Boolean).map(x => el("p", "", x.answer + (x.score ? `  (score ${x.score})` : ""))));
      return box;
    }));
  }

  whole() { this.plots.forEach(p => p.u && p.u.setData(p.u.data, true)); }

  pin(step) {
    this.pinned = step;
    this.plots.forEach(p => p.u && p.u.redraw(false));
    if (this.onpin) this.onpin(step);
  }
}

// The answers of the last sampled step until there.
const moment = (moments, step) => moments.findLast(m => m.step <= step);

// A place on a page: its data stand in it, or are put into an element that names it, again and again.
export function mount(host) {
  if (host.charts) return host.charts;
  const own = host.querySelector("script[type='application/json']");
  const charts = host.charts = new Charts(host);
  const still = host.querySelector(".rc-still");
  if (still) still.remove();
  if (own) { charts.update(JSON.parse(own.textContent)); return charts; }
  const name = CSS.escape(host.id);
  let last = null;
  setInterval(() => {
    const from = host.isConnected && document.querySelector(`pre[data-for="${name}"]`);
    if (!from || from === last || !from.textContent) return;
    last = from;
    charts.update(JSON.parse(from.textContent));
  }, 100);
  return charts;
}
document.querySelectorAll(".rc-charts").forEach(mount);

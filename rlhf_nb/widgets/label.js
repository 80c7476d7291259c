// Labelling: two answers side by side, one key decides. Stands behind prose.js in one module, in Jupyter and at the board alike.
// `send(message)` hands over what was pressed; what gets the next state calls `show`.
const act = (text, does, kind = '') => { const b = make('button', kind, text); b.type = 'button'; b.onclick = does; return b; };

class Labeller {
  constructor(host, send) {
    Object.assign(this, {host, send, told: null, turn: null, busy: false, view: 'rendered', chosen: new Set(), since: 0});
    host.classList.add('rl-page');
    this.head = make('div', 'rl-bar'); this.bar = make('progress'); this.count = make('span');
    this.bar.setAttribute('aria-label', 'pairs labelled');
    this.head.append(this.count, this.bar);
    this.body = make('div', 'rl-body'); this.main = make('div', 'rl-main'); this.guide = make('details', 'rl-guide');
    this.body.append(this.main, this.guide);
    this.prompt = make('div', 'rl-text rl-prompt'); this.sides = make('div', 'rl-sides');
    this.main.append(this.prompt, this.sides);
    this.reasons = make('div', 'rl-bar'); this.keys = make('div', 'rl-bar');
    this.note = make('input', 'rl-note');
    Object.assign(this.note, {placeholder: 'a note on this pair; Enter stores it', maxLength: 2000});
    this.note.setAttribute('aria-label', 'note');
    this.note.onkeydown = e => {
      e.stopPropagation();
      if (e.key === 'Enter') this.tell({note: this.note.value});
      if (e.key === 'Escape' || e.key === 'Enter') this.focus();
    };
    this.said = make('p', 'rl-said');
    this.said.setAttribute('role', 'status');
    host.append(this.head, this.body, this.reasons, this.keys, this.note, this.said);
  }

  focus() { this.note.blur(); }

  // A key: repeated ones, those of the browser, and those that come while a label is on its way count for nothing.
  key(e) {
    const key = e.key.toLowerCase(), known = this.told && this.told.keys;
    if (e.ctrlKey || e.metaKey || e.altKey || !known || !(key in known || key === 'd' || key === 'm' || /^[1-9]$/.test(key))) return;
    e.preventDefault();
    if (!e.repeat) this.press(key);
  }

  press(key) {
    if (/^[1-9]$/.test(key)) {
      const reason = this.told.reasons[key - 1];
      if (!reason) return;
      if (!this.chosen.delete(reason)) this.chosen.add(reason);
      this.buttons();
    } else if (key === 'd' || key === 'm') {
      const to = key === 'd' ? 'differences' : 'plain';
      this.view = this.view === to ? 'rendered' : to;
      this.answers();
      this.buttons();
    } else this.tell({key});
  }

  tell(what) {
    if (this.busy) return;
    this.busy = true;
    clearTimeout(this.later);
    this.later = setTimeout(() => { this.busy = false; this.said.textContent = 'No answer yet: is the kernel or the server busy?'; }, 15000);
    const seconds = (performance.now() - this.since) / 1000;
    this.send({pair: this.told.pair, seconds, reasons: [...this.chosen], ...what});
  }

  failed(text) { this.busy = false; clearTimeout(this.later); this.said.textContent = text; }

  show(told) {
    this.failed(told.message);
    const fresh = `${told.turn} ${told.pair} ${told.opened}` !== this.shown;
    this.shown = `${told.turn} ${told.pair} ${told.opened}`;
    this.told = told;
    this.host.classList.add('rl-begun');
    this.count.textContent = `${told.who}: ${told.done} of ${told.total} pairs`;
    this.bar.max = told.total;
    this.bar.value = told.done;
    if (!fresh) return;
    if (told.turn !== this.turn) this.chosen.clear();
    this.turn = told.turn;
    this.prompt.replaceChildren();
    markdown(this.prompt, told.pair ? told.prompt : `**All ${told.total} pairs are labelled.**`);
    this.note.value = told.note;
    if (!this.guide.childNodes.length && told.guideline) {
      const text = make('div', 'rl-text');
      markdown(text, told.guideline);
      this.guide.append(make('summary', '', 'guideline'), text);
      this.guide.open = this.host.clientWidth > 700;
    }
    this.guide.hidden = !told.guideline;
    this.answers();
    this.buttons();
    this.since = performance.now();
  }

  answers() {
    const {left, right, pair, opened} = this.told, shown = this.view === 'differences' && opened ? differences(left, right) : null;
    this.sides.replaceChildren(...(pair ? [left, right] : []).map((text, i) => {
      const box = make('section', 'rl-side'), inside = make('div', 'rl-text');
      box.append(make('div', 'rl-letter', 'AB'[i]), inside);
      box.setAttribute('aria-label', `answer ${'AB'[i]}`);
      if (!opened) inside.append(make('i', '', 'closed: long; press o to open both'));
      else if (shown) inside.append(shown[i]);
      else if (this.view === 'plain') inside.append(make('p', '', text));
      else markdown(inside, text);
      return box;
    }));
  }

  buttons() {
    const {keys, reasons, pair} = this.told, used = document.activeElement, before = used && used.dataset && used.dataset.key;
    const one = (key, name, on) => {
      const b = act(name, () => this.press(key));
      b.dataset.key = key;
      b.prepend(make('kbd', '', key), ' ');
      if (on !== undefined) b.setAttribute('aria-pressed', on);
      return b;
    };
    this.reasons.replaceChildren(...(pair ? reasons : []).map((r, i) => one(`${i + 1}`, r, this.chosen.has(r))));
    this.keys.replaceChildren(...Object.entries(keys).map(([k, name]) => one(k, name)),
      one('d', 'differences', this.view === 'differences'), one('m', 'plain text', this.view === 'plain'));
    const again = before && this.host.querySelector(`button[data-key="${CSS.escape(before)}"]`);
    if (again) again.focus();
  }
}

// In a notebook: an invisible field takes the keyboard and carries messages to the kernel; states come in an element that names this place.
function inNotebook(host) {
  let field = null, last = null, count = 0;
  const name = CSS.escape(host.id), find = () => document.querySelector(`.${name} input`);
  const labeller = new Labeller(host, message => {
    if (!(field = find())) return;
    field.value = JSON.stringify({...message, count: ++count});
    for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}));
  });
  labeller.focus = () => { if ((field = find())) field.focus({preventScroll: true}); };
  host.addEventListener('click', e => { if (!e.target.closest('input, summary')) labeller.focus(); });
  let touched = false;
  addEventListener('keydown', () => { touched = true; }, {capture: true, once: true});
  const clock = setInterval(() => {
    if (!host.isConnected) { clearInterval(clock); return; }
    const now = find();
    if (now && now !== field) {
      field = now;
      field.setAttribute('aria-label', 'keys of the labeller');
      field.addEventListener('keydown', e => { e.stopPropagation(); if (e.key !== 'Tab' && e.key !== 'Escape') e.preventDefault(); labeller.key(e); });
      for (const wait of [0, 300, 900]) setTimeout(() => { if (!touched) labeller.focus(); }, wait);
    }
    const from = document.querySelector(`pre[data-for="${name}"]`);
    if (!from || from === last || !from.textContent) return;
    last = from;
    labeller.show(JSON.parse(from.textContent));
  }, 40);
}

// At the board: a name, and everything else by this server.
async function atBoard(host) {
  const word = new URLSearchParams(location.search).get('word'), bar = make('div', 'rl-bar'), name = make('input'), label = make('label', '', 'your name ');
  const format = make('select'), home = make('a', '', '← all runs');
  home.href = `./${location.search}`;
  let who = '';
  try { who = localStorage.getItem('rlhf-nb labeller') || ''; } catch { /* a browser that keeps nothing */ }
  Object.assign(name, {value: who, maxLength: 80, size: 14});
  label.append(name);
  format.setAttribute('aria-label', 'format');
  const ask = async (path, how = {}) => {
    const response = await fetch(path, how), text = await response.text();
    if (!response.ok) throw new Error(text);
    return text;
  };
  const labeller = new Labeller(host, async message => {
    try {
      const body = JSON.stringify({run: '', request: 'label', who: name.value, message});
      labeller.show(JSON.parse(await ask('api/change', {method: 'POST', headers: {'X-Word': word || ''}, body})));
    } catch (e) { labeller.failed(`${e.message || e}`); }
  });
  const begin = async () => {
    if (!name.value.trim()) { labeller.failed('Say who you are, then press Enter.'); name.focus(); return; }
    try {
      const told = JSON.parse(await ask(`api/label?${new URLSearchParams({who: name.value})}`));
      format.replaceChildren(...told.formats.map(f => { const o = make('option', '', f); o.value = f; return o; }));
      labeller.show(told);
      format.hidden = rows.hidden = false;
      try { localStorage.setItem('rlhf-nb labeller', name.value); } catch { /* as above */ }
      name.blur();
    } catch (e) { labeller.failed(`${e.message || e}`); }
  };
  name.onchange = begin;
  name.onkeydown = e => { if (e.key === 'Enter') begin(); };
  const rows = act('download the rows', async () => {
    try {
      const link = make('a');
      link.href = URL.createObjectURL(new Blob([await ask(`api/labels?${new URLSearchParams({format: format.value})}`)], {type: 'application/jsonl'}));
      link.download = `${format.value}.jsonl`;
      link.click();
      URL.revokeObjectURL(link.href);
    } catch (e) { labeller.failed(`${e.message || e}`); }
  });
  format.hidden = rows.hidden = true;  // until a name says whose labels these are
  bar.append(home, label, format, rows);
  host.before(bar);
  addEventListener('keydown', e => { if (!e.target.closest('input, select, textarea')) labeller.key(e); });
  await begin();
}

for (const host of document.querySelectorAll('.rl-label')) {
  if (host.filled) continue;
  host.filled = true;
  host.replaceChildren();
  if (host.id) inNotebook(host); else atBoard(host);
}

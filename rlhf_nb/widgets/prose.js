// Markdown as elements: what a model wrote becomes text in a few kinds of elements, never markup and never an address.
const make = (tag, kind, text) => {
  const e = document.createElement(tag);
  if (kind) e.className = kind;
  if (text !== undefined) e.textContent = text;
  return e;
};
const MARKS = {'**': 'strong', '__': 'strong', '~~': 'del', '`': 'code', '*': 'em', '_': 'em'};

// Words with marks inside of a line; a mark that never ends is text, and is looked for once.
function inline(host, text, depth = 0) {
  const endless = new Set();
  let plain = '', i = 0;
  while (i < text.length) {
    const mark = Object.keys(MARKS).find(m => text.startsWith(m, i));
    let end = -1;
    if (mark && depth < 5 && !endless.has(mark) && !(mark[0] === '_' && /\w/.test(text[i - 1] || ''))) {
      end = text.indexOf(mark, i + mark.length);
      if (end < 0) endless.add(mark);
    }
    if (end > i + (mark || '').length && (mark === '`' || /\S/.test(text[i + mark.length]))) {
      const inside = text.slice(i + mark.length, end), e = make(MARKS[mark]);
      if (mark === '`') e.textContent = inside; else inline(e, inside, depth + 1);
      host.append(plain, e);
      plain = '';
      i = end + mark.length;
    } else {
      plain += mark || text[i];
      i += (mark || ' ').length;
    }
  }
  host.append(plain);
}

const FENCE = /^ {0,3}(```|~~~)/, ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/, HEAD = /^#{1,6} /, QUOTE = /^ {0,3}> ?/, RULE = /^ *(?:[-*_] *){3,}$/;
const cells = line => line.trim().replace(/^\||\|$/g, '').split('|');

// Blocks of a text, into an element.
function markdown(host, text, depth = 0) {
  const lines = text.split('\n');
  let i = 0;
  const while_ = test => { const from = i; while (i < lines.length && test(lines[i])) i++; return lines.slice(from, i); };
  while (i < lines.length) {
    const line = lines[i];
    if (!line.trim()) { i++; continue; }
    if (FENCE.test(line)) {
      const fence = line.trim().slice(0, 3), pre = make('pre');
      i++;
      pre.append(make('code', '', while_(l => !l.trim().startsWith(fence)).join('\n')));
      pre.tabIndex = 0;
      i++;
      host.append(pre);
    } else if (RULE.test(line)) { i++; host.append(make('hr')); }
    else if (HEAD.test(line)) { i++; const p = make('p', 'md-head'); inline(p, line.replace(HEAD, '')); host.append(p); }
    else if (QUOTE.test(line) && depth < 5) {
      const quote = make('blockquote');
      markdown(quote, while_(l => QUOTE.test(l)).map(l => l.replace(QUOTE, '')).join('\n'), depth + 1);
      host.append(quote);
    } else if (ITEM.test(line)) {
      const numbered = /\d/.test(ITEM.exec(line)[2]), list = make(numbered ? 'ol' : 'ul');
      if (numbered) list.start = parseInt(ITEM.exec(line)[2]);
      for (const l of while_(l => ITEM.test(l) || (/^ {2,}\S/.test(l) && !FENCE.test(l.trim())))) {
        const found = ITEM.exec(l);
        if (!found) { list.lastChild.append('\n'); inline(list.lastChild, l.trim()); continue; }
        const item = make('li');
        item.style.marginLeft = `${Math.min(found[1].length, 12) / 2}em`;
        inline(item, l.slice(found[0].length));
        list.append(item);
      }
      host.append(list);
    } else if (line.includes('|') && /^[ |:-]*-[ |:-]*$/.test(lines[i + 1] || '')) {
      const box = make('div', 'md-table'), table = make('table'), rows = while_(l => l.includes('|'));
      rows.splice(1, 1);
      rows.forEach((l, n) => {
        const tr = make('tr');
        for (const c of cells(l)) { const td = make(n ? 'td' : 'th'); inline(td, c.trim()); tr.append(td); }
        table.append(tr);
      });
      box.tabIndex = 0;
      box.append(table);
      host.append(box);
    } else {
      const p = make('p'), first = i;
      inline(p, while_(l => i === first || (l.trim() && ![FENCE, ITEM, HEAD, QUOTE, RULE].some(r => r.test(l)))).join('\n'));
      host.append(p);
    }
  }
}

// Words of two texts that the other one lacks, as marks in either: a longest common subsequence.
function differences(a, b) {
  const split = t => t.match(/\w+|\s+|[^\w\s]/g) || [], [x, y] = [split(a), split(b)];
  let start = 0, tail = 0;
  while (start < x.length && start < y.length && x[start] === y[start]) start++;
  while (tail < Math.min(x.length, y.length) - start && x.at(-1 - tail) === y.at(-1 - tail)) tail++;
  const n = x.length - start - tail, m = y.length - start - tail, kept = [new Set(), new Set()];
  if (n * m < 4e6) {
    const best = Array.from({length: n + 1}, () => new Uint16Array(m + 1));
    for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--)
      best[i][j] = x[start + i] === y[start + j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    for (let i = 0, j = 0; i < n && j < m;) {
      if (x[start + i] === y[start + j]) { kept[0].add(start + i++); kept[1].add(start + j++); }
      else if (best[i + 1][j] >= best[i][j + 1]) i++; else j++;
    }
  }
  return [x, y].map((words, side) => {
    const box = make('p'), outside = k => k < start || k >= words.length - tail || kept[side].has(k) || !words[k].trim();
    for (let k = 0; k < words.length;) {
      const same = outside(k), from = k;
      while (k < words.length && outside(k) === same) k++;
      const text = words.slice(from, k).join('');
      box.append(same ? text : make('mark', '', text));
    }
    return box;
  });
}

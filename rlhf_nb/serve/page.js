'use strict';
const by = id => document.getElementById(id), talk = by('talk'), history = [];
let running = null;
function make(tag, kind, text) {
  const e = document.createElement(tag);
  if (kind) e.className = kind;
  if (text) e.textContent = text;
  return e;
}
function headers() {
  const key = by('key').value.trim();
  return {'Content-Type': 'application/json', ...(key ? {Authorization: 'Bearer ' + key} : {})};
}
async function refusal(response) {
  try { return (await response.json()).error.message; } catch { return 'The server said ' + response.status + '.'; }
}
async function models() {
  const response = await fetch('v1/models', {headers: headers()});
  if (!response.ok) { by('note').textContent = await refusal(response); return; }
  const before = by('model').value;
  const names = (await response.json()).data.map(m => m.id);
  by('model').replaceChildren(...names.map(name => { const o = make('option', '', name); o.value = name; return o; }));
  if (before) by('model').value = before;
  by('note').textContent = '';
}
async function answer(n, show) {
  running = new AbortController();
  const asked = {model: by('model').value, messages: history, stream: true, n};
  const how = {method: 'POST', headers: headers(), body: JSON.stringify(asked), signal: running.signal};
  const response = await fetch('v1/chat/completions', how);
  if (!response.ok) throw new Error(await refusal(response));
  const texts = Array(n).fill(''), reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '', version = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith('data: ') || event === 'data: [DONE]') continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      version = data.system_fingerprint || version;
      for (const c of data.choices) {
        texts[c.index] += (c.delta && c.delta.content) || '';
        show(c.index, texts[c.index]);
      }
    }
  }
  return {texts, version};
}
async function tell(said, note) {
  const body = {...said, model: by('model').value, consent: by('consent').checked};
  const response = await fetch('v1/feedback', {method: 'POST', headers: headers(), body: JSON.stringify(body)});
  if (!response.ok) throw new Error(await refusal(response));
  const lost = said.reason && !(await response.json()).text_kept;
  note.textContent = lost ? 'Thank you. Your words were not kept: allow it below, and send them again.' : 'Thank you.';
  return !lost;
}
function thumb(kind) {
  const svg = by('thumb').content.firstElementChild.cloneNode(true);
  svg.setAttribute('class', kind);
  return svg;
}
function marks(buttons, said, about) {
  const box = make('div', 'marks'), word = make('input'), note = make('span', 'note'), all = [];
  word.placeholder = 'Why? (optional)'; word.maxLength = 2000; word.setAttribute('aria-label', 'reason');
  const failed = e => { note.textContent = e.message; for (const b of all) b.disabled = false; };
  for (const [text, label, value, icon] of buttons) {
    const b = make('button', '', text);
    if (icon) b.prepend(thumb(icon));
    b.type = 'button'; b.title = label; b.setAttribute('aria-label', label); b.setAttribute('aria-pressed', 'false');
    b.onclick = () => {
      for (const other of all) { other.setAttribute('aria-pressed', String(other === b)); other.disabled = true; }
      about(value);
      tell({...said, ...value, reason: word.value}, note)
        .then(kept => { if (kept) word.value = ''; word.placeholder = 'Why? (Enter sends)'; }).catch(failed);
    };
    all.push(b);
  }
  word.onkeydown = e => {
    if (e.key !== 'Enter' || !word.value.trim()) return;
    tell({...about(), reason: word.value}, note)
      .then(kept => { if (kept) word.value = ''; }).catch(e => { note.textContent = e.message; });
  };
  box.append(...all, word, note);
  return box;
}
const THUMBS = [['good', 'a good answer', {rating: 'up'}, 'up'], ['bad', 'a bad answer', {rating: 'down'}, 'down']];
const CHOICE = [
  ['left', 'the left one is better', {choice: 'first'}], ['right', 'the right one is better', {choice: 'second'}],
  ['tie', 'both are as good', {choice: 'tie'}], ['both bad', 'both are bad', {choice: 'both_bad'}]];
function opinion(prompt, texts, version, turn) {
  const one = {prompt, answer: texts[0], version};
  if (texts.length < 2) return marks(THUMBS, one, () => one);
  const about = value => {
    if (value && value.choice === 'second') turn.content = texts[1];
    return {prompt, answer: turn.content, version};
  };
  return marks(CHOICE, {prompt, answers: texts, versions: [version, version]}, about);
}
async function ask() {
  const text = by('words').value.trim(), n = by('two').checked ? 2 : 1;
  if (!text || running) return;
  by('words').value = '';
  history.push({role: 'user', content: text});
  const question = make('div', 'said user', text), box = make('div', n > 1 ? 'pair' : '');
  const boxes = Array.from({length: n}, () => make('div', 'said'));
  box.append(...boxes);
  talk.append(question, box);
  by('stop').hidden = false;
  scrollTo(0, document.body.scrollHeight);
  const prompt = history.map(m => ({...m}));
  try {
    const show = (i, t) => { boxes[i].textContent = t.trimStart(); scrollTo(0, document.body.scrollHeight); };
    const {texts, version} = await answer(n, show);
    const turn = {role: 'assistant', content: texts[0]};
    history.push(turn);
    if (document.body.dataset.feedback) talk.append(opinion(prompt, texts, version, turn));
    scrollTo(0, document.body.scrollHeight);
  } catch (e) {
    history.pop();
    boxes.slice(1).forEach(b => b.remove());
    boxes[0].className = 'said failed';
    boxes[0].textContent = e.name === 'AbortError' ? 'Stopped.' : e.message;
  } finally { running = null; by('stop').hidden = true; by('words').focus(); }
}
by('form').onsubmit = e => { e.preventDefault(); ask(); };
by('words').onkeydown = e => { if (e.key === 'Enter' && !e.shiftKey) { e.preventDefault(); ask(); } };
by('stop').onclick = () => running && running.abort();
by('clear').onclick = () => { history.length = 0; talk.replaceChildren(); };
by('key').onchange = models;
models().catch(e => { by('note').textContent = e.message; });

'use strict';
const by = id => document.getElementById(id);
// A talk: what was said, and the element that shows it; several are kept until the page is closed.
const talks = [];
let running = [], now = null;
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
  const options = () => names.map(name => { const o = make('option', '', name); o.value = name; return o; });
  by('model').replaceChildren(...options());
  by('other').replaceChildren(make('option', '', ''), ...options());
  by('other').parentElement.hidden = names.length < 2;
  if (before) by('model').value = before;
  by('note').textContent = '';
}
async function answer(model, messages, n, show) {
  const stop = new AbortController(), begun = performance.now();
  running.push(stop);
  const asked = {model, messages, stream: true, n, ...(by('chances').checked ? {logprobs: true, top_logprobs: 3} : {})};
  const how = {method: 'POST', headers: headers(), body: JSON.stringify(asked), signal: stop.signal};
  const response = await fetch('v1/chat/completions', how);
  if (!response.ok) throw new Error(await refusal(response));
  const texts = Array(n).fill(''), tokens = texts.map(() => []), reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '', version = '', first = 0, pieces = 0;
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
        if (c.delta && c.delta.content) { first = first || performance.now(); pieces++; }
        texts[c.index] += (c.delta && c.delta.content) || '';
        if (c.logprobs && c.logprobs.content) tokens[c.index].push(...c.logprobs.content);
        show(c.index, texts[c.index]);
      }
    }
  }
  const end = performance.now(), all = tokens.flat().length || pieces, unit = tokens.flat().length ? 'tokens' : 'pieces';
  const pace = all > 1 ? `, ${(1000 * (all - 1) / Math.max(end - first, 1)).toFixed(0)} ${unit} a second` : '';
  return {texts, version, tokens, speed: first ? `first after ${((first - begun) / 1000).toFixed(2)} s${pace}` : ''};
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
  ['tie', 'tie: both are as good', {choice: 'tie'}], ['both bad', 'both bad, neither is good', {choice: 'both_bad'}]];
function opinion(prompt, texts, versions, turn) {
  const one = {prompt, answer: texts[0], version: versions[0]};
  if (texts.length < 2) return marks(THUMBS, one, () => one);
  const about = value => {
    if (value && value.choice === 'second') turn.content = texts[1];
    return {prompt, answer: turn.content, version: versions[texts.indexOf(turn.content)]};
  };
  return marks(CHOICE, {prompt, answers: texts, versions}, about);
}
// An answer when it is whole: Markdown as elements, or its tokens coloured by how likely they were.
function finished(box, text, tokens) {
  box.replaceChildren();
  box.classList.add('whole');
  if (!tokens.length) { markdown(box, text.trimStart()); return; }
  const line = make('p');
  for (const t of tokens) {
    const word = make('span', 'token', t.token), share = p => `${(100 * Math.exp(p)).toPrecision(2)} %`;
    word.title = [share(t.logprob), ...(t.top_logprobs || []).map(o => `${JSON.stringify(o.token)} ${share(o.logprob)}`)].join('\n');
    word.style.backgroundColor = `rgb(213 94 0 / ${Math.min(0.7, -t.logprob / 6).toFixed(2)})`;
    line.append(word);
  }
  box.append(line);
}
// Go back to before a question: it and what followed are taken out of the talk.
function rewind(part, length) {
  now.history.length = length;
  while (part.nextSibling) part.nextSibling.remove();
  part.remove();
}
function small(text, does) { const b = make('button', '', text); b.type = 'button'; b.onclick = does; return b; }
async function ask(text) {
  const two = by('two').checked, other = two ? '' : by('other').value, n = two ? 2 : 1, said = now, {history, box: talk} = now;
  if (!text || running.length) return;
  const before = history.length, part = make('div', 'turn'), boxes = Array.from({length: two || other ? 2 : 1}, () => make('div', 'said'));
  history.push({role: 'user', content: text});
  const box = make('div', boxes.length > 1 ? 'pair' : ''), tools = make('div', 'tools note');
  box.append(...boxes);
  part.append(make('div', 'said user', text), box, tools);
  talk.append(part);
  by('stop').hidden = false;
  scrollTo(0, document.body.scrollHeight);
  const prompt = history.map(m => ({...m})), asked = other ? [by('model').value, other] : [by('model').value];
  try {
    const show = k => (i, t) => { boxes[k + i].textContent = t.trimStart(); scrollTo(0, document.body.scrollHeight); };
    const all = await Promise.all(asked.map((model, k) => answer(model, prompt, n, show(k))));
    const texts = all.flatMap(a => a.texts), turn = {role: 'assistant', content: texts[0]};
    const versions = all.flatMap(a => a.texts.map(() => a.version));
    all.flatMap(a => a.tokens).forEach((tokens, k) => finished(boxes[k], texts[k], tokens));
    tools.append(all.map((a, k) => (other ? `${asked[k]}: ` : '') + a.speed).filter(Boolean).join('; '));
    history.push(turn);
    if (document.body.dataset.feedback) part.append(opinion(prompt, texts, versions, turn));
    said.option.textContent = history[0].content.slice(0, 40);
  } catch (e) {
    history.length = before;
    running.forEach(r => r.abort());
    boxes.slice(1).forEach(b => b.remove());
    boxes[0].className = 'said failed';
    boxes[0].textContent = e.name === 'AbortError' ? 'Stopped.' : e.message;
  } finally {
    running = [];
    by('stop').hidden = true;
    const back = does => () => { if (!running.length && now === said) { rewind(part, before); does(); } };
    tools.prepend(small('again', back(() => ask(text))), small('edit', back(() => { by('words').value = text; by('words').focus(); })));
    scrollTo(0, document.body.scrollHeight);
    by('words').focus();
  }
}
function open(talk) {
  now = talk;
  by('talk').replaceChildren(talk.box);
  by('talks').value = talk.option.value;
  by('talks').parentElement.hidden = talks.length < 2;
}
function begin() {
  const option = make('option', '', `talk ${talks.length + 1}`), talk = {history: [], box: make('div', 'turns'), option};
  option.value = `${talks.push(talk) - 1}`;
  by('talks').append(option);
  open(talk);
}
function send() { const text = by('words').value.trim(); if (text && !running.length) { by('words').value = ''; ask(text); } }
by('form').onsubmit = e => { e.preventDefault(); send(); };
by('words').onkeydown = e => { if (e.key === 'Enter' && !e.shiftKey) { e.preventDefault(); send(); } };
by('stop').onclick = () => running.forEach(r => r.abort());
by('clear').onclick = () => { if (!running.length) begin(); };
by('talks').onchange = () => { if (!running.length) open(talks[by('talks').value]); else by('talks').value = now.option.value; };
by('key').onchange = models;
begin();
models().catch(e => { by('note').textContent = e.message; });

// Tokens that a person clicks, or reaches with Tab and the arrows: the number of the token goes to the kernel through an invisible field.
if (!document.rtTokens) {
  document.rtTokens = true;
  let count = 0;
  const token = e => e.target instanceof Element && e.target.closest('.rt-box .rt-token');
  const all = of => [...of.closest('.rt-box').querySelectorAll('.rt-token')];
  document.addEventListener('click', e => {
    const one = token(e), field = one && one.closest('.rt-box').querySelector('.rt-clicked input');
    if (!field) return;
    for (const other of all(one)) other.setAttribute('aria-pressed', other === one);
    field.value = `${one.dataset.at} ${++count}`;
    for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}));
  });
  // Before the notebook's own keys: Enter and Space press the token, the arrows go to its neighbours.
  addEventListener('keydown', e => {
    const one = token(e), step = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (!one || !(step || e.key === 'Enter' || e.key === ' ')) return;
    e.stopPropagation();
    const next = step && all(one)[all(one).indexOf(one) + step];
    if (step) e.preventDefault();
    if (next) next.focus();
  }, true);
}

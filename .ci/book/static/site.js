// A table that is wider than its page scrolls: let the keyboard into it, and only while it does.
"use strict";
function reach() {
  for (const table of document.querySelectorAll("article table.docutils")) {
    if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
    else table.removeAttribute("tabindex");
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);

// The search takes words as they are typed. Where the site doesn't hold one, offer the nearest that it holds.
function distance(a, b) {
  let before = null, last = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      row[j] = Math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] !== b[j - 1]));
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) row[j] = Math.min(row[j], before[j - 2] + 1);
    }
    [before, last] = [last, row];
  }
  return last[b.length];
}

function nearest(word, known) {
  const within = word.length < 5 ? 1 : 2;
  const near = [...known].filter((k) => Math.abs(k.length - word.length) <= within).map((k) => [distance(word, k), k]);
  near.sort((x, y) => x[0] - y[0] || x[1].localeCompare(y[1]));
  return near.length && near[0][0] <= within ? near[0][1] : null;
}

function suggest() {
  const asked = new URLSearchParams(location.search).get("q"), results = document.getElementById("search-results");
  if (!asked || !results || typeof Search === "undefined") return;
  if (!Search._index) return void setTimeout(suggest, 200);
  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  const headings = new Set(Object.keys(Search._index.alltitles).flatMap(words).filter((w) => w.length > 2));
  const terms = Object.keys(Search._index.terms);
  const holds = (word) => headings.has(word) || terms.some((term) => term.startsWith(word.slice(0, -1)) && Math.abs(term.length - word.length) < 3);
  const better = words(asked).map((word) => (holds(word) ? word : nearest(word, headings) || nearest(word, terms) || word)).join(" ");
  if (better === words(asked).join(" ")) return;
  const link = Object.assign(document.createElement("a"), { href: "?q=" + encodeURIComponent(better), textContent: better });
  const line = Object.assign(document.createElement("p"), { className: "did-you-mean", textContent: "Did you mean " });
  line.append(link, "?");
  results.before(line);
}
addEventListener("load", suggest);

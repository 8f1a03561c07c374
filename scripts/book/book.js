// What the book's pages do beyond being read: the program follows the chapter, from move
// to move, lines lead to their passages, All or New, keys, search, themes. Without it, all text is
// there, and plain links lead to the lines.
"use strict";

const root = document.documentElement;
root.classList.add("js");
// Set before the page is drawn, so that it does not flash.
const theme = remembered("theme");
if (theme) root.dataset.theme = theme;

// A page opened as a file may have no storage.
function remembered(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

const $ = (selector, from = document) => from.querySelector(selector);
const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];

function make(tag, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

const book = {};
addEventListener("DOMContentLoaded", () => {
  for (const button of $$("[data-do]"))
    button.addEventListener("click", () => actions[button.dataset.do]());
  document.addEventListener("keydown", onKey);
  // The menu of chapters goes away as one expects of a menu.
  document.addEventListener("click", event => {
    const menu = $(".menu");
    if (menu.open && !event.target.closest(".menu")) menu.open = false;
  });
  for (const box of $$(".wide")) enlargeable(box);
  for (const box of $$(CUT)) box.addEventListener("scroll", () => edges(box), {passive: true});
  cut();
  wayBack();
  if ($("#program")) beside();
  addEventListener("resize", cut);
  // A picture without a size is there only now.
  addEventListener("load", cut);
});

// ---- The way back ----

// To look something up, one leaves a chapter: for a manual page, a file, an appendix. The
// address of that page says where from, like ?6_write.p12, because a page that was opened
// as a file may have no storage.
const LOOKED_UP = /^(man\/|files\/|appendix_)/;

function wayBack() {
  const [, page, place] = location.search.match(/^\?(\w+)\.(.*)$/) || [];
  // Whose links lead to more of the same.
  const leaf = document.body.matches(".manual, .file");
  for (const link of $$("article a[href]"))
    if (!leaf) leave(link, link.closest("[id]")?.id);
    else if (page && /^[^:/]+\.html/.test(link.getAttribute("href")))
      link.search = location.search;
  if (!page) return;
  const href = `${root.dataset.up}${page}.html`;
  const known = $$(".chapters a").find(link => link.getAttribute("href") === href);
  $(".bar nav").prepend(make("a", {className: "back", href: `${href}#${place}`},
    `← Back to ${known ? known.firstChild.textContent : "where you were"}`));
}

// Puts into a link's address from which place it has been followed.
function leave(link, place) {
  if (LOOKED_UP.test(link.getAttribute("href")))
    link.search = `?${location.pathname.match(/(\w*)(\.html)?$/)[1] || "index"}.${place || ""}`;
  return link;
}

// ---- What is wider than its place ----

const CUT = "pre, .table, .wide, .code";

// It fades at the edge beyond which it goes on.
function edges(box) {
  const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
  box.classList.toggle("more-left", box.scrollLeft > 2);
  box.classList.toggle("more-right", rest > 2);
}

function cut() {
  for (const box of $$(".wide"))
    box.classList.toggle("small", $("img", box).getAttribute("width") > 1.1 * box.clientWidth);
  for (const box of $$(CUT)) {
    edges(box);
    if (box.matches(".code")) continue;
    // Tab stops only at what can be scrolled sideways.
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

// A picture that a narrow page has made small is shown as a whole, and a tap enlarges it.
function enlargeable(box) {
  const button = make("button", {type: "button", className: "enlarge"}, "Enlarge");
  function enlarge(event) {
    const picture = box.getBoundingClientRect();
    const at = event.currentTarget === box ? (event.clientX - picture.left) / picture.width : 0;
    button.textContent = box.classList.toggle("large") ? "Show all of it" : "Enlarge";
    // What was tapped comes into the middle.
    box.scrollLeft = at * box.scrollWidth - box.clientWidth / 2;
    cut();
  }
  button.addEventListener("click", enlarge);
  box.addEventListener("click", event =>
    getComputedStyle(button).display !== "none" && enlarge(event));
  box.after(button);
}

// ---- The program beside the chapter ----

function beside() {
  const program = $("#program"), code = $(".code", program), state = $(".state", program);
  const article = $("article");
  // Where there is no room beside the chapter, it is a sheet below it.
  const wide = matchMedia("(min-width: 75rem)");
  const map = $(".map", program), view = $(".view", map);
  const excerpts = $$(".excerpt");
  const parts = excerpts.flatMap(excerpt => {
    const found = $$(".part", excerpt);
    return (found.length ? found : [excerpt]).map(part => ({part, excerpt}));
  });
  // The finished program, and what it is after each move, as far as it has been shown.
  const finished = {name: "", head: $("h2", program).textContent, map: $("svg", map),
                    size: $(".size", program)?.innerHTML, rows: [...code.childNodes],
                    passages: JSON.parse($("#passages").textContent),
                    names: JSON.parse($("#names").textContent)};
  const moves = new Map(JSON.parse($("#program-moves")?.textContent || "[]").map(move =>
    [move.name, move]));
  let shown = finished;  // one of these
  let folds = $$("details.old", code), count = $$("[id^=L]", code).length;
  let at = "";           // the move in whose section the reader is
  let only = false;      // the finished program, whatever is read
  let held = null;     // the element whose lines stay, or null while we follow
  let reading = null;  // the part of an excerpt that is being read
  let lit = [];
  let found = null;
  let carried = null;  // from where to where a line has taken the chapter
  let arrived = null;  // where the page was when an address chose what is lit

  // Tab would stop at each of two thousand numbers otherwise.
  for (const number of $$("[id] > a", code)) number.tabIndex = -1;

  // ---- The program after a move ----

  // Makes the rows from what the page has of a move: lines of the finished program by their
  // numbers, and others.
  function build(move) {
    const codes = finished.rows.flatMap(row => row.matches("details") ? $$("[id]", row) :
      row.id ? [row] : []).map(row => row.innerHTML.replace(/^<a.*?<\/a>|\n$/g, ""));
    move.finished = [];  // a line of this move, from 0: its number in the finished program
    const one = (line, kind) => {
      const [number, code] = typeof line === "string" ? [0, line] : [line].flat();
      const html = code ?? codes[number - 1];
      if (kind === "gone") return `<del>${html}</del>`;
      move.finished.push(number);
      const at = move.finished.length;
      return `<div id=L${at}${kind === "new" ? " class=new" : ""}>` +
        `<a href="#${move.name}-L${at}" tabindex=-1>${at}</a>${html}\n</div>`;
    };
    const template = make("template", {innerHTML: move.lines.map(([kind, ...lines]) => {
      const html = lines.map(line => one(line, kind)).join("");
      return /^(new|gone)$/.test(kind) ? html
        : `<details class=old open><summary>${kind}</summary>${html}</details>`;
    }).join("") + move.map});
    move.rows = [...template.content.childNodes];
    move.map = move.rows.pop();
    move.head = `After ${move.name}: ${finished.head}`;
  }

  // Shows it, or, without a name, the finished program.
  function turn(name) {
    const next = moves.get(name) || finished;
    if (next === shown) return;
    if (!next.rows) build(next);
    light("");
    $("svg", map).replaceWith(next.map);
    shown = next;
    code.replaceChildren(...shown.rows);
    folds = $$("details.old", code);
    count = $$("[id^=L]", code).length;
    for (const fold of folds) fold.open = !program.classList.contains("only-new");
    $("h2", program).textContent = shown.head;
    if (shown.size) $(".size", program).innerHTML = shown.size;
    update();
  }

  // What the section that is being read is about, where the program beside it changes.
  function section() {
    const eye = middle();
    return $$("h1, h2", article).filter(heading =>
      heading.getBoundingClientRect().top < eye).at(-1)?.dataset.move || "";
  }

  // The reader has come to another move.
  function enter(name) {
    at = name;
    if (reading) reading.excerpt.classList.remove("reading");
    reading = null;
    say("");
    light("");
    turn(only ? "" : at);
    which();
    if (only) return;
    const near = at ? excerpts.find(excerpt => excerpt.dataset.move === at) : lastAbove(middle());
    const row = at && $("[id^=L].new", code);
    if (near) centre(...ranges(there(near))[0]);
    else if (row) centre(row.id.slice(1), row.id.slice(1));
  }

  // The last excerpt above this height of which something is shown.
  function lastAbove(eye) {
    return excerpts.filter(known => known.getBoundingClientRect().top < eye).reverse()
      .find(there);
  }

  // The switch: what can be chosen now, and what is.
  function which() {
    const box = $(".which", program);
    if (!box) return;
    box.hidden = !at && !shown.name;
    for (const button of $$("button", box)) {
      const move = button.dataset.which === "move";
      if (move) button.textContent = "After " + (shown.name || at);
      button.setAttribute("aria-pressed", move === Boolean(shown.name));
    }
  }

  function choose(whole) {
    if (held) follow();
    only = whole;
    const part = reading;
    enter(section());
    if (part) lightPart(part);
  }
  for (const button of $$("[data-which]", program))
    button.addEventListener("click", () => choose(button.dataset.which === "finished"));

  // Which lines of the finished program these of a move are; some may be gone.
  function inFinished(name, lines) {
    const move = moves.get(name);
    if (!move) return lines;
    if (!move.rows) build(move);
    const found = [];
    for (const [first, last] of ranges(lines))
      for (const number of move.finished.slice(first - 1, last).filter(known => known))
        if (found.at(-1)?.[1] === number - 1) found.at(-1)[1] = number;
        else found.push([number, number]);
    return found.map(range => range.join("-")).join(",");
  }

  // An excerpt's lines in what is shown.
  function there(excerpt) {
    const {move = "", lines} = excerpt.dataset;
    return move === shown.name ? lines : shown.name ? "" : inFinished(move, lines);
  }

  // Shows that of which an element has lines, and returns these. With the switch at the
  // finished program, what is left of them there; if nothing is, and the reader has asked
  // for them, the switch goes back.
  function bring(element, lines, asked) {
    const name = element.dataset.move || "";
    if (asked && only && !inFinished(name, lines)) only = false;
    turn(only ? "" : name);
    which();
    return only ? inFinished(name, lines) : lines;
  }

  const row = number => document.getElementById("L" + number);
  const ranges = text => text.split(",").map(range => range.split("-").map(Number));

  function say(text, ...more) {
    state.replaceChildren(text, ...more);
  }

  // A row in a closed fold has no place; its fold has.
  function visible(row) {
    const fold = row.closest("details:not([open])");
    return fold ? fold.firstChild : row;
  }

  function centre(first, last) {
    const top = visible(row(first)), bottom = visible(row(last));
    const middle = (top.offsetTop + bottom.offsetTop + bottom.offsetHeight) / 2;
    // What is too long to be centred begins at the top.
    code.scrollTop = Math.min(middle - code.clientHeight / 2, top.offsetTop - 8);
    code.scrollLeft = 0;
  }

  let lighting = [];  // how to do it again
  function light(lines, near = lines) {
    lighting = [lines, near];
    for (const old of lit) old.classList.remove("lit");
    lit = [];
    for (const [first, last] of lines ? ranges(lines) : [])
      for (let number = first; number <= last; ++number)
        if (row(number)) lit.push(row(number));
    for (const now of lit) now.classList.add("lit");
    if (!lit.length || !code.clientHeight) return;
    const all = ranges(lines), [first, last] = ranges(near)[0];
    const from = visible(row(all[0][0])).offsetTop;
    const to = visible(row(all.at(-1)[1])).offsetTop;
    // All of an excerpt, if there is room; otherwise the part that is being read.
    if (to - from < code.clientHeight - 40) centre(all[0][0], all.at(-1)[1]);
    else centre(first, last);
  }

  // "lines 436 to 444 and 460" for "436-444,460-460".
  function words(lines) {
    const all = ranges(lines);
    const text = all.map(([first, last]) => last > first ? `${first} to ${last}` : first)
      .join(", ").replace(/, ([^,]*)$/, " and $1");
    return (all.length > 1 || all[0][1] > all[0][0] ? "lines " : "line ") + text;
  }

  function mark(element) {
    if (found) found.classList.remove("found");
    found = !element ? null : element.id.startsWith("name-")
      ? element.closest("p, li, td, th, h1, h2, h3") : element;
    if (found) found.classList.add("found");
  }

  // Keeps lines of what is shown lit until they are released.
  function hold(element, lines, ...more) {
    held = element;
    for (const excerpt of excerpts) {
      excerpt.classList.toggle("held", excerpt === element);
      excerpt.classList.remove("reading");
    }
    unfold(lines);
    light(lines);
    const release = make("button", {type: "button", title: "Esc"}, "Let go");
    release.addEventListener("click", follow);
    say(release, `Held: ${words(lines)}`, ...more);
    address(lines);
  }

  function unfold(lines) {
    for (const fold of folds) {
      const numbers = $$("[id^=L]", fold).map(line => +line.id.slice(1));
      if (ranges(lines).some(([first, last]) => first <= numbers.at(-1) && numbers[0] <= last))
        fold.open = true;
    }
  }

  // The address says it, too, so that it can be sent to somebody.
  function address(lines) {
    const [first, last] = ranges(lines)[0];
    history.replaceState(null, "", "#" + (shown.name && shown.name + "-") + `L${first}` +
      (last > first ? `-L${last}` : ""));
  }

  const stillThere = () => carried && Math.abs(scrollY - carried.to) < 40;

  function follow() {
    held = reading = arrived = null;
    mark(null);
    for (const excerpt of excerpts) excerpt.classList.remove("held");
    // Back to where the chapter was, unless the reader has gone on from there.
    if (stillThere()) scrollTo(0, carried.from);
    carried = null;
    // Nothing is held when somebody comes back to this address.
    if (/^#([\d.]+-)?L\d/.test(location.hash))
      history.replaceState(null, "", location.pathname + location.search);
    say("");
    light("");
    turn(only ? "" : at);
    which();
    read();
  }

  // Of what is to be seen between the bar and the sheet; scrollIntoView takes it for the
  // centre, too.
  const bottom = () => wide.matches ? innerHeight : program.getBoundingClientRect().top;
  const middle = () => (64 + bottom()) / 2;

  // The part of an excerpt that is nearest to the reader's eye, in this section if that
  // is about a move.
  function nearest() {
    const eye = middle();
    let best = null, least = Infinity;
    for (const candidate of parts) {
      if ((candidate.excerpt.dataset.move || "") !== at) continue;
      const box = candidate.part.getBoundingClientRect();
      if (box.bottom < 60 || box.top > bottom() - 20) continue;
      const distance = Math.max(box.top - eye, eye - box.bottom, 0);
      if (distance < least) [best, least] = [candidate, distance];
    }
    return best;
  }

  // Lights what it shows.
  function read() {
    if (held || arrived !== null && Math.abs(scrollY - arrived) < 40) return;
    arrived = null;
    const here = section();
    if (here !== at) enter(here);
    const best = nearest();
    if (!best && reading) {
      // Between two excerpts, the last one stays; but not for ever.
      const box = reading.part.getBoundingClientRect();
      if (box.top < 2 * innerHeight && box.bottom > -innerHeight) return;
      reading.excerpt.classList.remove("reading");
      reading = null;
      light("");
      say("");
    }
    if (best && best !== reading) lightPart(best);
  }

  function lightPart(best) {
    reading = best;
    for (const excerpt of excerpts)
      excerpt.classList.toggle("reading", excerpt === best.excerpt);
    const lines = bring(best.excerpt, best.excerpt.dataset.lines);
    const near = best.part.dataset.lines;
    light(lines, (only ? inFinished(best.excerpt.dataset.move, near) : near) || lines);
    say(lines ? words(lines).replace(/^l/, "L") + ", as you read" : "Not in the finished program");
  }

  let waiting = false;
  function soon(what) {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; what(); });
  }
  addEventListener("scroll", () => soon(read), {passive: true});
  addEventListener("resize", () => soon(read));

  // ---- The sheet ----

  const handle = make("button", {type: "button", className: "handle"});
  $("h2", program).after(handle);
  handle.addEventListener("click", () => {
    slide(!program.classList.contains("open"));
    remembered("program", program.classList.contains("open") ? "open" : "closed");
  });

  function slide(open) {
    program.classList.toggle("open", open);
    handle.textContent = open ? "Hide" : "Show the program";
    handle.setAttribute("aria-expanded", open);
    light(...lighting);
    cut();
    update();
  }

  // ---- From the chapter to the program ----

  article.addEventListener("click", event => {
    if (program.contains(event.target) || String(getSelection())) return;
    const link = event.target.closest("a[href]");
    const excerpt = event.target.closest(".excerpt");
    if (link && link.dataset.lines) {
      event.preventDefault();
      open(excerpt || link, link.dataset.lines, excerpt);
    } else if (link && NEW.test(link.getAttribute("href"))) {
      event.preventDefault();
      whatIsNew(link.getAttribute("href"));
    } else if (link && link.getAttribute("href") === "#program") {
      slide(true);
    } else if (!link && excerpt) {
      open(excerpt, excerpt.dataset.lines, excerpt);
    }
  });

  function open(element, lines, excerpt) {
    if (held === element && excerpt && lines === excerpt.dataset.lines) return follow();
    mark(null);
    slide(true);
    // The sheet may just have come over it.
    if (!wide.matches) element.scrollIntoView({block: "nearest"});
    if (excerpt) hold(element, bring(excerpt, lines, true));
    else glance(element, lines);
  }

  // A glance at a definition: the next excerpt takes over again.
  function glance(element, lines) {
    if (held) follow();
    reading = nearest();
    lines = bring(element, lines, true);
    unfold(lines);
    light(lines);
    say(`${words(lines).replace(/^l/, "L")}: ${element.textContent}`);
  }

  // ---- From the program to the chapter ----

  const titles = name => {
    const link = $$(".chapters a").find(a => a.getAttribute("href") === name);
    return link ? link.textContent : name;
  };

  // What the names in a line mean: links, if that is not this very line.
  function meanings(number) {
    const code = [...row(number).childNodes].slice(1).map(node => node.textContent).join("");
    const names = shown.names;
    const links = [...new Set(code.match(/\w+/g) || [])].filter(word => names[word] &&
      Number(names[word].match(/^#.*?L(\d+)/)?.[1]) !== number)
      .map(word => leave(make("a", {href: names[word], className: "name"}, word), "L" + number));
    return links.flatMap((link, at) => [at ? " " : " · see ", link]);
  }

  function explain(number, lines = `${number}-${number}`) {
    const run = shown.passages.find(([first, last]) => first <= number && number <= last);
    const [, , kind, page, place] = run || [];
    const more = kind === "earlier"
      ? [" · explained in ", make("a", {href: page + "#" + place}, titles(page))]
      : kind ? [" · ", make("a", {href: "#" + place}, kind + " in the chapter")] : [];
    const target = kind && !page && document.getElementById(place);
    hold(row(number), lines, ...more, ...meanings(number));
    mark(target);
    if (!target) return;
    // From line to line, the way back stays the one to where the reader was.
    const from = stillThere() ? carried.from : scrollY;
    found.scrollIntoView({block: "center"});
    carried = {from, to: scrollY};
  }

  code.addEventListener("click", event => {
    const at = event.target.closest("[id^=L]");
    if (!at || event.ctrlKey || event.metaKey || String(getSelection())) return;
    event.preventDefault();
    const top = at.getBoundingClientRect().top;
    explain(Number(at.id.slice(1)));
    // The line stays below the pointer.
    code.scrollTop += at.getBoundingClientRect().top - top;
  });

  // ---- All or New ----

  function show(view) {
    const only = view === "new";
    const first = lit[0] || firstVisible();
    program.classList.toggle("only-new", only);
    for (const fold of folds) fold.open = !only;
    for (const button of $$("[data-view]", program))
      button.setAttribute("aria-pressed", button.dataset.view === view);
    if (lit.length) light(lit.map(now => now.id.slice(1)).map(n => `${n}-${n}`).join(","));
    else if (first) code.scrollTop = visible(first).offsetTop - 8;
    update();
  }
  for (const button of $$("[data-view]", program))
    button.addEventListener("click", () => show(button.dataset.view));

  // Of the program, #new, or of a move, #5.3-new.
  const NEW = /^#(?:(\d+\.\d+)-)?new$/;

  function whatIsNew(href) {
    slide(true);
    if (moves.size) {
      if (held) follow();
      only = false;
      turn(href.match(NEW)[1]);
      which();
      // That stays until the reader goes on.
      arrived = scrollY;
    }
    show("new");
  }

  // ---- The map ----

  function firstVisible(from = 4) {
    const box = code.getBoundingClientRect();
    const at = document.elementFromPoint(box.left + 20, box.top + from);
    if (!at || !code.contains(at)) return null;
    return at.closest("[id^=L]") || $("[id^=L]", at.closest("details") || code);
  }

  function update() {
    const box = code.getBoundingClientRect();
    const first = firstVisible(), last = firstVisible(box.height - 20);
    if (!first) return;
    const top = Number(first.id.slice(1)) - 1;
    const bottom = last ? Number(last.id.slice(1)) : count;
    view.style.top = `${100 * top / count}%`;
    view.style.height = `${100 * Math.max(bottom - top, 1) / count}%`;
  }
  code.addEventListener("scroll", () => requestAnimationFrame(update), {passive: true});
  map.addEventListener("click", event => {
    const box = map.getBoundingClientRect();
    const number = Math.ceil(count * (event.clientY - box.top) / box.height) || 1;
    centre(number, number);
  });

  // ---- Addresses ----

  // What of the program belongs to a place in the chapter: the first excerpt in its
  // section, or the first name there that leads to lines. Undefined if nothing does.
  function belonging(place) {
    const follows = (one, other) =>
      one === other || other.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING;
    const level = heading => Number(heading?.tagName.match(/^H(\d)$/)?.[1] || 9);
    const end = $$("h1, h2, h3", article).find(heading => heading !== place &&
      follows(heading, place) && level(heading) <= level(place));
    const there = $$(".excerpt, a[data-lines]", article).filter(element =>
      follows(element, place) && !(end && follows(element, end)));
    // A name's own place is in front of it.
    return /^name-/.test(place.id) && place.nextElementSibling === there[0] ? there[0]
      : there.find(element => element.matches(".excerpt")) || there[0];
  }

  // The reader is at this place, or somewhere else than at the beginning.
  function settle(place) {
    const element = place && belonging(place);
    if (!element) {
      // As if one had read on until here. Before all excerpts, the first one comes next.
      const eye = place ? place.getBoundingClientRect().top : middle();
      const last = lastAbove(eye) || place && excerpts.find(there);
      if (!last || !place && reading) return;
      light("");
      centre(...ranges(there(last))[0]);
      say("");
    } else if (element.matches(".excerpt")) {
      reading = null;
      lightPart(parts.find(known => known.excerpt === element));
    } else {
      glance(element, element.dataset.lines);
    }
    // That stays until the reader goes on.
    if (place) arrived = scrollY;
  }

  function arrive() {
    const name = decodeURIComponent(location.hash.slice(1));
    const [, move, ...lines] = name.match(/^(?:(\d+\.\d+)-)?L(\d+)(?:-L(\d+))?$/) || [];
    if (lines.length) {
      only = false;
      turn(move);
      which();
    }
    const place = name && document.getElementById(name);
    if (lines.length && row(lines[0]) && row(lines[1] || lines[0])) {
      slide(true);
      explain(Number(lines[0]), `${lines[0]}-${lines[1] || lines[0]}`);
    } else if (NEW.test(location.hash)) {
      whatIsNew(location.hash);
    } else if (name === "program") {
      slide(true);
    } else if (/^(name|excerpt)-/.test(name)) {
      mark(place);
    }
    found?.scrollIntoView({block: "center"});
    if (held || lines.length || moves.size && NEW.test(location.hash)) return;
    const here = section();
    if (here !== at) enter(here);
    const box = place && article.contains(place) && place.getBoundingClientRect();
    settle(box && box.top >= 0 && box.top < bottom() ? place : null);
  }
  addEventListener("hashchange", arrive);
  // The browser goes to its own idea of the place first.
  addEventListener("load", arrive);
  slide((remembered("program") ||
         (innerWidth >= 768 && innerHeight >= 640 ? "open" : "closed")) === "open");
  wide.addEventListener("change", () => { follow(); slide(program.classList.contains("open")); });
  read();
  update();

  // ---- What keys do here ----

  book.release = () => held || found ? follow() : null;
  book.which = () => $(".which:not([hidden])", program) && choose(!only);
  book.view = () => folds.length && show(program.classList.contains("only-new") ? "all" : "new");
  book.hold = () => {
    if (held) follow();
    else if (reading) open(reading.excerpt, reading.excerpt.dataset.lines, reading.excerpt);
  };
  book.step = by => {
    const ahead = excerpts.filter(excerpt => {
      const box = excerpt.getBoundingClientRect();
      return by * ((box.top + box.bottom) / 2 - middle()) > 20;
    });
    const next = by > 0 ? ahead[0] : ahead.at(-1);
    if (!next) return;
    if (held) follow();
    arrived = null;
    next.scrollIntoView({block: "center"});
  };
}

// ---- Keys ----

const keys = {
  "/": () => actions.search(),
  "?": () => actions.help(),
  t: () => actions.theme(),
  n: () => book.view?.(),
  f: () => book.which?.(),
  h: () => book.hold?.(),
  j: () => book.step?.(1),
  k: () => book.step?.(-1),
  Escape: () => { $(".menu").open = false; book.release?.(); },
  ArrowLeft: () => $(".back, .step[rel=prev]")?.click(),
  ArrowRight: () => $(".step[rel=next]")?.click(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest("input, dialog")) return;
  // Where something can be scrolled sideways, these keys do that.
  const box = event.target.closest("[tabindex='0']");
  if (/^Arrow/.test(event.key) && box && box.scrollWidth > box.clientWidth) return;
  const what = keys[event.key];
  if (!what) return;
  event.preventDefault();
  what();
}

const actions = {
  theme() {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remembered("theme", root.dataset.theme);
  },
  help() {
    let dialog = $("dialog.help");
    if (!dialog) {
      const list = make("dl", {className: "keys"});
      for (const [key, text] of [
        ["← →", "the chapter before, or where you came from; the next chapter"],
        ["j k", "the next excerpt, the one before"],
        ["h", "hold the lines of this excerpt, or let go"],
        ["n", "only what is new, or all"], ["f", "the finished program"], ["/", "search"],
        ["t", "light or dark"], ["Esc", "close this, let go of lines"]])
        list.append(make("dt", {}, ...key.split(" ").flatMap(k => [make("kbd", {}, k), " "])),
                    make("dd", {}, text));
      dialog = popup("help", "Keys", list, make("p", {},
        "Click an excerpt, and its lines stay. Click a line of the program, and the chapter " +
        "goes to where it explains that line; above the program, the names in it lead to " +
        "what they mean."));
    }
    dialog.showModal();
  },
  search() {
    const dialog = $("dialog.search") || searchBox();
    dialog.showModal();
    $("input", dialog).select();
  },
};

function popup(name, label, ...children) {
  const dialog = make("dialog", {className: name}, ...children);
  dialog.setAttribute("aria-label", label);
  // A click beside it closes it.
  dialog.addEventListener("click", event => event.target === dialog && dialog.close());
  document.body.append(dialog);
  return dialog;
}

// ---- Search ----

function searchBox() {
  const input = make("input", {type: "search", placeholder: "Search chapters and programs"});
  input.setAttribute("aria-label", "Search chapters and programs");
  const list = make("ol"), said = make("p");
  said.setAttribute("role", "status");
  const dialog = popup("search", "Search", input, said, list);
  let index = null;
  const up = root.dataset.up;
  const titles = new Map($$(".chapters a").map(a =>
    [a.getAttribute("href").slice(up.length), a.textContent]));

  book.index = data => { index = data; look(); };
  // A script, because a page that was opened as a file may load nothing else.
  document.head.append(make("script", {src: up + "search.js"}));

  // What is looked for: for each word, itself and others for the same.
  function wanted(text) {
    const found = [];
    for (const [said, ...ours] of index.same)
      text = text.replace(RegExp(`\\b${said}\\w*`, "g"), word => {
        found.push([word, ...ours]);
        return " ";
      });
    return [...found, ...text.split(/\s+/).filter(word => word.length > 1).map(word => [word])];
  }

  function marked(text, words) {
    const pattern = words.map(word => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
    return text.split(new RegExp(`(${pattern})`, "i")).map((piece, at) =>
      at % 2 ? make("mark", {}, piece) : piece);
  }

  function snippet(text, words) {
    const at = Math.max(0, Math.min(...words.map(word => {
      const found = text.toLowerCase().indexOf(word);
      return found < 0 ? Infinity : found;
    })) - 60);
    if (at === Infinity) return text.slice(0, 160);
    return (at > 0 ? "… " : "") + text.slice(at ? text.indexOf(" ", at) + 1 : 0, at + 200);
  }

  function look() {
    list.replaceChildren();
    if (!index) return void (said.textContent = "Loading …");
    const all = wanted(input.value.toLowerCase()), words = all.flat();
    if (!words.length) return void (said.textContent = "Type two letters or more.");
    const has = text => all.every(same => same.some(word => text.includes(word)));
    const texts = index.text.filter(([, , heading, text]) =>
      has((text || heading).toLowerCase()));
    // Headings first, and what is on this page.
    const here = location.pathname.split("/").pop();
    texts.sort((a, b) => Boolean(a[3]) - Boolean(b[3]) || (b[0] === here) - (a[0] === here));
    const codes = index.code.filter(([line]) => has(line.toLowerCase()));
    for (const [page, place, heading, text] of texts.slice(0, 15)) {
      const where = make("span", {}, `${titles.get(page) || "README"} › ${heading}`);
      list.append(make("li", {}, make("a", {href: `${up}${page}#${place}`},
        ...marked(snippet(text || heading, words), words), where)));
    }
    for (const [line, ...places] of codes.slice(0, 15)) {
      const [[program, number], ...others] = places;
      const [name, page] = index.programs[program];
      const also = others.length ? ` · also in ${[...new Set(others.map(([p]) =>
        index.programs[p][0]))].filter(p => p !== name).join(", ") || "other lines"}` : "";
      list.append(make("li", {}, make("a", {href: `${up}${page}#L${number}`},
        make("code", {}, ...marked(line, words)),
        make("span", {}, `${name}.cpp, line ${number}${also}`))));
    }
    said.textContent = texts.length + codes.length
      ? `${texts.length} in the text, ${codes.length} in the programs` : "Nothing found.";
  }

  input.addEventListener("input", look);
  dialog.addEventListener("keydown", event => {
    const all = [input, ...$$("a", list)], at = all.indexOf(document.activeElement);
    const by = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (by && all[at + by]) {
      event.preventDefault();
      all[at + by].focus();
    } else if (event.key === "Enter" && at === 0 && all[1]) {
      event.preventDefault();
      all[1].click();
    }
  });
  list.addEventListener("click", event => event.target.closest("a") && dialog.close());
  look();
  return dialog;
}

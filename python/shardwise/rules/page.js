"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const get = id => document.getElementById(id);
  document.documentElement.classList.add("js");
  const body = get("tensors").tBodies[0];
  const groups = [];
  for (const row of body.rows) {
    if (row.classList.contains("g")) groups.push({ row, members: [], text: row.textContent.toLowerCase() });
    else groups[groups.length - 1].members.push({ row, text: row.cells[0].textContent.toLowerCase() });
  }
  const search = get("search"), kind = get("kind"), status = get("status");

  function open(group, yes) {
    group.open = yes;
    const button = group.row.querySelector(".fold");
    if (button) {
      button.setAttribute("aria-expanded", yes);
      button.textContent = yes ? "−" : "+";
    }
    for (const member of group.members) member.row.classList.toggle("open", yes);
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, all = 0;
    for (const group of groups) {
      const count = group.members.length || 1;
      all += count;
      const fits = !kind.value || group.row.dataset.k === kind.value;
      const whole = fits && words.every(word => group.text.includes(word));
      let found = whole ? count : 0;
      for (const member of group.members) {
        const has = fits && words.every(word => member.text.includes(word) || group.text.includes(word));
        member.row.hidden = !whole && !has;
        if (!whole && has) found++;
      }
      group.row.hidden = !found;
      if (words.length && found && !whole) {
        if (!group.open) group.searched = true;
        open(group, true);
      } else if (group.searched) {
        group.searched = false;
        open(group, false);
      }
      shown += found;
    }
    status.textContent = `${shown} of ${all} tensors shown`;
  }

  const heads = get("tensors").tHead.rows[0].cells;
  function sort(column, direction) {
    const key = group => group.row.cells[column].dataset.v;
    const number = heads[column].classList.contains("n") || column === 0;
    groups.sort((one, other) => {
      const a = key(one), b = key(other);
      return direction * (number ? Number(a) - Number(b) : a < b ? -1 : a > b ? 1 : 0);
    });
    for (const group of groups) body.append(group.row, ...group.members.map(member => member.row));
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  }
  for (const [column, head] of [...heads].entries()) {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const first = head.classList.contains("n") ? -1 : 1;
      sort(column, now === null ? first : now === "ascending" ? -1 : 1);
    });
  }

  function element(name, attributes, text) {
    const made = /^(svg|rect|text|title|pattern|path)$/.test(name)
      ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // A cut of a regular grid has the ranges of its blocks along each dim, and their holders in C order; one of a packed
  // dim has a list of pieces. Ranges are text: a number of JavaScript does not hold all integers.
  function tiles(cut) {
    if (cut.pieces) return cut.pieces.map(([row, range, place, held]) => ({ row, range, place, held }));
    const held = data.held[cut.held];
    let index = [[]];
    for (const ranges of cut.ranges) index = index.flatMap(start => ranges.map(range => [...start, range]));
    return index.map((box, number) => ({ box, place: `[${box.join(", ")}]`, held: held[number] }))
      .filter(tile => tile.box.every(range => { const [a, b] = range.split(":"); return a !== b; }));
  }

  // Colours with patterns tell shards apart as long as no two share one; beyond that the labels do.
  function fill(svg, number, count) {
    if (count > data.most) return data.neutral;
    const colour = data.fills[number % data.fills.length], pattern = data.patterns[Math.floor(number / data.fills.length)];
    if (!pattern) return colour;
    if (!svg.querySelector(`#look${number}`)) {
      const made = element("pattern", { id: `look${number}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
      made.append(element("path", { d: "M0 0h8v8h-8z", fill: colour }), element("path", { d: pattern, stroke: data.ink, "stroke-opacity": 0.5, "stroke-width": 1.25 }));
      svg.append(made);
    }
    return `url(#look${number})`;
  }

  const bounds = range => range.split(":").map(Number);
  function draw(cut, all) {
    const list = Boolean(cut.pieces), margin = list ? 200 : 0, width = 768 - margin;
    const rows = new Map();
    if (list) for (const tile of all) if (!rows.has(tile.row)) rows.set(tile.row, rows.size);
    const [down, across] = cut.plane;
    const deep = list ? [] : [...new Set(all.map(tile => slice(tile)))];
    function slice(tile) {
      return tile.box.filter((_, dim) => dim !== down && dim !== across).join(", ");
    }
    const size = dim => (dim === null ? 1 : Number(cut.shape[dim]) || 1);
    const each = list ? rows.size * 20 : Math.max(60, Math.min(320, width * Math.min(1, Math.max(0.2, size(down) / size(across)))));
    const step = each + (deep.length > 1 ? 30 : 10);
    const svg = element("svg", { viewBox: `0 0 ${width + margin} ${step * Math.max(deep.length, 1)}`, role: "img", "aria-label": "the shards at their places; the table says the same" });
    const part = dim => tile => (dim === null ? [0, 1] : bounds(tile.box[dim]));
    all.forEach((tile, number) => {
      const [left, right] = list ? bounds(tile.range) : part(across)(tile);
      const [top, bottom] = list ? [rows.get(tile.row), rows.get(tile.row) + 0.85] : part(down)(tile);
      const high = list ? rows.size : size(down);
      const panel = list ? 0 : deep.indexOf(slice(tile)) * step + (deep.length > 1 ? 20 : 0);
      const x = margin + width * left / size(across), y = panel + each * top / high;
      const w = width * (right - left) / size(across), h = each * (bottom - top) / high;
      const rect = element("rect", { x, y, width: w, height: h, fill: list ? fill(svg, rows.get(tile.row), rows.size) : fill(svg, number, all.length), class: "tile" });
      rect.append(element("title", {}, `${tile.place}: ${tile.held}`));
      svg.append(rect);
      if (list && all.findIndex(each => each.row === tile.row) === number) {
        const room = Math.floor((margin - 8) / 6.7), label = tile.held.length > room ? `${tile.held.slice(0, room - 1)}…` : tile.held;
        svg.append(element("text", { x: margin - 6, y: y + 13, "text-anchor": "end", fill: "currentColor" }, label));
      }
      for (const label of list ? [tile.range] : [tile.held, tile.held.split(" ")[0]]) {
        const length = label.length * 6.7 + 4, upright = length > w || h < 14;
        if (upright && (length > h || w < 11)) continue;
        const place = upright ? { x: x + w / 2 + 4, y: y + h / 2, transform: `rotate(-90 ${x + w / 2 + 4} ${y + h / 2})` } : { x: x + w / 2, y: y + h / 2 + 4 };
        // On a pattern a rim keeps the letters clear.
        svg.append(element("text", { ...place, "text-anchor": "middle", fill: data.ink, class: rect.getAttribute("fill")[0] === "u" ? "on" : "" }, label));
        break;
      }
    });
    if (deep.length > 1) deep.forEach((name, number) => svg.append(element("text", { x: 0, y: number * step + 14, fill: "currentColor" }, `slice ${name}`)));
    return svg;
  }

  const who = get("who");
  let from = null;
  function choose(button) {
    from = button;
    for (const row of body.querySelectorAll(".chosen")) row.classList.remove("chosen");
    button.closest("tr").classList.add("chosen");
    let group = button.closest("tr");
    while (!group.classList.contains("g")) group = group.previousElementSibling;
    const cut = data.cuts[group.dataset.c];
    const name = button.closest("tr").classList.contains("g") && button.dataset.many
      ? `each of the ${button.dataset.many} tensors ${button.textContent}` : button.textContent;
    who.replaceChildren(element("h2", { tabindex: "-1", id: "chosen" }, "Who holds what"), element("h3", {}, name));
    const back = element("button", { class: "plain", type: "button" }, "Back to the table");
    back.addEventListener("click", () => { from.focus(); from.scrollIntoView({ block: "center" }); });
    if (!cut) {
      who.append(element("p", { class: "bad" }, group.cells[group.cells.length - 1].textContent), back);
    } else {
      who.append(element("p", { class: "quiet" }, cut.about));
      for (const note of cut.notes || []) who.append(element("p", { class: "warn" }, note));
      const all = tiles(cut);
      if (all.length) {
        const drawn = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "the shards at their places" });
        drawn.append(draw(cut, all));
        who.append(drawn);
        const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "who holds what" });
        const table = element("table"), head = element("tr"), rows = element("tbody");
        for (const title of ["elements", "held by"]) head.append(element("th", { scope: "col" }, title));
        for (const tile of all) {
          const row = element("tr");
          row.append(element("td", { class: "code" }, tile.place), element("td", { class: "code" }, tile.held));
          rows.append(row);
        }
        table.append(element("thead"), rows);
        table.tHead.append(head);
        scroll.append(table);
        who.append(scroll);
      } else if (!(cut.notes || []).length) who.append(element("p", {}, "It has no elements."));
      who.append(back);
    }
    get("chosen").focus();
    who.scrollIntoView({ block: "start" });
  }

  body.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("fold")) {
      const group = groups.find(each => each.row === button.closest("tr"));
      open(group, !group.open);
    } else choose(button);
  });
  get("unfold").addEventListener("click", () => {
    const yes = groups.some(group => group.members.length && !group.open);
    for (const group of groups) open(group, yes);
    get("unfold").textContent = yes ? "Fold all" : "Unfold all";
  });
  search.addEventListener("input", filter);
  kind.addEventListener("change", filter);
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && event.target === search) {
      search.value = "";
      filter();
    }
  });
  for (const group of groups) open(group, false);
  filter();
})();

"use strict";
// In: details.trajectory elements, with numbers in data-values and tokens as JSON inside.
// Out: the same list, sorted and filtered; an open element shows single tokens.
(() => {
  const rows = [...document.querySelectorAll("details.trajectory")];
  const list = document.querySelector(".list");
  const tools = document.getElementById("tools");
  const search = tools.querySelector("input[type=search]");
  const values = new Map(rows.map((row) => [row, JSON.parse(row.dataset.values)]));
  const fields = new Set([...values.values()].flatMap(Object.keys));
  const texts = new Map();

  const comparisons = {
    "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
    "=": (a, b) => a === b, "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  };

  function textOf(row) { // prompt, completion and detail, collected on first search
    if (!texts.has(row)) {
      texts.set(row, [...row.querySelectorAll("pre")].map((pre) => pre.textContent).join("\n").toLowerCase());
    }
    return texts.get(row);
  }

  function condition(word) { // FIELD OPERATOR VALUE as on the command line, or any other text
    const found = /^([^<>=!]+)(<=|>=|==|!=|=|<|>)(.+)$/.exec(word);
    if (found && fields.has(found[1])) {
      const [, field, sign, value] = found;
      return (row) => {
        const own = values.get(row)[field];
        if (own === null || own === undefined) return false;
        return comparisons[sign](own, typeof own === "number" ? Number(value) : value);
      };
    }
    return (row) => textOf(row).includes(word.toLowerCase());
  }

  function filter() {
    const conditions = search.value.split(/\s+/).filter(Boolean).map(condition);
    let count = 0;
    for (const row of rows) {
      row.hidden = !conditions.every((holds) => holds(row));
      count += !row.hidden;
    }
    document.getElementById("count").textContent = `${count} of ${rows.length} on this page`;
  }

  function sort(heading) { // missing values come last in both directions
    const key = heading.dataset.key;
    const up = heading.getAttribute("aria-sort") === "descending";
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const place = new Map(rows.map((row, index) => [row, index]));
    const ordered = [...rows].sort((one, other) => {
      const a = values.get(one)[key], b = values.get(other)[key];
      if (a === null || b === null) return (a === null) - (b === null) || place.get(one) - place.get(other);
      const order = a < b ? -1 : a > b ? 1 : 0;
      return (up ? order : -order) || place.get(one) - place.get(other);
    });
    list.append(...ordered);
  }

  function tooltip(data, index, version, own) {
    if (!own) return `id ${data.ids[index]}\nversion ${version}\nnot by the policy`;
    const logprob = data.logprobs[index];
    const lines = [`id ${data.ids[index]}`, `version ${version}`, `logprob ${logprob === null ? "none" : logprob}`];
    if (logprob !== null) lines.push(`probability ${Number(Math.exp(logprob).toPrecision(3))}`);
    if (data.advantages.length) lines.push(`advantage ${data.advantages[index]}`);
    return lines.join("\n");
  }

  function token(data, index, version, own) {
    const span = document.createElement("span");
    span.className = own ? `t v${version % 6}` : "t o";
    span.title = tooltip(data, index, version, own);
    const surprise = Math.min(1, Math.max(0, (data.logprobs[index] ?? -6) / -6)); // 1: probability below 1/400
    span.style.setProperty("--surprise", `${80 * surprise}%`);
    span.textContent = data.pieces[index].replace(/^\n+$/, (lines) => "⏎\n".repeat(lines.length));
    return span;
  }

  function open(row) { // replace runs of tokens by single tokens
    const source = row.querySelector("script[type='application/json']");
    if (!row.open || !source) return;
    const data = JSON.parse(source.textContent);
    textOf(row);
    const pre = row.querySelector("pre.completion");
    const gap = pre.querySelector(".gap");
    const spans = [];
    let index = 0;
    for (const [version, own, count] of data.runs) {
      for (const end = index + count; index < end; index++) {
        if (gap && index === data.gap[0]) spans.push(gap);
        spans.push(token(data, index, version, own));
      }
    }
    pre.replaceChildren(...spans);
    source.remove();
  }

  for (const row of rows) row.addEventListener("toggle", () => open(row));
  for (const heading of document.querySelectorAll(".head [data-key]:not([data-key=''])")) {
    heading.setAttribute("role", "button");
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sort(heading));
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort(heading));
  }
  for (const choice of tools.querySelectorAll("input[type=radio]")) {
    choice.addEventListener("change", () => { document.body.className = choice.value; });
  }
  search.addEventListener("input", filter);
  document.body.className = tools.querySelector("input[type=radio]:checked").value; // the browser keeps the choice on reload
  tools.hidden = false;
  filter();
})();

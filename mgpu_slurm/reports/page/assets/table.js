"use strict";
// The table of runs: sorting, filtering, choosing, and its curves as CSV.
(() => {
  const { one, all, runs, column } = report;
  const table = one("#runs");
  if (!table) return;
  const body = one("tbody", table);
  const rows = all("tr", body);
  const texts = rows.map((row) => row.textContent.toLowerCase());

  // -- sorting

  const heads = all("thead th", table);
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => sort(head, place));
  });

  function sort(head, place) {
    const isNumeric = rows.some((row) => row.children[place].dataset.v !== undefined);
    const before = head.getAttribute("aria-sort");
    const first = isNumeric ? "descending" : "ascending";
    const other = isNumeric ? "ascending" : "descending";
    const next = before === first ? other : first;
    heads.forEach((each) => each.setAttribute("aria-sort", each === head ? next : "none"));
    const sign = next === "ascending" ? 1 : -1;
    const value = (row) => {
      const cell = row.children[place];
      return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
    };
    const isMissing = (each) => each === "" || Number.isNaN(each);
    body.append(...rows.slice().sort((one, two) => {
      const a = value(one), b = value(two);
      // what is missing is last in both directions
      if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
      if (typeof a === "number" && typeof b === "number") return sign * (a - b);
      return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
    }));
  }

  // -- filtering

  const compare = {
    "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
    "=": (a, b) => a === b, "!=": (a, b) => a !== b,
  };

  /** Return a test for a word of the filter: `lr<0.01`, `state:failed`, or text of the row. */
  function test(word) {
    const comparison = word.match(/^([^<>=!]+)(<=|>=|!=|<|>|=)(.+)$/);
    if (comparison) {
      const [, key, sign, expected] = comparison;
      return (run) => {
        const found = valueOf(run, key);
        if (found === undefined || found === null) return false;
        const isNumber = expected !== "" && !Number.isNaN(Number(expected)) && typeof found === "number";
        return isNumber ? compare[sign](found, Number(expected)) : compare[sign](String(found).toLowerCase(), expected);
      };
    }
    const named = word.match(/^state:(.*)$/);
    if (named) return (run) => run.state.toLowerCase().startsWith(named[1]);
    return (run, index) => texts[index].includes(word);
  }

  /** Return a config value or the last value of a metric, whatever the case of its name. */
  function valueOf(run, name) {
    const key = Object.keys(run.config).find((each) => each.toLowerCase() === name);
    if (key !== undefined) return run.config[key];
    const metric = Object.keys(run.metrics).find((each) => each.toLowerCase() === name);
    if (metric === undefined) return undefined;
    return run.last[metric];
  }

  const filter = one("#filter");
  let unknown = "";
  /** Return a name that the filter compares and no run has; empty if there is none. */
  function unknownName(words) {
    const names = words.map((word) => word.match(/^([^<>=!]+)(<=|>=|!=|<|>|=)(.+)$/)?.[1]).filter(Boolean);
    return names.find((name) => !runs.some((run) => ![undefined, null].includes(valueOf(run, name)))) ?? "";
  }
  filter.addEventListener("input", () => {
    const words = filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean), tests = words.map(test);
    unknown = unknownName(words);
    report.setFilter("words", (run, index) => tests.every((each) => each(run, index)));
  });

  const boxes = rows.map((row) => one("input", row));
  body.addEventListener("change", () => {
    const checked = boxes.map((box) => box.checked);
    report.setFilter("checked", (run, index) => checked[index]);
  });

  one("#all").addEventListener("click", () => {
    filter.value = unknown = "";
    boxes.forEach((box) => { box.checked = true; });
    dispatchEvent(new Event("report-reset"));
    for (const name of ["checked", "words", "brushed"]) report.setFilter(name, () => true);
  });

  const count = one("#count");
  function show() {
    let shown = 0;
    rows.forEach((row, index) => {
      // a run that is only unchecked stays in the table, to be checked again
      row.classList.toggle("off", !report.isListed(index));
      shown += report.isVisible(index);
    });
    const why = unknown && ` (no run has a value ${unknown})`;
    count.textContent = shown === runs.length ? `${shown} runs` : `${shown} of ${runs.length} runs${why}`;
  }
  report.onChange(show);
  show();

  // -- the rest

  const more = one("#more-columns");
  if (more) {
    table.classList.add("narrow");
    const words = more.textContent;
    more.addEventListener("click", () => {
      more.textContent = table.classList.toggle("narrow") ? words : "Show fewer config values";
    });
  }
  body.addEventListener("pointerover", (event) => {
    const row = event.target.closest("tr");
    if (row) report.light(Number(row.dataset.r));
  });
  body.addEventListener("pointerleave", () => report.light(-1));
  body.addEventListener("focusin", (event) => report.light(Number(event.target.closest("tr").dataset.r)));
  body.addEventListener("focusout", () => report.light(-1));

  one("#csv").addEventListener("click", () => {
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const lines = [["run", "metric", ...report.data.axes, "value"].join(",")];
    runs.forEach((run, index) => {
      if (!report.isVisible(index)) return;
      for (const [metric, places] of Object.entries(run.metrics)) {
        const columns = places.map(column);
        for (let i = 0; i < columns[0].length; i++) {
          // float32 has seven digits
          lines.push([quoted(run.name), quoted(metric), ...columns.map((values) => Number(values[i].toPrecision(7)))].join(","));
        }
      }
    });
    report.save("curves.csv", `${lines.join("\n")}\n`, "text/csv");
  });
})();

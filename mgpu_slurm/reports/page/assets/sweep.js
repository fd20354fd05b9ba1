"use strict";
// Marks of trials and attempts, brushes on parallel coordinates, and charts as files.
(() => {
  const { one, all } = report;
  const NAMESPACE = "http://www.w3.org/2000/svg";

  // -- marks: hovering lights a run everywhere, a click leads to its row

  const markOf = (event) => event.target.closest?.(".linked [data-r], .linked .bar, .linked .point");
  document.addEventListener("pointerover", (event) => {
    const mark = markOf(event);
    if (!mark) return;
    if (mark.dataset.r !== undefined) report.light(Number(mark.dataset.r));
    const title = one("title", mark);
    if (title) report.say(title.textContent, event.clientX, event.clientY);
  });
  document.addEventListener("pointerout", (event) => {
    if (!markOf(event)) return;
    report.say("");
    report.light(-1);
  });
  document.addEventListener("click", (event) => {
    const mark = markOf(event);
    if (!mark || mark.dataset.r === undefined) return;
    const row = one(`#runs tr[data-r="${mark.dataset.r}"]`);
    if (!row) return;
    row.scrollIntoView({ block: "center" });
    one("input", row).focus({ preventScroll: true });
  });

  // -- brushes: an interval of an axis chooses the trials that pass through it

  const brushes = new Map();

  /** Return where a line crosses an axis; undefined if it has no value there. */
  function crossing(line, x) {
    const path = line.getAttribute("d");
    let at = null;
    for (const [, letter, first, second] of path.matchAll(/([Ml])(-?[\d.]+)[ ]?(-?[\d.]+)/g)) {
      const dx = Number(first), dy = Number(second);
      at = letter === "M" ? [dx, dy] : [at[0] + dx, at[1] + dy];
      if (Math.abs(at[0] - x) < 1) return at[1];
    }
    return undefined;
  }

  function sift() {
    const passes = new Map();
    for (const { svg, x, low, high } of brushes.values()) {
      for (const line of all(".line[data-r]", svg)) {
        const y = crossing(line, x), trial = report.trialOf(Number(line.dataset.r));
        const isInside = y !== undefined && y >= low && y <= high;
        passes.set(trial, (passes.get(trial) ?? true) && isInside);
      }
    }
    report.setFilter("brushed", (run, index) => !brushes.size || passes.get(report.trialOf(index)) === true);
  }

  function clear(axis) {
    brushes.get(axis)?.mark.remove();
    brushes.delete(axis);
  }

  for (const svg of all("svg.parallel")) {
    for (const axis of all(".upright", svg)) {
      const x = Number(axis.dataset.x);
      const [top, bottom] = one(".base", axis).getAttribute("d").match(/[\d.]+/g).slice(1).map(Number).sort((a, b) => a - b);
      const target = document.createElementNS(NAMESPACE, "rect");
      for (const [name, value] of Object.entries({ x: x - 12, y: top - 8, width: 24, height: bottom - top + 16, fill: "transparent" })) {
        target.setAttribute(name, value);
      }
      axis.append(target);
      const heightOf = (event) => {
        const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
        return Math.max(top, Math.min(bottom, point.y));
      };
      let start = null;
      target.addEventListener("pointerdown", (event) => {
        clear(axis);
        start = heightOf(event);
        target.setPointerCapture(event.pointerId);
        event.preventDefault();
      });
      target.addEventListener("pointermove", (event) => {
        if (start === null) return;
        const y = heightOf(event), low = Math.min(start, y), high = Math.max(start, y);
        let brush = brushes.get(axis);
        if (!brush) {
          const mark = document.createElementNS(NAMESPACE, "rect");
          mark.setAttribute("class", "brush");
          mark.setAttribute("x", x - 7);
          mark.setAttribute("width", 14);
          axis.insertBefore(mark, target);
          brushes.set(axis, (brush = { svg, x, mark }));
        }
        Object.assign(brush, { low, high });
        brush.mark.setAttribute("y", low);
        brush.mark.setAttribute("height", high - low);
        sift();
      });
      target.addEventListener("pointercancel", () => { start = null; });
      target.addEventListener("pointerup", (event) => {
        if (start !== null && Math.abs(heightOf(event) - start) < 4) clear(axis);
        start = null;
        sift();
      });
    }
  }
  const clearAll = () => { [...brushes.keys()].forEach(clear); };
  addEventListener("report-reset", clearAll);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && brushes.size) { clearAll(); sift(); }
  });

  // -- charts as files

  for (const figure of all("figure")) {
    const charts = all("svg.chart", figure), caption = one("figcaption", figure);
    if (charts.length !== 1 || !caption) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "save";
    button.textContent = "SVG";
    button.setAttribute("aria-label", `Save as SVG: ${one("title", charts[0]).textContent}`);
    button.addEventListener("click", () => {
      const copy = charts[0].cloneNode(true), style = document.createElementNS(NAMESPACE, "style");
      style.textContent = one("style").textContent;
      copy.prepend(style);
      copy.setAttribute("xmlns", NAMESPACE);
      copy.setAttribute("font-family", "sans-serif");
      report.save(`${charts[0].id}.svg`, new XMLSerializer().serializeToString(copy), "image/svg+xml");
    });
    caption.append(button);
  }
})();

"use strict";
// A page that is written again and again keeps what its reader has chosen when the browser loads it again.
(() => {
  const { one, all, runs } = report;
  const root = document.documentElement;
  const KEY = `view of ${location.pathname}`;
  const CONTROLS = ["filter", "smooth", "axis", "color", "band", "log"];
  const heads = all("#runs thead th");
  const sortedHead = () => heads.find((head) => ["ascending", "descending"].includes(head.getAttribute("aria-sort")));
  // of the others, the defaults may depend on what is there
  const touched = new Set();
  addEventListener("input", (event) => touched.add(event.target.id));
  addEventListener("change", (event) => touched.add(event.target.id));

  const view = () => {
    const controls = CONTROLS.map((id) => one(`#${id}`)).filter((each) => each && touched.has(each.id));
    const head = sortedHead();
    return {
      controls: controls.map((each) => [each.id, each.type === "checkbox" ? each.checked : each.value]),
      hidden: all("#runs tbody tr").filter((row) => !one("input", row).checked).map((row) => runs[row.dataset.r].name),
      sorted: head && [head.textContent, head.getAttribute("aria-sort")],
      theme: root.dataset.theme,
      focus: document.activeElement.id,
      scroll: [scrollX, scrollY],
    };
  };

  function restore({ controls, hidden, sorted, theme, focus, scroll }) {
    if (theme) root.dataset.theme = theme;
    report.nameTheme();
    for (const [id, value] of controls) {
      const control = one(`#${id}`);
      if (!control) continue;
      control[control.type === "checkbox" ? "checked" : "value"] = value;
      for (const name of ["input", "change"]) control.dispatchEvent(new Event(name, { bubbles: true }));
    }
    const names = new Set(hidden);
    const boxes = all("#runs tbody tr").filter((row) => names.has(runs[row.dataset.r].name)).map((row) => one("input", row));
    for (const box of boxes) box.checked = false;
    if (boxes.length) boxes[0].dispatchEvent(new Event("change", { bubbles: true }));
    const head = sorted && heads.find((each) => each.textContent === sorted[0]);
    for (let clicks = 0; head && clicks < 2 && head.getAttribute("aria-sort") !== sorted[1]; clicks++) one("button", head).click();
    if (focus) one(`#${CSS.escape(focus)}`)?.focus({ preventScroll: true });
    scrollTo(...scroll);
  }

  // a browser may refuse to store anything
  const mayFail = (action) => { try { action(); } catch { /* the page works without it */ } };
  mayFail(() => {
    const kept = JSON.parse(sessionStorage.getItem(KEY));
    sessionStorage.removeItem(KEY);
    if (!kept) return;
    history.scrollRestoration = "manual";
    restore(kept);
  });
  // the last page that is written is not loaded again
  if (one("meta[http-equiv=refresh]")) {
    addEventListener("pagehide", () => mayFail(() => sessionStorage.setItem(KEY, JSON.stringify(view()))));
  }
})();

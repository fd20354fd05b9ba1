"use strict";
// Curves on a canvas over the static drawing, which stays what is printed, saved and read aloud.
(() => {
  const { one, all, data, runs, column, number, ticks, logTicks } = report;
  const NEAR = 30; // pixels within which a curve is the one that is meant
  const MANY = 20000; // points of a chart from which lines are thin: wider ones take six times as long without a GPU
  const state = { smooth: 0, axis: "progress", color: "", band: "std", log: null };

  /** Return an exponential moving average without bias to the first values, as TensorBoard's. */
  function smoothed(values, weight) {
    if (!weight) return values;
    const found = new Float64Array(values.length);
    let sum = 0, total = 0;
    for (let i = 0; i < values.length; i++) {
      if (Number.isFinite(values[i])) {
        sum = sum * weight + values[i] * (1 - weight);
        total = total * weight + (1 - weight);
        found[i] = sum / total;
      } else {
        found[i] = values[i];
      }
    }
    return found;
  }

  /** Return the colour of each run: that of its family, or of its value of the chosen config key. */
  function coloring() {
    if (!state.color) return (run) => run.color;
    const seen = new Map();
    return (run) => {
      const value = JSON.stringify(run.config[state.color] ?? null);
      if (!seen.has(value)) seen.set(value, seen.size % 8);
      return seen.get(value);
    };
  }

  class Plot {
    constructor(svg) {
      this.metric = svg.dataset.metric;
      this.isLogByDefault = svg.dataset.log === "1";
      this.svg = svg;
      this.box = svg.parentElement;
      this.canvas = document.createElement("canvas");
      this.canvas.setAttribute("aria-hidden", "true");
      // what is highlighted is drawn on a second one, so that a move of the pointer does not draw all curves again
      this.top = this.canvas.cloneNode();
      this.box.append(this.canvas, this.top);
      this.box.classList.add("live");
      this.top.addEventListener("pointermove", (event) => this.point(event));
      this.top.addEventListener("pointerleave", () => { this.cross = null; report.say(""); report.light(-1); });
    }

    /** Read the visible curves, and draw them. */
    draw() {
      const place = data.axes.indexOf(state.axis);
      this.lines = [];
      runs.forEach((run, index) => {
        const places = run.metrics[this.metric];
        if (!places || !report.isVisible(index)) return;
        this.lines.push({ run, index, xs: column(places[place]), ys: smoothed(column(places[3]), state.smooth) });
      });
      this.fit();
      this.colorOf = coloring();
      this.banded = this.isEmpty || state.band === "none" ? [] : this.bands();
      this.paint();
    }

    /** Choose the scales. */
    fit() {
      this.isLog = state.log ?? this.isLogByDefault;
      let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
      for (const { xs, ys } of this.lines) {
        for (let i = 0; i < ys.length; i++) {
          const x = xs[i], y = ys[i];
          if (!Number.isFinite(y) || !Number.isFinite(x) || (this.isLog && y <= 0)) continue;
          if (x < left) left = x;
          if (x > right) right = x;
          if (y < low) low = y;
          if (y > high) high = y;
        }
      }
      this.isEmpty = !(right >= left);
      if (this.isEmpty) return;
      if (right - left <= 1e-12 * Math.abs(right)) { left -= 0.5; right += 0.5; }
      // rounding errors of a constant are no range
      if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
        const room = Math.abs(low) * 0.05 || 0.5;
        [low, high] = this.isLog ? [low / 1.1, high * 1.1] : [low - room, high + room];
      } else if (!this.isLog) {
        const room = (high - low) * 0.04;
        low -= room;
        high += room;
      }
      Object.assign(this, { left, right, low, high });
    }

    x(value) { return this.x0 + ((value - this.left) / (this.right - this.left)) * (this.x1 - this.x0); }

    y(value) {
      const share = this.isLog
        ? Math.log(value / this.low) / Math.log(this.high / this.low)
        : (value - this.low) / (this.high - this.low);
      return this.y0 + share * (this.y1 - this.y0);
    }

    paint() {
      const { width, height } = this.box.getBoundingClientRect();
      if (!width) return;
      Object.assign(this, { x0: 52, x1: width - 12, y0: height - 40, y1: 10, width, height });
      const pen = this.cleared(this.canvas);
      const style = getComputedStyle(document.documentElement);
      const color = (name) => style.getPropertyValue(`--${name}`);
      pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
      if (this.isEmpty) {
        pen.fillStyle = color("quiet");
        pen.fillText("no visible run has values here", this.x0, height / 2);
        return;
      }
      this.axes(pen, color, height);
      const inBand = new Set(this.banded.flatMap((band) => band.members));
      const points = this.lines.reduce((sum, { ys }) => sum + ys.length, 0);
      for (const line of this.lines) {
        const isFaint = inBand.has(line.index) || line.run.state === "PRUNED";
        this.stroke(pen, line, color(`k${this.colorOf(line.run)}`), isFaint ? 0.35 : 0.75, points > MANY ? 1 / this.ratio : 1.4);
      }
      for (const band of this.banded) this.band(pen, band, color(`k${band.color}`));
      this.highlight();
    }

    /** Draw the run that is lit, and where the pointer is. */
    highlight() {
      if (this.isEmpty || !this.width) return;
      const pen = this.cleared(this.top);
      const style = getComputedStyle(document.documentElement);
      const color = (name) => style.getPropertyValue(`--${name}`);
      for (const line of this.lines) if (report.isLit(line.index)) this.stroke(pen, line, color("mark"), 1, 2.8);
      if (this.cross) this.crossLines(pen, color);
    }

    /** Return the pen of a canvas, emptied, which draws in pixels of the page. */
    cleared(canvas) {
      this.ratio = Math.min(2, devicePixelRatio || 1);
      canvas.width = this.width * this.ratio;
      canvas.height = this.height * this.ratio;
      const pen = canvas.getContext("2d");
      pen.scale(this.ratio, this.ratio);
      return pen;
    }

    axes(pen, color, height) {
      pen.lineWidth = 1;
      for (const value of this.isLog ? logTicks(this.low, this.high) : ticks(this.low, this.high)) {
        const y = Math.round(this.y(value)) + 0.5;
        pen.strokeStyle = color("grid");
        pen.beginPath();
        pen.moveTo(this.x0, y);
        pen.lineTo(this.x1, y);
        pen.stroke();
        pen.fillStyle = color("quiet");
        pen.textAlign = "right";
        pen.fillText(number(value), this.x0 - 6, y + 4);
      }
      pen.textAlign = "center";
      for (const value of ticks(this.left, this.right)) {
        if (state.axis !== "minutes" && !Number.isInteger(value)) continue;
        pen.fillText(number(value), this.x(value), this.y0 + 17);
      }
      pen.strokeStyle = color("quiet");
      pen.beginPath();
      pen.moveTo(this.x0, this.y0 + 0.5);
      pen.lineTo(this.x1, this.y0 + 0.5);
      pen.stroke();
      pen.fillStyle = color("ink");
      pen.fillText(state.axis === "minutes" ? "minutes at work" : state.axis, (this.x0 + this.x1) / 2, height - 5);
    }

    /** Draw a curve: of each pixel column only the first, lowest, highest and last value. */
    stroke(pen, { xs, ys }, color, opacity, width) {
      pen.strokeStyle = pen.fillStyle = color;
      pen.globalAlpha = opacity;
      pen.lineWidth = width;
      pen.lineJoin = "bevel";
      pen.beginPath();
      let isDown = false, col = NaN, low = 0, high = 0, last = 0;
      const flush = () => {
        if (isDown && high > low) { pen.lineTo(col, low); pen.lineTo(col, high); pen.lineTo(col, last); }
      };
      for (let i = 0; i < ys.length; i++) {
        const value = ys[i];
        if (!Number.isFinite(value) || !Number.isFinite(xs[i]) || (this.isLog && value <= 0)) {
          flush();
          isDown = false;
          continue;
        }
        const x = this.x(xs[i]), y = this.y(value), at = Math.round(x);
        if (isDown && at === col) {
          if (y < low) low = y;
          if (y > high) high = y;
          last = y;
          continue;
        }
        flush();
        if (isDown) pen.lineTo(x, y); else pen.moveTo(x, y);
        isDown = true;
        col = at;
        low = high = last = y;
      }
      flush();
      pen.stroke();
      if (ys.length === 1 && isDown) {
        pen.beginPath();
        pen.arc(this.x(xs[0]), last, 2.5, 0, 7);
        pen.fill();
      }
      pen.globalAlpha = 1;
    }

    /** Return means and spreads of runs that are repetitions of each other with other seeds. */
    bands() {
      const groups = new Map();
      for (const line of this.lines) {
        const key = line.run.repeats;
        if (key === null) continue;
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push(line);
      }
      const found = [];
      for (const lines of groups.values()) {
        if (lines.length < 2) continue;
        const at = new Map();
        for (const { xs, ys } of lines) {
          for (let i = 0; i < ys.length; i++) {
            if (!Number.isFinite(ys[i]) || !Number.isFinite(xs[i])) continue;
            let entry = at.get(xs[i]);
            if (!entry) at.set(xs[i], (entry = { count: 0, mean: 0, squares: 0, low: Infinity, high: -Infinity }));
            const delta = ys[i] - entry.mean;
            entry.mean += delta / ++entry.count;
            entry.squares += delta * (ys[i] - entry.mean);
            entry.low = Math.min(entry.low, ys[i]);
            entry.high = Math.max(entry.high, ys[i]);
          }
        }
        const points = [...at].filter(([, entry]) => entry.count > 1).sort((a, b) => a[0] - b[0]);
        if (points.length > 1) found.push({ points, color: this.colorOf(lines[0].run), members: lines.map((line) => line.index) });
      }
      return found;
    }

    band(pen, { points }, color) {
      const spread = ({ count, squares }) => Math.sqrt(squares / (count - 1));
      const upper = (entry) => (state.band === "std" ? entry.mean + spread(entry) : entry.high);
      const lower = (entry) => (state.band === "std" ? entry.mean - spread(entry) : entry.low);
      const inside = (value) => Math.min(Math.max(value, this.low), this.high);
      pen.fillStyle = pen.strokeStyle = color;
      pen.globalAlpha = 0.16;
      pen.beginPath();
      for (const [x, entry] of points) pen.lineTo(this.x(x), this.y(inside(upper(entry))));
      for (const [x, entry] of [...points].reverse()) pen.lineTo(this.x(x), this.y(inside(lower(entry))));
      pen.fill();
      pen.globalAlpha = 1;
      pen.lineWidth = 2.4;
      pen.beginPath();
      for (const [x, entry] of points) if (!this.isLog || entry.mean > 0) pen.lineTo(this.x(x), this.y(entry.mean));
      pen.stroke();
    }

    crossLines(pen, color) {
      const { x, y } = this.cross;
      pen.strokeStyle = color("quiet");
      pen.setLineDash([3, 3]);
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, this.y1);
      pen.lineTo(x, this.y0);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = color("mark");
      pen.beginPath();
      pen.arc(x, y, 4, 0, 7);
      pen.fill();
    }

    /** Light the curve next to the pointer, and say its value. */
    point(event) {
      if (!this.lines || this.isEmpty) return;
      const box = this.top.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const value = this.left + ((x - this.x0) / (this.x1 - this.x0)) * (this.right - this.left);
      let best = null, nearest = NEAR * NEAR;
      for (const line of this.lines) {
        for (const place of around(line.xs, value)) {
          const px = this.x(line.xs[place]), py = this.y(line.ys[place]);
          const distance = (px - x) ** 2 + (py - y) ** 2;
          if (distance < nearest) { nearest = distance; best = { line, place, x: px, y: py }; }
        }
      }
      this.cross = best;
      if (!best) { report.say(""); report.light(-1); this.later(); return; }
      const { run, index, xs, ys } = best.line;
      report.light(index);
      report.say(`${run.name}\n${state.axis} ${number(xs[best.place], 6)}: ${this.metric} ${number(ys[best.place], 5)}`, event.clientX, event.clientY);
      this.later();
    }

    /** Highlight before the next frame, once. */
    later() {
      if (this.isQueued) return;
      this.isQueued = true;
      requestAnimationFrame(() => { this.isQueued = false; this.highlight(); });
    }
  }

  /** Return the places of the values before and after one in an ascending column. */
  function around(xs, value) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < value) low = middle; else high = middle;
    }
    return low === high ? [low] : [low, high];
  }

  const plots = all("svg.curves").map((svg) => new Plot(svg));
  if (!plots.length) return;

  let isQueued = false;
  function redraw() {
    if (isQueued) return;
    isQueued = true;
    requestAnimationFrame(() => { isQueued = false; plots.forEach((plot) => plot.draw()); });
  }

  report.onChange(redraw);
  report.onLight(() => plots.forEach((plot) => plot.lines && plot.later()));
  addEventListener("resize", redraw);

  one("#smooth").addEventListener("input", (event) => {
    state.smooth = Number(event.target.value);
    one("#smooth-value").textContent = number(state.smooth, 2);
    redraw();
  });
  for (const name of ["axis", "band", "color"]) {
    one(`#${name}`).addEventListener("change", (event) => {
      state[name] = event.target.value;
      if (name === "color") legend();
      redraw();
    });
  }
  one("#log").addEventListener("change", (event) => { state.log = event.target.checked; redraw(); });

  const families = one("#legend").innerHTML;
  /** Say which colour is which value of the chosen key. */
  function legend() {
    const list = one("#legend");
    if (!state.color) { list.innerHTML = families; return; }
    const colorOf = coloring();
    const seen = new Map(runs.map((run) => [JSON.stringify(run.config[state.color] ?? null), colorOf(run)]));
    list.replaceChildren(...[...seen].slice(0, 24).map(([value, place]) => {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.className = `swatch k${place}`;
      item.append(swatch, `${state.color}=${value}`);
      return item;
    }));
    if (seen.size > 24) list.append(Object.assign(document.createElement("li"), { textContent: `and ${seen.size - 24} more` }));
  }

  redraw();
})();

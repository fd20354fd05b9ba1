"use strict";
// What all parts of the page share: its data, which runs are visible, and the run that is lit everywhere.
const report = (() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const one = (selector, below = document) => below.querySelector(selector);
  const all = (selector, below = document) => [...below.querySelectorAll(selector)];

  const data = JSON.parse(one("#data").textContent);
  const runs = data.runs;
  const decoded = new Map();

  /** Return a column of numbers. */
  function column(place) {
    if (!decoded.has(place)) {
      const text = data.columns[place];
      const bytes = Uint8Array.from(atob(text.slice(3)), (letter) => letter.charCodeAt(0));
      const Type = text.startsWith("f8") ? Float64Array : Float32Array;
      decoded.set(place, new Type(bytes.buffer));
    }
    return decoded.get(place);
  }

  // -- numbers for people, as `markup.number` and `svg.ticks` write them

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "";
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return String(value);
    if (size >= 1e6 || size < 1e-3) {
      const [mantissa, exponent] = value.toExponential(digits - 2).split("e");
      return `${Number(mantissa)}e${Number(exponent)}`;
    }
    return String(Math.round(size) < 10 ** digits ? Number(value.toPrecision(digits)) : Math.round(value));
  }

  function ticks(low, high, count = 5) {
    const raw = high / count - low / count;
    if (!(raw > 1e-290) || !Number.isFinite(raw)) return [low];
    const exponent = Math.floor(Math.log10(raw));
    const steps = [1, 2, 2.5, 5, 10].map((mantissa) => mantissa * 10 ** exponent);
    const digits = Math.max(0, 1 - exponent);
    const rounded = (value) => (digits > 100 ? value : Number(value.toFixed(digits)));
    const step = steps.reduce((best, each) => (Math.abs(each - raw) < Math.abs(best - raw) ? each : best));
    const found = new Set();
    const first = Math.ceil(low / step - 1e-9);
    // numbers of this size have no place for a step between them
    if (first + 1 === first) return [low];
    for (let place = first; place <= high / step + 1e-9; place++) {
      found.add(rounded(place * step));
    }
    return [...found].filter((each) => low - step * 1e-9 <= each && each <= high + step * 1e-9);
  }

  function logTicks(low, high) {
    const first = Math.floor(Math.log10(low));
    const last = Math.ceil(Math.log10(high));
    const span = last - first;
    const factors = span > 3 ? [1] : span > 1 ? [1, 2, 5] : [1, 2, 3, 5, 7];
    const found = [];
    for (let power = first; power <= last; power += Math.max(1, Math.floor(span / 5))) {
      found.push(...factors.map((factor) => Number(`${factor}e${power}`)));
    }
    const inside = found.filter((each) => low / 1.001 <= each && each / 1.001 <= high);
    return inside.length > 1 ? inside : ticks(low, high);
  }

  // -- which runs are visible

  const filters = { checked: () => true, words: () => true, brushed: () => true };
  const changed = [];
  let visible = runs.map(() => true);
  let listed = visible;

  /** Replace one of the filters, and draw what depends on it. */
  function setFilter(name, test) {
    filters[name] = test;
    listed = runs.map((run, index) => filters.words(run, index) && filters.brushed(run, index));
    visible = runs.map((run, index) => listed[index] && filters.checked(run, index));
    for (const mark of all(".linked [data-r]")) mark.classList.toggle("off", !visible[mark.dataset.r]);
    changed.forEach((each) => each());
  }

  // -- the run that is lit

  const lit = [];
  let current = -1;
  let lights = new Set();

  /** Return what the runs of one trial with several seeds have in common. */
  const trialOf = (index) => (runs[index].kind === "trial" ? runs[index].repeats ?? index : index);

  /** Light a run, or all seeds of a trial, in all charts and in the table; -1 for none. */
  function light(index) {
    if (index === current) return;
    for (const each of lights) for (const mark of all(`[data-r="${each}"]`)) mark.classList.remove("lit");
    current = index;
    const trial = index < 0 ? null : trialOf(index);
    lights = new Set(index < 0 ? [] : [...runs.keys()].filter((each) => trialOf(each) === trial));
    for (const each of lights) for (const mark of all(`[data-r="${each}"]`)) mark.classList.add("lit");
    lit.forEach((each) => each(index));
  }

  const tip = one("#tip");

  /** Show words next to a place on the screen; nothing hides them. */
  function say(words, x = 0, y = 0) {
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(innerWidth - box.width - 8, x + 14))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  }

  // -- controls of the page

  const theme = one("#theme");
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  nameTheme();
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
    changed.forEach((each) => each());
  });
  one("#print").addEventListener("click", () => print());

  /** Offer a text as a file. */
  function save(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  return {
    one, all, data, runs, column, number, ticks, logTicks, setFilter, light, trialOf, nameTheme, say, save,
    isVisible: (index) => visible[index],
    isListed: (index) => listed[index],
    isLit: (index) => lights.has(index),
    onChange: (action) => changed.push(action),
    onLight: (action) => lit.push(action),
  };
})();

"use strict";
// The charts of a report that answer: values at the pointer, zoom, smoothing, axes, runs on and off. Without this script
// the page shows drawings instead. Everything it shows is in the page; ticks are those of ticks.py.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = {"-": "", "--": "6 3", ":": "1.5 2.5", "-.": "6 2.5 1.5 2.5"};
  const GLYPHS = {"^": "m0-4l4 8h-8z", "x": "m-4-4l8 8m0-8l-8 8", "|": "m0-5v10",
    "D": "m0-5l5 5l-5 5l-5-5z", "s": "m-4-4h8v8h-8z", "v": "m-4-4h8l-4 8z", "o": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0"};
  const UNITS = [[172800, 86400, "days"], [7200, 3600, "hours"], [120, 60, "minutes"], [0, 1, "seconds"]];
  const RIGHT = 14, TOP = 18, BOTTOM = 40, FAR = 28, ROW = 12, SPARSE = 36, DOTS = 8, CLOSEST = 1e-9;
  const $ = id => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const chosen = new URLSearchParams(location.hash.slice(1));
  // `log` and `large` have the titles of the charts at which these buttons were pressed.
  const [log, large] = ["log", "large"].map(text => new Set(chosen.getAll(text)));
  const state = {axis: "tokens", smooth: 0, off: new Set(), view: null, log, large};

  // Numbers

  const decoded = [];
  const numbers = at => {
    if (at === null) return null;
    if (!decoded[at]) {
      const text = data.arrays[at], bytes = Uint8Array.from(atob(text.slice(1)), c => c.charCodeAt(0));
      decoded[at] = text[0] === "f" ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
    }
    return decoded[at];
  };
  const places = of => {
    const first = numbers(of.first), last = numbers(of.last);
    return {first, last, steps: first === last ? first : Float64Array.from(first, (v, i) => (v + last[i]) / 2),
      tokens: numbers(of.tokens), time: numbers(of.time), breaks: new Set(of.breaks)};
  };
  const si = (value, digits = 4) => {
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (size >= limit * 0.9999) return plain(value / limit, digits) + letter;
    return plain(value, digits);
  };
  const plain = (value, digits) => {
    const text = String(Number(value.toPrecision(digits)));
    return 0 < Math.abs(value) && Math.abs(value) < 1e-3 ? Number(text).toExponential().replace("e+", "e") : text;
  };
  const whole = value => Math.round(value).toLocaleString("en-US");
  const figure = value => Number.isFinite(value) ? (Math.abs(value) >= 1e6 ? whole(value) : plain(value, 6)) : "no value";
  const duration = value => {
    const [, unit, name] = UNITS.find(([least]) => value >= least) ?? UNITS[3];
    return `${plain(value / unit, 3)} ${name}`;
  };
  const linearTicks = (low, high, most = 6) => {
    if (!(high > low)) return [low];
    const rough = (high - low) / (most - 1), power = 10 ** Math.floor(Math.log10(rough));
    const steps = [0.5, 1, 2, 2.5, 5, 10], place = steps.findIndex(factor => factor >= 1 && factor * power >= rough * (1 - 1e-9));
    for (const step of [steps[place] * power, steps[place - 1] * power]) {
      // Counted from the first one: numbers of ticks beyond 2^53 have no next.
      const first = Math.ceil(low / step - 1e-9), count = Math.min(20, Math.floor(high / step + 1e-9) - first + 1);
      const ticks = Array.from({length: Math.max(0, count)}, (_, n) => (first + n) * step);
      if (ticks.length > 2 || step < steps[place] * power) return ticks;
    }
  };
  const logTicks = (low, high, most = 7) => {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), decades = [];
    for (let power = first; power <= last; power++) decades.push(10 ** power);
    const within = ticks => ticks.filter(tick => low * (1 - 1e-9) <= tick && tick <= high * (1 + 1e-9));
    for (const factors of [[1, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1]]) {
      const found = within(decades.flatMap(decade => factors.map(factor => factor * decade)));
      if (found.length >= 3 && found.length <= most) return found;
    }
    const found = within(decades), every = Math.ceil(found.length / most);
    return found.length > most ? found.filter((_, n) => n % every === 0)
      : linearTicks(low, high, most).filter(tick => tick > 0);
  };
  const labelsOf = ticks => {
    const gap = Math.min(...ticks.slice(1).map((tick, n) => Math.abs(tick - ticks[n])));
    const most = Math.max(...ticks.map(Math.abs));
    const digits = gap > 0 && gap < Infinity && most ? Math.max(4, Math.min(12, 2 + Math.ceil(Math.log10(most / gap)))) : 4;
    return ticks.map(tick => si(tick, digits));
  };

  // Charts

  const make = (tag, attributes = {}, parent = null, text = "") => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    parent?.append(element);
    return element;
  };
  const html = (tag, name, parent, text = "") => {
    const element = document.createElement(tag);
    element.className = name;
    element.textContent = text;
    parent?.append(element);
    return element;
  };
  const ink = (element, slot) => { element.style.setProperty("--ink-of-line", `var(--${slot})`); return element; };
  const shown = of => of.run === null || !state.off.has(of.run);
  const charts = data.charts.map(chart => ({...chart,
    lines: chart.lines.map(line => ({...line, ...places(line), mean: numbers(line.mean), low: numbers(line.low),
      high: numbers(line.high), smoothed: {}})),
    marks: chart.marks.map(marks => ({...marks, ...places(marks)})),
    rules: chart.rules && {names: chart.rules.names, ...places(chart.rules)}, cursor: null}));
  const axisOf = chart =>
    chart.lines.some(line => line[state.axis].some(Number.isFinite)) ? state.axis : chart.axis;
  const longest = Math.max(0, ...charts.flatMap(chart => chart.lines.map(line => line.last.reduce((a, b) => b > a ? b : a, 0))));
  // Less than a bin would show nothing.
  const bin = Math.min(...charts.flatMap(chart => chart.lines.filter(line => line.smooth && line.last.length)
    .map(line => line.last[0] - line.first[0] + 1)));
  const SMOOTH = [0, ...[...Array(36).keys()].map(n => [2, 5, 10][n % 3] * 10 ** Math.floor(n / 3))
    .filter(steps => steps === 2 && bin < 2 || steps > bin && steps <= longest / 4)];

  // The mean of the values until a step, of which one that is `over` steps before counts 1/e. Steps without a value add
  // nothing and get none; where the line is broken it begins anew.
  const smoothed = (line, over) => line.smoothed[over] ??= (() => {
    const found = new Float64Array(line.mean.length).fill(NaN);
    let sum = 0, weight = 0, before = NaN;
    line.mean.forEach((value, i) => {
      if (line.breaks.has(i)) sum = weight = 0;
      if (!Number.isFinite(value)) return;
      const steps = line.last[i] - line.first[i] + 1;
      const decay = weight ? Math.exp(-(line.steps[i] - before) / over) : 0;
      sum = sum * decay + value * steps;
      weight = weight * decay + steps;
      before = line.steps[i];
      found[i] = sum / weight;
    });
    return found;
  })();

  const extents = {};
  const extent = axis => extents[axis] ??= (() => {
    let low = Infinity, high = -Infinity;
    for (const chart of charts.filter(chart => axisOf(chart) === axis))
      for (const of of [...chart.lines.filter(shown), ...(chart.rules ? [chart.rules] : [])])
        for (const x of of[axis]) if (Number.isFinite(x)) { low = Math.min(low, x); high = Math.max(high, x); }
    if (!(low <= high)) return [0, 1];
    if (low === high) return [low - (low || 1) * 0.5, low + (low || 1) * 0.5];
    if (low < 0.3 * high && low >= 0) low = 0;
    return [low, high + 0.015 * (high - low)];
  })();
  const view = axis => axis === state.axis && state.view || extent(axis);

  // What is seen of a line: its values, or for each pixel with several of them their mean, lowest and highest. A null
  // breaks the line.
  const seen = (line, values, x, [from, to], axis, positive) => {
    const at = line[axis], found = [];
    let count = 0;
    for (let i = 0; i < at.length; i++) if (from <= at[i] && at[i] <= to) count++;
    const merges = count > x(to) - x(from);
    let open = null, lacks = false;
    const close = () => { if (open) found.push({...open, x: open.px / open.steps, y: open.sum / open.steps}); open = null; };
    for (let i = 0; i < at.length; i++) {
      if (line.breaks.has(i)) { close(); found.push(null); }
      const y = values[i], beside = at[i + 1] >= from && at[i] < from || at[i - 1] <= to && at[i] > to;
      if (!Number.isFinite(at[i]) || !Number.isFinite(y) || positive && y <= 0) {
        if (!merges || !Number.isFinite(at[i])) { close(); found.push(null); }
        lacks = true;
        continue;
      }
      if (!(from <= at[i] && at[i] <= to) && !beside) continue;
      const px = x(at[i]), steps = line.last[i] - line.first[i] + 1 || 1;
      if (lacks && open && Math.floor(px) - open.column > 1) { close(); found.push(null); }  // a pixel without a value
      lacks = false;
      const low = line.low ? line.low[i] : line.mean[i], high = line.high ? line.high[i] : line.mean[i];
      if (open && (!merges || Math.floor(px) !== open.column)) close();
      open ??= {column: Math.floor(px), px: 0, sum: 0, steps: 0, low: Infinity, high: -Infinity, inside: false};
      open.px += px * steps; open.sum += y * steps; open.steps += steps;
      open.low = Math.min(open.low, positive && low <= 0 ? y : low);
      open.high = Math.max(open.high, high);
      open.inside ||= from <= at[i] && at[i] <= to;
    }
    close();
    return found;
  };
  const pieces = points => {
    const found = [[]];
    for (const point of points) if (point) found.at(-1).push(point); else if (found.at(-1).length) found.push([]);
    return found.filter(piece => piece.length);
  };

  const draw = chart => {
    const box = chart.box, width = Math.max(240, box.clientWidth), height = Math.round(Math.min(440, Math.max(230, width * 0.6)));
    const axis = axisOf(chart), [from, to] = view(axis), log = chart.log, over = SMOOTH[state.smooth];
    const lines = chart.lines.filter(shown);
    const probe = value => (value - from) / (to - from) * (width - 60);
    let low = Infinity, high = -Infinity;
    for (const line of lines)
      for (const values of over && line.smooth ? [line.mean, smoothed(line, over)] : [line.mean])
        for (const point of seen(line, values, probe, [from, to], axis, log))
          if (point?.inside) { low = Math.min(low, point.low, point.y); high = Math.max(high, point.high, point.y); }
    const empty = !(low <= high);
    if (empty) [low, high] = log ? [0.1, 1] : [0, 1];
    else if (chart.zero && !log) [low, high] = [Math.min(0, low), Math.max(high * 1.08, 1e-12)];
    else if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    else if (log) { const room = (high / low) ** 0.05; low /= room; high *= room; }
    else { const room = (high - low) * 0.05; low -= room; high += room; }
    const ticks = (log ? logTicks(low, high) : linearTicks(low, high)), labels = labelsOf(ticks);
    const left = 26 + 7.2 * Math.max(...labels.map(label => label.length), 2);
    const right = width - RIGHT, bottom = height - BOTTOM, scaled = log ? Math.log : value => value;
    const x = value => left + (value - from) / (to - from) * (right - left);
    const y = value => bottom - (scaled(value) - scaled(low)) / (scaled(high) - scaled(low)) * (bottom - TOP);
    Object.assign(chart, {toX: x, toY: y, left, right, bottom, axisNow: axis, from, to, visible: lines, empty});

    const svg = chart.svg;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    const clip = make("clipPath", {id: `${chart.id}-clip`}, make("defs", {}, svg));
    make("rect", {x: left, y: 0, width: Math.max(1, right - left), height: bottom + 1}, clip);
    ticks.forEach((tick, n) => {
      make("path", {class: "gridline", d: `M${left} ${y(tick).toFixed(1)}H${right}`}, svg);
      make("text", {x: left - 6, y: (y(tick) + 4).toFixed(1), "text-anchor": "end"}, svg, labels[n]);
    });
    make("path", {class: "axis", d: `M${left} ${bottom}H${right}`}, svg);
    const [, unit, name] = axis === "time" ? UNITS.find(([least]) => to >= least) ?? UNITS[3] : [0, 1, axis];
    const across = linearTicks(from / unit, to / unit, Math.max(4, Math.min(9, Math.floor((right - left) / 50))))
      .filter(tick => axis === "time" || tick % 1 === 0 || to - from < 3);
    const below = labelsOf(across);
    across.forEach((tick, n) => make("text", {x: Math.min(x(tick * unit), width - 3.6 * below[n].length).toFixed(1),
      y: bottom + 16, "text-anchor": "middle"}, svg, below[n]));
    make("text", {x: (left + right) / 2, y: height - 6, "text-anchor": "middle"}, svg,
      axis === "time" ? `${name} since the start` : name);
    make("text", {transform: `translate(12 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle"}, svg, chart.y);
    if (empty) make("text", {x: (left + right) / 2, y: (TOP + bottom) / 2, "text-anchor": "middle"}, svg, "no value here");

    const inside = make("g", {"clip-path": `url(#${chart.id}-clip)`}, svg);
    const at = point => `${point.x.toFixed(1)} ${y(point.y).toFixed(1)}`;
    const curve = (line, points, kind) => {
      const whole = pieces(points).filter(piece => piece.length > 1), alone = pieces(points).filter(piece => piece.length === 1);
      const drawn = ink(make("path", {class: kind, d: whole.map(piece => "M" + piece.map(at).join("L")).join("")}, inside), line.slot);
      drawn.setAttribute("stroke-dasharray", kind === "raw" ? "" : DASHES[line.dash] ?? "");
      const every = points.filter(point => point), sparse = every.length * DOTS <= right - left;
      const dots = line.points && sparse ? every : alone.map(piece => piece[0]);
      ink(make("path", {class: `dots ${kind === "raw" ? "faint" : ""}`, d: dots.map(dot => `M${at(dot)}h.01`).join("")}, inside), line.slot);
    };
    for (const line of lines) {
      const points = seen(line, line.mean, x, [from, to], axis, log);
      const edges = pieces(points).filter(piece => piece.some(point => point.high > point.low));
      const band = edges.map(piece => piece.length === 1
        ? `M${piece[0].x - 0.5} ${y(piece[0].high)}h1V${y(piece[0].low)}h-1Z`
        : "M" + piece.map(p => `${p.x.toFixed(1)} ${y(p.high).toFixed(1)}`).join("L") + "L"
          + piece.toReversed().map(p => `${p.x.toFixed(1)} ${y(p.low).toFixed(1)}`).join("L") + "Z").join("");
      if (band) ink(make("path", {class: "band", d: band}, inside), line.slot);
      curve(line, points, over && line.smooth ? "raw" : "curve");
      if (over && line.smooth) curve(line, seen(line, smoothed(line, over), x, [from, to], axis, log), "curve");
    }
    if (chart.rules) {
      const begun = [...chart.rules[axis].keys()].filter(n => from <= chart.rules[axis][n] && chart.rules[axis][n] <= to);
      const few = begun.length * SPARSE <= right - left;
      const named = [];
      for (const n of begun) {
        const px = x(chart.rules[axis][n]), name = chart.rules.names[n];
        make("path", {class: few ? "rule" : "rule faint", d: `M${px.toFixed(1)} ${TOP - 4}V${bottom}`}, svg);
        if (named.length && px - named.at(-1).px < 22) named.at(-1).last = name;
        else named.push({px, first: name, last: name});
      }
      for (const {px, first, last} of few ? named : [])
        make("text", {x: px.toFixed(1), y: TOP - 7, "text-anchor": "middle"}, svg, first === last ? first : `${first}–${last}`);
    }
    const rows = [...new Set(chart.marks.map(marks => marks.label))];
    for (const marks of chart.marks.filter(shown)) {
      const columns = new Set();
      for (const place of marks[axis]) if (from <= place && place <= to) columns.add(Math.round(x(place)));
      const level = bottom - 7 - ROW * rows.indexOf(marks.label);
      make("path", {class: "^Dsv".includes(marks.symbol) ? "mark filled" : "mark",
        d: [...columns].map(px => `M${px} ${level}${GLYPHS[marks.symbol]}`).join("")}, inside);
    }
    chart.select = make("rect", {class: "select", y: TOP, height: bottom - TOP, width: 0}, svg);
    chart.pointer = make("g", {class: "pointer"}, svg);
    point(chart);
  };

  // Values at the pointer

  const nearest = (line, chart, value) => {
    const at = line[chart.axisNow];
    let best = -1, distance = Infinity;
    for (let i = 0; i < at.length; i++) {
      const far = Math.abs(at[i] - value);
      if (far < distance && chart.from <= at[i] && at[i] <= chart.to) { best = i; distance = far; }
    }
    return best >= 0 && Math.abs(chart.toX(at[best]) - chart.toX(value)) <= FAR ? best : -1;
  };
  const stepsOf = (line, i) => line.first[i] === line.last[i] ? `step ${whole(line.first[i])}`
    : `steps ${whole(line.first[i])}–${whole(line.last[i])}`;
  const point = (chart, speak = false) => {
    chart.pointer?.replaceChildren();
    chart.tip.hidden = true;
    if (chart.cursor === null || chart.empty) return;
    const found = chart.visible.map(line => [line, nearest(line, chart, chart.cursor)]).filter(([, i]) => i >= 0);
    if (!found.length) return;
    const distance = ([line, i]) => Math.abs(line[chart.axisNow][i] - chart.cursor);
    const [main, at] = found.reduce((a, b) => distance(b) < distance(a) - CLOSEST ? b : a);
    const px = chart.toX(main[chart.axisNow][at]);
    make("path", {class: "hair", d: `M${px.toFixed(1)} ${TOP}V${chart.bottom}`}, chart.pointer);
    chart.tip.replaceChildren();
    const where = [stepsOf(main, at)];
    if (Number.isFinite(main.tokens[at])) where.push(`${si(main.tokens[at])} tokens`);
    if (Number.isFinite(main.time[at])) where.push(duration(main.time[at]));
    html("b", "", chart.tip, Number.isFinite(main.first[at]) ? where.join(" · ") : `${chart.axisNow} ${si(chart.cursor)}`);
    const over = SMOOTH[state.smooth], spoken = [chart.tip.textContent];
    for (const [line, i] of found) {
      const value = line.mean[i], row = html("div", "", chart.tip);
      ink(html("i", "", row), line.slot);
      html("span", "", row, line.label);
      const words = [figure(value)];
      if (line.low && line.high[i] > line.low[i]) words.push(`(${figure(line.low[i])} to ${figure(line.high[i])})`);
      if (over && line.smooth) words.push(`smoothed ${figure(smoothed(line, over)[i])}`);
      if (line.first[i] !== main.first[at]) words.push(stepsOf(line, i));
      html("strong", "", row, words.join(" "));
      spoken.push(`${line.label} ${words.join(" ")}`);
      if (Number.isFinite(value) && !(chart.log && value <= 0))
        ink(make("circle", {r: 3.5, cx: chart.toX(line[chart.axisNow][i]).toFixed(1), cy: chart.toY(value).toFixed(1)}, chart.pointer), line.slot);
    }
    for (const marks of chart.marks.filter(shown))
      if (marks.run === main.run && marks.first.some(step => main.first[at] <= step && step <= main.last[at])) {
        html("div", "", chart.tip, marks.label);
        spoken.push(marks.label);
      }
    chart.tip.hidden = false;
    // Beside the pointer; where it would hide the curve, below the chart.
    const room = chart.box.clientWidth - chart.tip.offsetWidth, below = room < 0.45 * chart.box.clientWidth;
    const beside = px + 12 <= room ? px + 12 : px - 12 - chart.tip.offsetWidth;
    chart.tip.style.left = `${Math.max(0, Math.min(room, below ? px - chart.tip.offsetWidth / 2 : beside))}px`;
    chart.tip.style.top = below ? "100%" : "";
    if (speak) $("live").textContent = spoken.join(", ");
  };
  const move = (chart, by, to = null) => {
    const line = chart.visible[0], at = line?.[chart.axisNow];
    if (!at) return;
    const inside = [...at.keys()].filter(i => chart.from <= at[i] && at[i] <= chart.to);
    if (!inside.length) return;
    let place = to === null ? 0 : to < 0 ? inside.length - 1 : 0;
    if (to === null && chart.cursor !== null) {
      const now = nearest(line, chart, chart.cursor);
      place = Math.max(0, Math.min(inside.length - 1, (now < 0 ? 0 : inside.indexOf(now)) + by));
    }
    chart.cursor = at[inside[place]];
    point(chart, true);
  };

  // Zoom

  let waiting = false;
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; charts.forEach(chart => chart.svg && draw(chart)); keep(); });
  };
  const zoom = range => {
    const [low, high] = extent(state.axis);
    state.view = range && [Math.max(low, range[0]), Math.min(high, range[1])];
    if (state.view && (state.view[0] <= low && state.view[1] >= high || !(state.view[1] > state.view[0]))) state.view = null;
    $("whole").disabled = state.view === null;
    redraw();
  };
  // The same steps on another axis: of runs of different speed those of the line that has most of them in view.
  const carried = axis => {
    const [from, to] = state.view ?? [1, 0], seen = charts.flatMap(chart => chart.lines.filter(shown)).map(line =>
      line[axis].filter((x, i) => from <= line[state.axis][i] && line[state.axis][i] <= to && Number.isFinite(x)));
    const most = seen.reduce((a, b) => b.length > a.length ? b : a, []);
    return most.length > 1 ? [most[0], most.at(-1)] : null;
  };
  const zoomBy = factor => {
    const [low, high] = view(state.axis), cursors = charts.map(chart => chart.cursor).filter(each => low <= each && each <= high && each !== null);
    const middle = cursors[0] ?? (low + high) / 2;
    zoom([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  };

  const live = chart => {
    const figure = $(chart.id), drawn = figure.querySelector(":scope > svg");
    chart.box = html("div", "plot");
    chart.svg = make("svg", {tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": chart.title,
      "aria-description": `${chart.about} Arrow keys read values, plus and minus zoom, Escape shows all.`});
    chart.tip = html("div", "tip");
    chart.tip.hidden = true;
    chart.box.append(chart.svg, chart.tip);
    (drawn ?? figure.querySelector(".note")).before(chart.box);
    try { draw(chart); } catch (error) { chart.box.remove(); chart.svg = null; console.error(error); return; }
    figure.classList.add("lives");
    figure.querySelectorAll(".live").forEach(each => { each.hidden = false; });
    for (const item of figure.querySelectorAll(".legend li"))
      if (data.runs.length > 1 && data.runs.includes(item.textContent.trim())) item.hidden = true;
    const buttons = html("span", "buttons", figure.querySelector("figcaption"));
    const toggle = (text, title, usual, act) => {
      const button = Object.assign(html("button", "", buttons, text), {type: "button", title}), pressed = state[text];
      const set = on => { button.setAttribute("aria-pressed", on); act(on); };
      set(usual !== pressed.has(chart.title));
      button.addEventListener("click", () => {
        if (!pressed.delete(chart.title)) pressed.add(chart.title);
        set(usual !== pressed.has(chart.title));
        redraw();
      });
    };
    toggle("log", "Logarithmic vertical axis", chart.log, on => { chart.log = on; });
    toggle("large", "Use the whole width", false, on => { figure.classList.toggle("large", on); });

    const svg = chart.svg;
    let start = null;
    const value = event => {
      const px = event.clientX - svg.getBoundingClientRect().left;
      return chart.from + (px - chart.left) / (chart.right - chart.left) * (chart.to - chart.from);
    };
    const clamp = v => Math.max(chart.from, Math.min(chart.to, v));
    svg.addEventListener("pointerdown", event => {
      if (event.pointerType !== "touch" && event.button === 0) { start = value(event); svg.setPointerCapture(event.pointerId); }
      for (const other of charts) if (other !== chart && other.svg) { other.cursor = null; point(other); }
      chart.cursor = clamp(value(event));
      point(chart);
    });
    svg.addEventListener("pointermove", event => {
      chart.cursor = clamp(value(event));
      point(chart);
      if (start === null) return;
      const [a, b] = [clamp(start), chart.cursor].map(chart.toX).sort((p, q) => p - q);
      chart.select.setAttribute("x", a);
      chart.select.setAttribute("width", b - a);
    });
    const end = event => {
      const [a, b] = start === null ? [0, 0] : [clamp(start), clamp(value(event))].sort((p, q) => p - q);
      start = null;
      chart.select.setAttribute("width", 0);
      if (event.type === "pointerup" && chart.axisNow === state.axis && chart.toX(b) - chart.toX(a) > 6) zoom([a, b]);
    };
    for (const kind of ["pointerup", "pointercancel"]) svg.addEventListener(kind, end);
    svg.addEventListener("pointerleave", event => {
      if (event.pointerType !== "touch" && start === null) { chart.cursor = null; point(chart); }
    });
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("keydown", event => {
      const far = event.shiftKey ? 10 : 1;
      const act = {ArrowLeft: () => move(chart, -far), ArrowRight: () => move(chart, far), Home: () => move(chart, 0, 0),
        End: () => move(chart, 0, -1), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
        Escape: () => { chart.cursor = null; zoom(null); }}[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    svg.addEventListener("blur", () => { chart.cursor = null; point(chart); });
  };

  // What is chosen, kept in the address so that it outlives loading the page again

  const keep = () => {
    const words = new URLSearchParams();
    if (state.axis !== "tokens") words.set("axis", state.axis);
    if (state.smooth) words.set("smooth", state.smooth);
    if (state.off.size) words.set("off", [...state.off].join(" "));
    if (state.view) words.set("view", state.view.join(" "));
    for (const text of ["log", "large"]) for (const title of state[text]) words.append(text, title);
    const next = words.size ? `#${words}` : "";
    try { if (next !== location.hash) history.replaceState(null, "", next || "#"); } catch { /* a frame may forbid it */ }
  };
  if (["tokens", "time", "steps"].includes(chosen.get("axis"))) state.axis = chosen.get("axis");
  state.smooth = Math.max(0, Math.min(SMOOTH.length - 1, Math.floor(Number(chosen.get("smooth"))) || 0));
  for (const run of (chosen.get("off") ?? "").split(" ")) if (/^\d+$/.test(run) && run < data.runs.length) state.off.add(Number(run));
  const range = (chosen.get("view") ?? "").split(" ").map(Number);
  if (range.length === 2 && range.every(Number.isFinite) && range[0] < range[1]) state.view = range;

  const tools = $("tools");
  tools.hidden = false;
  tools.addEventListener("submit", event => event.preventDefault());
  for (const radio of tools.querySelectorAll("[name=axis]")) {
    radio.checked = radio.value === state.axis;
    radio.addEventListener("change", () => {
      const range = carried(radio.value);
      state.axis = radio.value;
      for (const chart of charts) chart.cursor = null;
      zoom(range);
    });
  }
  const slider = $("smooth"), say = () => {
    const words = state.smooth ? `${whole(SMOOTH[state.smooth])} steps` : "off";
    $("smoothed").textContent = words;
    slider.setAttribute("aria-valuetext", words);
  };
  slider.max = SMOOTH.length - 1;
  slider.value = state.smooth;
  say();
  slider.addEventListener("input", () => { state.smooth = Number(slider.value); say(); redraw(); });
  $("closer").addEventListener("click", () => zoomBy(0.5));
  $("wider").addEventListener("click", () => zoomBy(2));
  $("whole").addEventListener("click", () => zoom(null));
  $("whole").disabled = state.view === null;
  for (const button of tools.querySelectorAll(".run")) {
    const run = Number(button.dataset.run);
    button.setAttribute("aria-pressed", !state.off.has(run));
    button.addEventListener("click", () => {
      if (!state.off.delete(run)) state.off.add(run);
      button.setAttribute("aria-pressed", !state.off.has(run));
      for (const axis of Object.keys(extents)) delete extents[axis];
      redraw();
    });
  }
  charts.forEach(live);
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width !== width) { width = entry.contentRect.width; redraw(); }
  }).observe(document.querySelector(".grid"));
})();

// Draw figures over the last minutes: lines with a gap where there is no value, and a raster of cells.

const NUMBERS = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const MINUTE_S = 60, HEIGHT = 100;
const number = (value) => NUMBERS.format(value);
const duration = (seconds) => seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`;

// An element with classes and children.
export function element(name, classes = "", ...children) {
  const made = document.createElement(name);
  made.className = classes;
  made.append(...children);
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// The next round number: 1, 2, 4, 5 or 10 times a power of ten, whose half is round as well.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((each) => each * power).find((each) => each >= value * 0.9999);
}

// Where values lie from the bottom (0) to the top (1) of a chart, and the labels of its top, centre and bottom.
function linear(values) {
  const top = roundUp(Math.max(0, ...values) || 1);
  return { place: (value) => value / top, labels: [top, top / 2, 0].map(number) };
}

// Times differ by orders of magnitude, so that the axis has powers of ten: two, or four where two are too few.
// What lies below is drawn at the bottom: tokens that came in one packet are a microsecond apart.
function logarithmic(values) {
  const shown = values.filter((value) => value > 0);
  const top = Math.ceil(Math.log10(Math.max(...shown, 1e-3))), low = Math.log10(Math.min(...shown, 10 ** top));
  const half = top - low > 2 ? 2 : 1;
  const place = (value) => Math.max(0, 1 - (top - Math.log10(value)) / (2 * half));
  return { place, labels: [top, top - half, top - 2 * half].map((power) => duration(10 ** power)) };
}

// A frame whose width is the last `spanS` seconds, with a label at each minute; `area` is drawn within it.
export function frame(figure, spanS, area) {
  const high = element("span"), middle = element("span"), low = element("span");
  const minutes = Array.from({ length: Math.floor(spanS / MINUTE_S) + 1 }, (_, each) => spanS / MINUTE_S - each);
  const times = element("div", "times", ...minutes.map((each) => element("span", "", each ? `−${each} min` : "now")));
  [...times.children].forEach((each, at) => { each.style.left = `${100 * at / (minutes.length - 1)}%`; });
  figure.append(element("div", "plot", element("div", "scale", high, middle, low), area, times));
  return (labels) => [high, middle, low].forEach((each, at) => { each.textContent = labels[at]; });
}

// Lines over time, of numbers or of times. Each series is [name, value of a sample]; the first lies on top.
export class LineChart {
  constructor(figure, spanS, kind, series) {
    Object.assign(this, { spanS, series });
    [this.scale, this.shown] = { numbers: [linear, number], times: [logarithmic, duration] }[kind];
    this.title = figure.querySelector("figcaption").textContent;
    this.paths = series.map((_, at) => svg("path", { class: `line-${at}` }));
    this.area = svg("svg", { viewBox: `0 0 ${spanS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const grid = [];
    for (let x = 0; x <= spanS; x += MINUTE_S) grid.push(`M${x} 0V${HEIGHT}`);
    for (const y of [0, HEIGHT / 2, HEIGHT]) grid.push(`M0 ${y}H${spanS}`);
    this.area.append(svg("path", { class: "grid", d: grid.join("") }), ...[...this.paths].reverse());
    this.readings = series.map(() => element("b"));
    figure.querySelector("figcaption").append(element("ul", "legend", ...series.map(([name], at) =>
      element("li", "", element("i", `line-${at}`), `${name} `, this.readings[at]))));
    this.label = frame(figure, spanS, this.area);
  }

  draw(samples) {
    const until = samples.length ? samples.at(-1).at_s : 0;
    const values = this.series.map(([, value]) => samples.map((each) => value(each) ?? null));
    const known = values.flat().filter((value) => value !== null);
    const { place, labels } = this.scale(known);
    this.label(labels);
    const told = values.map((each, at) => {
      const last = each.findLast((value) => value !== null);
      this.readings[at].textContent = last === undefined ? "–" : this.shown(last);
      this.paths[at].setAttribute("d", this.lineOf(samples, each, until, place));
      return `${this.series[at][0]} ${this.readings[at].textContent}`;
    });
    this.area.setAttribute("aria-label", `${this.title}: ${told.join(", ")}; at most ${this.shown(Math.max(0, ...known))}`);
  }

  lineOf(samples, values, until, place) {
    let path = "", isOpen = false;
    values.forEach((value, at) => {
      if (value !== null) {
        const x = (this.spanS - until + samples[at].at_s).toFixed(1), y = (HEIGHT * (1 - place(value))).toFixed(1);
        path += isOpen ? `L${x} ${y}` : `M${x} ${y}h.1`; // a value between two gaps is a dot
      }
      isOpen = value !== null;
    });
    return path;
  }
}

// The value of a colour of the style sheet, as the number that a canvas has for it.
export function colourOf(name) {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  context.fillRect(0, 0, 1, 1);
  return new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0];
}

// Draw one pixel for each cell; the style sheet makes them large.
export function drawCells(canvas, width, height, colourAt) {
  Object.assign(canvas, { width, height });
  const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) pixels[y * width + x] = colourAt(x, y);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

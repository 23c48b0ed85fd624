// Draw figures over the last minutes: lines with a gap where there is no value, and a raster of cells.

const NUMBERS = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const MINUTE_S = 60, HEIGHT = 100;

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

// A frame whose width is the last `spanS` seconds, with a label at each minute; `area` is drawn within it.
export function frame(figure, spanS, area) {
  const high = element("span"), middle = element("span"), low = element("span");
  const minutes = Array.from({ length: Math.floor(spanS / MINUTE_S) + 1 }, (_, each) => spanS / MINUTE_S - each);
  const times = element("div", "times", ...minutes.map((each) => element("span", "", each ? `−${each} min` : "now")));
  figure.append(element("div", "plot", element("div", "scale", high, middle, low), area, times));
  return (top, centre, bottom) => [high, middle, low].forEach((each, at) => {
    each.textContent = [top, centre, bottom][at];
  });
}

// Lines over time. Each series is [name, value of a sample]; times in seconds have the unit "s".
export class LineChart {
  constructor(figure, spanS, unit, series) {
    Object.assign(this, { spanS, unit, series });
    this.title = figure.querySelector("figcaption").textContent;
    this.paths = series.map((_, at) => svg("path", { class: `line-${at}` }));
    this.area = svg("svg", { viewBox: `0 0 ${spanS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const grid = [];
    for (let x = 0; x <= spanS; x += MINUTE_S) grid.push(`M${x} 0V${HEIGHT}`);
    for (const y of [0, HEIGHT / 2, HEIGHT]) grid.push(`M0 ${y}H${spanS}`);
    this.area.append(svg("path", { class: "grid", d: grid.join("") }), ...this.paths);
    this.readings = series.map(() => element("b"));
    figure.querySelector("figcaption").append(element("ul", "legend", ...series.map(([name], at) =>
      element("li", "", element("i", `line-${at}`), `${name} `, this.readings[at]))));
    this.label = frame(figure, spanS, this.area);
  }

  draw(samples) {
    const until = samples.length ? samples.at(-1).at_s : 0;
    const values = this.series.map(([, value]) => samples.map((each) => value(each) ?? null));
    const most = Math.max(0, ...values.flat());
    const top = roundUp(most || 1);
    const [factor, unit] = this.unit === "s" && top < 1 ? [1000, "ms"] : [1, this.unit];
    const shown = (value) => `${NUMBERS.format(factor * value)}${unit && ` ${unit}`}`;
    this.label(shown(top), shown(top / 2), shown(0));
    const told = values.map((each, at) => {
      const last = each.findLast((value) => value !== null);
      this.readings[at].textContent = last === undefined ? "–" : shown(last);
      this.paths[at].setAttribute("d", this.lineOf(samples, each, until, top));
      return `${this.series[at][0]} ${this.readings[at].textContent}`;
    });
    this.area.setAttribute("aria-label", `${this.title}: ${told.join(", ")}; at most ${shown(most)}`);
  }

  lineOf(samples, values, until, top) {
    let path = "", isOpen = false;
    values.forEach((value, at) => {
      if (value !== null) {
        const x = (this.spanS - until + samples[at].at_s).toFixed(1), y = (HEIGHT * (1 - value / top)).toFixed(1);
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

// Loss landscapes that turn together. A surface is drawn in software, triangle by triangle with a
// depth for each pixel: some 20,000 triangles take a few milliseconds, on any device, and a surface
// can be cut at a loss, and lined at its levels, exactly.
"use strict";
const START = { turn: -0.6, tilt: 0.78 };
const HEIGHT = 0.85; // of the box, whose floor reaches from -1 to 1

class Surface {
  constructor(canvas, packed, scale) {
    Object.assign(this, { canvas, scale, columns: packed.columns, rows: packed.rows, x: packed.x, y: packed.y });
    const bytes = Uint8Array.from(atob(packed.losses), (letter) => letter.charCodeAt(0));
    const steps = new DataView(bytes.buffer);
    const step = (scale.ceiling - scale.bottom) / 65535;
    this.losses = Float32Array.from({ length: bytes.length / 2 }, (_, i) => {
      const value = steps.getUint16(2 * i, true);
      return value === 65535 ? Infinity : scale.bottom + step * value;
    });
    this.layer = document.createElement("canvas");
  }

  // A point of the box to pixels, and its depth: larger is nearer.
  project(x, y, z, view, size) {
    const [sin, cos] = [Math.sin(view.turn), Math.cos(view.turn)];
    const across = x * cos - y * sin, along = x * sin + y * cos;
    const up = z - HEIGHT / 2;
    const [lift, lie] = [Math.sin(view.tilt), Math.cos(view.tilt)];
    const depth = -along * lie + up * lift;
    const zoom = (0.295 * size.width * 5) / (5 - depth);
    return [size.width * 0.53 + across * zoom, size.height * 0.47 - (along * lift + up * lie) * zoom, depth];
  }

  draw(view, top, quick) {
    const ratio = quick ? 1 : Math.min(2, Math.max(1.5, devicePixelRatio || 1));
    const size = { width: Math.round(this.canvas.clientWidth * ratio), height: Math.round(this.canvas.clientHeight * ratio) };
    if (!size.width || !size.height) return;
    if (this.canvas.width !== size.width || this.canvas.height !== size.height) Object.assign(this.canvas, size);
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, size.width, size.height);
    this.drawBox(pen, view, top, size, ratio);
    pen.drawImage(this.rasterise(view, top, size), 0, 0);
  }

  drawBox(pen, view, top, size, ratio) {
    const style = getComputedStyle(this.canvas);
    const point = (...at) => this.project(...at, view, size);
    const path = (...points) => {
      pen.beginPath();
      points.forEach((at) => pen.lineTo(...point(...at).slice(0, 2)));
      pen.stroke();
    };
    pen.lineWidth = ratio * 0.8;
    const letters = Math.min(11 * ratio, size.width / 17);
    pen.font = `${letters}px system-ui, sans-serif`;
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.fillStyle = style.getPropertyValue("--muted");
    // Of the four edges of the box the two whose walls are behind, and the leftmost for the numbers.
    const corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]];
    const back = corners.reduce((a, b) => (point(...a, 0)[2] < point(...b, 0)[2] ? a : b));
    for (let i = 0; i < 4; i++) path([...corners[i], 0], [...corners[(i + 1) % 4], 0]);
    const [bx, by] = back;
    path([bx, by, 0], [bx, by, HEIGHT]);
    for (const at of [0.5, 1]) path([-bx, by, HEIGHT * at], [bx, by, HEIGHT * at], [bx, -by, HEIGHT * at]);
    const ends = [[-bx, by], [bx, -by]];
    for (const end of ends) path([...end, 0], [...end, HEIGHT]);
    const side = ends.reduce((a, b) => (point(...a, 0)[0] < point(...b, 0)[0] ? a : b));
    // Where there is no room beside the box, a label lies on it: better than cut off.
    const write = (label, x, y, share) => {
      const wide = pen.measureText(label).width;
      pen.fillText(label, Math.max(0, Math.min(size.width - wide, x - share * wide)), Math.min(y, size.height - letters));
    };
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (const at of [0, 0.5, 1]) {
      const [x, y] = point(...side, HEIGHT * at);
      const loss = this.scale.bottom + at * (top - this.scale.bottom);
      write(loss < top / 100 ? "0" : short(loss), x - 3 * ratio, y, 1);
    }
    pen.textBaseline = "top";
    const front = [-bx, -by];
    for (const [label, x, y] of [
      [`${short(this.x[0])} to ${short(this.x[1])}`, 0, front[1]],
      [`${short(this.y[0])} to ${short(this.y[1])}`, front[0], 0],
    ]) {
      const [px, py] = point(x * 1.12, y * 1.12, 0);
      write(label, px, py + 5 * ratio, 0.5);
    }
  }

  rasterise(view, top, size) {
    const { columns, rows, losses, scale } = this;
    const { width, height } = size;
    Object.assign(this.layer, size);
    const pen = this.layer.getContext("2d");
    const image = pen.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const depths = new Float32Array(width * height).fill(-Infinity);
    const count = columns * rows;
    const px = new Float32Array(count), py = new Float32Array(count), pz = new Float32Array(count);
    const range = top - scale.bottom;
    const rise = (loss) => Math.min(2, (loss - scale.bottom) / range) * HEIGHT;
    for (let r = 0, i = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++, i++) {
        const at = this.project((2 * c) / (columns - 1) - 1, (2 * r) / (rows - 1) - 1, rise(losses[i]), view, size);
        [px[i], py[i], pz[i]] = at;
      }
    }
    const levels = scale.levels.map(rise).concat(HEIGHT); // and where it is cut
    const shades = this.shades(range);
    const triangle = (a, b, c) => {
      const za = rise(losses[a]), zb = rise(losses[b]), zc = rise(losses[c]);
      if (za > HEIGHT && zb > HEIGHT && zc > HEIGHT) return;
      const area = (px[b] - px[a]) * (py[c] - py[a]) - (px[c] - px[a]) * (py[b] - py[a]);
      if (Math.abs(area) < 1e-6) return;
      const left = Math.max(0, Math.ceil(Math.min(px[a], px[b], px[c]) - 0.5));
      const right = Math.min(width - 1, Math.floor(Math.max(px[a], px[b], px[c]) - 0.5 + 1));
      const high = Math.max(0, Math.ceil(Math.min(py[a], py[b], py[c]) - 0.5));
      const low = Math.min(height - 1, Math.floor(Math.max(py[a], py[b], py[c]) - 0.5 + 1));
      // Shares of b and c grow linearly over the picture, and so do height and depth.
      const bx = (py[c] - py[a]) / area, by = -(px[c] - px[a]) / area;
      const cx = -(py[b] - py[a]) / area, cy = (px[b] - px[a]) / area;
      const zx = bx * (zb - za) + cx * (zc - za), zy = by * (zb - za) + cy * (zc - za);
      const slope = Math.hypot(zx, zy) || 1e-9;
      const light = this.light(a, b, c, za, zb, zc);
      for (let y = high; y <= low; y++) {
        for (let x = left; x <= right; x++) {
          const dx = x + 0.5 - px[a], dy = y + 0.5 - py[a];
          const sb = bx * dx + by * dy, sc = cx * dx + cy * dy;
          if (sb < -1e-4 || sc < -1e-4 || sb + sc > 1.0001) continue;
          const z = za + sb * (zb - za) + sc * (zc - za);
          if (z > HEIGHT) continue;
          const depth = pz[a] + sb * (pz[b] - pz[a]) + sc * (pz[c] - pz[a]);
          const at = y * width + x;
          if (depth <= depths[at]) continue;
          depths[at] = depth;
          let line = 1;
          for (const level of levels) {
            const away = Math.abs(z - level) / slope; // in pixels
            if (away < 1.1) line = Math.min(line, 0.7 + 0.3 * Math.max(0, away - 0.1));
          }
          const shade = shades[Math.max(0, Math.min(1023, Math.round((z / HEIGHT) * 1023)))];
          const bright = light * line;
          pixels[at] = 0xff000000 | ((shade[2] * bright) << 16) | ((shade[1] * bright) << 8) | (shade[0] * bright);
        }
      }
    };
    for (let r = 0; r + 1 < rows; r++) {
      for (let c = 0; c + 1 < columns; c++) {
        const i = r * columns + c;
        triangle(i, i + 1, i + columns);
        triangle(i + 1, i + columns + 1, i + columns);
      }
    }
    pen.putImageData(image, 0, 0);
    return this.layer;
  }

  // Colours by height, with the levels of the legend equally far from each other.
  shades(range) {
    const { levels, colors, bottom } = this.scale;
    const [low, high] = [levels[0], levels[levels.length - 1]];
    return Array.from({ length: 1024 }, (_, i) => {
      const loss = Math.min(high, Math.max(low, bottom + (range * i) / 1023));
      const place = (Math.log(loss / low) / Math.log(high / low)) * (colors.length - 1);
      const first = Math.min(colors.length - 2, Math.floor(place));
      return colors[first].map((part, k) => part + (place - first) * (colors[first + 1][k] - part));
    });
  }

  // A lamp that stands with the surface, so that turning it does not change its shades.
  light(a, b, c, za, zb, zc) {
    const at = (i) => [(2 * (i % this.columns)) / (this.columns - 1), (2 * Math.floor(i / this.columns)) / (this.rows - 1)];
    const [ax, ay] = at(a), [bx, by] = at(b), [cx, cy] = at(c);
    const u = [bx - ax, by - ay, zb - za], v = [cx - ax, cy - ay, zc - za];
    const n = [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
    const length = Math.hypot(...n) * Math.sign(n[2] || 1);
    return 0.62 + 0.38 * Math.max(0, (n[0] * -0.45 + n[1] * -0.3 + n[2] * 0.84) / length);
  }
}

const short = (value) => String(Number(value.toPrecision(2)));

for (const group of document.querySelectorAll(".landscapes")) {
  const data = JSON.parse(document.getElementById(group.dataset.surfaces).textContent);
  const canvases = [...group.querySelectorAll("canvas")];
  const surfaces = canvases.map((canvas, i) => new Surface(canvas, data.surfaces[i], data));
  const view = { ...START };
  const cut = group.querySelector(".cut"), said = group.querySelector(".cut-at");
  const turning = group.querySelector(".turn");
  const seen = new Set(); // only what is on the screen is drawn
  let top = data.top, waiting = 0, settle = 0;

  const draw = (quick) => surfaces.forEach((surface) => seen.has(surface.canvas) && surface.draw(view, top, quick));
  const redraw = (quick = true) => {
    if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; draw(quick); });
    clearTimeout(settle);
    if (quick) settle = setTimeout(() => draw(false), 160); // sharp again when it stands still
  };
  const turn = (by, lift = 0) => {
    view.turn += by;
    view.tilt = Math.min(1.5, Math.max(0.05, view.tilt + lift));
    redraw();
  };
  const setCut = () => {
    // From an eighth of the scale to four times it; the middle is the scale itself.
    const power = (cut.value - 50) / 50;
    top = data.bottom + (data.top - data.bottom) * (power < 0 ? 8 ** power : 4 ** power);
    said.textContent = short(top);
    redraw();
  };

  for (const canvas of canvases) {
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      stop();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (canvas.hasPointerCapture(event.pointerId)) turn(event.movementX * 0.01, event.pointerType === "touch" ? 0 : event.movementY * 0.008);
    });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
      if (by) { event.preventDefault(); turn(...by); }
    });
  }
  const stop = () => turning.setAttribute("aria-pressed", "false");
  turning.addEventListener("click", () => {
    const on = turning.getAttribute("aria-pressed") !== "true";
    turning.setAttribute("aria-pressed", String(on));
    const go = () => {
      if (turning.getAttribute("aria-pressed") !== "true") return;
      turn(0.006);
      requestAnimationFrame(go);
    };
    if (on) go();
  });
  group.querySelector(".reset").addEventListener("click", () => {
    stop();
    Object.assign(view, START);
    cut.value = 50;
    setCut();
  });
  cut.addEventListener("input", setCut);
  setCut();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target);
    redraw(false);
  }, { rootMargin: "200px" });
  const sizes = new ResizeObserver(() => redraw(false));
  for (const canvas of canvases) {
    watcher.observe(canvas);
    sizes.observe(canvas);
  }
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => {
      if (matchMedia("print").matches) canvases.forEach((canvas) => seen.add(canvas));
      draw(false);
    });
  }
}

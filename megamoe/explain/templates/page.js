"use strict";
(() => {
  const { drawings } = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const HUES = [214, 152, 38, 280, 190, 330, 96, 18];

  // Position <-> coordinates, from the layout's digits, as reference.layouts does it.
  function placer(layout) {
    const digits = Object.fromEntries(layout.digits.map((d) => [d.name, d]));
    const parts = {};
    for (const d of layout.digits) if (d.part_of !== d.name) (parts[d.part_of] ||= []).push(d);
    const value = (name, found) => name in found ? found[name]
      : parts[name].reduce((sum, p) => sum + value(p.name, found) * (p.weight / (digits[name]?.weight ?? 1)), 0);
    function locate(position) {
      const found = {};
      let ok = true;
      for (const dim of layout.memory) {
        const within = Math.floor(position / dim.stride) % dim.room;
        dim.digits.forEach((name, i) => {
          const d = digits[name];
          let v = Math.floor(within / (d.stride / dim.stride));
          if (i > 0) v %= d.room;
          found[name] = v;
          if (v >= d.size) ok = false;
        });
      }
      for (const d of layout.digits) if (!(d.name in found)) { found[d.name] = value(d.name, found); if (found[d.name] >= d.size) ok = false; }
      const axes = {};
      for (const axis of layout.axes) {
        axes[axis.name] = axis.name in found ? found[axis.name] : value(axis.name, found);
        if (axes[axis.name] >= axis.size) ok = false;
      }
      return ok ? { axes, digits: found } : null;
    }
    const leaves = layout.digits.filter((d) => d.stored);
    function digitValue(d, index) {
      if (d.part_of === d.axis || d.part_of === d.name) return Math.floor(index / d.weight) % d.size;
      const up = digits[d.part_of];
      return Math.floor(digitValue(up, index) / (d.weight / up.weight)) % d.size;
    }
    const offset = (indices) => leaves.reduce((sum, d) => sum + digitValue(d, indices[d.axis]) * d.stride, 0);
    return { locate, offset };
  }

  // The three ways to lay the units out as a matrix: name, rows, columns, (row, column) -> position, or -1.
  function viewsOf(data, place) {
    const { axes, shape, strides, per } = data.layout;
    const product = (list) => list.reduce((a, b) => a * b, 1);
    const lead = axes.slice(0, -1), last = axes[axes.length - 1];
    const logical = {
      name: "logical", label: `${lead.map((a) => a.name).join(" × ") || "—"} by ${last.name}`, rows: product(lead.map((a) => a.size)), columns: last.size,
      at(r, c) {
        const indices = { [last.name]: c };
        for (let i = lead.length - 1; i >= 0; i--) { indices[lead[i].name] = r % lead[i].size; r = Math.floor(r / lead[i].size); }
        return place.offset(indices);
      },
    };
    const stored = {
      name: "stored", label: "the tensor as stored", rows: product(shape.slice(0, -1)), columns: (shape[shape.length - 1] || 1) * per,
      at(r, c) {
        let position = Math.floor(c / per) * strides[strides.length - 1] + c % per;
        for (let i = shape.length - 2; i >= 0; i--) { position += (r % shape[i]) * strides[i]; r = Math.floor(r / shape[i]); }
        return position < data.units ? position : -1;
      },
    };
    const width = data.bits === 4 ? 128 : Math.max(8, 512 / data.bits);
    const memory = {
      name: "memory", label: "memory, 64 bytes a line", rows: Math.ceil(data.units / width), columns: width,
      at: (r, c) => (r * width + c < data.units ? r * width + c : -1),
    };
    return [logical, stored, memory];
  }

  function unitsOf(data) {
    const size = Math.max(1, data.bits / 8), cache = {};
    const chunk = (number) => {
      if (!(number in cache)) cache[number] = data.chunks[number] ? data.chunks[number].map(bytesOf) : null;
      return cache[number];
    };
    return (position) => {
      const found = chunk(Math.floor(position / data.chunk));
      if (!found) return null;
      const at = (position % data.chunk) * size;
      const hex = (bytes) => {
        let text = "";
        for (let i = size - 1; i >= 0; i--) text += bytes[at + i].toString(16).padStart(2, "0");
        return data.bits === 4 ? text[1] : text;
      };
      const same = () => { for (let i = 0; i < size; i++) if (found[0][at + i] !== found[1][at + i]) return false; return true; };
      return { expected: hex(found[0]), actual: hex(found[1]), same: same(), bytes: [found[0].subarray(at, at + size), found[1].subarray(at, at + size)] };
    };
  }

  function decoded(data, bytes) {
    if (data.values) return data.values[data.bits === 4 ? bytes[0] & 15 : bytes[0]];
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (data.code === "float32") return view.getFloat32(0, true);
    if (data.code === "bfloat16") { const wide = new DataView(new ArrayBuffer(4)); wide.setUint16(0, view.getUint16(0, true)); return wide.getFloat32(0); }
    if (data.bits === 64) return view.getBigInt64(0, true).toString();
    if (data.bits === 32) return view.getInt32(0, true);
    if (data.bits === 16) return view.getInt16(0, true);
    return bytes[0];
  }
  const shown = (v) => typeof v === "number" ? String(Number(v.toPrecision(9))) : v;

  function draw(section, data) {
    const place = placer(data.layout), views = viewsOf(data, place), unit = unitsOf(data);
    const shades = bytesOf(data.density.shades);
    const holder = section.querySelector(".drawing");
    holder.innerHTML = `<div class="tools"><select title="How the units are laid out">${views.map((v, i) => `<option value="${i}"${i === (data.padding ? 1 : 0) ? " selected" : ""}>${v.label}</option>`).join("")}</select>
      <button data-do="fit">Whole</button><button data-do="in">+</button><button data-do="out">−</button><button data-do="next">Next difference</button>
      <span class="count where"></span></div>
      <div class="stage"><canvas class="map"></canvas><div class="probe">Point at a cell; scroll to zoom down to bytes, drag to move.</div></div>
      <div class="legend"></div><div class="axes"></div>`;
    const canvas = holder.querySelector("canvas"), probe = holder.querySelector(".probe"), where = holder.querySelector(".where");
    const pen = canvas.getContext("2d");
    let view = views[data.padding ? 1 : 0], zoomX = 1, zoomY = 1, left = 0, top = 0, current = -1, marked = null;
    const tint = ["half", "page", "strip", "tile", "j", "block", "batch", "word"].find((n) => data.layout.digits.some((d) => d.name === n && d.size > 1));
    const legend = [["equal", "var(--card)"], ["differs", css("--bad")], ["padding", css("--line")]];
    holder.querySelector(".legend").innerHTML = legend.map(([t, c]) => `<span><i style="background:${c}"></i>${t}</span>`).join("") +
      `<span>far out: the share of differing units</span>` + (tint ? `<span>tint: ${tint}</span>` : "") +
      (data.layout.expression ? `<span class="mono">${data.layout.expression.replace(/</g, "&lt;").replace(/->/g, "→")}</span>` : "");

    function size() { const box = canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1; canvas.width = box.width * ratio; canvas.height = box.height * ratio; pen.setTransform(ratio, 0, 0, ratio, 0, 0); return box; }
    function fit() { const box = size(); zoomX = box.width / view.columns; zoomY = box.height / view.rows; left = top = 0; if (zoomX > 52) zoomX = 52; if (zoomY > 30) zoomY = 30; paint(); }
    function paint() {
      const box = size();
      pen.fillStyle = css("--bg"); pen.fillRect(0, 0, box.width, box.height);
      const bad = css("--bad"), card = css("--card"), line = css("--line"), ink = css("--ink"), soft = css("--soft"), dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const r0 = Math.max(0, Math.floor(top)), r1 = Math.min(view.rows, Math.ceil(top + box.height / zoomY));
      const c0 = Math.max(0, Math.floor(left)), c1 = Math.min(view.columns, Math.ceil(left + box.width / zoomX));
      const cells = (r1 - r0) * (c1 - c0);
      if (cells > 40000 && view.name === "logical") {
        const { rows, columns } = data.density;
        pen.fillStyle = card; pen.fillRect(-left * zoomX, -top * zoomY, view.columns * zoomX, view.rows * zoomY);
        const h = view.rows / rows * zoomY, w = view.columns / columns * zoomX;
        for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
          const shade = shades[r * columns + c];
          if (!shade) continue;
          pen.globalAlpha = 0.25 + 0.75 * shade / 255; pen.fillStyle = bad;
          const x = Math.floor(c * w - left * zoomX), y = Math.floor(r * h - top * zoomY);
          pen.fillRect(x, y, Math.max(1, Math.floor((c + 1) * w - left * zoomX) - x), Math.max(1, Math.floor((r + 1) * h - top * zoomY) - y));
        }
        pen.globalAlpha = 1;
      } else {
        const stepR = Math.max(1, Math.floor(1 / zoomY)), stepC = Math.max(1, Math.floor(1 / zoomX));
        const text = zoomX >= (data.bits > 16 ? 64 : data.bits > 8 ? 38 : 22) && zoomY >= 20;
        pen.textAlign = "center"; pen.textBaseline = "middle";
        for (let r = r0; r < r1; r += stepR) for (let c = c0; c < c1; c += stepC) {
          const x = (c - left) * zoomX, y = (r - top) * zoomY, w = zoomX * stepC, h = zoomY * stepR, position = view.at(r, c);
          if (position < 0) continue;
          const found = unit(position), at = place.locate(position);
          if (!at) { pen.fillStyle = line; }
          else {
            const v = tint ? (at.digits[tint] ?? at.axes[tint] ?? 0) : 0;
            pen.fillStyle = tint ? `hsl(${HUES[v % HUES.length]} ${dark ? "30% 22%" : "60% 94%"})` : card;
          }
          pen.fillRect(x, y, w, h);
          if (found && !found.same) { pen.fillStyle = bad; pen.globalAlpha = text ? 0.22 : 0.85; pen.fillRect(x, y, w, h); pen.globalAlpha = 1; }
          if (!found && at) {
            const { rows, columns } = data.density, L = views[0];
            let row = 0; for (const a of data.layout.axes.slice(0, -1)) row = row * a.size + at.axes[a.name];
            const shade = shades[Math.floor(row * rows / L.rows) * columns + Math.floor(at.axes[data.layout.axes[data.layout.axes.length - 1].name] * columns / L.columns)];
            if (shade) { pen.globalAlpha = 0.15 + 0.5 * shade / 255; pen.fillStyle = bad; pen.fillRect(x, y, w, h); pen.globalAlpha = 1; }
          }
          if (zoomX > 5 && zoomY > 5) { pen.strokeStyle = line; pen.lineWidth = 1; pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1); }
          if (text && found) {
            const digits = found.expected.length, font = Math.min(13, zoomY * (found.same ? 0.55 : 0.42), zoomX / digits * 1.5);
            pen.font = `${font}px ${css("--mono")}`;
            if (found.same) { pen.fillStyle = at ? soft : soft; pen.fillText(found.expected, x + w / 2, y + h / 2 + 0.5); }
            else { pen.fillStyle = ink; pen.fillText(found.expected, x + w / 2, y + h * 0.29); pen.fillStyle = bad; pen.font = `bold ${font}px ${css("--mono")}`; pen.fillText(found.actual, x + w / 2, y + h * 0.74); }
          }
        }
      }
      if (marked) { pen.strokeStyle = css("--accent"); pen.lineWidth = 2; pen.strokeRect((marked[1] - left) * zoomX, (marked[0] - top) * zoomY, Math.max(zoomX, 3), Math.max(zoomY, 3)); }
      where.textContent = `rows ${r0} to ${r1 - 1} of ${view.rows}, columns ${c0} to ${c1 - 1} of ${view.columns}`;
    }
    function explainCell(r, c) {
      const position = r >= 0 && r < view.rows && c >= 0 && c < view.columns ? view.at(r, c) : -1;
      if (position < 0) return;
      const at = place.locate(position), found = unit(position);
      const rows = at ? [...Object.entries(at.axes), ...Object.entries(at.digits).filter(([n]) => !(n in at.axes))] : [["", "padding: no element"]];
      let html = `<dl>${rows.map(([n, v]) => `<dt>${n}</dt><dd>${v}</dd>`).join("")}<dt>offset</dt><dd>byte ${Math.floor(position * data.bits / 8)}${data.bits === 4 ? (position % 2 ? ", bits 7..4" : ", bits 3..0") : ""}</dd></dl>`;
      html += found ? `<dl class="both"><dt>expected</dt><dd style="color:var(--good)">0x${found.expected} = ${shown(decoded(data, found.bytes[0]))}</dd><dt>actual</dt><dd style="color:var(${found.same ? "--good" : "--bad"})">0x${found.actual} = ${shown(decoded(data, found.bytes[1]))}</dd></dl>`
        : `<p class="both count">These bytes are not in the page: only stretches with differences are, up to a budget.</p>`;
      probe.innerHTML = html;
    }
    const cellAt = (event) => { const box = canvas.getBoundingClientRect(); return [Math.floor(top + (event.clientY - box.top) / zoomY), Math.floor(left + (event.clientX - box.left) / zoomX)]; };
    function zoom(factor, x, y) {
      whole = false;
      const box = canvas.getBoundingClientRect(); x ??= box.width / 2; y ??= box.height / 2;
      const cx = left + x / zoomX, cy = top + y / zoomY, most = data.bits > 16 ? 96 : 44;
      zoomX = Math.min(most, Math.max(box.width / view.columns / 1.5, zoomX * factor)); zoomY = Math.min(44, Math.max(box.height / view.rows / 1.5, zoomY * factor));
      left = cx - x / zoomX; top = cy - y / zoomY; keep(box); paint();
    }
    function keep(box) { left = Math.max(0, Math.min(left, view.columns - box.width / zoomX)); top = Math.max(0, Math.min(top, view.rows - box.height / zoomY)); if (left < 0) left = 0; if (top < 0) top = 0; }
    function show(position) {
      whole = false;
      const at = place.locate(position);
      let r = 0, c = 0;
      if (!at && view.name === "logical") { view = views[1]; holder.querySelector("select").value = "1"; }
      if (view.name === "logical") { if (!at) return; for (const a of data.layout.axes.slice(0, -1)) r = r * a.size + at.axes[a.name]; c = at.axes[data.layout.axes[data.layout.axes.length - 1].name]; }
      else if (view.name === "memory") { r = Math.floor(position / view.columns); c = position % view.columns; }
      else {
        const { shape, strides, per } = data.layout;
        // The stored matrix has few dimensions: find the row and column by walking them from the slowest.
        let rest = position, index = new Array(shape.length).fill(0);
        const order = shape.map((_, i) => i).sort((a, b) => strides[b] - strides[a]);
        for (const i of order) { index[i] = Math.min(shape[i] - 1, Math.floor(rest / strides[i])); rest -= index[i] * strides[i]; }
        for (let i = 0; i < shape.length - 1; i++) r = r * shape[i] + index[i];
        c = index[shape.length - 1] * per + rest;
      }
      const box = canvas.getBoundingClientRect();
      zoomX = data.bits > 16 ? 72 : data.bits > 8 ? 40 : 28; zoomY = 28;
      left = Math.round(c - box.width / zoomX / 2); top = Math.round(r - box.height / zoomY / 2); keep(box);
      marked = [r, c]; paint(); explainCell(r, c);
    }
    let drag = null, whole = true;  // whole: nothing was zoomed yet
    canvas.addEventListener("wheel", (e) => { e.preventDefault(); const box = canvas.getBoundingClientRect(); zoom(e.deltaY < 0 ? 1.25 : 0.8, e.clientX - box.left, e.clientY - box.top); }, { passive: false });
    canvas.addEventListener("pointerdown", (e) => { drag = [e.clientX, e.clientY]; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("pointermove", (e) => {
      if (drag) { left -= (e.clientX - drag[0]) / zoomX; top -= (e.clientY - drag[1]) / zoomY; drag = [e.clientX, e.clientY]; keep(canvas.getBoundingClientRect()); paint(); }
      const [r, c] = cellAt(e); explainCell(r, c);
    });
    canvas.addEventListener("dblclick", (e) => { const box = canvas.getBoundingClientRect(); zoom(3, e.clientX - box.left, e.clientY - box.top); });
    holder.querySelector("select").addEventListener("change", (e) => { view = views[+e.target.value]; marked = null; fit(); });
    holder.querySelector(".tools").addEventListener("click", (e) => {
      const what = e.target.dataset?.do;
      if (what === "fit") { marked = null; whole = true; fit(); } if (what === "in") zoom(1.6); if (what === "out") zoom(0.625);
      if (what === "next") { current = (current + 1) % data.first.length; show(data.first[current]); }
    });
    holder.querySelector(".axes").innerHTML = data.axes.map((axis) => {
      const most = Math.max(1, ...axis.counts), w = 100 / axis.counts.length;
      const bars = axis.counts.map((n, i) => n ? `<rect x="${(i * w).toFixed(3)}" y="${(44 - 42 * n / most).toFixed(2)}" width="${Math.max(0.15, w - (w > 1 ? 0.2 : 0)).toFixed(3)}" height="${(42 * n / most).toFixed(2)}" fill="var(--bad)"/>` : "").join("");
      return `<figure><figcaption><b>${axis.name}</b> 0 to ${axis.size - 1}${axis.words ? ": " + axis.words : ""}</figcaption><svg viewBox="0 0 100 46" preserveAspectRatio="none"><line x1="0" y1="44.5" x2="100" y2="44.5" stroke="var(--line)"/>${bars}</svg></figure>`;
    }).join("");
    fit();
    addEventListener("resize", () => (whole ? fit() : paint()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    return { show, fit };
  }

  const sections = [...document.querySelectorAll("section[data-output]")];
  const taken = new Set();
  window.megamoe = drawings.map((data) => {
    const section = sections.find((s) => s.dataset.output === data.name && !taken.has(s));
    if (!section) return null;
    taken.add(section);
    return draw(section, data);
  });
  // #output@position opens the page at that unit.
  const [name, position] = decodeURIComponent(location.hash.slice(1)).split("@");
  const number = drawings.findIndex((d) => d.name === name);
  if (number >= 0 && position !== undefined) window.megamoe[number]?.show(+position);
})();

"use strict";
// The numbers under the pointer, read from the table that stands under each chart.
for (const chart of document.querySelectorAll("figure[data-box]")) {
  const [left, right, bottom, top] = chart.dataset.box.split(" ").map(Number);
  const [low, high] = chart.dataset.limits.split(" ").map(Number);
  const drawing = chart.querySelector(".drawing");
  const names = [...chart.querySelectorAll("thead th")].map((cell) => cell.textContent);
  const rows = [...chart.querySelectorAll("tbody tr")].map((row) =>
    [...row.cells].map((cell) => cell.textContent));
  const xs = rows.map((row) => Number(row[0]));
  const tip = document.querySelector(".tip");
  const rule = drawing.appendChild(document.createElement("div"));
  rule.className = "rule";
  rule.hidden = true;

  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const wanted = low + ((share - left) / (right - left)) * (high - low);
    let nearest = 0;
    xs.forEach((x, i) => {
      if (Math.abs(x - wanted) < Math.abs(xs[nearest] - wanted)) nearest = i;
    });
    const at = left + ((xs[nearest] - low) / (high - low)) * (right - left);
    rule.style.left = `${100 * at}%`;
    rule.style.top = `${100 * (1 - top)}%`;
    rule.style.height = `${100 * (top - bottom)}%`;
    const lines = names.slice(1).map((name, i) => {
      const line = document.createElement("span");
      const value = document.createElement("span");
      value.textContent = rows[nearest][i + 1] || "–";
      line.append(name, value);
      return line;
    });
    const head = document.createElement("b");
    head.textContent = `${names[0]} ${rows[nearest][0]}`;
    tip.replaceChildren(head, ...lines);
    tip.hidden = rule.hidden = false;
    const x = Math.min(event.pageX + 16, scrollX + innerWidth - tip.offsetWidth - 12);
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${event.pageY - tip.offsetHeight - 14}px`;
  });
  drawing.addEventListener("pointerleave", () => {
    tip.hidden = rule.hidden = true;
  });
}
// On paper nothing can be opened: all of it is.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll(".commands details, .common")) {
    const details = part.closest("details");
    if (!details.open) { details.open = true; details.dataset.printed = ""; }
  }
});
addEventListener("afterprint", () => {
  for (const details of document.querySelectorAll("details[data-printed]")) {
    details.open = false;
    delete details.dataset.printed;
  }
});

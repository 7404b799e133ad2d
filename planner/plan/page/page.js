// Moves a cursor over the step and tells what is alive there; lets a slider choose a point of the curve. All that it
// shows is in the page already: without it the fullest moment is told, and the curve's points are radio buttons.
"use strict";
for (const page of document.querySelectorAll(".autopar")) {
  const steps = page.querySelector(".steps .data");
  if (steps) cursor(steps.closest(".steps"), JSON.parse(steps.textContent));
  const curve = page.querySelector(".curve");
  if (curve) slider(curve);
}

function cursor(card, data) {
  const control = card.querySelector(".cursor"), line = card.querySelector(".line"), alive = card.querySelector(".alive");
  const select = card.querySelector(".choose select"), labels = [...alive.querySelectorAll(".uses [data-use]")];
  let rank = data.shown;

  const shown = () => data.ranks[rank].at;
  const place = seconds => Math.round(1000 * seconds / data.end);
  function number() { // of the stretch at the cursor: the last one that begins before it
    const at = shown(), now = (Number(control.value) + 0.5) * data.end / 1000;
    let low = 0, high = at.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (at[middle][0] <= now) low = middle; else high = middle - 1;
    }
    return low;
  }
  function show() {
    const [start, what, fullest, state] = shown()[number()], [uses, largest] = data.states[state];
    const total = uses.reduce((sum, size) => sum + size, 0);
    line.style.left = Number(control.value) / 10 + "%";
    const when = alive.querySelector(".when");
    const bold = document.createElement("b");
    bold.textContent = inBytes(total);
    when.replaceChildren(bold, ` at ${inSeconds(start)} on ${data.ranks[rank].title}: ${data.words[what]}`);
    control.setAttribute("aria-valuetext", when.textContent);
    for (const part of labels) {
      const size = uses[part.dataset.use];
      part.hidden = !size;
      if (part.tagName === "I") part.style.width = 100 * size / (total || 1) + "%";
      else part.querySelector("b").textContent = inBytes(size);
      const share = part.querySelector(".share");
      if (share) share.textContent = inPercent(size / (total || 1));
    }
    alive.querySelector("tbody").replaceChildren(...largest.map(([name, size]) => {
      const row = document.createElement("tr"), cells = [data.words[name], inBytes(size)];
      row.append(...cells.map((text, column) => {
        const cell = document.createElement("td");
        cell.textContent = text;
        if (column) cell.className = "n";
        return cell;
      }));
      return row;
    }));
  }
  function choose() {
    rank = Number(select.value);
    for (const each of card.querySelectorAll(".memory")) each.hidden = Number(each.dataset.rank) !== rank;
    show();
  }

  for (const each of card.querySelectorAll(".over-time [hidden].line, .over-time [hidden].cursor, .choose[hidden]"))
    each.hidden = false;
  const fullest = data.ranks[rank].fullest, next = shown()[fullest + 1];
  control.value = place((shown()[fullest][0] + (next ? next[0] : data.end)) / 2);
  control.addEventListener("input", show);
  control.addEventListener("pointermove", event => {
    const box = control.getBoundingClientRect();
    control.value = Math.round(1000 * (event.clientX - box.left) / box.width);
    show();
  });
  if (select) select.addEventListener("change", choose);
  show();
}

function slider(curve) {
  const points = [...curve.querySelectorAll(".pick")], control = curve.querySelector(".slide");
  if (!control) return;
  const follow = () => {
    const number = points.findIndex(point => point.checked);
    control.value = number;
    control.setAttribute("aria-valuetext", points[number].getAttribute("aria-label"));
  };
  control.closest("[hidden]").hidden = false;
  control.addEventListener("input", () => { points[Number(control.value)].checked = true; follow(); });
  for (const point of points) point.addEventListener("change", follow);
  follow();
}

// As planner/base/formatting.py writes them.
function inBytes(count) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return (count / size).toFixed(1) + " " + unit;
  return count.toFixed(0) + " B";
}
function inSeconds(seconds) {
  if (seconds >= 1) return seconds.toFixed(2) + " s";
  for (const [unit, size] of [["ms", 1e-3], ["us", 1e-6]])
    if (seconds >= size) return (seconds / size).toFixed(1) + " " + unit;
  return seconds ? (seconds / 1e-6).toFixed(2) + " us" : "0 s";
}
function inPercent(share) {
  return 0 < share && share < 0.005 ? "< 1 %" : (100 * share).toFixed(0) + " %";
}

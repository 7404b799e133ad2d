// What somebody sees of a page: sizes, labels that lie on each other, and text that can hardly be read.
const width = document.documentElement.clientWidth;
const visible = element => element.checkVisibility() && element.getBoundingClientRect().height > 0;
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)].filter(visible);

function scrolls(element) { // whether it stands in a part that scrolls by itself
  return element.closest(".wide") !== null;
}
function channels(colour) {
  const context = channels.context ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data];
}
function luminance(colour) { // https://www.w3.org/TR/WCAG21/#dfn-relative-luminance
  const [red, green, blue] = colour.map(value => value / 255)
    .map(value => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
function behind(element) {
  for (let each = element; each; each = each.parentElement) {
    const colour = channels(getComputedStyle(each).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255, 255];
}
function contrast(element) { // https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio
  const [dark, light] = [channels(getComputedStyle(element).color), behind(element)].map(luminance).sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}
const said = all(".autopar *").filter(element => !element.closest("svg") &&
  [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim()));
const texts = new Map(said.map(element => [getComputedStyle(element).color + behind(element), element]));
const outside = [...all(".card, h1, .pill, .over-time .row, .ticks span, .alive *, .tree *, .axes *"), ...said]
  .filter(element => !scrolls(element))
  .filter(element => {
    const box = element.getBoundingClientRect();
    return box.left < -0.5 || box.right > width + 0.5;
  });
const overlapping = all(".track, .ticks").flatMap(track => {
  const boxes = all("span", track).map(span => span.getBoundingClientRect());
  return boxes.filter((box, at) => boxes.slice(0, at).some(other => box.left < other.right && other.left < box.right &&
    box.top + 2 < other.bottom && other.top + 2 < box.bottom));
});
const plot = document.querySelector(".over-time").getBoundingClientRect();
const svg = all(".over-time svg").map(each => each.getBoundingClientRect());
return {
  titles: all("h2").map(title => title.textContent),
  page: document.documentElement.scrollWidth,
  outside: outside.map(element => element.className + " " + element.textContent.slice(0, 40)),
  overlapping: overlapping.length,
  unaligned: svg.filter(box => Math.abs(box.left - plot.left) > 0.5 || Math.abs(box.right - plot.right) > 0.5).length,
  drawings: svg.length,
  areas: all(".memory path").length,
  fainter: [...texts.values()].filter(element => contrast(element) < 4.5)
    .map(element => `${element.className} ${element.textContent.slice(0, 30)} ${contrast(element).toFixed(2)}`),
  back: luminance(channels(getComputedStyle(document.querySelector(".autopar")).backgroundColor)),
  when: document.querySelector(".when")?.textContent,
  elements: document.getElementsByTagName("*").length,
  requests: performance.getEntriesByType("resource").length,
};

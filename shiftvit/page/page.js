() => {
  // Where an image is after it moved by `by` pixels. A circular shift comes back on the other side, a standard one ends
  // at the border. Whatever was typed beside a slider (nothing, a fraction, too much) becomes a shift.
  window.shifted = (dx, dy, kind, size, by) => [dx, dy].map((from, axis) => {
    const side = size[axis], half = Math.floor(side / 2), to = (Math.round(from) || 0) + by[axis];
    if (kind === "standard") return Math.min(Math.max(to, -half), side - half - 1);
    return ((to + half) % side + side) % side - half;
  });

  const buttons = {ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down"};
  window.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input:not([type=range]), textarea, select, [role=tab], [contenteditable=true]");
    if (!(event.key in buttons) || typing || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...document.querySelectorAll(`[id$="-${buttons[event.key]}"]`)];
    const button = all.find((each) => each.offsetParent);  // of the tab that is open
    if (!button) return;
    event.preventDefault();  // neither does the page scroll, nor the slider that has the focus move by itself
    event.stopPropagation();
    button.click();
  }, true);

  let drag = null;
  window.addEventListener("pointerdown", (event) => {
    const picture = event.target.closest?.(".picture");
    if (!picture || !event.isPrimary || event.button) return;
    const view = picture.closest('[id$="-view"]'), tab = view.id.replace("-view", "");
    const at = (axis) => Number(document.querySelector(`#${tab}-${axis} input[type=range]`).value);
    const scale = picture.querySelector("img").naturalWidth / picture.getBoundingClientRect().width;
    drag = {tab, scale, x: event.clientX, y: event.clientY, from: [at("dx"), at("dy")], to: ""};
    view.setPointerCapture(event.pointerId);  // the picture inside is replaced while it moves
  });
  window.addEventListener("pointermove", (event) => {
    if (!drag || !event.isPrimary) return;
    const moved = [event.clientX - drag.x, event.clientY - drag.y];
    window.dragged = drag.from.map((from, axis) => from + Math.round(moved[axis] * drag.scale));
    if (drag.to === String(window.dragged)) return;
    drag.to = String(window.dragged);
    document.getElementById(`${drag.tab}-drag`).click();
  });
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { drag = null; });

  document.body.dataset.keys = "ready";
}

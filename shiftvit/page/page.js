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
    const typing = event.target.closest?.("input:not([type=range], [type=radio]), textarea, select, [role=tab]");
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

  // The tab pan: everything of a frame hangs on --x, --y and --t; the words come with the frames.
  const show = (pan, index) => {
    if (pan.source !== pan.dataset.frames) pan.frames = JSON.parse(pan.source = pan.dataset.frames);  // another picture
    const frames = pan.frames, frame = frames[index];
    pan.index = index;
    for (const [name, value] of [["--x", frame[0]], ["--y", frame[1]], ["--t", index / (frames.length - 1)]])
      pan.style.setProperty(name, value);
    pan.querySelector(".time").value = index;
    pan.querySelectorAll(".verdicts > div").forEach((verdict, model) => {
      const [name, sure, right] = frame.slice(2 + 3 * model);
      verdict.querySelector(".now").textContent = name;
      verdict.querySelector(".sure").textContent = sure;
      verdict.classList.toggle("yes", right);
      verdict.classList.toggle("no", !right);
    });
  };
  let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  setInterval(() => {
    for (const pan of document.querySelectorAll(".pan")) {
      pan.querySelector(".play").textContent = playing ? "pause" : "play";
      if (pan.source !== pan.dataset.frames) show(pan, 0);
      else if (playing && pan.offsetParent) show(pan, (pan.index + 1) % pan.frames.length);
    }
  }, 90);
  document.addEventListener("click", (event) => { if (event.target.closest?.(".pan .play")) playing = !playing; });
  document.addEventListener("input", (event) => {
    if (!event.target.matches?.(".pan .time")) return;
    playing = false;
    show(event.target.closest(".pan"), Number(event.target.value));
  });

  document.body.dataset.keys = "ready";
}

() => {
  const buttons = {ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down"};
  const move = (event) => {
    const typing = event.target.closest?.("input:not([type=range]), textarea, select, [contenteditable=true]");
    if (!(event.key in buttons) || typing || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();  // neither does the page scroll, nor the slider that has the focus move by itself
    event.stopPropagation();
    document.getElementById(buttons[event.key]).click();
  };
  window.addEventListener("keydown", move, true);
  document.body.dataset.keys = "ready";
}

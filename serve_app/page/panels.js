// Panels that a button opens beside the view: settings, and on narrow screens the chats. On a phone each is a full sheet.

/** Gives each button with `aria-expanded` its panel. */
export function startPanels() {
  for (const button of document.querySelectorAll('[aria-controls][aria-expanded]')) {
    const panel = document.getElementById(button.getAttribute('aria-controls'));
    const set = open => {
      button.ariaExpanded = open;
      panel.classList.toggle('open', open);
      if (panel.classList.contains('settings')) panel.hidden = !open;
      if (open) panel.focus();
      else if (panel.contains(document.activeElement)) button.focus();
    };
    button.addEventListener('click', () => set(button.ariaExpanded !== 'true'));
    panel.querySelector('.close').addEventListener('click', () => {
      set(false);
      button.focus();
    });
    panel.addEventListener('keydown', event => {
      if (event.key !== 'Escape' || button.ariaExpanded !== 'true') return;
      event.stopPropagation(); // it stops no answer
      set(false);
    });
    panel.addEventListener('chosen', () => set(false)); // a chat was opened, or a new one
  }
}

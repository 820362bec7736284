// Elements, made of text nodes only: nothing here is ever parsed as HTML (markdown.js has what is).

/** `element('p', { className: 'x' }, 'text', child)` */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function quietButton(label, onClick) {
  const button = element('button', { type: 'button', className: 'quiet' }, label);
  button.addEventListener('click', onClick);
  return button;
}

/** Shows `text` on a button for a moment. */
export function flash(button, text) {
  button.dataset.label ??= button.textContent;
  button.textContent = text;
  clearTimeout(button.flashing);
  button.flashing = setTimeout(() => (button.textContent = button.dataset.label), 1500);
}

/** Copies `text`, also where the browser has no clipboard for scripts (plain HTTP from another machine). */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element('textarea', { value: text, className: 'copied' });
  document.body.append(box);
  box.select();
  document.execCommand('copy');
  box.remove();
}

/** A button that copies `text()`. */
export function copyButton(text) {
  const button = quietButton('Copy', async () => {
    await copyText(text());
    flash(button, 'Copied');
  });
  return button;
}

/** Keeps the end of `box` in view while `change()` lengthens it, unless the reader has scrolled away. */
export function following(box, change) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

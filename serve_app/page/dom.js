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

/** A button that copies `text()`; nothing where the browser has no clipboard (plain HTTP from another machine). */
export function copyButton(text) {
  if (!navigator.clipboard) return '';
  const button = quietButton('Copy', async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = 'Copied';
    setTimeout(() => (button.textContent = 'Copy'), 1500);
  });
  return button;
}

/** Keeps the end of `box` in view while `change()` lengthens it, unless the reader has scrolled away. */
export function following(box, change) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

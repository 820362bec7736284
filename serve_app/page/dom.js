// Elements, made of text nodes only: nothing that a model or a server sends is ever parsed as HTML.

/** `element('p', { className: 'x' }, 'text', child)` */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** A button that copies `text()`; nothing where the browser has no clipboard (plain HTTP from another machine). */
export function copyButton(text) {
  if (!navigator.clipboard) return '';
  const button = element('button', { type: 'button', className: 'quiet', textContent: 'Copy' });
  button.addEventListener('click', async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = 'Copied';
    setTimeout(() => (button.textContent = 'Copy'), 1500);
  });
  return button;
}

/** The fields of a settings form as those of an API request; empty ones are left to the server. */
export function settings(form) {
  const fields = {};
  for (const { name, type, value, checked } of form.elements) {
    if (!name || !value || (type === 'checkbox' && !checked)) continue;
    fields[name] = type === 'textarea' ? value.split('\n').filter(Boolean).map(withBreaks) : Number(value);
  }
  return fields;
}

const withBreaks = line => line.replaceAll('\\n', '\n');

/** Wires a form whose one button starts `answer(text, signal)` and, until that settles, stops it. Returns what stops it. */
export function composer(form, answer) {
  const [box, button] = [form.querySelector('textarea'), form.querySelector('button')];
  const label = button.textContent;
  let running = null;
  form.addEventListener('submit', async event => {
    event.preventDefault();
    if (running) return running.abort();
    const text = box.value;
    if (!text.trim()) return box.focus();
    running = new AbortController();
    button.textContent = 'Stop';
    try {
      await answer(text, running.signal);
    } finally {
      running = null;
      button.textContent = label;
    }
  });
  box.addEventListener('keydown', event => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) form.requestSubmit();
  });
  document.addEventListener('keydown', event => {
    if (event.key === 'Escape' && !form.closest('[hidden]')) running?.abort();
  });
  return () => running?.abort();
}

/** Keeps the end of `box` in view while `change()` lengthens it, unless the reader has scrolled away. */
export function following(box, change) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/**
 * Shows `text` with its code blocks, inline code, bold words and headings. Blocks that did not change stay as they are:
 * a stream costs its last block only, and a selection outlives it.
 */
export function render(target, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, at) => {
    const old = target.children[at];
    const source = `${block.language}\n${block.lines.join('\n')}`;
    if (old?.source === source) return;
    const made = Object.assign(block.language === undefined ? prose(block) : code(block), { source });
    old ? old.replaceWith(made) : target.append(made);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

/** Paragraphs, and code between fences: `{ language, lines }`, where prose has no language. */
function blocksOf(text) {
  const blocks = [];
  let open = null;
  for (const line of text.split('\n')) {
    const inCode = open?.language !== undefined;
    const fence = line.match(/^\s*```(.*)$/);
    if (fence && inCode) open = null;
    else if (fence) blocks.push((open = { language: fence[1].trim(), lines: [] }));
    else if (!inCode && !line.trim()) open = null;
    else {
      if (!open) blocks.push((open = { lines: [] }));
      open.lines.push(line);
    }
  }
  return blocks;
}

function code({ language, lines }) {
  const text = lines.join('\n');
  const head = element('figcaption', {}, element('span', {}, language || 'code'), copyButton(() => text));
  return element('figure', {}, head, element('pre', { tabIndex: 0 }, element('code', {}, text)));
}

function prose({ lines }) {
  const parts = lines.join('\n').split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|^#{1,6} .+$)/m);
  return element('p', {}, ...parts.map(part => {
    if (/^`[^`]+`$/.test(part)) return element('code', {}, part.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(part)) return element('strong', {}, part.slice(2, -2));
    if (/^#{1,6} /.test(part)) return element('strong', {}, part.replace(/^#+ /, ''));
    return part;
  }));
}

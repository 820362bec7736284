// Formulas in Markdown: $…$ and \(…\) within a line, $$…$$ and \[…\] on their own, shown as MathML.

/* global temml */

const BRACKETS = [['$$', '$$', true], ['\\[', '\\]', true], ['\\(', '\\)', false], ['$', '$', false]];

/** A plugin of markdown-it. */
export function math(md) {
  md.inline.ruler.before('escape', 'math', inline);
  md.block.ruler.before('fence', 'math_block', block, { alt: ['paragraph', 'reference', 'blockquote', 'list'] });
  md.renderer.rules.math = (tokens, at) => {
    const { content, info, markup } = tokens[at];
    try {
      const options = { displayMode: info === 'display', throwOnError: true, maxSize: [20, 100] };
      return temml.renderToString(content, options).replace(/ style="[^"]*"/g, ''); // the page's policy allows none
    } catch {
      return md.utils.escapeHtml(markup); // no formula that is known: as it was written
    }
  };
}

function inline(state, silent) {
  const [text, start] = [state.src, state.pos];
  const found = BRACKETS.find(([open]) => text.startsWith(open, start));
  if (!found) return false;
  const [open, close, display] = found;
  const end = endOf(text, start + open.length, close);
  const content = text.slice(start + open.length, end);
  // Two sums of money are no formula: "$5 and $6".
  const isMoney = open === '$' && (/^\s|\s$/.test(content) || /\d/.test(text[end + 1] ?? ''));
  if (end < 0 || end + close.length > state.posMax || !content.trim() || isMoney) return false;
  if (!silent) push(state, content, display, text.slice(start, end + close.length));
  state.pos = end + close.length;
  return true;
}

function block(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const found = BRACKETS.slice(0, 2).find(([open]) => state.src.startsWith(open, start));
  if (!found) return false;
  const [open, close] = found;
  const end = endOf(state.src, start + open.length, close);
  let line = startLine;
  while (line < endLine && state.eMarks[line] < end) line++;
  if (end < 0 || line === endLine || state.src.slice(end + close.length, state.eMarks[line]).trim()) return false;
  if (silent) return true;
  const token = push(state, state.src.slice(start + open.length, end), true, state.src.slice(start, end + close.length));
  [token.map, token.block, state.line] = [[startLine, line + 1], true, line + 1];
  return true;
}

function endOf(text, from, close) {
  let end = text.indexOf(close, from);
  while (end > 0 && close.startsWith('$') && text[end - 1] === '\\') end = text.indexOf(close, end + 1);
  return end;
}

function push(state, content, display, markup) {
  return Object.assign(state.push('math', 'math', 0), { content, markup, info: display ? 'display' : '' });
}

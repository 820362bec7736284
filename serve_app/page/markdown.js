// A model's text as elements: Markdown and formulas. What comes of them passes a sanitiser that knows which elements and
// attributes there may be, and the page's policy lets nothing else become markup.

/* global DOMPurify, markdownit */

import { codeFigure } from './code.js';
import { element } from './dom.js';
import { math } from './math.js';

const md = markdownit({ html: false, breaks: true, linkify: true }).use(math);
// A picture would be a request to another host, which then knows the reader: it is a link that one may follow.
md.renderer.rules.image = (tokens, at) => {
  const escape = md.utils.escapeHtml;
  return `<a href="${escape(tokens[at].attrGet('src'))}">${escape(tokens[at].content || 'picture')}</a>`;
};
md.inline.ruler.after('link', 'footnote', (state, silent) => {
  const [mark, number] = state.src.slice(state.pos, state.posMax).match(/^\[\^(\d+)\]/) ?? [];
  if (mark && !silent) state.push('footnote', 'sup', 0).content = number;
  state.pos += mark?.length ?? 0;
  return Boolean(mark);
});
md.renderer.rules.footnote = (tokens, at) => `<sup>${tokens[at].content}</sup>`;
for (const cell of ['th_open', 'td_open']) {
  md.renderer.rules[cell] = (tokens, at, options, env, renderer) => {
    const style = tokens[at].attrGet('style'); // the page's policy allows no styles in markup
    if (style) tokens[at].attrs = [['align', style.replace('text-align:', '')]];
    return renderer.renderToken(tokens, at, options);
  };
}

const MARKUP = {
  ALLOWED_TAGS: `a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s strong sup table tbody td th thead tr ul
    math annotation menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace
    msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover semantics`.split(/\s+/),
  ALLOWED_ATTR: `align class columnalign columnspacing columnspan depth display displaystyle fence form height href lspace
    linethickness mathvariant maxsize minsize movablelimits notation rowspacing rspace scriptlevel separator start
    stretchy symmetric voffset width`.split(/\s+/),
  ALLOWED_URI_REGEXP: /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$))/i, // the sanitiser asks it of all values
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.sanitize(''); // takes the one policy that the page allows, so that nothing else can

/**
 * Shows `text` in `target`. Blocks that did not change stay as they are: a stream costs its last block only, and a
 * selection outlives it.
 */
export function render(target, text) {
  const [environment, lines] = [{}, text.split('\n')];
  const blocks = blocksOf(md.parse(text, environment));
  blocks.forEach((tokens, at) => {
    const source = lines.slice(...tokens[0].map).join('\n');
    const old = target.children[at];
    if (old?.source === source) return;
    const html = md.renderer.render(tokens, md.options, environment);
    const made = Object.assign(element('div', {}, DOMPurify.sanitize(html, MARKUP)), { source });
    finish(made);
    old ? old.replaceWith(made) : target.append(made);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

/** The tokens of each outermost block. */
function blocksOf(tokens) {
  const blocks = [];
  let [depth, start] = [0, 0];
  tokens.forEach((token, at) => {
    depth += token.nesting;
    if (depth) return;
    blocks.push(tokens.slice(start, at + 1));
    start = at + 1;
  });
  return blocks;
}

/** Code gets its head and colours, tasks their boxes, wide tables a bar to scroll, and links open beside the page. */
function finish(block) {
  for (const pre of block.querySelectorAll('pre')) {
    const code = pre.querySelector('code');
    const text = code.textContent.replace(/\n$/, '');
    const language = code.className.replace('language-', '') || 'code';
    pre.replaceWith(codeFigure(language, text));
  }
  for (const item of block.querySelectorAll('li')) {
    const text = document.createTreeWalker(item, NodeFilter.SHOW_TEXT).nextNode();
    const box = text?.data.match(/^\s*\[([ xX])\]\s/);
    if (!box) continue;
    text.data = text.data.slice(box[0].length);
    const checked = box[1] !== ' ';
    text.before(element('input', { type: 'checkbox', disabled: true, checked, ariaLabel: checked ? 'done' : 'to do' }), ' ');
    item.className = 'task';
  }
  for (const table of block.querySelectorAll('table')) {
    const box = element('div', { className: 'wide-table', tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  for (const link of block.querySelectorAll('a')) Object.assign(link, { target: '_blank', rel: 'noopener noreferrer' });
}

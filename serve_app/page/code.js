// Code with colours: spans of text, by rules that many languages share. What no rule knows stays as it is.

import { copyButton, element } from './dom.js';

const WORDS = `abstract and as assert async await break case catch class const continue def default defer del do elif else
  end enum except export extends extern final finally fn for foreach from func function go if impl implements import in
  include instanceof interface is lambda let local loop match mod module mut namespace new not nonlocal of or package pass
  private protected pub public raise return select self static struct super switch template then this throw trait try
  type typeof unsafe until use using var void when where while with yield`;
const SQL = `alter and as asc by case create delete desc distinct drop else end exists from full group having in index inner
  insert into is join left like limit not null on or order outer primary right select set table then union unique update
  values view when where with`;
const SHELL = 'case do done elif else esac export fi for function if in local return set shift then until while';
const VALUES = 'true|false|null|none|nil|undefined|nan|True|False|None';
const HASH = new Set('python py ruby rb bash sh shell zsh console yaml yml toml r perl makefile dockerfile elixir julia nginx ini'.split(' '));
const DASHES = new Set('sql lua haskell hs elm ada vhdl'.split(' '));
const PLAIN = new Set('text txt plain plaintext code output log diff markdown md csv latex tex'.split(' '));
const MARKUP = new Set('html xml svg vue jsp'.split(' '));

const MOST_CHARS = 20_000; // longer code would be slow to draw while it comes
const alternatives = words => words.trim().split(/\s+/).join('|');
const made = new Map();

/** The expression whose named groups are a language's parts. */
function rules(language) {
  if (made.has(language)) return made.get(language);
  const line = HASH.has(language) ? '#' : DASHES.has(language) ? '--' : '//';
  const words = language === 'sql' ? SQL : HASH.has(language) && /sh|console/.test(language) ? SHELL : language === 'json' ? '' : WORDS;
  const parts = MARKUP.has(language)
    ? ['(?<comment><!--[^]*?(?:-->|$))', '(?<keyword></?[A-Za-z][\\w:-]*|/?>)', '(?<string>"[^"]*"|\'[^\']*\')']
    : [
      `(?<comment>(?:${language === 'css' ? '(?!)' : line === '#' ? '(?<![^\\s;])#' : line}).*${line === '#' ? '' : '|/\\*[^]*?(?:\\*/|$)'})`,
      '(?<string>"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:[^"\\\\\\n]|\\\\[^])*"?|\'(?:[^\'\\\\\\n]|\\\\[^])*\'?|`(?:[^`\\\\]|\\\\[^])*`?)',
      `(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b|\\b(?:${VALUES})\\b)`,
      `(?<keyword>\\b(?:${alternatives(words) || '(?!)'})\\b)`,
      '(?<name>\\b[A-Za-z_]\\w*(?=\\())',
    ];
  const found = new RegExp(parts.join('|'), language === 'sql' ? 'gi' : 'g');
  made.set(language, found);
  return found;
}

/** The text as nodes. */
function coloured(language, text) {
  if (PLAIN.has(language) || text.length > MOST_CHARS) return [text];
  const nodes = [];
  let at = 0;
  for (const { 0: part, index, groups } of text.matchAll(rules(language))) {
    const [kind] = Object.entries(groups).find(([, value]) => value !== undefined);
    nodes.push(text.slice(at, index), element('span', { className: `code-${kind}` }, part));
    at = index + part.length;
  }
  return [...nodes, text.slice(at)];
}

/** A block of code with a head that names it, by its language unless it has a `title`, and copies it. */
export function codeFigure(language, text, title = language) {
  const code = element('code', {}, ...coloured(language.toLowerCase(), text));
  return element('figure', {}, element('figcaption', {}, element('span', {}, title), copyButton(() => text)),
    element('pre', { tabIndex: 0 }, code));
}

// The form of an answer: a schema, an expression or a grammar that it is bound to, checked before a request is sent.

import { request } from './api.js';
import { element } from './dom.js';

const PAUSE_MS = 500; // after the last key, before what was written is checked
const KINDS = {
  '': ['Free text'],
  schema: ['JSON Schema', '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'],
  regex: ['Regular expression', '[A-Z][a-z]+( [A-Z][a-z]+)*'],
  choice: ['One of these lines', 'yes\nno'],
  grammar: ['Grammar (GBNF or Lark)', 'root ::= "yes" | "no"'],
};
const NAMES = { schema: 'the schema', regex: 'the expression', choice: 'the choice', grammar: 'the grammar' };

/** Adds the fields to `form`; the function that is returned shows those that fit the values. */
export function buildStructure(form) {
  const kind = element('select', { name: 'structure' },
    ...Object.entries(KINDS).map(([value, [label]]) => element('option', { value }, label)));
  const text = element('textarea', { name: 'structure_text', rows: 4, spellcheck: false, ariaLabel: 'Schema or grammar' });
  const verdict = element('p', { className: 'verdict', role: 'status' });
  const lenient = element('input', { name: 'structure_lenient', type: 'checkbox', value: 'true' });
  const ignore = element('label', { className: 'check' }, lenient, ' strict: false (ignores what cannot be kept)');
  kind.dataset.own = '';
  text.dataset.own = lenient.dataset.own = 'part';
  form.append(element('label', { className: 'wide' }, 'Form of the answer ', kind), element('div', { className: 'wide structure' }, text, ignore, verdict));
  let [timer, turn] = [0, 0];

  const say = (words, isGood) => {
    verdict.textContent = words;
    verdict.className = `verdict ${words && !isGood ? 'error' : ''}`;
  };
  async function judge() {
    const mine = ++turn;
    const problem = await fault(form);
    if (mine === turn) say(problem || (isBound(form) ? `Every answer will fit ${NAMES[kind.value]}.` : ''), !problem);
  }
  function refresh() {
    text.parentElement.hidden = !kind.value;
    ignore.hidden = kind.value !== 'schema';
    text.placeholder = KINDS[kind.value]?.[1] ?? '';
    say('', true);
    clearTimeout(timer);
    turn++;
    if (isBound(form)) timer = setTimeout(judge, PAUSE_MS);
  }
  kind.addEventListener('input', refresh);
  text.addEventListener('input', refresh);
  lenient.addEventListener('input', refresh);
  return refresh; // for values that were filled in
}

/** Whether an answer is bound to a form. */
export const isBound = form => Boolean(form.elements.structure.value && form.elements.structure_text.value.trim());

/** The fields of a request that bind its answer. Throws if a schema is not JSON. */
export function structureOf(form) {
  if (!isBound(form)) return {};
  const [kind, text] = [form.elements.structure.value, form.elements.structure_text.value];
  if (kind === 'schema') {
    const strict = form.elements.structure_lenient.checked ? { strict: false } : {};
    return { response_format: { type: 'json_schema', json_schema: { name: 'answer', schema: parsed(text), ...strict } } };
  }
  if (kind === 'choice') return { structured_outputs: { choice: text.split('\n').filter(Boolean) } };
  return { structured_outputs: { [kind]: kind === 'regex' ? text.trim() : text } };
}

/** Resolves if the server can bind answers to what the fields ask for; throws a sentence if it cannot. */
export async function checkStructure({ response_format, structured_outputs }, signal) {
  if (!response_format && !structured_outputs) return;
  await request('check_grammar', { body: { response_format, structured_outputs }, signal });
}

/** What the answer of a request with these fields fits, in words; empty if it is free. */
export function fits({ response_format, structured_outputs } = {}) {
  if (response_format) return NAMES.schema;
  return structured_outputs ? NAMES[Object.keys(structured_outputs)[0]] : '';
}

async function fault(form) {
  try {
    await checkStructure(structureOf(form));
    return '';
  } catch (error) {
    return error.message;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The schema is not JSON: ${lowered(error.message)}.`);
  }
}

const lowered = text => text[0].toLowerCase() + text.slice(1).replace(/\.$/, '');

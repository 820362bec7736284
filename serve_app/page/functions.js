// Functions that the model may call: written by hand in the settings, and each call answered by hand.

import { codeFigure } from './code.js';
import { element } from './dom.js';
import { contentOf } from './pictures.js';

const EXAMPLE = '{"name": "weather", "description": "The weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}';
const CHOICES = { '': 'The model decides', required: 'It must call one' };
const NAMED = 'function '; // before a name among the choices
const NO_RESULT = 'No result was given.';

/** Adds the fields to `form`; the function that is returned shows those that fit the values. */
export function buildFunctions(form) {
  const text = element('textarea', { name: 'functions', rows: 4, spellcheck: false, placeholder: EXAMPLE });
  const choice = element('select', { name: 'function_choice' });
  const lenient = element('input', { name: 'functions_lenient', type: 'checkbox', value: 'true' });
  const verdict = element('p', { role: 'status' });
  text.dataset.own = '';
  choice.dataset.own = lenient.dataset.own = 'part';
  const parts = element('div', { className: 'wide parts' },
    element('label', {}, 'Call ', choice),
    element('label', { className: 'check' }, lenient, ' strict: false (arguments need not fit)'), verdict);
  form.append(element('label', { className: 'wide structure' }, 'Functions ', text), parts);

  function refresh({ function_choice: chosen = choice.value } = {}) {
    let [functions, fault] = [[], ''];
    try {
      functions = functionsOf(form);
    } catch (error) {
      fault = error.message;
    }
    const choices = [...Object.entries(CHOICES), ...functions.map(({ name }) => [NAMED + name, `It must call ${name}`])];
    choice.replaceChildren(...choices.map(([value, label]) => element('option', { value }, label)));
    choice.value = choices.some(([value]) => value === chosen) ? chosen : '';
    parts.hidden = !text.value.trim();
    [verdict.textContent, verdict.className] = [fault, `verdict ${fault && 'error'}`];
  }
  text.addEventListener('input', () => refresh());
  return refresh;
}

/** The functions of the form, one or a list of them, also as a client sends them. Throws if it has others. */
function functionsOf(form) {
  const text = form.elements.functions?.value.trim();
  if (!text) return [];
  let found;
  try {
    found = [JSON.parse(text)].flat().map(each => each?.function ?? each);
  } catch (error) {
    throw new Error(`Functions: the text is not JSON (${error.message}).`);
  }
  const fault = found.find(each => typeof each?.name !== 'string' || !each.name);
  if (fault !== undefined) throw new Error(`Functions: ${JSON.stringify(fault).slice(0, 60)} has no "name".`);
  return found;
}

/** The fields of a request that offer the functions. */
export function toolsOf(form) {
  const functions = functionsOf(form);
  if (!functions.length) return {};
  const strict = !form.elements.functions_lenient.checked;
  const chosen = form.elements.function_choice.value;
  const name = chosen.startsWith(NAMED) && chosen.slice(NAMED.length);
  return {
    tools: functions.map(each => ({ type: 'function', function: { ...each, strict } })),
    tool_choice: name ? { type: 'function', function: { name } } : chosen || 'auto',
  };
}

/** Adds the pieces of a delta to `calls`. */
export function addPieces(calls, pieces) {
  for (const { index, id, function: piece } of pieces) {
    const call = (calls[index] ??= { id, name: '', arguments: '' });
    call.name += piece.name ?? '';
    call.arguments += piece.arguments ?? '';
  }
}

/** Calls as the text that two answers are compared by. */
export const callsText = (calls = []) => calls.map(({ name, arguments: text }) => name + text).join('');

/** The messages of a turn with an answer; none without one. */
export function messagesOf({ question, images, text, calls = [] }) {
  if (!text && !calls.length) return [];
  const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: 'function', function: { name, arguments: text } }));
  return [
    ...(question || images ? [{ role: 'user', content: contentOf({ question, images }) }] : []), // none after the results of calls
    { role: 'assistant', content: text, ...(calls.length && { tool_calls }) },
    ...calls.map(({ id, result }) => ({ role: 'tool', tool_call_id: id, content: result ?? NO_RESULT })),
  ];
}

/** Shows calls with their results; with `send`, as a form whose results it gets, one of each call. */
export function renderCalls(box, calls, send) {
  const written = [...box.querySelectorAll('textarea')].map(({ value }) => value);
  const fields = calls.map(({ name, result = '' }, at) => element('textarea', {
    rows: 1, required: true, placeholder: `What ${name} gives`, ariaLabel: `Result of ${name}`, value: written[at] || result,
  }));
  const shown = calls.flatMap(({ name, arguments: text, result }, at) => [
    codeFigure('json', indented(text), `Call of ${name}`),
    ...(send ? [fields[at]] : result === undefined ? [] : [codeFigure('json', indented(result), 'Result')]),
  ]);
  if (!send) return box.replaceChildren(...shown);
  const form = element('form', {}, ...shown, element('button', { className: 'primary' }, calls.length > 1 ? 'Send results' : 'Send result'));
  form.addEventListener('submit', event => {
    event.preventDefault();
    send(fields.map(({ value }) => value));
  });
  return box.replaceChildren(form);
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still coming, or is not JSON
  }
}

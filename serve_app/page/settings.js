// The sampling settings of a view: their form, their values as fields of an API request, and that they survive a reload.

import { element, quietButton } from './dom.js';
import { buildFunctions, toolsOf } from './functions.js';
import { load, save } from './store.js';
import { buildStructure, isBound, structureOf } from './structure.js';

const NUMBERS = [
  ['temperature', 'Temperature', '1', '0 always takes the likeliest token; higher values vary more'],
  ['top_p', 'Top p', '1', 'Only the likeliest tokens that make up this share'],
  ['top_k', 'Top k', 'Off', 'Only so many of the likeliest tokens'],
  ['min_p', 'Min p', '0', 'Only tokens with this share of the likeliest one’s probability'],
  ['max_tokens', 'Max tokens', 'All that fit', 'The answer is cut there'],
  ['seed', 'Seed', 'Random', 'The same seed gives the same answer'],
];
const MORE_NUMBERS = [
  ['repetition_penalty', 'Repetition penalty', '1', 'Above 1: tokens of the prompt and the answer become less likely'],
  ['min_tokens', 'Min tokens', '0', 'The answer does not end before'],
  ['presence_penalty', 'Presence penalty', '0', 'Taken off each token that the answer has'],
  ['frequency_penalty', 'Frequency penalty', '0', 'Taken off for each time that the answer has the token'],
];
const LISTS = [
  ['stop', 'Stop at', 'One text a line; \\n is a line break', 'The answer ends before the first of them'],
  ['logit_bias', 'Token bias', 'One a line: token id, bias', 'Added to a token’s logit; -100 rules it out'],
];

const LONGEST = 28; // characters of a value on its chip
const CHIPS = { // each setting in words, where its name and its value are not enough
  max_tokens: value => `${value} token${value === '1' ? '' : 's'}`,
  system: () => 'system prompt',
  logit_bias: () => 'token bias',
  ignore_eos: () => 'no end token',
  logprobs: () => 'token probabilities',
  functions: (value, { form }) => (form.elements.function_choice.value ? 'functions, a call demanded' : 'functions'),
  structure: (value, field) => field.selectedOptions[0].text,
};

/** Builds the fields into `form`, behind those that it has, and gives each the value that it had last. */
export function buildSettings(form, name, initial) {
  const number = ([field, label, placeholder, title]) =>
    element('label', { title }, `${label} `, element('input', { name: field, type: 'number', step: 'any', placeholder }));
  const list = ([field, label, placeholder, title]) =>
    element('label', { title, className: 'wide' }, `${label} `, element('textarea', { name: field, rows: 2, placeholder }));
  const ignore = element('input', { name: 'ignore_eos', type: 'checkbox', value: 'true' });
  const more = element('details', { className: 'wide more' }, element('summary', {}, 'More'), element('div', {},
    ...MORE_NUMBERS.map(number), ...LISTS.map(list),
    element('label', { className: 'wide check' }, ignore, ' Go on after the end token')));
  const reset = element('button', { type: 'button', className: 'quiet reset' }, 'Back to the defaults');
  form.append(...NUMBERS.map(number));
  const showStructure = buildStructure(form);
  const showFunctions = form.elements.system ? buildFunctions(form) : () => {};
  form.append(more, reset);
  more.addEventListener('toggle', () => more.open && more.scrollIntoView({ block: 'nearest' }));

  const fields = [...form.elements].filter(field => field.name);
  const chips = form.closest('.split').querySelector('.chips');
  const valueOf = field => (field.type === 'checkbox' ? field.checked : field.value);
  const isOn = field =>
    field.name === 'structure' ? isBound(form) : field.dataset.own !== 'part' && String(valueOf(field) || '').trim();
  const chip = field => {
    const told = CHIPS[field.name]?.(field.value, field) ?? `${field.name.replaceAll('_', ' ')} ${field.value.replaceAll('\n', ' ')}`;
    const label = told.length > LONGEST ? `${told.slice(0, LONGEST)}…` : told;
    const remove = quietButton('×', () => {
      fill({ ...values(), [field.name]: '' });
      save(name, values());
      (chips.querySelector('button') ?? chips.closest('.stage').querySelector('textarea')).focus();
    });
    remove.ariaLabel = remove.title = `Remove ${label}`;
    return element('li', {}, label, remove);
  };
  const showChips = () => chips.replaceChildren(...fields.filter(isOn).map(chip));
  const fill = values => {
    for (const field of fields) {
      if (field.type === 'checkbox') field.checked = Boolean(values[field.name]);
      else field.value = values[field.name] ?? '';
    }
    showStructure();
    showFunctions(values);
    showChips();
  };
  const values = () => Object.fromEntries(fields.map(field => [field.name, valueOf(field)]));
  fill(load(name, initial));
  form.addEventListener('input', () => {
    save(name, values());
    showChips();
  });
  reset.addEventListener('click', () => {
    fill(initial);
    save(name, values());
  });
  return () => fill(initial);
}

/** Shows what the server takes where a field is empty: what the model's makers recommend, else OpenAI's defaults. */
export function showDefaults(form, sampling) {
  for (const [name, , placeholder] of [...NUMBERS, ...MORE_NUMBERS]) {
    const field = form.elements[name];
    field.placeholder = sampling[name] ?? (field.dataset.placeholder || placeholder);
  }
}

/** Draws a seed: one that is sent gives an answer that can be asked for again. */
export const drawnSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

/** The fields as those of an API request; empty ones are left to the server. Throws if one cannot be read. */
export function settings(form) {
  const fields = { ...structureOf(form), ...toolsOf(form) };
  for (const { name, type, value, checked, dataset } of form.elements) {
    if (!name || dataset.own !== undefined || !value.trim() || (type === 'checkbox' && !checked)) continue;
    if (name === 'logit_bias') fields[name] = biases(value);
    else if (type === 'textarea') fields[name] = linesOf(value).map(line => line.replaceAll('\\n', '\n'));
    else fields[name] = value === 'true' ? true : Number(value);
  }
  return fields;
}

const linesOf = text => text.split('\n').filter(Boolean);

function biases(text) {
  return Object.fromEntries(linesOf(text).filter(line => line.trim()).map(line => {
    const [id, bias, ...rest] = line.trim().split(/[\s,:=]+/);
    if (!/^\d+$/.test(id) || !bias || rest.length || Number.isNaN(Number(bias))) {
      throw new Error(`Token bias: "${line}" is not a token id and a number, such as 1234 -2.`);
    }
    return [id, Number(bias)];
  }));
}

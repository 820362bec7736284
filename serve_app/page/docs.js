// The API by /openapi.json: each route opens to its fields and answers, which are made when it is opened first.
import { request, setKey } from './api.js';

const $ = id => document.getElementById(id);
const MAX_DEPTH = 6; // of schemas within schemas: some hold themselves
const BOUNDS = { minimum: 'at least', exclusiveMinimum: 'above', maximum: 'at most', exclusiveMaximum: 'below' };
let schemas = {};

function element(name, text = '', className = '') {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

const named = schema => schema.$ref?.split('/').pop();
const resolved = schema => (schema.$ref ? schemas[named(schema)] ?? {} : schema);
const choices = schema => schema.anyOf ?? schema.oneOf ?? schema.allOf;

/** A schema in one line. */
function kind(schema) {
  if (schema.$ref) return named(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(' or ');
  if (choices(schema)) return [...new Set(choices(schema).map(kind))].filter(text => text !== 'null').join(' or ');
  if (schema.type === 'array') return `list of ${kind(schema.items ?? {})}`;
  const bounds = Object.entries(BOUNDS).filter(([name]) => name in schema).map(([name, words]) => `${words} ${schema[name]}`);
  return `${schema.type ?? 'any'}${bounds.length ? `, ${bounds.join(', ')}` : ''}`;
}

/** The schemas with fields of their own that a schema refers to. */
function parts(schema) {
  if (schema.$ref) return resolved(schema).properties || choices(resolved(schema)) ? [schema] : [];
  return [...(choices(schema) ?? []), ...(schema.items ? [schema.items] : [])].flatMap(parts);
}

/** A <details> whose inside is made when it is opened first. */
function opening(summary, fill) {
  const details = element('details');
  const head = element('summary');
  head.append(...summary);
  details.append(head);
  details.addEventListener('toggle', () => {
    const inside = element('div', '', 'inside');
    inside.append(...fill());
    details.append(inside);
  }, { once: true });
  return details;
}

/** The fields of a schema, or of what it may be. */
function fields(schema, depth = 0) {
  const own = resolved(schema);
  if (!own.properties) return parts(own).map(part => nested(part, depth));
  const table = element('table');
  for (const [name, field] of Object.entries(own.properties)) {
    const row = table.insertRow();
    row.insertCell().append(element('code', name, own.required?.includes(name) ? 'needed' : ''));
    const cell = row.insertCell();
    cell.append(kind(field), ...(field.description ? [element('div', field.description)] : []));
    cell.append(...parts(field).map(part => nested(part, depth)));
  }
  return [table];
}

const nested = (schema, depth) =>
  depth < MAX_DEPTH ? opening([element('code', named(schema))], () => fields(schema, depth + 1)) : named(schema);

/** A value that a required field could have. */
function example(schema) {
  const own = resolved(schema);
  if (own.const !== undefined) return own.const;
  if (own.enum) return own.enum[0];
  if (choices(own)) return example(choices(own).find(choice => choice.type !== 'null') ?? {});
  if (own.type === 'array') return [example(own.items ?? {})];
  if (own.type === 'integer' || own.type === 'number') return own.minimum ?? 1;
  if (own.type === 'boolean') return true;
  if (!own.properties) return own.type === 'object' ? {} : '...';
  return Object.fromEntries((own.required ?? []).map(name => [name, example(own.properties[name])]));
}

function curl(method, path, operation, body) {
  const words = [`curl ${new URL(path.slice(1), document.baseURI)}`];
  if (method !== 'get' && !(method === 'post' && body)) words.push(`-X ${method.toUpperCase()}`);
  if (operation.security?.length) words.push("-H 'Authorization: Bearer KEY'");
  if (body) words.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(example(body))}'`);
  return words.join(' \\\n  ');
}

function route(path, method, operation) {
  const summary = [element('b', method.toUpperCase()), element('code', path), element('span', operation.summary)];
  const made = opening(summary, () => {
    const inside = operation.description ? [element('p', operation.description)] : [];
    const contents = Object.entries(operation.requestBody?.content ?? {});
    const json = operation.requestBody?.content['application/json']?.schema;
    inside.push(element('pre', curl(method, path, operation, json)));
    if (operation.parameters?.length) {
      const properties = Object.fromEntries(operation.parameters.map(p => [p.name, { ...p.schema, description: p.description }]));
      const required = operation.parameters.filter(p => p.required).map(p => p.name);
      inside.push(element('h2', 'Parameters'), ...fields({ properties, required }));
    }
    for (const [type, { schema }] of contents) inside.push(element('h2', `Body: ${type}`), ...fields(schema));
    inside.push(element('h2', 'Answers'));
    const table = element('table');
    for (const [status, answer] of Object.entries(operation.responses)) {
      const row = table.insertRow();
      row.insertCell().append(element('code', status));
      const cell = row.insertCell();
      cell.append(answer.description);
      const shown = answer.content?.['application/json']?.schema;
      if (shown && status < 300) cell.append(...parts(shown).map(part => nested(part, 0)));
    }
    inside.push(table);
    return inside;
  });
  made.dataset.text = `${method} ${path} ${operation.summary}`.toLowerCase();
  return made;
}

async function show() {
  let api;
  try {
    api = await (await request('openapi.json')).json();
  } catch (error) {
    $('trouble').textContent = error.message;
    $('trouble').hidden = !$('key').hidden;
    return;
  }
  $('trouble').hidden = $('key').hidden = true;
  schemas = api.components?.schemas ?? {};
  const all = Object.entries(api.paths).flatMap(([path, item]) =>
    Object.entries(item).map(([method, operation]) => route(path, method, operation)));
  $('routes').replaceChildren(...all);
  $('filter').hidden = false;
}

$('base').textContent = new URL('v1', document.baseURI).href;
$('filter').addEventListener('input', () => {
  const wanted = $('filter').value.trim().toLowerCase();
  for (const each of $('routes').children) each.hidden = !each.dataset.text.includes(wanted);
});
addEventListener('key-wanted', event => {
  document.querySelector('#key label').textContent = event.detail;
  $('key').hidden = false;
  $('key-field').focus();
});
$('key').addEventListener('submit', event => {
  event.preventDefault();
  setKey($('key-field').value);
  show();
});
show();

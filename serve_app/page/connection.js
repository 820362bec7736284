// The server's state at the model's name: green, amber while it starts or sleeps, red when it cannot be reached.

import { request, setKey } from './api.js';
import { element } from './dom.js';
import { load, save } from './store.js';

const [READY_MS, WAITING_MS, PATIENCE_MS] = [5000, 2000, 10_000];
const byId = id => document.getElementById(id);
let timer;
let served = {}; // the chosen model's card and the facts, once known
let facts = {}; // what the server tells of itself
let cards = []; // of all models, aliases and adapters

/** The chosen model's card, with the server's `facts`; empty until the server has told it. */
export const model = () => served;

export function startConnection() {
  addEventListener('key-wanted', ({ detail }) => {
    byId('key').querySelector('label').textContent = detail;
    if (!byId('key').hidden) return;
    byId('key').hidden = false;
    byId('key-field').focus();
  });
  byId('key').addEventListener('submit', event => {
    event.preventDefault();
    setKey(byId('key-field').value);
    byId('key').hidden = true;
    look();
  });
  byId('models').addEventListener('change', ({ target }) => {
    save('model', target.value);
    choose();
    look();
  });
  addEventListener('focus', () => served.id && learn().then(look, () => {})); // an adapter may have been loaded meanwhile
  for (const kind of ['server-lost', 'online']) addEventListener(kind, look);
  document.addEventListener('visibilitychange', look);
  look();
}

/** Looks at the server, and again later for as long as the page is seen. */
async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  const [state, name, problem] = await read();
  const box = byId('server');
  if (box.dataset.state !== state) box.dataset.state = state;
  if (byId('model').textContent !== name) byId('model').textContent = name;
  byId('models').hidden = !served.id || cards.length < 2;
  byId('trouble').textContent = problem;
  byId('trouble').dataset.state = state;
  byId('trouble').hidden = !problem || !byId('key').hidden;
  clearTimeout(timer); // another look may have ended meanwhile
  timer = setTimeout(look, state === 'ready' ? READY_MS : WAITING_MS);
}

/** The state, what stands beside it, and a sentence on what is wrong. */
async function read() {
  let response;
  try {
    response = await fetch('ready', { signal: AbortSignal.timeout(PATIENCE_MS), cache: 'no-store' });
  } catch {
    served = {};
    return ['down', 'Not reachable', 'The server cannot be reached. Is it still running?'];
  }
  const told = await response.json().catch(() => ({}));
  if (!response.ok) {
    served = {};
    return ['waiting', 'Not ready', told.error?.message ?? `The server answered with status ${response.status}.`];
  }
  if (!byId('key').hidden) return ['waiting', 'Not ready', ''];
  try {
    if (!served.id) await learn();
  } catch (error) {
    return ['waiting', 'Not ready', error.message];
  }
  const phases = told.phases ?? { [base()]: told.phase };
  const [name, phase] = [cards.length > 1 ? '' : shortName(served), phases[base()]?.split(';')[0]];
  return phase ? ['waiting', [name, phase].filter(Boolean).join(', '), ''] : ['ready', name, ''];
}

async function learn() {
  const { data } = await (await request('v1/models')).json();
  const { sampling = {}, allow_chaos = false, max_images, max_image_bytes } = await (await request('server_info')).json();
  facts = { sampling, allow_chaos, max_images, max_image_bytes };
  const isNew = JSON.stringify(data.map(({ id }) => id)) !== JSON.stringify(cards.map(({ id }) => id));
  cards = data;
  if (isNew) byId('models').replaceChildren(...cards.map(option)); // a list that is open stays so
  choose();
}

/** Takes the card chosen last, else the first one. */
function choose() {
  const card = cards.find(({ id }) => id === load('model')) ?? cards[0];
  served = { ...card, ...facts };
  byId('models').value = served.id;
  byId('model').title = byId('models').title = served.draft ? `${served.id}, draft ${served.draft}` : served.id;
  dispatchEvent(new Event('model-known'));
}

function option(card) {
  const isAlone = cards.filter(other => shortName(other) === shortName(card)).length === 1;
  return element('option', { value: card.id }, (isAlone ? shortName(card) : card.id) + (card.parent ? ' (adapter)' : ''));
}

const base = () => served.parent ?? served.root; // the model itself, for an alias or an adapter
const shortName = ({ id }) => id.split('/').at(-1);

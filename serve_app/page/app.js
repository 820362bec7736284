// Tabs, the connection to the server, and the key.

import { request, setKey } from './api.js';
import { startChat } from './chat.js';
import { startCompletion } from './completion.js';
import { startEngine } from './engine.js';

const byId = id => document.getElementById(id);
const tabs = [...document.querySelectorAll('[role=tab]')];
const wide = matchMedia('(min-width: 60rem)');
let served = {}; // the model's card, once known

function show(tab) {
  for (const other of tabs) {
    other.ariaSelected = other === tab;
    other.tabIndex = other === tab ? 0 : -1;
    byId(other.getAttribute('aria-controls')).hidden = other !== tab;
  }
  history.replaceState(null, '', `#/${tab.getAttribute('aria-controls')}`); // no element's id: one would take the focus
  dispatchEvent(new Event('view-changed'));
}

tabs.forEach((tab, at) => {
  tab.addEventListener('click', () => show(tab));
  tab.addEventListener('keydown', event => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs.at(to % tabs.length);
    next.focus();
    show(next);
  });
});

/** Asks for the model's name until the server tells it; meanwhile says why it does not. */
async function connect() {
  try {
    const { data } = await (await request('v1/models')).json();
    served = data[0];
    byId('server').dataset.state = 'ready';
    byId('model').textContent = served.id.split('/').at(-1);
    byId('model').title = served.draft ? `${served.id}, draft ${served.draft}` : served.id;
    byId('key').hidden = byId('trouble').hidden = true;
  } catch (error) {
    byId('model').textContent = 'Not ready';
    byId('trouble').textContent = error.message;
    byId('trouble').hidden = !byId('key').hidden;
    if (byId('key').hidden) setTimeout(connect, 2000);
  }
}

addEventListener('key-wanted', ({ detail }) => {
  byId('key').querySelector('label').textContent = detail;
  if (!byId('key').hidden) return;
  byId('key').hidden = false;
  byId('key-field').focus();
});
byId('key').addEventListener('submit', event => {
  event.preventDefault();
  setKey(byId('key-field').value);
  connect();
});

const openSettings = () => document.querySelectorAll('aside > details').forEach(box => (box.open = wide.matches));
wide.addEventListener('change', openSettings);
openSettings();
startChat(() => served);
startCompletion(() => served);
startEngine(() => served);
show(byId(`tab-${location.hash.slice(2)}`) ?? tabs[0]);
if (!matchMedia('(pointer: coarse)').matches) byId('message').focus(); // there it would open the screen's keyboard
connect();

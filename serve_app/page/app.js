// The tabs and the panels beside them.

import { startChaos } from './chaos.js';
import { startChat } from './chat.js';
import { startCompletion } from './completion.js';
import { model, startConnection } from './connection.js';
import { startEngine } from './engine.js';
import { startPanels } from './panels.js';

const byId = id => document.getElementById(id);
const tabs = [...document.querySelectorAll('[role=tab]')];

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

startPanels();
startChat(model);
startCompletion(model);
startEngine(model);
startChaos(model);
show(byId(`tab-${location.hash.slice(2)}`) ?? tabs[0]);
if (!matchMedia('(pointer: coarse)').matches) byId('message').focus(); // there it would open the screen's keyboard
startConnection();

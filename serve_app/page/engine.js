// The engine view: what the engines do, asked for only while someone looks.

import { request } from './api.js';
import { element } from './dom.js';
import { COLUMNS, FIGURES, refusals, standstill, summary } from './figures.js';
import { Metrics } from './metrics.js';
import { NUM_SAMPLES, Sparkline } from './sparkline.js';

const PERIOD_MS = 2000;

export function startEngine(served) {
  const panel = document.getElementById('engine');
  const [note, state] = [document.getElementById('engine-note'), document.getElementById('engine-state')];
  const [cards, table] = [panel.querySelector('dl'), panel.querySelector('table')];
  const figures = FIGURES.map(figure => new Card(cards, figure));
  const isWatched = () => !panel.hidden && !document.hidden;
  let [polling, readings] = [false, []]; // the readings of the last two minutes

  table.tHead.append(element('tr', {}, ...COLUMNS.map(([title]) => element('th', { scope: 'col' }, title))));

  async function poll() {
    try {
      const now = new Metrics(await (await request('metrics')).text());
      const [before, first] = [readings.at(-1), readings[0]];
      const seconds = before && (now.time - before.time) / 1000;
      for (const figure of figures) figure.show({ now, before, first, seconds, draft: served().draft });
      table.tBodies[0].replaceChildren(...now.engines.map(engine =>
        element('tr', {}, ...COLUMNS.map(([, read]) => element('td', {}, String(read(now, before, engine)))))));
      state.textContent = summary(now);
      const badge = standstill(now);
      if (badge) state.prepend(element('span', { className: 'badge' }, badge), ' ');
      document.getElementById('refusals').textContent = refusals(now);
      readings = [...readings, now].slice(-NUM_SAMPLES);
      note.textContent = '';
    } catch (error) {
      readings = [];
      note.textContent = error.message;
    }
    note.className = note.textContent && 'error';
    panel.classList.toggle('stale', Boolean(note.textContent));
  }

  async function watch() {
    if (polling) return;
    polling = true;
    readings = []; // rates begin anew: nobody looked
    while (isWatched()) {
      await poll();
      await new Promise(resolve => setTimeout(resolve, PERIOD_MS));
    }
    polling = false;
  }
  addEventListener('view-changed', watch);
  document.addEventListener('visibilitychange', watch);
}

/** One figure: its value, what it is of, its line, and what it means. */
class Card {
  constructor(cards, figure) {
    this.figure = figure;
    [this.value, this.caption] = [element('dd', {}, '–'), element('dd', {}, 'none yet')];
    this.element = element('div', { id: figure.id, hidden: Boolean(figure.isOptional) },
      element('dt', {}, figure.title), this.value, this.caption, element('dd', { className: 'about' }, figure.about));
    this.line = new Sparkline(this.element, figure.most);
    cards.append(this.element);
  }

  show(readings) {
    const read = this.figure.read(readings);
    if (!read) return;
    this.element.hidden = false;
    [this.value.textContent, this.caption.textContent] = [read.text, read.caption];
    if (read.value !== null) this.line.push(read.value);
  }
}

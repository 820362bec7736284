// The engine view: what the engines do, asked for only while someone looks.

import { request } from './api.js';
import { Chart, SPAN_MS } from './chart.js';
import { element } from './dom.js';
import { COLUMNS, FIGURES, refusals, rounded, share, standstill, summary } from './figures.js';
import { Metrics } from './metrics.js';

const PERIOD_MS = 2000;

export function startEngine(served) {
  const panel = document.getElementById('engine');
  const [note, state] = [document.getElementById('engine-note'), document.getElementById('engine-state')];
  const [row, table] = [document.getElementById('figures'), panel.querySelector('table')];
  const [chart, about] = [new Chart(document.getElementById('chart')), document.getElementById('about')];
  const figures = FIGURES.map(figure => new Figure(row, figure, choose));
  const isWatched = () => !panel.hidden && !document.hidden;
  let [polling, readings] = [false, []]; // the readings of the last two minutes
  let chosen;

  /** Charts and explains this figure. */
  function choose(figure) {
    chosen = figure;
    for (const other of figures) other.element.ariaPressed = other === chosen;
    showChosen();
  }

  function showChosen() {
    const { figure, caption, points } = chosen;
    about.replaceChildren(element('b', {}, figure.title), element('span', {}, caption), element('span', {}, figure.about));
    chart.draw(points, figure.most, figure.format ?? (figure.most ? share : rounded));
  }

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
      readings = [...readings, now].filter(({ time }) => time > now.time - SPAN_MS);
      showChosen();
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
  choose(figures.find(({ figure }) => figure.id === 'generated'));
  addEventListener('view-changed', watch);
  document.addEventListener('visibilitychange', watch);
}

/** One figure of the row: a button that has it charted, and its points of the last two minutes. */
class Figure {
  points = [];
  caption = 'none yet';

  constructor(row, figure, onClick) {
    this.figure = figure;
    this.value = element('span', {}, '–');
    const properties = { type: 'button', id: figure.id, hidden: Boolean(figure.isOptional), title: figure.about };
    this.element = element('button', properties, figure.title, this.value);
    this.element.addEventListener('click', () => onClick(this));
    row.append(this.element);
  }

  show(readings) {
    const read = this.figure.read(readings);
    if (!read) return;
    this.element.hidden = false;
    [this.value.textContent, this.caption] = [read.text, read.caption];
    const { time } = readings.now;
    if (read.value !== null) this.points = [...this.points, [time, read.value]].filter(([at]) => at > time - SPAN_MS);
  }
}

// The last two minutes of one figure as a line, whose right end is now.

import { element } from './dom.js';

export const SPAN_MS = 120_000;
const SVG = 'http://www.w3.org/2000/svg';

export class Chart {
  #line = document.createElementNS(SVG, 'polyline');
  #area = document.createElementNS(SVG, 'polygon');
  #top = element('span');

  constructor(box) {
    const svg = document.createElementNS(SVG, 'svg');
    svg.setAttribute('viewBox', '0 -1 1 1');
    svg.setAttribute('preserveAspectRatio', 'none');
    svg.setAttribute('aria-hidden', 'true');
    const grid = document.createElementNS(SVG, 'path');
    grid.setAttribute('d', 'M0,0 H1 M0,-0.5 H1 M0,-1 H1');
    svg.append(grid, this.#area, this.#line);
    box.append(this.#top, svg, element('span', {}, '2 minutes ago'), element('span', {}, 'now'));
  }

  /** Draws `points`, which are `[time, value]`; `most` is the value at the top, else a quarter above the largest one. */
  draw(points, most, format) {
    const now = performance.now();
    const top = most ?? (1.25 * Math.max(...points.map(([, value]) => value), 0) || 1);
    const places = points.map(([time, value]) => `${(1 - (now - time) / SPAN_MS).toFixed(4)},${(-value / top).toFixed(4)}`);
    const [first, last] = [places[0], places.at(-1)].map(place => place?.split(',')[0]);
    this.#line.setAttribute('points', places.join(' '));
    this.#area.setAttribute('points', places.length ? `${first},0 ${places.join(' ')} ${last},0` : '');
    this.#top.textContent = format(top);
  }
}

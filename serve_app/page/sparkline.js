// The last readings of a figure as a line over a base, which begins at the left and fills the width.

export const NUM_SAMPLES = 60;
const SVG = 'http://www.w3.org/2000/svg';

export class Sparkline {
  #values = [];
  #line = document.createElementNS(SVG, 'polyline');
  #area = document.createElementNS(SVG, 'polygon');

  /** Draws it at the lower edge of `card`; `most` is the value at its top; without it, a quarter above the largest one. */
  constructor(card, most) {
    this.most = most;
    const svg = document.createElementNS(SVG, 'svg');
    svg.setAttribute('viewBox', '0 -1 1 1');
    svg.setAttribute('preserveAspectRatio', 'none');
    svg.setAttribute('aria-hidden', 'true');
    const base = document.createElementNS(SVG, 'path');
    base.setAttribute('d', 'M0,0 H1');
    svg.append(base, this.#area, this.#line);
    card.append(svg);
  }

  push(value) {
    this.#values = [...this.#values, value].slice(-NUM_SAMPLES);
    if (this.#values.length < 2) return; // one reading is no line
    const top = this.most ?? (1.25 * Math.max(...this.#values) || 1);
    const points = this.#values.map((y, at) => `${(at / (this.#values.length - 1)).toFixed(4)},${(-y / top).toFixed(4)}`);
    this.#line.setAttribute('points', points.join(' '));
    this.#area.setAttribute('points', `0,0 ${points.join(' ')} 1,0`);
  }
}

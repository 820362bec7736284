// The last readings of a figure as a line.

export const NUM_SAMPLES = 60;

export class Sparkline {
  #values = [];
  #line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');

  /** Draws it at the lower edge of `card`. */
  constructor(card) {
    const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    svg.setAttribute('viewBox', `0 -1 ${NUM_SAMPLES - 1} 1`);
    svg.setAttribute('preserveAspectRatio', 'none');
    svg.setAttribute('aria-hidden', 'true');
    svg.append(this.#line);
    card.append(svg);
  }

  push(value) {
    this.#values = [...this.#values, value].slice(-NUM_SAMPLES);
    const [top, start] = [Math.max(...this.#values) || 1, NUM_SAMPLES - this.#values.length];
    this.#line.setAttribute('points', this.#values.map((y, x) => `${start + x},${-y / top}`).join(' '));
  }
}

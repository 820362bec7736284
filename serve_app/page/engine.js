// The engine's figures, from its Prometheus page (vLLM's names), asked for only while someone looks.

import { request } from './api.js';

const PERIOD_MS = 2000;
const NUM_SAMPLES = 60;

export function startEngine() {
  const panel = document.getElementById('engine');
  const [note, cards] = [document.getElementById('engine-note'), panel.querySelector('dl')];
  const lines = Object.fromEntries([...cards.children].map(card => [card.id, new Sparkline(card)]));
  const isWatched = () => !panel.hidden && !document.hidden;
  let [polling, before] = [false, null];

  function draw(id, value, text, detail) {
    const [figure, caption] = document.getElementById(id).querySelectorAll('dd');
    figure.textContent = text;
    if (detail) caption.textContent = detail;
    lines[id].push(value);
  }

  async function poll() {
    try {
      const now = new Metrics(await (await request('metrics')).text());
      draw('running', now.sum('vllm:num_requests_running'), String(now.sum('vllm:num_requests_running')));
      draw('waiting', now.sum('vllm:num_requests_waiting'), String(now.sum('vllm:num_requests_waiting')));
      const kv = now.largest('vllm:kv_cache_usage_perc');
      draw('kv', kv, `${(kv * 100).toFixed(kv < 0.1 ? 1 : 0)} %`);
      if (before) {
        const rate = name => now.since(before, name) / ((now.time - before.time) / 1000);
        for (const [id, name] of [['generated', 'vllm:generation_tokens_total'], ['prompt-rate', 'vllm:prompt_tokens_total']]) {
          draw(id, rate(name), rate(name).toFixed(rate(name) < 10 ? 1 : 0));
        }
      }
      const [name, count] = ['vllm:time_to_first_token_seconds', now.sum('vllm:time_to_first_token_seconds_count')];
      const recent = before ? now.since(before, `${name}_count`) : count;
      if (recent) {
        const mean = (before ? now.since(before, `${name}_sum`) : now.sum(`${name}_sum`)) / recent;
        const of = before ? `mean of the last ${recent}` : `mean of ${count}`;
        draw('ttft', mean, duration(mean), `${of}; 95 % within ${duration(now.quantile(name, 0.95))}`);
      }
      before = now;
      note.textContent = '';
    } catch (error) {
      before = null;
      note.textContent = error.message;
    }
    note.className = note.textContent && 'error';
    cards.className = note.textContent && 'stale';
  }

  async function watch() {
    if (polling) return;
    polling = true;
    before = null; // rates begin anew: nobody looked
    while (isWatched()) {
      await poll();
      await new Promise(resolve => setTimeout(resolve, PERIOD_MS));
    }
    polling = false;
  }
  addEventListener('view-changed', watch);
  document.addEventListener('visibilitychange', watch);
}

/** One reading of a Prometheus text: name -> samples, whatever their labels. */
class Metrics {
  time = performance.now();
  #samples = new Map();

  constructor(text) {
    for (const [, name, labels, value] of text.matchAll(/^([^\s{#]+)(?:\{(.*)\})? (\S+)/gm)) {
      if (!this.#samples.has(name)) this.#samples.set(name, []);
      this.#samples.get(name).push({ value: Number(value), le: labels?.match(/(?:^|,)le="([^"]+)"/)?.[1] });
    }
  }

  #of(name) {
    return this.#samples.get(name) ?? [];
  }

  sum(name) {
    return this.#of(name).reduce((sum, { value }) => sum + value, 0);
  }

  largest(name) {
    return Math.max(0, ...this.#of(name).map(({ value }) => value));
  }

  /** How far a counter has come since an `earlier` reading; 0 if the server has started anew. */
  since(earlier, name) {
    return Math.max(0, this.sum(name) - earlier.sum(name));
  }

  /** The upper bound of the histogram's bucket that `share` of its values do not exceed. */
  quantile(name, share) {
    const counts = new Map();
    for (const { le, value } of this.#of(`${name}_bucket`)) {
      const bound = le === '+Inf' ? Infinity : Number(le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    const wanted = share * this.sum(`${name}_count`);
    const bounds = [...counts.keys()].sort((a, b) => a - b);
    return bounds.find(bound => counts.get(bound) >= wanted) ?? Infinity;
  }
}

function duration(seconds) {
  if (seconds === Infinity) return 'the largest bucket';
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** The last readings of one card as a line from the card's lower edge up. */
class Sparkline {
  #values = [];
  #line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');

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

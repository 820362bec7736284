// One reading of the server's Prometheus page (vLLM's names, and Callboard's own beside them).

export class Metrics {
  time = performance.now();
  #samples = new Map(); // name -> [{ labels, value }]

  constructor(text) {
    for (const [, name, labels = '', value] of text.matchAll(/^([^\s{#]+)(?:\{(.*)\})? (\S+)/gm)) {
      if (!this.#samples.has(name)) this.#samples.set(name, []);
      const pairs = [...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text]);
      this.#samples.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
    }
  }

  #of(name, wanted = {}) {
    const samples = this.#samples.get(name) ?? [];
    return samples.filter(({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value));
  }

  /** The names of all engines. */
  get engines() {
    return [...new Set(this.#of('vllm:num_requests_running').map(({ labels }) => labels.engine))].sort();
  }

  /** Of all samples with the `wanted` labels, such as { engine: '0' }. */
  sum(name, wanted) {
    return this.#of(name, wanted).reduce((sum, { value }) => sum + value, 0);
  }

  largest(name) {
    return Math.max(0, ...this.#of(name).map(({ value }) => value));
  }

  /** How far a counter has come since an `earlier` reading; 0 if the server has started anew. */
  since(earlier, name, wanted) {
    return Math.max(0, this.sum(name, wanted) - (earlier?.sum(name, wanted) ?? 0));
  }

  /** A histogram's mean of what came since an `earlier` reading, and how much that was. */
  mean(earlier, name) {
    const count = this.since(earlier, `${name}_count`);
    return { count, mean: count ? this.since(earlier, `${name}_sum`) / count : null };
  }

  /** The upper bound of the histogram's bucket that `share` of its values do not exceed. */
  quantile(name, share) {
    const counts = new Map();
    for (const { labels, value } of this.#of(`${name}_bucket`)) {
      const bound = labels.le === '+Inf' ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    const wanted = share * this.sum(`${name}_count`);
    const bounds = [...counts.keys()].sort((a, b) => a - b);
    return bounds.find(bound => counts.get(bound) >= wanted) ?? Infinity;
  }
}

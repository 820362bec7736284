// What the engine view shows: each figure with how it is read, and what it means for those who choose it.

export const share = value => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
export const rounded = value => value.toFixed(value < 10 ? 1 : 0);

const short = value => new Intl.NumberFormat('en', { notation: 'compact' }).format(value);

export function duration(seconds) {
  if (seconds === Infinity) return 'the largest bucket';
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** Bytes in the unit that gives the shortest number. */
export function size(bytes) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(bytes || 1) / 10)));
  const value = bytes / 1024 ** power;
  return `${value.toFixed(power && value < 10 ? 1 : 0)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
}

/**
 * `read({ now, before, first, seconds, draft })` gives `{ value, text, caption }`, or nothing if there is nothing to tell
 * (without a `value`, nothing for the line); `most` is the top of the chart, where it has one, and `format` writes a value at its edge;
 * `now` is this reading, `before` the last one, `first` the oldest one kept, and `seconds` the time since the last one.
 */
export const FIGURES = [
  {
    id: 'running',
    title: 'Running',
    about: 'Requests that are being answered.',
    read: ({ now }) => count(now, 'vllm:num_requests_running', 'requests in the batch'),
  },
  {
    id: 'waiting',
    title: 'Waiting',
    about: 'Requests that have no place in the batch yet, or no memory for their tokens.',
    read({ now, first }) {
      const { count: begun, mean } = now.mean(first, 'vllm:request_queue_time_seconds');
      return count(now, 'vllm:num_requests_waiting', begun ? `the last ${begun} waited ${duration(mean)} on average` : 'requests in the queue');
    },
  },
  {
    id: 'kv',
    title: 'KV cache',
    most: 1,
    about: 'Memory for tokens. When it is full, requests wait, or the last one gives up its place and is computed again later.',
    read({ now }) {
      const [used, lost] = [now.largest('vllm:kv_cache_usage_perc'), now.sum('vllm:num_preemptions_total')];
      const places = lost ? `, ${lost} place${lost > 1 ? 's' : ''} given up so far` : '';
      return { value: used, text: share(used), caption: `of the fullest engine${places}` };
    },
  },
  {
    id: 'prefix',
    title: 'Prefix cache',
    most: 1,
    about: 'Prompt tokens that an earlier request had in the same places are not computed again.',
    read({ now, first }) {
      const [hits, queries] = ['vllm:prefix_cache_hits_total', 'vllm:prefix_cache_queries_total'];
      const from = now.since(first, queries) ? first : null;
      const asked = now.since(from, queries);
      if (!asked) return null;
      const found = now.since(from, hits);
      return { value: found / asked, text: share(found / asked), caption: `of ${asked} prompt tokens were known` };
    },
  },
  {
    id: 'tier',
    title: 'KV tier',
    isOptional: true,
    format: size,
    about: 'Memory of the machine that outlives engines. A prompt whose beginning is there is loaded, if that is quicker than to compute it.',
    read({ now }) {
      const [used, most] = ['callboard:kv_tier_used_bytes', 'callboard:kv_tier_size_bytes'].map(name => now.largest(name));
      if (!most) return null;
      const damaged = now.sum('callboard:kv_tier_damaged_total');
      const lost = damaged ? `, ${damaged} damaged ${damaged > 1 ? 'entries' : 'entry'} left out` : '';
      return { value: used, text: size(used), caption: `of ${size(most)}${lost}` };
    },
  },
  {
    id: 'tier-hits',
    title: 'From the tier',
    isOptional: true,
    format: short,
    about: 'Prompt tokens that were loaded and not computed. Loads that are under way delay no other request.',
    read({ now }) {
      if (!now.largest('callboard:kv_tier_size_bytes')) return null;
      const [tokens, loads] = [now.sum('callboard:kv_tier_hit_tokens_total'), now.sum('callboard:kv_tier_loads_in_flight')];
      const saved = now.sum('callboard:kv_tier_saved_seconds_total');
      const caption = `${duration(saved)} of computing saved since the start, ${loads} load${loads === 1 ? '' : 's'} under way`;
      return { value: tokens, text: short(tokens), caption };
    },
  },
  {
    id: 'generated',
    title: 'Tokens a second',
    about: 'All answers together.',
    read: figures => rate(figures, 'vllm:generation_tokens_total'),
  },
  {
    id: 'prompt-rate',
    title: 'Prompt tokens a second',
    about: 'The prompts of requests that began.',
    read: figures => rate(figures, 'vllm:prompt_tokens_total'),
  },
  {
    id: 'ttft',
    title: 'First token',
    format: duration,
    about: 'A request’s wait in the queue and the reading of its prompt.',
    read({ now, before }) {
      const name = 'vllm:time_to_first_token_seconds';
      const { count, mean } = now.mean(before, name);
      if (!count) return null;
      const of = before ? `mean of the last ${count}` : `mean of ${count}`;
      return { value: mean, text: duration(mean), caption: `${of}; 95 % within ${duration(now.quantile(name, 0.95))}` };
    },
  },
  {
    id: 'between',
    title: 'Between tokens',
    format: duration,
    about: 'How fast one answer goes on.',
    read({ now, before }) {
      const { count, mean } = now.mean(before, 'vllm:inter_token_latency_seconds');
      return count ? { value: mean, text: duration(mean), caption: `mean of ${count} token${count > 1 ? 's' : ''}` } : null;
    },
  },
  {
    id: 'draft',
    title: 'Draft',
    isOptional: true,
    most: 1,
    about: 'A quicker guesser proposes tokens and the model checks them in one step. A wrong guess changes no answer.',
    read({ now, first, draft }) {
      const names = ['num_drafts', 'num_draft_tokens', 'num_accepted_tokens'].map(name => `vllm:spec_decode_${name}_total`);
      const from = now.since(first, names[1]) ? first : null;
      const [rounds, guessed, accepted] = names.map(name => now.since(from, name));
      if (!guessed) return draft ? { value: 0, text: '–', caption: `${draft}: no guesses yet` } : null;
      const gain = (1 + accepted / rounds).toFixed(1);
      const byPosition = [];
      for (let right = 1; right; ) {
        const position = String(byPosition.length);
        right = now.since(from, 'vllm:spec_decode_num_accepted_tokens_per_pos_total', { position });
        if (right) byPosition.push(share(right / rounds));
      }
      const places = byPosition.length ? `; by position ${byPosition.join(', ')}` : '';
      const caption = `of ${guessed} guesses${draft ? ` of ${draft}` : ''} were right: ${gain} tokens a step${places}`;
      return { value: accepted / guessed, text: share(accepted / guessed), caption };
    },
  },
  {
    id: 'grammars',
    title: 'Grammars',
    isOptional: true,
    about: 'Requests for structured output wait until their schema or expression is compiled.',
    read({ now }) {
      const begun = now.sum('callboard:grammar_waits_total');
      if (!begun) return null;
      const waiting = Math.max(0, begun - now.sum('callboard:grammar_seconds_count'));
      return { value: waiting, text: String(waiting), caption: `of ${begun} wait for theirs` };
    },
  },
];

/** The state of all in one sentence. */
export function summary(now) {
  const [running, waiting] = [now.sum('vllm:num_requests_running'), now.sum('vllm:num_requests_waiting')];
  if (!now.engines.length) return 'No engine tells its figures now: it is starting or restarting, and requests wait or are refused.';
  if (!running && !waiting) return 'Nothing to do: no request is running, and none waits.';
  const are = `${running} request${running === 1 ? ' is' : 's are'} running`;
  if (!waiting) return `${are}, and none waits.`;
  const why = now.largest('vllm:kv_cache_usage_perc') > 0.85 ? 'the KV cache has no room for more' : 'the places in the batch are taken';
  return `${are}; ${waiting} more wait${waiting === 1 ? 's' : ''}, as ${why}.`;
}

/** Why engines compute nothing now though requests may wait; empty if all compute. */
export function standstill(now) {
  const all = now.engines.length;
  const states = [['callboard:sleep_level', 'asleep'], ['callboard:paused', 'paused']];
  const found = states.map(([name, word]) => [now.engines.filter(engine => now.sum(name, { engine })).length, word]);
  return found.filter(([count]) => count).map(([count, word]) => (count === all ? word : `${count} of ${all} ${word}`)).join(', ');
}

/** Requests that were not served, by the reason; empty if there are none. */
export function refusals(now) {
  const reasons = { busy: 'the queue was full', late: 'they had waited too long', draining: 'the engine was stopping', never: 'they were too long' };
  const parts = Object.entries(reasons)
    .map(([reason, why]) => [now.sum('callboard:requests_refused_total', { reason }), why])
    .filter(([number]) => number)
    .map(([number, why]) => `${number} because ${why}`);
  return parts.length ? `Refused since the start: ${parts.join(', ')}.` : '';
}

/** The columns of the table of engines. */
export const COLUMNS = [
  ['Engine', (now, before, engine) => engine],
  ['Running', (now, before, engine) => now.sum('vllm:num_requests_running', { engine })],
  ['Waiting', (now, before, engine) => now.sum('vllm:num_requests_waiting', { engine })],
  ['KV cache', (now, before, engine) => share(now.sum('vllm:kv_cache_usage_perc', { engine }))],
  ['Tokens a second', (now, before, engine) => {
    if (!before) return '–';
    return rounded(now.since(before, 'vllm:generation_tokens_total', { engine }) / ((now.time - before.time) / 1000));
  }],
  ['Engine restarts', (now, before, engine) => now.sum('callboard:restarts_total', { engine, actor: 'engine' })],
  ['Runner restarts', (now, before, engine) => now.sum('callboard:restarts_total', { engine, actor: 'runners' })],
];

function count(now, name, caption) {
  return { value: now.sum(name), text: String(now.sum(name)), caption };
}

/** Tokens a second, which a first reading does not tell, and how many there were in all. */
function rate({ now, before, seconds }, name) {
  const sum = Math.round(now.sum(name)).toLocaleString('en');
  if (!before) return { value: null, text: '–', caption: `${sum} since the start` };
  const value = now.since(before, name) / seconds;
  return { value, text: rounded(value), caption: `${sum} since the start` };
}

// The server's API: requests with the key, answers as events, and every failure as an Error with a plain sentence.

const KEY = 'callboard-key';
const LEAST_S = 0.05; // of an answer whose rate says something: chunks that come at once have none

export const setKey = key => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/**
 * The response, if it is a good one. A 401 also fires the event "key-wanted" on the window, with what is wrong, and a
 * server that cannot be reached fires "server-lost".
 */
export async function request(path, { body, signal, method = body ? 'POST' : 'GET' } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { 'content-type': 'application/json' }) };
  let response;
  try {
    response = await fetch(path, { method, headers, body: JSON.stringify(body), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    dispatchEvent(new Event('server-lost'));
    throw new Error('The server cannot be reached. Is it still running?');
  }
  if (response.ok) return response;
  if (response.status === 401) {
    const problem = key ? 'The server did not accept this API key.' : 'The server asks for an API key.';
    dispatchEvent(new CustomEvent('key-wanted', { detail: problem }));
    throw new Error(problem);
  }
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `The server answered with status ${response.status}.`);
}

/** `body` as it is sent for a stream; the count of tokens comes with each chunk, so that a stopped answer has one. */
export const streamed = body => ({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });

/** The chunks of a streamed answer, as they come. */
export async function* stream(path, body, signal) {
  const response = await request(path, { body: streamed(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ''; ;) {
    const { value, done } = await reader.read().catch(error => {
      if (signal.aborted) throw error;
      dispatchEvent(new Event('server-lost'));
      throw new Error('The connection broke off before the answer ended.');
    });
    if (done) throw new Error('The answer ended without its end mark; it may be incomplete.');
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue; // blank lines, and comments that keep the connection alive
      const data = line.slice(5).trim();
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** How an answer ended by its `finish_reason`; empty if by itself. */
export const ending = reason => ({ length: 'cut at the token limit', abort: 'ended by the server' })[reason] ?? '';

/** Counts and times one answer, and what a draft guessed of it. */
export class Pace {
  #start = performance.now();
  #first;
  #last;
  #tokens;
  #guesses;

  /** Call with every chunk. */
  see(chunk) {
    this.#tokens = chunk.usage?.completion_tokens ?? this.#tokens;
    this.#guesses = chunk.usage?.completion_tokens_details ?? this.#guesses;
    if (!chunk.choices.length) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  /** "31 tokens, 52 a second, the first after 0.21 s, 12 guesses accepted, 3 rejected"; empty if the server sent no count. */
  toString() {
    if (!this.#tokens) return '';
    const seconds = (this.#last - this.#first) / 1000;
    const rate = this.#tokens > 1 && seconds >= LEAST_S ? `, ${((this.#tokens - 1) / seconds).toFixed(0)} a second` : '';
    const wait = ((this.#first - this.#start) / 1000).toFixed(2);
    const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = this.#guesses ?? {};
    const guesses = accepted + rejected > 0 ? `, ${accepted} guesses accepted, ${rejected} rejected` : '';
    return `${this.#tokens} token${this.#tokens > 1 ? 's' : ''}${rate}, the first after ${wait} s${guesses}`;
  }
}

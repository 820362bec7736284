// Tokens with their probabilities. Of a character that is several tokens, as an emoji often is, the server names each
// token by its bytes; they are shown as one, with the character.

import { element } from './dom.js';

const BYTES = 'bytes:';

/** Appends tokens to `output`, shaded by how unlikely they were. */
export class Tokens {
  #parts = []; // of a character that is not whole yet

  constructor(output) {
    this.output = output;
  }

  /** A `logprobs` object's tokens; those that begin within `spans` are marks. */
  add({ tokens, token_logprobs: logprobs, top_logprobs: tops, text_offset: offsets }, spans) {
    tokens.forEach((token, at) => {
      const top = Object.entries({ ...tops?.[at], [token]: logprobs[at] }).sort((a, b) => b[1] - a[1]);
      const isGuessed = spans.some(([start, end]) => start <= offsets[at] && offsets[at] < end);
      const part = { bytes: bytesOf(token), logprob: logprobs[at], top, isGuessed };
      if (!part.bytes) {
        this.finish();
        this.#append(token.replace(/^\n+$/, '↵$&'), [part]);
        return;
      }
      this.#parts.push(part);
      const text = decoded(this.#parts, true);
      if (text !== null) this.#append(text, this.#parts.splice(0));
    });
  }

  /** No more tokens come: a character that is not whole stays one. */
  finish() {
    if (this.#parts.length) this.#append(decoded(this.#parts, false), this.#parts.splice(0));
  }

  #append(text, parts) {
    const [{ top, isGuessed }] = parts;
    const properties = { className: 'token', tabIndex: -1, top, numParts: parts.length };
    const shown = element(isGuessed ? 'mark' : 'span', properties, text);
    shown.style.setProperty('--p', Math.exp(parts.reduce((sum, { logprob }) => sum + logprob, 0)));
    this.output.append(shown);
  }
}

/** The alternatives of a token that is shown: each with its text, a bar and its probability. */
export function chances({ top, numParts }) {
  const several = numParts > 1 ? [element('span', {}, `One character of ${numParts} tokens; the first of them:`)] : [];
  return [...several, ...top.map(chance)];
}

function chance([token, logprob]) {
  const [p, bytes] = [Math.exp(logprob), bytesOf(token)];
  const bar = element('span', { className: 'bar' });
  bar.style.setProperty('--p', p);
  const name = bytes ? decoded([{ bytes }], true) ?? `part of a character (${hex(bytes)})` : JSON.stringify(token).slice(1, -1);
  return element('span', { className: 'chance' }, element('code', {}, name), bar, `${(p * 100).toFixed(1)} %`);
}

/** The bytes of a token that the server could not write as text, else null. */
function bytesOf(token) {
  if (!token.startsWith(BYTES)) return null;
  return token.slice(BYTES.length).match(/\\x[0-9a-f]{2}/g)?.map(byte => parseInt(byte.slice(2), 16)) ?? null;
}

/** The text of all parts; null if they are no whole characters and `isStrict` asks for such. */
function decoded(parts, isStrict) {
  try {
    return new TextDecoder('utf-8', { fatal: isStrict, ignoreBOM: true }).decode(new Uint8Array(parts.flatMap(({ bytes }) => bytes)));
  } catch {
    return null;
  }
}

const hex = bytes => bytes.map(byte => byte.toString(16).toUpperCase().padStart(2, '0')).join(' ');

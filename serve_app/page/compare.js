// "Compare": the same question with the settings as they are now, beside the answer that is there, and kept with it.

import { ending, stream } from './api.js';
import { element, following } from './dom.js';
import { Reply } from './reply.js';

const NONE = 'the default';
const MOST_CHARS = 80; // of a value

/** Shows the other answer of `reply`'s turn, if it has one, or one is asked for. */
export function showOther({ scroll, pair, turn }, isAsked = false) {
  pair.querySelector('.other')?.remove();
  if (!turn.other) return null;
  const other = new Reply(scroll, turn.other);
  if (other.isEmpty && !isAsked) { // it was interrupted before its first token
    delete turn.other;
    return null;
  }
  other.element.className = 'other';
  other.element.prepend(element('p', { className: 'settings-now' }, difference(turn.request, turn.other.request)));
  following(scroll, () => pair.append(other.element));
  return other;
}

/** Asks with the request `now`, whose body is `body`, for the other answer of a turn: `other` shows it. */
export async function compare(other, path, body, signal) {
  other.begin();
  try {
    for await (const chunk of stream(path, body, signal)) other.add(chunk);
    other.finish(ending(other.reason));
  } catch (error) {
    signal.aborted ? other.finish('stopped') : other.finish('', error.message);
  }
}

/** "temperature 1 (was 0)" of all that differs. */
function difference(then, now) {
  const all = ({ model, system, fields }) => ({ model, 'system prompt': system || undefined, ...fields });
  const [old, current] = [all(then), all(now)];
  const shown = value => (value === undefined ? NONE : JSON.stringify(value).slice(0, MOST_CHARS));
  const names = [...new Set([...Object.keys(old), ...Object.keys(current)])];
  const changed = names.filter(name => JSON.stringify(old[name]) !== JSON.stringify(current[name]));
  return changed.map(name => `${name} ${shown(current[name])} (was ${shown(old[name])})`).join(', ') || 'The same settings';
}

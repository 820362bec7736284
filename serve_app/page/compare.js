// "Compare": the same question with the settings as they are now, beside the answer that is there.

import { Pace, ending, stream } from './api.js';
import { copyButton, element, following } from './dom.js';
import { renderAnswer } from './reply.js';

const NONE = 'the default';
const MOST_CHARS = 80; // of a value

/** Asks with the request `now`, whose body is `body`, and shows the answer beside `reply`, that of the request `then`. */
export async function compare({ pair, scroll }, then, now, path, body, signal) {
  const [text, foot] = [element('div', { className: 'text' }), element('footer')];
  const column = element('div', { className: 'other', ariaBusy: 'true' }, element('p', { className: 'settings-now' }, difference(then, now)), text, foot);
  pair.querySelector('.other')?.remove();
  following(scroll, () => pair.append(column));
  const pace = new Pace();
  let [said, end, frame] = ['', '', 0];
  const draw = () => {
    frame = 0;
    following(scroll, () => renderAnswer(text, said, now.fields));
  };
  try {
    for await (const chunk of stream(path, body, signal)) {
      pace.see(chunk);
      said += chunk.choices[0]?.delta.content ?? '';
      end ||= ending(chunk.choices[0]?.finish_reason);
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (signal.aborted) end = 'stopped';
    else column.append(element('p', { className: 'error', role: 'alert' }, error.message));
  }
  cancelAnimationFrame(frame);
  draw();
  column.ariaBusy = 'false';
  const facts = [String(pace), end, `seed ${now.fields.seed}`].filter(Boolean).join(', ');
  following(scroll, () => foot.append(said ? copyButton(() => said) : '', element('span', {}, facts)));
}

/** "temperature 1 (was 0)" of all that differs. */
function difference(then, now) {
  const all = ({ system, fields }) => ({ 'system prompt': system || undefined, ...fields });
  const [old, current] = [all(then), all(now)];
  const shown = value => (value === undefined ? NONE : JSON.stringify(value).slice(0, MOST_CHARS));
  const names = [...new Set([...Object.keys(old), ...Object.keys(current)])];
  const changed = names.filter(name => JSON.stringify(old[name]) !== JSON.stringify(current[name]));
  return changed.map(name => `${name} ${shown(current[name])} (was ${shown(old[name])})`).join(', ') || 'The same settings';
}

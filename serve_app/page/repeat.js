// "Again": the same request once more, and whether its answer is the same to the character.

import { stream } from './api.js';
import { element } from './dom.js';

const AROUND = 12; // characters of both texts that are shown where they part

/**
 * Asks again and shows in `note` what came of it. `kept` is the text that the answer has, `isWhole` whether it ended by
 * itself; of one that was stopped, only what it has is compared.
 */
export async function repeat(note, body, kept, isWhole, signal) {
  const own = new AbortController();
  const stop = () => own.abort();
  signal.addEventListener('abort', stop);
  let text = '';
  note.className = 'repeated';
  note.replaceChildren('Asking again …');
  note.scrollIntoView({ block: 'nearest' });
  try {
    for await (const { choices: [choice] } of stream('v1/chat/completions', body, own.signal)) {
      const { content, reasoning_content, reasoning, tool_calls = [] } = choice?.delta ?? {};
      text += (reasoning_content ?? reasoning ?? '') + (content ?? '');
      for (const { function: piece } of tool_calls) text += (piece.name ?? '') + (piece.arguments ?? '');
      if (!kept.startsWith(text.slice(0, kept.length)) || (!isWhole && text.length >= kept.length)) break;
      note.textContent = `Asking again: the same so far, ${text.length} of ${kept.length} characters.`;
    }
    own.abort();
    note.replaceChildren(...verdict(kept, isWhole ? text : text.slice(0, kept.length)));
    note.scrollIntoView({ block: 'nearest' });
  } catch (error) {
    note.className = 'repeated error';
    note.textContent = signal.aborted ? 'Stopped before the end; it was the same so far.' : error.message;
    if (signal.aborted) note.className = 'repeated';
  } finally {
    signal.removeEventListener('abort', stop);
  }
}

function verdict(kept, text) {
  if (text === kept) return [`Asked again: the same answer, to the character (${kept.length} of ${kept.length}).`];
  let at = 0;
  while (at < kept.length && kept[at] === text[at]) at++;
  const around = whole => JSON.stringify(whole.slice(Math.max(0, at - AROUND), at + AROUND)).slice(1, -1) || 'nothing';
  return [
    `Asked again: another answer from character ${at + 1} on. It was `, element('code', {}, around(kept)), ' and is ',
    element('code', {}, around(text)), '. A server with --deterministic gives the same.',
  ];
}

// The playground: a prompt, its completion, how likely each token was, and what of it a draft had guessed.

import { Pace, ending, stream, streamed } from './api.js';
import { Composer } from './composer.js';
import { copyButton, element, following } from './dom.js';
import { buildSettings, drawnSeed, settings, showDefaults } from './settings.js';
import { startSnippets } from './snippets.js';
import { checkStructure } from './structure.js';
import { Tokens, chances } from './tokens.js';

const PATH = 'v1/completions';
const SETTINGS = { max_tokens: '64' };

export function startCompletion(served) {
  const panel = document.getElementById('completion');
  const [scroll, output] = [panel.querySelector('.scroll'), document.getElementById('output')];
  const [note, alternatives] = [document.getElementById('output-note'), document.getElementById('alternatives')];
  const legend = document.getElementById('draft-legend');

  const form = panel.querySelector('.settings form');
  buildSettings(form, 'completion-settings', SETTINGS);
  form.elements.max_tokens.dataset.placeholder = '16';
  addEventListener('model-known', () => showDefaults(form, served().sampling));
  let seed = drawnSeed(); // of the next request, if the settings have none

  function bodyOf(prompt) {
    const { id: model, draft } = served();
    return { model, prompt, seed, ...settings(form), ...(draft && { return_draft_spans: true }) };
  }

  const composer = new Composer(panel.querySelector('.composer'), async (prompt, signal) => {
    document.getElementById('blank').hidden = true;
    const { draft } = served();
    let body;
    try {
      body = bodyOf(prompt);
      await checkStructure(body, signal);
    } catch (error) {
      note.replaceChildren(element('span', { className: 'error', role: 'alert' }, error.message));
      return;
    }
    seed = drawnSeed();
    output.replaceChildren(element('span', { className: 'given' }, prompt));
    legend.hidden = !draft;
    legend.querySelector('span').textContent = draft;
    output.ariaBusy = 'true';
    note.replaceChildren();
    alternatives.hidden = true;
    const [pace, tokens] = [new Pace(), new Tokens(output)];
    let [end, completion, length] = ['', '', 0]; // its length is in characters, as the server counts them
    try {
      for await (const chunk of stream(PATH, body, signal)) {
        pace.see(chunk);
        const [choice] = chunk.choices;
        end ||= ending(choice?.finish_reason);
        const chars = [...(choice?.text ?? '')];
        const spans = (choice?.draft_spans ?? []).map(span => span.map(place => place - length));
        completion += choice?.text ?? '';
        following(scroll, () => {
          if (choice?.logprobs) tokens.add(choice.logprobs, choice.draft_spans ?? []);
          else appendText(output, chars, spans);
        });
        length += chars.length;
      }
    } catch (error) {
      if (signal.aborted) end = 'stopped';
      else note.append(element('span', { className: 'error', role: 'alert' }, error.message));
    }
    tokens.finish();
    output.ariaBusy = 'false';
    const first = output.querySelector('.token');
    if (first) first.tabIndex = 0;
    following(scroll, () => {
      note.append(completion ? copyButton(() => completion) : '', [String(pace), end, `seed ${body.seed}`].filter(Boolean).join(', '));
      if (first) note.append(element('span', {}, 'Point at a token, or reach it with the arrow keys, to see what else it could have been.'));
    });
  });

  startSnippets(panel.querySelector('.menu'), () => {
    const prompt = composer.box.value;
    return prompt.trim() ? { path: PATH, body: streamed(bodyOf(prompt)) } : null;
  });

  /** One stop for the Tab key; the arrow keys go from token to token. */
  output.addEventListener('keydown', event => {
    const steps = { ArrowLeft: 'previousElementSibling', ArrowRight: 'nextElementSibling' };
    const next = document.activeElement[steps[event.key]];
    if (!next?.matches('.token')) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  for (const kind of ['focusin', 'pointerover', 'click']) {
    output.addEventListener(kind, ({ target }) => target.top && showChances(target));
  }
  for (const kind of ['focusout', 'pointerleave']) output.addEventListener(kind, () => (alternatives.hidden = true));

  /** Shows what a token could have been, below it or, where there is no room, above. */
  function showChances(token) {
    alternatives.replaceChildren(...chances(token));
    alternatives.hidden = false;
    const [box, at, { offsetWidth: width, offsetHeight: height }] = [scroll.getBoundingClientRect(), token.getBoundingClientRect(), alternatives];
    const top = at.bottom + height > box.bottom ? at.top - height - 4 : at.bottom + 4;
    alternatives.style.left = `${Math.max(8, Math.min(at.left - box.left, box.width - width - 20))}px`;
    alternatives.style.top = `${top - box.top + scroll.scrollTop}px`;
  }
}

/** Appends characters, those in `spans` as marks. */
function appendText(output, chars, spans) {
  const append = (from, to) => {
    if (from === to) return;
    const text = chars.slice(from, to).join('');
    if (output.lastChild.nodeType === Node.TEXT_NODE) output.lastChild.appendData(text);
    else output.append(text);
  };
  let at = 0;
  for (const [start, end] of spans) {
    append(at, start);
    output.append(element('mark', {}, chars.slice(start, end).join('')));
    at = end;
  }
  append(at, chars.length);
}

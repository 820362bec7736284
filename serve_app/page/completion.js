// The playground: a prompt, its completion, and how likely each token was.

import { Pace, stream } from './api.js';
import { composer, copyButton, element, following, settings } from './dom.js';

export function startCompletion(model) {
  const panel = document.getElementById('completion');
  const [scroll, output] = [panel.querySelector('.scroll'), document.getElementById('output')];
  const [note, alternatives] = [document.getElementById('output-note'), document.getElementById('alternatives')];

  composer(panel.querySelector('.composer'), async (prompt, signal) => {
    document.getElementById('blank').hidden = true;
    const text = document.createTextNode('');
    const fields = settings(panel.querySelector('.settings form'));
    output.replaceChildren(element('span', { className: 'given' }, prompt), text);
    output.ariaBusy = 'true';
    note.replaceChildren();
    alternatives.hidden = !fields.logprobs;
    alternatives.textContent = 'Point at a token, or reach it with the arrow keys, to see what else it could have been.';
    const pace = new Pace();
    let [end, completion] = ['', ''];
    try {
      for await (const chunk of stream('v1/completions', { model: model(), prompt, ...fields }, signal)) {
        pace.see(chunk);
        const [choice] = chunk.choices;
        if (choice?.finish_reason === 'length') end = 'cut at the token limit';
        completion += choice?.text ?? '';
        following(scroll, () => {
          if (choice?.logprobs) output.append(...tokensOf(choice.logprobs));
          else text.appendData(choice?.text ?? '');
        });
      }
    } catch (error) {
      if (signal.aborted) end = 'stopped';
      else note.append(element('span', { className: 'error', role: 'alert' }, error.message));
    }
    output.ariaBusy = 'false';
    const first = output.querySelector('.token');
    if (first) first.tabIndex = 0;
    following(scroll, () => {
      note.append(completion ? copyButton(() => completion) : '', [String(pace), end].filter(Boolean).join(', '));
    });
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
    output.addEventListener(kind, ({ target }) => target.top && alternatives.replaceChildren(...target.top.map(chance)));
  }
}

/** A `logprobs` object's tokens, shaded by how unlikely they were; `top` holds what else was likely. */
function tokensOf({ tokens, token_logprobs: logprobs, top_logprobs: tops }) {
  return tokens.map((token, at) => {
    const top = Object.entries({ ...tops?.[at], [token]: logprobs[at] }).sort((a, b) => b[1] - a[1]);
    const shown = element('span', { className: 'token', tabIndex: -1, top }, token.replace(/^\n+$/, '↵$&'));
    shown.style.setProperty('--p', Math.exp(logprobs[at]));
    return shown;
  });
}

/** One alternative: its text, a bar and its probability. */
function chance([token, logprob]) {
  const p = Math.exp(logprob);
  const bar = element('span', { className: 'bar' });
  bar.style.setProperty('--p', p);
  return element('span', { className: 'chance' }, element('code', {}, JSON.stringify(token).slice(1, -1)), bar, `${(p * 100).toFixed(1)} %`);
}

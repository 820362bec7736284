// A conversation: what was said, and its next answer as it comes.

import { Pace, stream } from './api.js';
import { composer, copyButton, element, following, render, settings } from './dom.js';

export function startChat(served) {
  const panel = document.getElementById('chat');
  const [scroll, turns] = [panel.querySelector('.scroll'), document.getElementById('turns')];
  const [box, form] = [document.getElementById('message'), panel.querySelector('.composer')];
  const [welcome, newChat] = [document.getElementById('welcome'), document.getElementById('new-chat')];
  let history = []; // the messages that the model is told: each question whose answer came, and that answer

  async function answer(question, signal) {
    turns.querySelector('.failed')?.remove();
    welcome.hidden = true;
    newChat.hidden = false;
    box.value = '';
    const reply = new Reply(scroll);
    const turn = element('article', {}, element('p', { className: 'question' }, question), reply.element);
    turns.append(turn);
    scroll.scrollTop = scroll.scrollHeight;

    const system = document.getElementById('system').value.trim();
    const asked = [...history, { role: 'user', content: question }];
    const messages = system ? [{ role: 'system', content: system }, ...asked] : asked;
    const conversation = history;
    try {
      const body = { model: served().id, messages, ...settings(panel.querySelector('.settings form')) };
      for await (const chunk of stream('v1/chat/completions', body, signal)) reply.add(chunk);
      reply.finish(reply.reason === 'length' ? 'cut at the token limit' : '');
    } catch (error) {
      signal.aborted ? reply.finish('stopped') : reply.finish('', error.message);
    }
    if (history !== conversation) return; // a new chat began meanwhile
    if (reply.text) {
      history = [...asked, { role: 'assistant', content: reply.text }];
    } else if (reply.failed) {
      turn.classList.add('failed'); // the next message takes its place
      box.value ||= question;
    }
  }

  const stop = composer(form, answer);
  newChat.addEventListener('click', () => {
    stop();
    history = [];
    turns.replaceChildren();
    welcome.hidden = false;
    newChat.hidden = true;
    box.focus();
  });
  for (const suggestion of welcome.querySelectorAll('button')) {
    suggestion.addEventListener('click', () => {
      box.value = suggestion.textContent;
      box.focus();
      form.requestSubmit();
    });
  }
}

/** One answer on the page. Text that has come is drawn once a frame, however many tokens that is. */
class Reply {
  text = '';
  failed = false;
  reason = null;
  #reasoning = '';
  #pace = new Pace();
  #frame = 0;

  constructor(scroll) {
    this.scroll = scroll;
    this.body = element('div', { className: 'text' });
    this.thoughts = element('p');
    this.folded = element('details', { hidden: true }, element('summary', {}, 'Reasoning'), this.thoughts);
    this.foot = element('footer');
    this.element = element('div', { className: 'answer', ariaBusy: 'true' }, this.folded, this.body, this.foot);
  }

  add(chunk) {
    this.#pace.see(chunk);
    const [choice] = chunk.choices;
    this.text += choice?.delta.content ?? '';
    this.#reasoning += choice?.delta.reasoning_content ?? choice?.delta.reasoning ?? '';
    this.reason = choice?.finish_reason ?? this.reason;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** `note` says how it ended, if not by itself; `error` what went wrong. */
  finish(note, error) {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.failed = Boolean(error);
    const facts = [String(this.#pace), note].filter(Boolean).join(', ');
    following(this.scroll, () => {
      if (error) this.foot.before(element('p', { className: 'error', role: 'alert' }, error));
      this.foot.append(this.text ? copyButton(() => this.text) : '', facts);
    });
    this.element.ariaBusy = 'false'; // a screen reader hears the answer once, whole
  }

  #draw() {
    this.#frame = 0;
    following(this.scroll, () => {
      this.folded.hidden = !this.#reasoning;
      this.thoughts.textContent = this.#reasoning.trim();
      render(this.body, this.text);
    });
  }
}

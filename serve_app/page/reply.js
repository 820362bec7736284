// One answer of a chat on the page, as it comes and when it is there.

import { Pace } from './api.js';
import { copyButton, element, following } from './dom.js';
import { addPieces, renderCalls } from './functions.js';
import { render } from './markdown.js';
import { fits } from './structure.js';

const FENCE = '~~~~~~~~';

/** Shows the text of an answer to a request with `fields` in `target`: as Markdown, unless it is bound to a form. */
function renderAnswer(target, text, fields) {
  const form = fits(fields);
  render(target, form && text ? `${FENCE}${form === 'the schema' ? 'json' : 'text'}\n${text}\n${FENCE}` : text);
}

/** Text that has come is drawn once a frame, however many tokens that is. */
export class Reply {
  failed = false;
  reason = null;
  #pace = new Pace();
  #frame = 0;
  #killed = null; // the process killed meanwhile: its role, the time of the last chunk, and the longest pause since

  /** `turn` holds the text that is there already, and gets what comes. */
  constructor(scroll, turn) {
    [this.scroll, this.turn] = [scroll, turn];
    this.body = element('div', { className: 'text' });
    this.thoughts = element('p');
    this.folded = element('details', { hidden: true }, element('summary', {}, 'Reasoning'), this.thoughts);
    [this.foot, this.note] = [element('footer'), element('p', { className: 'repeated', role: 'status' })];
    this.calls = element('div', { className: 'calls' });
    this.pair = element('div', { className: 'pair' }, element('div', {}, this.body, this.calls, this.foot));
    this.element = element('div', { className: 'answer' }, this.folded, this.pair, this.note);
    this.#draw();
    this.finish(turn.end);
  }

  /** Whether nothing has come. */
  get isEmpty() {
    return !this.turn.text && !this.turn.calls?.length;
  }

  /** Shows the calls; `send`, where given, gets the results that are written to them. */
  showCalls(send) {
    renderCalls(this.calls, this.turn.calls ?? [], send);
  }

  /** An answer is asked for: this one, or what goes on from it. */
  begin() {
    this.element.querySelector('.error')?.remove();
    this.foot.replaceChildren();
    this.pair.querySelector('.other')?.remove();
    delete this.turn.other;
    this.note.replaceChildren();
    this.element.ariaBusy = 'true';
    [this.failed, this.reason, this.#pace, this.turn.pace, this.#killed] = [false, null, new Pace(), '', null];
    this.#draw();
  }

  add(chunk) {
    this.#pace.see(chunk);
    const [choice] = chunk.choices;
    this.turn.text += choice?.delta.content ?? '';
    this.turn.reasoning += choice?.delta.reasoning_content ?? choice?.delta.reasoning ?? '';
    if (choice?.delta.tool_calls) addPieces((this.turn.calls ??= []), choice.delta.tool_calls);
    this.reason = choice?.finish_reason ?? this.reason;
    if (this.#killed) this.#tellOfPause();
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** `end` says how it ended, if not by itself; `error` what went wrong. */
  finish(end, error) {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.failed = Boolean(error);
    Object.assign(this.turn, { end: error && !this.isEmpty ? 'broken off' : end, pace: String(this.#pace) || this.turn.pace });
    following(this.scroll, () => {
      if (error) this.foot.before(element('p', { className: 'error', role: 'alert' }, error));
      this.#tell();
    });
    this.element.ariaBusy = 'false'; // a screen reader hears the answer once, whole
  }

  /** While this answer comes, a process of `role` was killed, or a `problem` prevented it. */
  witness({ role, problem }) {
    this.#killed = { role, at: performance.now(), longest: 0 };
    following(this.scroll, () => (this.note.textContent = problem ?? `Killed the ${role}; waiting for the next token.`));
    if (problem) this.#killed = null;
  }

  #tellOfPause() {
    const { role, at, longest } = this.#killed;
    const now = performance.now();
    Object.assign(this.#killed, { at: now, longest: Math.max(longest, now - at) });
    this.note.textContent = `The ${role} was killed; the answer went on after a pause of ${(this.#killed.longest / 1000).toFixed(2)} s.`;
  }

  /** The page goes while the answer comes: what is there is kept. */
  interrupt() {
    Object.assign(this.turn, { end: 'stopped', pace: String(this.#pace) });
  }

  /** Shows the turn as it was. */
  restore(before) {
    Object.assign(this.turn, before);
    this.#draw();
    this.#tell();
  }

  /** The line below the answer. */
  #tell() {
    const { text, end, pace, request } = this.turn;
    const form = text && !end && fits(request?.fields);
    const facts = [pace, end, form && `fits ${form}`, request && `seed ${request.fields.seed}`].filter(Boolean).join(', ');
    this.foot.replaceChildren(text ? copyButton(() => this.turn.text) : '', element('span', {}, facts));
  }

  #draw() {
    this.#frame = 0;
    following(this.scroll, () => {
      this.folded.hidden = !this.turn.reasoning;
      this.thoughts.textContent = this.turn.reasoning.trim();
      renderAnswer(this.body, this.turn.text, this.turn.request?.fields);
      this.showCalls();
    });
  }
}
